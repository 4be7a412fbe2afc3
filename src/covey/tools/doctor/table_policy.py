"""The rules about the update: what each needs, what is expected, why it matters, the remedy."""

from __future__ import annotations

from covey.tools.doctor import rules_policy as policy
from covey.tools.doctor.evidence import Rule
from covey.tools.doctor.rules_policy import ENTROPY
from covey.tools.doctor.rules_reward import SCORE, SPREAD

_UPDATE = ("actor/ppo_kl", "actor/pg_clipfrac")

POLICY = (
    Rule(
        "entropy_collapse",
        "policy",
        (ENTROPY, SCORE),
        5,
        f"over {policy.DEAD_ENTROPY:g} nats a token until the task is solved",
        "a policy without alternatives samples the same response again and cannot find a better one",
        "algorithm.entropy_target about half the first steps' entropy, clip_high 0.28 (DAPO), train.lr / 3, "
        "rollout.temperature 1.0",
        policy.entropy_collapse,
    ),
    Rule(
        "entropy_blowup",
        "policy",
        (ENTROPY, SCORE),
        5,
        f"less than {policy.BLOWUP_RATIO:g} x the first steps' entropy",
        "the policy is becoming random text; rewards follow",
        "train.lr / 10 or longer warm-up; algorithm.entropy_coef 0 or less; a KL term; look at rollout_mismatch first",
        policy.entropy_blowup,
    ),
    Rule(
        "kl_blowup",
        "policy",
        ("actor/kl_loss",),
        5,
        f"under {policy.KL_NATS:g} nats a token from the reference",
        "what the model knew before is being lost",
        "algorithm.kl_coef x 3 or kl_target 0.02; train.lr / 3; fewer epochs",
        policy.kl_blowup,
    ),
    Rule(
        "large_updates",
        "policy",
        _UPDATE,
        3,
        f"KL under {policy.MAX_UPDATE_KL:g} nats a token and under {policy.MAX_CLIPPED:.0%} clipped tokens in a step",
        "the surrogate holds near the policy that sampled; beyond the clip range tokens have no gradient",
        "train.lr / 3, algorithm.epochs 1, a larger algorithm.mini_batch_size",
        policy.large_updates,
    ),
    Rule(
        "clip_range",
        "policy",
        _UPDATE,
        3,
        f"clip_low and clip_high in {policy.USUAL_CLIP[0]:g} to {policy.USUAL_CLIP[1]:g} when updates are clipped "
        "or large",
        "too narrow: most tokens lose their gradient; too wide: nothing holds an update back",
        "algorithm.clip_low 0.2, clip_high 0.2 to 0.28",
        policy.clip_range,
    ),
    Rule(
        "gradient_spikes",
        "policy",
        ("actor/grad_norm",),
        10,
        f"no step over {policy.SPIKE_RATIO:g} x the median norm",
        "a few batches decide where the policy goes; AdamW's moments carry them on",
        "train.max_grad_norm near the median; look at the step's rows in `covey show RUN --step N`; reward outliers",
        policy.gradient_spikes,
    ),
    Rule(
        "gradient_clipped",
        "policy",
        ("actor/grad_norm",),
        5,
        f"a median norm under {policy.CLIPPED_RATIO:g} x train.max_grad_norm",
        "every gradient is cut to the same length: train.lr alone sets the step, and small batches count like "
        "large ones",
        "train.max_grad_norm to about the median norm; look for a reward or advantage scale first",
        policy.gradient_clipped,
    ),
    Rule(
        "gradient_vanished",
        "policy",
        ("actor/grad_norm", SPREAD),
        3,
        "a gradient when groups have spread",
        "the loss does not reach the weights: everything is masked, frozen or clipped away",
        "algorithm.mask_truncated with everything truncated? lora.target_modules that match nothing? `covey "
        "replay RUN --step N`",
        policy.gradient_vanished,
    ),
    Rule(
        "non_finite",
        "policy",
        ("actor/skipped_steps", "actor/nonfinite_tokens"),
        1,
        "no NaN and no infinity",
        "steps are skipped and tokens left out; what is left is another objective",
        "`debug: true` names the first module with NaN; model.dtype: float32 or model.kernels: reference to tell "
        "kernels "
        "from data; train.lr / 3 if gradient_spikes speaks too",
        policy.non_finite,
    ),
    Rule(
        "lr_too_high",
        "policy",
        (SCORE, "actor/grad_norm"),
        5,
        "no early fall of the reward together with a runaway gradient, entropy, KL or length",
        "GRPO is sensitive to the first updates: a policy that is thrown out early samples nothing worth learning",
        "train.lr / 10; train.warmup_steps 10 to 5 % of the run; algorithm.kl_coef 0.001",
        policy.lr_too_high,
    ),
    Rule(
        "no_warmup",
        "policy",
        (SCORE, "actor/lr"),
        10,
        "warm-up, or first steps that do not lose reward",
        "AdamW's second moment is unknown in the first steps: each moves every weight by the whole learning rate",
        "train.warmup_fraction: 0.05",
        policy.no_warmup,
    ),
    Rule(
        "lr_never_arrives",
        "policy",
        ("actor/lr",),
        1,
        f"a learning rate that reaches {policy.LR_REACHED:.0%} of train.lr",
        "warm-up counts optimizer steps; one longer than the run leaves the policy where it was",
        "train.warmup_fraction: 0.05 instead of warmup_steps, or more train.steps",
        policy.lr_never_arrives,
    ),
    Rule(
        "rollout_mismatch",
        "policy",
        ("rollout/logprob_gap_mean",),
        1,
        f"a mean difference of at most {policy.MAX_GAP:g} nats",
        "the policy that samples is not the one that is trained: the ratio starts away from 1",
        "temperature, top-p and top-k alike on both sides (algorithm.sampling_consistent); "
        "algorithm.rollout_correction: "
        "token_truncate; `covey align` finds the layer that differs",
        policy.rollout_mismatch,
    ),
    Rule(
        "mismatch_grows",
        "policy",
        ("rollout/logprob_gap_mean",),
        6,
        f"a difference that stays under {policy.GAP_RATIO:g} x the first steps'",
        "a mismatch that grows is weights that do not arrive, or numbers that run out of range",
        "look at stale_weights; model.dtype: float32 for a few steps; `covey replay RUN --step N`",
        policy.mismatch_grows,
    ),
    Rule(
        "stale_weights",
        "policy",
        ("actor/skipped_steps",),
        2,
        "every rollout from the weights of the last update",
        "the policy learns from what an old one did, ever further away",
        "an engine's load_weights must take effect before it returns; with an engine of your own, return the "
        "version it samples by",
        policy.stale_weights,
    ),
    Rule(
        "importance_weights",
        "policy",
        ("rollout/weight_mean",),
        3,
        f"a mean weight in {policy.WEIGHT_RANGE[0]:g} to {policy.WEIGHT_RANGE[1]:g}",
        "the correction hides that rollout and training differ, and takes most of the gradient with it",
        "look at rollout_mismatch; rollout in bfloat16 or float32 instead of fewer bits",
        policy.importance_weights,
    ),
)
