"""Checkpoints of a run: `OUTPUT/checkpoints/step-000012/`, complete or absent; any layout reads what another wrote.

Every rank writes its pieces of the trained weights (the fp32 masters, where there are; with LoRA the adapter alone) and
moments with torch.distributed.checkpoint; rank 0 adds `training.pt` (random state of every rank, optimizer step
counts), `state.json` (step, data cursor and what else the trainer hands over) and `hf/` (model config and tokenizer,
for `covey export`). All of it is written beside its place; the file COMPLETE, with the size of every other file, comes
last, and the directory is moved into place in one step. A directory without COMPLETE, or whose files have other sizes,
is never loaded.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import warnings
from collections.abc import Collection, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_pieces
from torch.distributed.checkpoint.state_dict_saver import save as save_pieces

from covey.checkpoint_files import MARKER, DamagedError, Keep, complete, damage, sizes, superfluous
from covey.distributed.collectives import gather_objects, wait_for_all
from covey.distributed.fsdp import local_tensor
from covey.distributed.mesh import Mesh
from covey.distributed.pieces import Cut, Piece, PieceLoadPlanner, PieceSavePlanner, places
from covey.models.adapters import save_adapter_config

log = logging.getLogger(__name__)
Others = Mapping[str, Mapping[str, Tensor]]  # kind -> parameter's name -> this rank's part, live


class Optimizer(Protocol):
    """What a checkpoint asks of an optimizer; all lists in the order of `parameters`."""

    parameters: list[Tensor]
    masters: list[Tensor]  # this rank's fp32 numbers behind them

    @property
    def steps(self) -> list[float]:
        """Step count of each parameter; can be set."""
        ...

    @steps.setter
    def steps(self, values: list[float]) -> None: ...

    def moments(self) -> list[dict[str, Tensor]]:
        """Live tensors by name, each of its master's shape."""
        ...

    def publish(self) -> None:
        """Take over changed masters into the parameters."""
        ...


