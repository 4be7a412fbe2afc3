"""The rules about rewards: what each needs, what is expected, why it matters, the remedy."""

from __future__ import annotations

from covey.tools.doctor import rules_reward as reward
from covey.tools.doctor.evidence import Rule
from covey.tools.doctor.rules_reward import SCORE, SPREAD

_RANGE = ("grpo/score/min", "grpo/score/max")
_FAILURES = ("reward/errors", "reward/timeouts", "reward/none_share")

REWARD = (
    Rule(
        "constant_reward",
        "reward",
        _RANGE,
        3,
        "rewards that differ between responses",
        "equal rewards give advantage 0 everywhere: the weights do not move",
        "`covey show RUN` and `covey reward try CONFIG`: does the function find the answer (prompt_type, stop tokens, "
        "response_key), does it ever return another value?",
        reward.constant_reward,
    ),
    Rule(
        "groups_all_right",
        "reward",
        (SPREAD, SCORE),
        3,
        f"at most {reward.SOLVED_NO_SPREAD:.0%} of the groups without spread",
        "the task is solved: most sampled tokens teach nothing any more",
        "stop here, or add harder prompts: data.curriculum with drop_after, algorithm.max_rounds above 1",
        reward.groups_all_right,
    ),
    Rule(
        "groups_all_wrong",
        "reward",
        (SPREAD, SCORE),
        3,
        f"at most {reward.MAX_NO_SPREAD:.0%} of the groups without spread",
        "a group in which every response fails has advantage 0: the policy never sees a success to imitate",
        "easier prompts first (data.curriculum), a cold start (`covey sft`), a reward with parts, "
        "rollout.num_samples up; "
        "look whether right answers are scored as wrong (`covey reward try`)",
        reward.groups_all_wrong,
    ),
    Rule(
        "samples_alike",
        "reward",
        (SPREAD, SCORE),
        3,
        f"at most {reward.MAX_NO_SPREAD:.0%} of the groups without spread",
        "G equal responses are one response: no difference, no gradient",
        "rollout.temperature 1.0, top_k 0, top_p 1.0; rollout.num_samples up; if entropy is low too, an entropy bonus "
        "(algorithm.entropy_target)",
        reward.samples_alike,
    ),
    Rule(
        "reward_flat",
        "reward",
        (SCORE, SPREAD),
        30,
        f"a rise over {reward.RISE_ERRORS:g} standard errors, or a reward near its top",
        "the run spends compute and learns nothing that the noise does not hide",
        "check the reward's range and spread first (`covey show RUN`); then train.lr x 3, rollout.num_samples x 2, "
        "clip range 0.1 to 0.3 (GRPO has no value function to look at)",
        reward.reward_flat,
    ),
    Rule(
        "reward_collapse",
        "reward",
        (SCORE,),
        10,
        f"no fall over {reward.COLLAPSE_SHARE:.0%} of the reward's range from its best",
        "the policy has left what it had learned; more steps rarely bring it back",
        "go back to the best checkpoint (checkpoint.best), train.lr / 3, a KL term (algorithm.kl_coef 0.001 to "
        "0.01); if it "
        "came after a thousand steps or more, compare rms_norm_eps and eos with the checkpoint: `covey doctor "
        "--config`",
        reward.reward_collapse,
    ),
    Rule(
        "reward_noisy",
        "reward",
        (SCORE,),
        20,
        f"less than {reward.NOISE_SHARE:.0%} of the range from step to step",
        "the direction of an update is mostly chance",
        "train.batch_size x 2 or rollout.num_samples x 2; one scale for all tasks (reward.normalization)",
        reward.reward_noisy,
    ),
    Rule(
        "reward_errors",
        "reward",
        _FAILURES,
        1,
        f"at most {reward.MAX_FAILED_SHARE:.0%} of the responses",
        "what raises is unscored; if it raises on one kind of response, that kind is never judged",
        "the run's log has one traceback per kind of error; `covey reward try CONFIG` repeats it; retries for "
        "remote services",
        reward.reward_errors,
    ),
    Rule(
        "reward_timeouts",
        "reward",
        _FAILURES,
        1,
        f"at most {reward.MAX_FAILED_SHARE:.0%} of the responses",
        "slow responses go unscored, and each costs the whole time limit",
        "timeout_s of that function up, or the function made faster; reward.num_workers at most the host's cores",
        reward.reward_timeouts,
    ),
    Rule(
        "unscored",
        "reward",
        _FAILURES,
        1,
        f"at most {reward.MAX_UNSCORED:.0%} of the responses without a reward, failures apart",
        "they leave the group's baseline and are not learned from",
        "return 0.0 for a wrong answer, None only where the function does not apply; give the task a route in "
        "reward.tasks",
        reward.unscored,
    ),
    Rule(
        "format_hack",
        "reward",
        (SCORE,),
        10,
        "content that improves along with form",
        "the policy earns the form's points and stops trying; the total hides it",
        "weight of the form down (0.1 to 0.2), or give its points only with a right answer; harder to satisfy forms",
        reward.format_hack,
    ),
    Rule(
        "train_eval_gap",
        "reward",
        (SCORE, "eval/reward"),
        10,
        f"held-out rows that rise by at least {reward.GAP_SHARE:.0%} of the training rows' rise",
        "the policy memorises rows or exploits the training reward",
        "more rows, fewer passes; checkpoint.best: eval/reward; algorithm.kl_coef; compare `covey show` of both",
        reward.train_eval_gap,
    ),
    Rule(
        "task_neglected",
        "reward",
        (SCORE,),
        10,
        "no task that falls while another rises",
        "the mean hides a task that is unlearned",
        "weights by task in reward.tasks, reward.normalization: range or zscore, the task's share of the rows",
        reward.task_neglected,
    ),
    Rule(
        "task_scales",
        "reward",
        (SCORE,),
        3,
        f"spreads of tasks within {reward.TASK_RATIO:g} x, or advantages that normalise them",
        "the task with the widest rewards has the gradient to itself",
        "reward.normalization: range (declared) or zscore (measured), or algorithm.advantage: group_norm",
        reward.task_scales,
    ),
    Rule(
        "advantage_scale",
        "reward",
        ("advantage/max", "advantage/min"),
        3,
        f"advantages up to {reward.MAX_ADVANTAGE:g}",
        "advantages multiply the gradient: the learning rate is no longer what it says",
        "rewards of one range (0 to 1), algorithm.advantage: group_norm, or reward.normalization",
        reward.advantage_scale,
    ),
    Rule(
        "duplicate_prompts",
        "reward",
        (SCORE,),
        1,
        f"at most {reward.DUPLICATES:.0%} equal prompts within a step",
        "a prompt that is there twice counts twice, and held-out rows may be among the training rows",
        "remove equal rows from the data: `covey preprocess` with drop_duplicates: true",
        reward.duplicate_prompts,
    ),
    Rule(
        "data_exhausted",
        "reward",
        (SCORE,),
        1,
        f"at most {reward.MAX_PASSES} passes over the prompts",
        "rows seen so often are memorised; the reward rises without a better policy",
        "more rows, or fewer train.steps; hold rows out (data.eval_rows) to see it",
        reward.data_exhausted,
    ),
    Rule(
        "responses_alike",
        "reward",
        (SCORE,),
        1,
        "different responses to different prompts",
        "one text that the reward likes, whatever was asked: the policy has found a hole in it",
        "read it in `covey show RUN`; close the hole in the reward; go back to a checkpoint before it; an "
        "entropy bonus or KL term",
        reward.responses_alike,
    ),
    Rule(
        "rounds_exhausted",
        "reward",
        ("rollout/dropped_groups", "rollout/filled_groups"),
        3,
        f"at most {reward.DROPPED_RATIO:g} groups dropped for one trained on, enough groups in most steps",
        "most of the rollout's time goes into groups that are thrown away",
        "prompts of middle difficulty (data.curriculum by pass_rate), rollout.num_samples up, "
        "algorithm.max_rounds down",
        reward.rounds_exhausted,
    ),
)
