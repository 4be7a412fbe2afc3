"""Every setting of a run: the only place where defaults stand.

A field's docstring says what it means; `covey config reference` and docs/config.md print it. Sections are YAML maps.
Nothing here imports torch. Cross-field rules are validators that name the keys, the values and the fix.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from covey.config.algorithm import AlgorithmConfig
from covey.config.lora import LoraConfig, check_reference
from covey.config.scoring_models import DistillationConfig, ReferenceConfig
from covey.config.section import NonNegative, NonNegativeInt, PositiveInt, Probability, Section


class ModelConfig(Section):
    """The policy: which weights, in which numbers."""

    path: str
    """Hugging Face directory or hub id of the policy (Qwen2/2.5, Qwen3, Llama)."""
    tokenizer: str | None = None
    """Directory or hub id of the tokenizer; default: the model's own."""
    ref_path: str | None = None
    """Reference for the KL term; default: the policy's starting weights, with lora the model without adapter. Loaded
    only when kl_coef is not 0."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Numbers the weights are kept and computed in; auto: float32 on cpu, bfloat16 on cuda and npu."""
    kernels: Literal["auto", "reference"] = "auto"
    """auto: fused attention, norm, rotary embedding and SwiGLU, tested at start; reference: plain torch."""
    gradient_checkpointing: bool = False
    """Recompute each layer in backward: less memory, about a third more compute."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""


class CurriculumConfig(Section):
    """Which prompts come next, by a column or by how often their responses passed."""

    by: str | None = None
    """A column of the rows, or `pass_rate` = share of the prompt's last group that passed; null: the usual order."""
    mode: Literal["order", "sample"] = "order"
    """order: sort every epoch; sample: draw by weight (the column, or p (1 - p) of the pass rate p)."""
    descending: bool = False
    """Largest values first (mode `order`)."""
    drop_after: NonNegativeInt = 0
    """Leave a prompt out when its groups were all right or all wrong so many times in a row; 0: never."""

    @model_validator(mode="after")
    def _does_something(self) -> CurriculumConfig:
        if self.by is None and not self.drop_after:
            raise ValueError("curriculum has neither `by` nor `drop_after`: set one, or remove the section")
        if self.descending and (self.by is None or self.mode == "sample"):
            raise ValueError("descending has an effect only with `by` and mode: order")
        return self


class DataConfig(Section):
    """Where prompts come from."""

    train: str | list[str]
    """File, directory or hub id of training rows (json, jsonl, parquet, csv), or several of them."""
    eval: str | None = None
    """Held-out rows; default: the last `eval_rows` of the training rows are held out."""
    eval_rows: NonNegativeInt = 0
    """Rows to hold out of `train` (or to take of `eval`; 0 there: all of them)."""
    prompt_key: str = "problem"
    """Column with the question: text, or a list of chat messages."""
    response_key: str | None = "answer"
    """Column with the reference answer, given to rewards as `response`; null: none."""
    system: str | None = None
    """System message put before every prompt (template `chat` and named templates)."""
    prompt_type: str = "auto"
    """Prompt template: `chat` = the tokenizer's own, `empty` = raw text; auto: chat if the tokenizer has one."""
    chat_template_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the chat template, for example {enable_thinking: false}."""
    max_prompt_length: PositiveInt = 1024
    """Longest prompt in tokens; longer rows follow `overlong_prompts`."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """What happens to longer prompts: dropped and counted, or an error that names the row."""
    shuffle: bool = True
    """New order every epoch, from the seed."""
    curriculum: CurriculumConfig | None = None
    """Order or choose prompts by difficulty; default: every prompt once an epoch."""
    limit: PositiveInt | None = None
    """Use only the first so many rows of `train`: 200 is a quick check of a new set-up."""


class RolloutConfig(Section):
    """How responses are sampled."""

    num_samples: PositiveInt = 8
    """Responses per prompt (G)."""
    max_response_length: PositiveInt = 1024
    """Longest response in tokens."""
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """Logits are divided by it, in rollout and in training; 0: greedy (evaluation only)."""
    top_k: NonNegativeInt = 0
    """Keep the k likeliest tokens; 0: all."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Keep the smallest set of likeliest tokens with at least this probability; 1: all."""
    min_p: Probability = 0.0
    """Drop tokens less likely than this share of the likeliest; 0: none."""
    stop_token_ids: list[NonNegativeInt] = Field(default_factory=list)
    """Ids that end a response, besides those of generation_config, tokenizer and template."""
    max_num_seqs: PositiveInt = 256
    """Most responses decoded at once (native engine)."""
    kv_cache_bytes: PositiveInt = 4 * 2**30
    """Memory for keys and values of prompts and responses in flight (native engine), bytes."""


