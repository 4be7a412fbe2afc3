"""Held-out evaluation: the run's own rewards and rollout engine on rows that are never trained on.

pass@k is the unbiased estimate 1 - C(n - c, k) / C(n, k) over n samples of which c pass, averaged over prompts
(arXiv:2107.03374, eq. 1); a response passes when its reward is at least evaluation.pass_threshold.
"""

from __future__ import annotations

import math
import sys
import time
from contextlib import closing

import numpy as np

from covey.config.load import LoadedConfig
from covey.config.lora import LoraConfig
from covey.config.schema import Config
from covey.distributed import mesh as meshes
from covey.distributed.mesh import Mesh
from covey.models.adapters import is_adapter_directory
from covey.preflight import check_pass_on
from covey.rewards.runner import Scorer, Scores
from covey.rollout.engine import RolloutEngine, Sampling
from covey.rollout.shared import gather_scores
from covey.setup import check_tasks, load_parts, load_prompts, make_engine, make_scorer
from covey.types import Group, Prompt


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Chance that at least one of k responses, drawn without return from the n, passes."""
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def evaluate(
    engine: RolloutEngine, scorer: Scorer, prompts: list[Prompt], config: Config, mesh: Mesh | None = None
) -> tuple[dict[str, float], list[Group], Scores]:
    """Metrics under `eval/...`, with the groups and scores they come from; of all ranks of `mesh`, on each.

    Every evaluation of a run draws the same random numbers, so that two of them differ by the weights alone.
    """
    settings = config.evaluation
    sampling = Sampling(
        num_samples=settings.num_samples,
        max_response_length=settings.max_response_length or config.rollout.max_response_length,
        temperature=settings.temperature,
        seed=config.seed,
        step=-1,
    )
    start = time.perf_counter()
    groups = engine.generate(prompts, sampling, on_group=scorer.submit)
    scores = gather_scores(scorer.collect(), mesh or Mesh())
    values = summarize_evaluation(groups, scores, threshold=settings.pass_threshold, pass_on=settings.pass_on)
    values["timing/eval"] = time.perf_counter() - start
    return values, groups, scores


def run(loaded: LoadedConfig[Config], *, model: str | None = None) -> dict[str, float]:
    """Evaluate `model` (default: the configuration's) on the configuration's held-out rows; prints one line."""
    config = _evaluated(loaded.config, model)
    parts = load_parts(
        config.model,
        config.train,
        config.parallel,
        kind=config.device,
        temperature=config.rollout.temperature,
        lora=config.lora,
        debug=config.debug,
        deterministic=config.deterministic,
    )
    with closing(make_scorer(config, parts)) as scorer:
        prompts = load_prompts(config, parts.tokenizer)
        if prompts.eval is None:
            raise ValueError(
                f"{loaded.source}: no held-out rows to evaluate on; set data.eval, or data.eval_rows above 0"
            )
        check_tasks(scorer, prompts, config.reward.task_key)
        check_pass_on(config.evaluation.pass_on, scorer, prompts.eval, config.reward.task_key)
        engine = make_engine(config, parts, prompts)
        values, _, _ = evaluate(engine, scorer, list(prompts.eval), config, parts.mesh)
    meshes.stop()
    if parts.mesh.is_main:
        sys.stderr.write("  ".join(f"{name} {value:.4g}" for name, value in values.items()) + "\n")
    return values


def _evaluated(config: Config, model: str | None) -> Config:
    """The configuration with the model to evaluate in place of the one to train from.

    An adapter is evaluated on the configuration's model; one that training would start from zero is left out.
    """
    if model is None:
        new = config.lora is not None and config.lora.path is None
        return config.model_copy(update={"lora": None}) if new else config
    if is_adapter_directory(model):
        return config.model_copy(update={"lora": LoraConfig(path=model)})
    return config.model_copy(update={"model": config.model.model_copy(update={"path": model}), "lora": None})


def passes(scores: Scores, *, threshold: float, pass_on: str | None) -> np.ndarray:
    """(P, G) bool: which responses pass; an unscored one does not."""
    judged = scores.total if pass_on is None else (scores.parts | scores.details).get(pass_on)
    if judged is None:
        known = ", ".join(sorted(scores.parts | scores.details))
        raise ValueError(f"evaluation.pass_on: {pass_on!r} is neither a reward nor a part of one; known: {known}")
    return np.nan_to_num(judged, nan=-math.inf) >= threshold - 1e-9


def summarize_evaluation(
    groups: list[Group], scores: Scores, *, threshold: float, pass_on: str | None = None
) -> dict[str, float]:
    """eval/reward, eval/pass@1, eval/pass@k, per-reward means, lengths. An unscored response does not pass.

    pass_on: the reward ("math") or part of one ("math/answer") that must reach the threshold; None: the total reward.
    """
    if not groups:
        return {}
    passed = passes(scores, threshold=threshold, pass_on=pass_on).sum(axis=1)
    num_samples = scores.total.shape[1]
    lengths = [len(r.token_ids) for group in groups for r in group.responses]
    truncated = [r.finish_reason == "length" for group in groups for r in group.responses]
    values = {
        f"eval/pass@{k}": float(np.mean([pass_at_k(num_samples, int(c), k) for c in passed])) for k in {1, num_samples}
    }
    if not np.isnan(scores.total).all():
        values["eval/reward"] = float(np.nanmean(scores.total))
    reported = {name: value for name, value in scores.summary().items() if name.endswith(("/mean", "/reward"))}
    values |= {f"eval/{name}": value for name, value in reported.items()}
    if len(set(scores.tasks)) > 1:
        for task in dict.fromkeys(scores.tasks):
            of_task = [
                pass_at_k(num_samples, int(c), 1) for c, t in zip(passed, scores.tasks, strict=True) if t == task
            ]
            values[f"eval/task/{task}/pass@1"] = float(np.mean(of_task))
    values["eval/response_length/mean"] = float(np.mean(lengths))
    values["eval/truncated_share"] = float(np.mean(truncated))
    return values
