"""Score the responses of a step: which functions apply, their weighted sum, what failed.

`submit` takes a group as soon as its rollout is finished and returns at once, so that scoring overlaps the rollout;
`collect` waits and returns the scores of all submitted groups. A function that failed on a response (error, timeout)
leaves that response unscored (NaN), because the sum of the other functions would be a lower reward than the response
may deserve. A None of a function is different: the function does not apply, and the others make the reward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey.config.schema import RewardConfig, RewardEntry
from covey.rewards.adapters import Adapted
from covey.rewards.base import REWARDS, BuiltIn, RewardFn, source_digest, split_name
from covey.rewards.cache import Cache, key_maker
from covey.rewards.execute import FunctionSpec, Outcome, call, load, run
from covey.rewards.multitask import Router, RunningScale, to_range, zscore
from covey.rewards.pool import Pool
from covey.rewards.sandbox import Sandbox
from covey.rewards.scores import Scores
from covey.types import Group, Response

__all__ = ["RewardError", "Scorer", "Scores"]

log = logging.getLogger(__name__)


class RewardError(ValueError):
    """A reward function failed and reward.on_error is `raise`."""


@dataclass
class _Call:
    """One function on one group: what is known at once, and what is computed elsewhere."""

    outcomes: list[Outcome | None]  # by response
    columns: list[list[int]]  # responses that computed outcome i is for (equal ones are computed once)
    keys: list[bytes | None]
    future: Future[list[Outcome]]


class Scorer:
    """The reward functions of a run. `local` functions run in this process, at collect(), in one batch."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        max_response_length: int | None = None,
        local: Mapping[str, RewardFn] | None = None,  # name -> (responses, rows, config) -> list, e.g. on the device
    ) -> None:
        """Start loading every function; ready() waits for it."""
        self._config = config
        self._local = dict(local or {})
        self._settings = {"max_response_length": max_response_length, "sandbox": config.sandbox}
        self._max_response_length = max_response_length
        self._specs: list[FunctionSpec] = []
        always = self._add(config.functions, "reward.functions", ())
        by_task = {task: self._add(entries, f"reward.tasks.{task}", always) for task, entries in config.tasks.items()}
        self.router = Router(always, by_task, config.task_key)
        self.scale = RunningScale()
        self.cache = Cache(config.cache_bytes, config.cache_path)
        self._remote = [i for i, spec in enumerate(self._specs) if spec.name not in self._local]
        remote_specs = [self._specs[i] for i in self._remote]
        self._pool = Pool(remote_specs, config.num_workers) if config.num_workers and self._remote else None
        self._functions: list[Adapted] = [] if self._pool else [load(spec) for spec in remote_specs]
        self._pending: dict[int, tuple[Group, str, tuple[int, ...], list[_Call]]] = {}
        self._local_calls: dict[int, list[tuple[_Call, list[str], list[dict[str, Any]]]]] = {}
        self._logged: set[tuple[str, str]] = set()
        self._began = 0.0
        self.seconds = 0.0  # from the first submit until everything of the last collect was scored

    def ready(self) -> list[dict[str, str]]:
        """Wait until every function is loaded; one row per function for the start-up table.

        ValueError for an unknown name, module, option, or a sandbox that this machine does not offer.
        """
        forms = dict(zip(self._remote, self._forms(), strict=True))
        tasks = {i: [task for task, indices in self.router.by_task.items() if i in indices] for i in range(len(forms))}
        return [
            {
                "reward": spec.label,
                "function": spec.name,
                "form": forms.get(i, "local"),
                "weight": f"{spec.weight:g}",
                "tasks": "all" if i in self.router.always else ", ".join(tasks.get(i, [])),
                "time limit": f"{spec.timeout_s:g} s" + ("" if self._pool else " (not enforced on C code)"),
                "sandbox": Sandbox(spec.options["sandbox"]).describe() if spec.name == "code" else "",
            }
            for i, spec in enumerate(self._specs)
        ]

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
        """Rows per task; ValueError when a row has a task without reward functions."""
        return dict(self.router.check(rows))

    def score(self, groups: list[Group]) -> Scores:
        """Scores of `groups`, in their order."""
        for index, group in enumerate(groups):
            self.submit(index, group)
        return self.collect()

    def submit(self, index: int, group: Group) -> None:
        """Start scoring `group`, which becomes row `index` of the next collect()."""
        if index in self._pending:
            raise ValueError(f"group {index} was already submitted")
        if not self._pending:
            self._began = time.perf_counter()
        task, indices = self.router.route(group.prompt.row)
        calls = [self._begin(i, group) for i in indices]
        self._pending[index] = (group, task, indices, calls)

    def collect(self) -> Scores:
        """Scores of the groups submitted since the last collect, by ascending index; waits for the unfinished."""
        pending, self._pending = [self._pending[index] for index in sorted(self._pending)], {}
        self._run_local()
        scores = Scores.empty(len(pending), max((len(group.responses) for group, *_ in pending), default=0))
        for row, (group, task, indices, calls) in enumerate(pending):
            outcomes = [self._finish(one) for one in calls]
            for i, of_function in zip(indices, outcomes, strict=True):
                self._report(self._specs[i], of_function)
            scores.tasks.append(task)
            scores.add_group(row, [self._specs[i] for i in indices], outcomes, len(group.responses))
        self.cache.flush()
        self.seconds = time.perf_counter() - self._began if pending else 0.0
        return scores

    def normalize(self, scores: Scores) -> np.ndarray:
        """(P, G) total rewards on the scale of reward.normalization, for the advantages.

        Once per training step, with the scores of all devices: `zscore` counts them into its running scale.
        """
        if self._config.normalization == "range":
            return to_range(scores.total, scores.ranges)
        if self._config.normalization == "zscore":
            return zscore(scores.total, scores.tasks, self.scale)
        return scores.total

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the running scale of every task."""
        return {"moments": {task: list(values) for task, values in self.scale.moments.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from state_dict()."""
        self.scale.moments = {task: (n, s, q) for task, (n, s, q) in state["moments"].items()}

    def close(self) -> None:
        """End the workers and close the cache."""
        if self._pool is not None:
            self._pool.close()
        self.cache.close()

    def _add(self, entries: list[RewardEntry], where: str, others: tuple[int, ...]) -> tuple[int, ...]:
        labels = {self._specs[i].label for i in others}
        indices = []
        for entry in entries:
            spec = self._spec(entry)
            if spec.label in labels:
                raise ValueError(f"{where}: two functions are called {spec.label!r}; give one of them another `label`")
            labels.add(spec.label)
            self._specs.append(spec)
            indices.append(len(self._specs) - 1)
        return tuple(indices)

    def _spec(self, entry: RewardEntry) -> FunctionSpec:
        if entry.name not in self._local:
            split_name(entry.name)  # a misspelt name is refused here, before anything is started
        known = REWARDS.get(entry.name)
        built_in = known or BuiltIn(entry.name, cache=False)
        settings = {key: self._settings[key] for key in built_in.settings if self._settings[key] is not None}
        return FunctionSpec(
            label=entry.label or (entry.name if known else entry.name.rpartition(":")[2]),
            name=entry.name,
            weight=entry.weight,
            options={**settings, **entry.options},
            batch=entry.batch,
            timeout_s=entry.timeout_s or built_in.timeout_s or self._config.timeout_s,
            retries=entry.retries,
            include=(*built_in.include, *entry.include),
            cache=built_in.cache if entry.cache is None else entry.cache,
            range=entry.range or built_in.range,
            digest=source_digest(entry.name) if entry.cache else "",
        )

    def _forms(self) -> list[str]:
        if self._pool is not None:
            return [form for form, _ in self._pool.ready()]
        return [function.form for function in self._functions]

    def _begin(self, index: int, group: Group) -> _Call:
        spec, row = self._specs[index], group.prompt.row
        extras = [self._facts(spec, group, response) for response in group.responses]
        make_key = key_maker(spec, row) if spec.cache else None
        one = _Call([None] * len(extras), [], [], Future())
        responses: list[str] = []
        kept_extras: list[dict[str, Any]] = []
        place: dict[bytes, int] = {}
        for column, (response, extra) in enumerate(zip(group.responses, extras, strict=True)):
            key = make_key(response.text, extra) if make_key else None
            if key is not None and key in place:
                one.columns[place[key]].append(column)
                continue
            one.outcomes[column] = self.cache.get(key) if key is not None else None
            if one.outcomes[column] is None:
                if key is not None:
                    place[key] = len(responses)
                responses.append(response.text)
                kept_extras.append(extra)
                one.columns.append([column])
                one.keys.append(key)
        self._dispatch(index, one, responses, row, kept_extras)
        return one

    def _dispatch(
        self, index: int, one: _Call, responses: list[str], row: dict[str, Any], extras: list[dict[str, Any]]
    ) -> None:
        rows = [{**row, **extra} for extra in extras]
        if not responses:
            one.future.set_result([])
        elif index not in self._remote:
            self._local_calls.setdefault(index, []).append((one, responses, rows))
        elif self._pool is not None:
            one.future = self._pool.submit(self._remote.index(index), responses, row, extras)
        else:
            outcomes = dict(run(self._specs[index], self._functions[self._remote.index(index)], responses, rows))
            one.future.set_result([outcomes[i] for i in range(len(responses))])

    def _run_local(self) -> None:
        """Call each local function once with everything submitted."""
        waiting, self._local_calls = self._local_calls, {}
        for index, calls in waiting.items():
            spec = self._specs[index]
            responses = [text for _, texts, _ in calls for text in texts]
            rows = [row for _, _, of_call in calls for row in of_call]
            outcomes = iter(call(self._local[spec.name], responses, rows, dict(spec.options)))
            for one, texts, _ in calls:
                one.future.set_result([next(outcomes) for _ in texts])

    def _finish(self, one: _Call) -> list[Outcome]:
        for outcome, columns, key in zip(one.future.result(), one.columns, one.keys, strict=True):
            if key is not None:
                self.cache.put(key, outcome)
            for column in columns:
                one.outcomes[column] = outcome
        return [outcome for outcome in one.outcomes if outcome is not None]

    def _facts(self, spec: FunctionSpec, group: Group, response: Response) -> dict[str, Any]:
        facts = {
            "uid": group.prompt.uid,
            "finish_reason": response.finish_reason,
            "num_tokens": len(response.token_ids),
            "token_ids": response.token_ids,
            "max_response_length": self._max_response_length,
        }
        return {key: facts[key] for key in spec.include}

    def _report(self, spec: FunctionSpec, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.status in ("ok", "none"):
                continue
            message = f"reward {spec.label!r}: {outcome.status} ({outcome.error})"
            if (spec.label, outcome.error) not in self._logged:
                self._logged.add((spec.label, outcome.error))
                log.warning("%s\n%s\n(further ones of this kind are only counted)", message, outcome.detail.rstrip())
            if self._config.on_error == "raise":
                raise RewardError(f"{message}; reward.on_error is raise, so the run ends here")