class RewardEntry(Section):
    """One reward function. In YAML, a bare name stands for an entry without further settings."""

    name: str
    """Registered name, "module:function" or "file.py:function"."""
    weight: float = 1.0
    """The score is multiplied by it before the sum."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Given to the function as its `config`."""
    label: str | None = None
    """Name in metrics and records; default: the registered name, or the function's own name."""
    batch: bool = False
    """Call once with all responses to a prompt, instead of once per response (faster if the function vectorises)."""
    timeout_s: Annotated[float, Field(gt=0.0)] | None = None
    """Time limit per response, seconds; default: reward.timeout_s."""
    retries: NonNegativeInt = 0
    """Further calls after an exception, with pauses of 0.5, 1, 2 ... s (for remote services)."""
    include: list[Literal["uid", "finish_reason", "num_tokens", "token_ids", "max_response_length"]] = Field(
        default_factory=list
    )
    """Facts about the response to add to the row that the function sees."""
    cache: bool | None = None
    """Reuse the score of an equal response to an equal row; default: yes for built-in rules, no for others."""
    range: tuple[float, float] | None = None
    """Lowest and highest score, for normalization `range`; default: the built-in's own, else 0 and 1."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _range_has_a_width(self) -> RewardEntry:
        if self.range is not None and self.range[0] >= self.range[1]:
            raise ValueError(f"range={list(self.range)}: the lowest score must be below the highest")
        return self


class RewardConfig(Section):
    """How responses are scored."""

    functions: list[RewardEntry] = Field(default_factory=list)
    """Reward functions for every row; a response's reward is the weighted sum of those that score it."""
    tasks: dict[str, list[RewardEntry]] = Field(default_factory=dict)
    """Further reward functions by task; `default` is for rows of any other task. A row without a route is an error."""
    task_key: str = "task"
    """Column with the row's task."""
    on_error: Literal["none", "raise"] = "none"
    """A reward function that raises: count it and leave the response unscored, or stop the run."""
    num_workers: NonNegativeInt = 2
    """Processes that run the reward functions; 0: in the trainer's own, where a hang cannot be ended."""
    timeout_s: Annotated[float, Field(gt=0.0)] = 10.0
    """Time limit of a reward function per response, seconds; over it the response is unscored and counted."""
    cache_bytes: NonNegativeInt = 64 * 2**20
    """Memory for scores of responses seen before, bytes; 0: none."""
    cache_path: str | None = None
    """File (SQLite) that keeps scores between runs, bounded by cache_bytes too; default: none."""
    normalization: Literal["none", "range", "zscore"] = "none"
    """Scale of rewards between tasks before advantages: none, by the declared ranges, or by running mean and std."""
    sandbox: Literal["isolated", "rlimits"] = "isolated"
    """Where generated programs run; isolated needs bubblewrap; rlimits only bounds resources (docs/sandbox.md)."""

    @model_validator(mode="after")
    def _every_task_has_one(self) -> RewardConfig:
        empty = [task for task, entries in self.tasks.items() if not entries and not self.functions]
        if empty:
            raise ValueError(f"reward.tasks.{empty[0]} lists no reward function")
        return self