class Checkpoints:
    """The checkpoints under one directory. Every method is called on all ranks."""

    def __init__(self, root: Path, mesh: Mesh | None = None, *, keep: Keep = Keep(), background: bool = False) -> None:  # noqa: B008
        """background: `save` returns once the pieces are copied to host memory; they are written meanwhile."""
        self.root = root
        self._mesh = mesh or Mesh()
        self._keep = keep
        self._background = background
        # Its own processes' group: the writer must not wait in line with training's exchanges.
        self._group: Any = dist.new_group(backend="gloo") if self._mesh.world > 1 else None
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        *,
        model: Any,
        tokenizer: Any,
        optimizer: Optimizer,
        state: dict[str, Any],
        cuts: Mapping[str, Cut] | None = None,
        others: Others | None = None,
    ) -> None:
        """Write the checkpoint of `step`, then remove those that `keep` does not name.

        others: further weights of the model's shapes, for example a reference's. `state` must be JSON. Raises OSError
        when the disk refuses (in the background: at the next call of a method here); older checkpoints are then
        untouched.
        """
        self.wait()
        pieces = _pieces(model, optimizer, self._mesh, cuts, others)
        random = gather_objects(torch.get_rng_state(), self._group, what="random states of the checkpoint")
        training = {"random": random, "optimizer_steps": self._steps(model, optimizer)}

        def describe(directory: Path) -> None:
            model.config.save_pretrained(directory)
            if getattr(model, "generation_config", None) is not None:
                model.generation_config.save_pretrained(directory)
            if tokenizer is not None:
                tokenizer.save_pretrained(directory)
            save_adapter_config(model, directory / "adapter")

        if not self._background:
            self._write(step, pieces, training, json.dumps(state, indent=1), describe)
            return
        copies = {name: Piece(piece.tensor.to("cpu", copy=True), piece.place) for name, piece in pieces.items()}
        arguments = (step, copies, training, json.dumps(state, indent=1), describe)
        self._writer = threading.Thread(target=self._try_write, args=arguments, name="checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Return when the last checkpoint is on disk; raises what went wrong with it."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return complete(self.root)

    def load_latest(
        self,
        *,
        model: Any,
        optimizer: Optimizer | None,
        cuts: Mapping[str, Cut] | None = None,
        others: Others | None = None,
    ) -> dict[str, Any] | None:
        """Load the newest checkpoint that reads back whole; its state with `path` added, or None when there is none.

        A damaged one is reported and the one before it is taken.
        """
        names = gather_objects([p.name for p in self.complete()], self._group, what="names of the checkpoints")[0]
        for name in reversed(names):
            try:
                return self.load(self.root / name, model=model, optimizer=optimizer, cuts=cuts, others=others)
            except DamagedError as error:
                log.warning("%s; trying the checkpoint before it", error)
        return None

    def load(
        self,
        path: Path,
        *,
        model: Any,
        optimizer: Optimizer | None,
        cuts: Mapping[str, Cut] | None = None,
        others: Others | None = None,
    ) -> dict[str, Any]:
        """Load one checkpoint; its state with `path` added. ValueError that names it when that is not possible.

        Those of `others` that it does not hold stay as they are.
        DamagedError (a ValueError) on every rank when any rank cannot read it.
        """
        self.wait()
        problem = damage(path)
        problems = gather_objects(problem, self._group, what="check of the checkpoint")
        if any(problems):
            raise DamagedError(next(p for p in problems if p))
        try:
            stored = FileSystemReader(path).read_metadata().state_dict_metadata
            kinds = {name.partition(".")[0] for name in stored}
            held = {kind: tensors for kind, tensors in (others or {}).items() if kind in kinds}
            pieces = _pieces(model, optimizer, self._mesh, cuts, held)
            self._refuse_other_model(path, pieces, stored)
            with _quiet():
                load_pieces(pieces, checkpoint_id=path, planner=PieceLoadPlanner(), **self._ranks())
            training = torch.load(path / "training.pt", weights_only=True)
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        except (CheckpointException, OSError, RuntimeError, KeyError, EOFError, UnpicklingError) as error:
            raise DamagedError(f"checkpoint {path} is damaged: {type(error).__name__}: {error}") from error
        if optimizer is not None:
            optimizer.steps = [training["optimizer_steps"][name] for name in _names(model, optimizer)]
            optimizer.publish()
        random = training["random"]
        torch.set_rng_state(random[self._mesh.rank if len(random) == self._mesh.world else 0])
        return state | {"path": str(path)}

    def _steps(self, model: Any, optimizer: Optimizer) -> dict[str, float]:
        """Step count of every parameter by name; the stages of a pipeline have different ones."""
        mine = dict(zip(_names(model, optimizer), optimizer.steps, strict=True))
        parts = gather_objects(mine, self._mesh.pp_group, what="step counts of the checkpoint")
        return {name: steps for part in parts for name, steps in part.items()}

    def _refuse_other_model(self, path: Path, pieces: Mapping[str, Piece], stored: Mapping[str, Any]) -> None:
        """ValueError on every rank when the checkpoint does not hold what the ranks want, or more of its kinds."""
        of_stages = gather_objects(list(pieces), self._mesh.pp_group, what="names of the weights")
        wanted = {name for names in of_stages for name in names}
        problem = _difference(pieces, stored, wanted)
        problems = gather_objects(problem, self._group, what="comparison with the checkpoint")
        if any(problems):
            raise ValueError(f"checkpoint {path} belongs to another model: {next(p for p in problems if p)}")

    def _ranks(self) -> dict[str, Any]:
        return {"process_group": self._group, "no_dist": self._group is None}

    def _try_write(self, *arguments: Any) -> None:
        try:
            self._write(*arguments)
        except (OSError, RuntimeError, CheckpointException) as error:
            self._error = error

    def _write(self, step: int, pieces: dict[str, Piece], training: dict[str, Any], state: str, describe: Any) -> None:
        final = self.root / f"step-{step:06d}"
        temporary = self.root / f".{final.name}.tmp"
        if self._mesh.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        wait_for_all(self._group, what="directory of the checkpoint")
        with _quiet():
            save_pieces(pieces, checkpoint_id=temporary, planner=PieceSavePlanner(), **self._ranks())
        if self._mesh.is_main:
            torch.save(training, temporary / "training.pt")
            (temporary / "state.json").write_text(state, encoding="utf-8")
            describe(temporary / "hf")
            (temporary / MARKER).write_text(json.dumps(sizes(temporary), indent=1), encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
            for path in superfluous(self.root, self._keep):
                shutil.rmtree(path, ignore_errors=True)
        wait_for_all(self._group, what="completion of the checkpoint")


def read_weights(path: Path, model: Any) -> None:
    """Load only the weights of a checkpoint into an unsharded model; ValueError when that is not possible."""
    Checkpoints(path.parent).load(path, model=model, optimizer=None)


def _pieces(
    model: Any,
    optimizer: Optimizer | None,
    mesh: Mesh,
    cuts: Mapping[str, Cut] | None,
    others: Others | None = None,
) -> dict[str, Piece]:
    """This rank's part of trained weights and moments, live; frozen weights are in the files they came from."""
    where = places(model, mesh, cuts)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = {f"model.{n}": Piece(local_tensor(p).detach(), where[n]) for n, p in trained.items()}
    if optimizer is not None:
        for name, master, moments in zip(_names(model, optimizer), optimizer.masters, optimizer.moments(), strict=True):
            found[f"model.{name}"] = Piece(master.detach(), where[name])
            found |= {f"optimizer.{name}.{kind}": Piece(tensor, where[name]) for kind, tensor in moments.items()}
    for kind, tensors in (others or {}).items():
        found |= {f"{kind}.{name}": Piece(tensor, where[name]) for name, tensor in tensors.items()}
    return found


def _names(model: Any, optimizer: Optimizer) -> list[str]:
    """The optimizer's parameters by name, in its order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in optimizer.parameters]


def _difference(pieces: Mapping[str, Piece], stored: Mapping[str, Any], wanted: Collection[str]) -> str | None:
    """What of `pieces` is not stored, and what is stored besides `wanted`, of the kinds that are; None: nothing."""
    missing = [name for name in pieces if name not in stored]
    kinds = {name.partition(".")[0] for name in wanted}
    unknown = [name for name in stored if name not in wanted and name.partition(".")[0] in kinds]
    shapes = [n for n, p in pieces.items() if n in stored and getattr(stored[n], "size", None) != p.size()]
    if missing or unknown or shapes:
        return f"missing {missing[:3]}, unknown {unknown[:3]}, other shapes {shapes[:3]}"
    return None


@contextmanager
def _quiet() -> Any:
    """Without torch's notes that a single process needs no group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
