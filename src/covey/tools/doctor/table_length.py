"""The rules about lengths and about memory: what each needs, what is expected, why it matters, the remedy."""

from __future__ import annotations

from covey.tools.doctor import rules_length as length
from covey.tools.doctor import rules_memory as memory
from covey.tools.doctor.evidence import Rule
from covey.tools.doctor.rules_length import LENGTH, TRUNCATED
from covey.tools.doctor.rules_reward import SCORE

_MEMORY = (
    "memory/start_bytes",
    "memory/limit_bytes",
    "memory/rollout_bytes",
    "memory/scoring_bytes",
    "memory/update_bytes",
)

LENGTH_RULES = (
    Rule(
        "truncated",
        "length",
        (TRUNCATED, LENGTH),
        1,
        f"at most {length.MAX_TRUNCATED:.0%} of the responses at the length limit",
        "a response without its answer is scored as wrong: thinking longer is punished, whatever it finds",
        "rollout.max_response_length up",
        length.truncated,
    ),
    Rule(
        "never_stops",
        "length",
        (TRUNCATED,),
        1,
        "responses that end with a stop token",
        "the token that the model ends with is not among the run's stop tokens (Qwen2.5: 151643 and 151645)",
        "`covey doctor --config FILE` compares eos of tokenizer, model and template; rollout.stop_token_ids; or the "
        "limit is far too short: rollout.max_response_length",
        length.never_stops,
    ),
    Rule(
        "length_creep",
        "length",
        (LENGTH, SCORE),
        10,
        f"lengths under {length.CREEP_RATIO:g} x the first third's, unless rewards rise",
        "every token costs time and memory; sequence means reward filler in long wrong responses",
        "algorithm.aggregation: token_mean or preset dr_grpo; algorithm.overlong_buffer; look for filler in "
        "`covey show RUN`",
        length.length_creep,
    ),
    Rule(
        "length_collapse",
        "length",
        (LENGTH, SCORE),
        10,
        f"lengths over {length.COLLAPSE_RATIO:g} x the first third's, unless rewards rise",
        "the policy stops reasoning and guesses",
        "a penalty for short or a reward for worked answers; overlong_penalty down; entropy_collapse may speak too",
        length.length_collapse,
    ),
)

MEMORY_RULES = (
    Rule(
        "memory_update",
        "memory",
        _MEMORY,
        1,
        f"the update under {memory.NEAR_LIMIT:.0%} of the device's memory",
        "one batch of longer responses ends the run",
        "train.max_tokens_per_micro_batch / 2, then model.gradient_checkpointing, then parallel.dp_shard",
        memory.memory_update,
    ),
    Rule(
        "memory_scoring",
        "memory",
        _MEMORY,
        1,
        f"old, reference and teacher log-probabilities under {memory.NEAR_LIMIT:.0%} of the device's memory",
        "reference and teacher lie beside policy and optimizer",
        "reference.offload or distillation.offload: true; train.logits_chunk_bytes / 2; "
        "train.max_tokens_per_micro_batch / 2",
        memory.memory_scoring,
    ),
    Rule(
        "memory_rollout",
        "memory",
        _MEMORY,
        1,
        f"the rollout under {memory.NEAR_LIMIT:.0%} of the device's memory",
        "keys and values grow with lengths and with responses at once",
        "rollout.kv_cache_bytes / 2, rollout.max_num_seqs / 2, parallel.tp",
        memory.memory_rollout,
    ),
    Rule(
        "memory_growth",
        "memory",
        _MEMORY,
        15,
        f"less than {memory.GROWTH_RATIO:g} x from the first to the last third",
        "something is kept from step to step; the run ends when the device is full",
        "a reward function or an engine of your own that keeps tensors or texts; reward.cache_bytes; "
        "`py-spy dump` or tracemalloc on the trainer",
        memory.memory_growth,
    ),
    Rule(
        "ended_near_limit",
        "memory",
        ("memory/peak_bytes", *_MEMORY),
        1,
        "a run that ends with summary.json",
        "the process was most likely killed for memory",
        "the log's last lines say (out of memory, or killed by signal 9: dmesg); then as for the phase that is named",
        memory.ended_near_limit,
    ),
)