class TrainConfig(Section):
    """The loop and the optimizer."""

    steps: PositiveInt = 100
    """Steps; one step is one rollout and its update."""
    batch_size: PositiveInt = 16
    """Prompts per step, over all devices (P)."""
    print_every: PositiveInt = 1
    """Print a line every so many steps, after evaluations and at the end; metrics.jsonl has every step."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Packed tokens per forward and backward; changes memory and speed, not the gradient."""
    logits_chunk_bytes: PositiveInt = 256 * 2**20
    """Largest block of fp32 logits held at once, bytes; changes memory and speed, not the result."""
    lr: NonNegative = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, down to min_lr at the last optimizer step."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    warmup_fraction: Probability = 0.0
    """Warm-up as a share of all optimizer steps; give this or warmup_steps."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay of matrices (norms and biases have none)."""
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """Added to the root of AdamW's second moment."""
    max_grad_norm: NonNegative = 1.0
    """The gradient's norm is clipped to it; 0: no clipping."""

    @model_validator(mode="after")
    def _one_warmup(self) -> TrainConfig:
        if self.warmup_steps and self.warmup_fraction:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_fraction={self.warmup_fraction} both set: keep one"
            )
        return self


class EvaluationConfig(Section):
    """Held-out evaluation with the training rewards."""

    every: NonNegativeInt = 0
    """Evaluate every so many steps, and before the first and after the last; 0: never."""
    num_samples: PositiveInt = 1
    """Responses per held-out prompt; pass@k needs at least k."""
    temperature: NonNegative = 1.0
    """Sampling temperature of the evaluation; 0: greedy."""
    pass_on: str | None = None
    """Reward ("math") or part of one ("math/answer") that decides whether a response passes; default: the total."""
    pass_threshold: float = 1.0
    """A response passes when that reward is at least this."""
    max_response_length: PositiveInt | None = None
    """Longest response; default: rollout.max_response_length."""


class CheckpointConfig(Section):
    """What is kept to go on later."""

    every: NonNegativeInt = 0
    """Write a checkpoint every so many steps, and at the end; 0: only at the end and when interrupted."""
    keep_last: PositiveInt = 2
    """Checkpoints kept; older ones are removed, except for those of keep_every and best."""
    keep_every: NonNegativeInt = 0
    """Keep the checkpoint of every so many steps for good; 0: none."""
    best: str | None = None
    """Also keep the checkpoint with the highest value of this metric, for example eval/pass@1."""
    background: bool = False
    """Write while training goes on; needs host memory for a copy of weights and optimizer."""
    export: bool = True
    """Write the final weights as a Hugging Face directory `OUTPUT/model`."""


class ParallelConfig(Section):
    """How several processes share the work; start them with `covey launch` or torchrun. One process: all 1."""

    dp_shard: PositiveInt | Literal["auto"] = "auto"
    """Ranks that train on different micro-batches and hold a part of the weights each; auto: all that are left."""
    dp_replicate: PositiveInt = 1
    """Copies of the sharded weights, for example one a host; each trains on different micro-batches."""
    cp: PositiveInt = 1
    """Ranks that cut the tokens of one micro-batch (context parallelism); tp x cp must divide the attention heads."""
    tp: PositiveInt = 1
    """Ranks that cut every matrix (tensor parallelism); must divide the model's attention and key/value heads."""
    sequence_parallel: bool = False
    """With tp: cut the tokens between layers over the same ranks; less activation memory, the same communication."""
    pp: PositiveInt = 1
    """Ranks that hold some of the layers each and pass micro-batches on (pipeline parallelism, 1F1B)."""
    pp_chunks: PositiveInt = 1
    """With pp: pieces of the layers on each rank; from 2 on interleaved: shorter waits, more transfers."""
    pp_layers: list[PositiveInt] | None = None
    """With pp: layers of each piece, pp x pp_chunks numbers; piece i is on rank i modulo pp. Default: evenly."""
    reduce_every_micro_batch: bool = False
    """Add up gradients over ranks after every micro-batch: each keeps its piece of them only, and more is sent."""
    timeout_s: Annotated[float, Field(gt=0.0)] = 1800.0
    """How long a rank waits for the slowest one before the run ends with an error, seconds."""

    @model_validator(mode="after")
    def _pieces_need_a_pipeline(self) -> ParallelConfig:
        if self.pp == 1 and (self.pp_chunks > 1 or self.pp_layers is not None):
            raise ValueError("pp_chunks and pp_layers have an effect only with a pipeline: set pp, or remove them")
        if self.pp_layers is not None and len(self.pp_layers) != self.pp * self.pp_chunks:
            raise ValueError(
                f"pp_layers={self.pp_layers} has {len(self.pp_layers)} numbers, but pp={self.pp} x "
                f"pp_chunks={self.pp_chunks} = {self.pp * self.pp_chunks} pieces need one each"
            )
        return self


class LoggingConfig(Section):
    """What is shown and kept of a run. metrics.jsonl is always written."""

    records: bool = True
    """Write every step's rollouts to parquet (for `covey show`)."""
    tensorboard: bool | Literal["auto"] = "auto"
    """Write TensorBoard events (extra `tensorboard`); auto: when that is installed."""
    wandb_project: str | None = None
    """Send metrics to this Weights & Biases project (extra `wandb`)."""
    swanlab_project: str | None = None
    """Send metrics to this SwanLab project (extra `swanlab`)."""
    names: Literal["covey", "mindspeed_grpo", "mindspeed_dapo"] = "covey"
    """Names and definitions on the console and in dashboards: Covey's or MindSpeed-RL's; metrics.jsonl has Covey's."""
    longest_in_tps: bool = False
    """With MindSpeed-RL's names: *_tps count the longest lengths, not the mean (its log_max_throughput)."""

    @model_validator(mode="after")
    def _longest_is_upstreams(self) -> LoggingConfig:
        if self.longest_in_tps and self.names == "covey":
            raise ValueError("longest_in_tps has an effect only with the names mindspeed_grpo and mindspeed_dapo")
        return self


class PreflightConfig(Section):
    """Checks before the first step: docs/replay.md lists them."""

    skip: dict[str, str] = Field(default_factory=dict)
    """Checks to leave out, each with the reason: {turn_end: "the template's last token is not used"}."""


class SftConfig(Section):
    """Demonstrations of a cold start."""

    data: str | list[str]
    """File of rows with a prompt and a response to imitate, or several of them."""
    prompt_key: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    response_key: str = "response"
    """Column with the demonstration, without the stop token."""
    prompt_type: str = "auto"
    """Prompt template, as data.prompt_type."""
    max_prompt_length: PositiveInt = 1024
    """Longest prompt in tokens; rows with a longer one are dropped and counted."""
    max_response_length: PositiveInt = 1024
    """Longest demonstration in tokens, stop token included; longer ones are dropped and counted."""
    epochs: PositiveInt | None = None
    """Passes over the rows; default: train.steps optimizer steps."""


class Config(Section):
    """A run."""

    model: ModelConfig
    lora: LoraConfig | None = None
    """Train an adapter beside frozen weights; default: all weights are trained."""
    data: DataConfig
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    distillation: DistillationConfig | None = None
    """A teacher's verdict on the policy's own responses, with rewards or instead of them; default: none."""
    train: TrainConfig = Field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    preflight: PreflightConfig = Field(default_factory=PreflightConfig)
    output_dir: str
    """Directory of the run: metrics, records, checkpoints, final model."""
    seed: NonNegativeInt = 1234
    """Seeds the data order and the sampling."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Where to run; auto: npu, else cuda, else cpu."""
    debug: bool = False
    """Find faults, slowly: NaN named by module, ranks' exchanges compared, one launch at a time (docs/replay.md)."""
    deterministic: bool = False
    """Only kernels and collectives whose result does not vary from run to run; slower on cuda and npu, free on cpu."""
    environment: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Environment variables to set before torch is imported; one that the shell has set stays (docs/npu.md)."""

    @model_validator(mode="after")
    def _something_to_learn_from(self) -> Config:
        if self.reward.functions or self.reward.tasks:
            return self
        if self.distillation is None:
            raise ValueError(
                "no reward function: name at least one under reward.functions or reward.tasks, "
                "or give a teacher under distillation"
            )
        curriculum = self.data.curriculum
        readers = {
            "evaluation.every": self.evaluation.every > 0,
            "algorithm.max_rounds": self.algorithm.max_rounds > 1,
            "algorithm.kl_in_reward": self.algorithm.kl_in_reward,
            "algorithm.overlong_buffer": self.algorithm.overlong_buffer > 0,
            "reward.normalization": self.reward.normalization != "none",
            "data.curriculum": curriculum is not None and (curriculum.drop_after > 0 or curriculum.by == "pass_rate"),
        }
        if useless := [key for key, is_set in readers.items() if is_set]:
            raise ValueError(
                f"{', '.join(useless)} without a reward function: it goes by rewards and there are none; remove it, or "
                "name a function under reward.functions (with weight 0 it only measures)"
            )
        return self

    @model_validator(mode="after")
    def _reference_is_loaded(self) -> Config:
        if not self.algorithm.kl_coef:
            for key, value in (("sync_every", self.reference.sync_every), ("offload", self.reference.offload)):
                if value:
                    raise ValueError(
                        f"reference.{key}={value} has no effect with algorithm.kl_coef=0, which loads no reference: "
                        f"give kl_coef a value, or remove {key}"
                    )
        return self

    @model_validator(mode="after")
    def _reference_beside_an_adapter(self) -> Config:
        if self.lora is not None:
            check_reference(self.reference, self.model.ref_path)
        return self

    @model_validator(mode="after")
    def _teacher_judges_tokens(self) -> Config:
        algorithm = self.algorithm
        if self.distillation is None:
            return self
        if algorithm.loss in ("gspo", "rloo") or algorithm.sequence_ratio:
            raise ValueError(
                f"distillation with algorithm.loss={algorithm.loss}, "
                f"algorithm.sequence_ratio={algorithm.sequence_ratio}: one ratio for a response gives its tokens one "
                "mean advantage; choose loss gspo_token, or a ratio per token"
            )
        if algorithm.off_policy_max_kl is not None or algorithm.sampling_consistent:
            raise ValueError(
                f"distillation with algorithm.off_policy_max_kl={algorithm.off_policy_max_kl}, "
                f"algorithm.sampling_consistent={algorithm.sampling_consistent}: the first goes by the sign of a "
                "response's one advantage, the second by tokens that the teacher did not choose; remove them"
            )
        return self

    @model_validator(mode="after")
    def _group_baseline_needs_a_group(self) -> Config:
        alone = not (self.reward.functions or self.reward.tasks)
        own = ":" in self.algorithm.advantage
        if self.rollout.num_samples < 2 and self.algorithm.advantage != "batch_norm" and not alone and not own:
            raise ValueError(
                f"rollout.num_samples={self.rollout.num_samples} with algorithm.advantage={self.algorithm.advantage}: "
                "a group baseline needs at least 2 responses per prompt; set rollout.num_samples to 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _batch_arithmetic(self) -> Config:
        mini, batch = self.algorithm.mini_batch_size, self.train.batch_size
        if mini is not None and batch % mini:
            raise ValueError(
                f"train.batch_size={batch} is not a multiple of algorithm.mini_batch_size={mini}: "
                "both count prompts; every optimizer step needs the same number of them"
            )
        return self

    @model_validator(mode="after")
    def _sampling_temperature(self) -> Config:
        if self.rollout.temperature == 0:
            raise ValueError("rollout.temperature=0 samples G equal responses; training needs a temperature above 0")
        return self


class SftRunConfig(Section):
    """A cold start: `covey sft FILE`."""

    model: ModelConfig
    lora: LoraConfig | None = None
    """Train an adapter beside frozen weights; default: all weights are trained."""
    sft: SftConfig
    train: TrainConfig = Field(default_factory=TrainConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    output_dir: str
    """Directory of the run; the trained model is written to OUTPUT/model."""
    seed: NonNegativeInt = 1234
    """Seeds the order of the demonstrations."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Where to run; auto: npu, else cuda, else cpu."""
    debug: bool = False
    """Find faults, slowly: NaN named by module, ranks' exchanges compared, one launch at a time (docs/replay.md)."""
    deterministic: bool = False
    """Only kernels and collectives whose result does not vary from run to run; slower on cuda and npu, free on cpu."""
    environment: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Environment variables to set before torch is imported; one that the shell has set stays (docs/npu.md)."""
