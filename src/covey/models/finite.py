"""Debug mode's look for NaN and infinity: the first module that puts one out, and parameters that get one in backward.

Every check waits for the device, so a run with them is slow; the numbers stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_SHOWN = 5  # names in a message


class NonFiniteError(ValueError):
    """A number that is NaN or infinite, and where it came up first."""


def watch_outputs(model: nn.Module, alone: str | None = None) -> None:
    """From now on, raise NonFiniteError at the first module of `model` whose output is not finite.

    Modules inside others are checked first, so the innermost one is named. alone: check only the output of `model`
    itself, under this name.
    """
    watched = model.named_modules() if alone is None else [(alone, model)]
    for name, module in watched:
        module.register_forward_hook(partial(_check_output, name or type(model).__name__))


def watch_gradients(
    names: Sequence[str],  # of the parameters, in their order
    norm: Callable[[Sequence[Tensor | None]], Tensor],  # of the whole gradient; what an optimizer step begins with
) -> Callable[[Sequence[Tensor | None]], Tensor]:
    """`norm` that first raises NonFiniteError for gradients that are not finite, by the parameters' names."""

    def checked(grads: Sequence[Tensor | None]) -> Tensor:
        bad = [name for name, grad in zip(names, grads, strict=True) if grad is not None and _count(grad)]
        if bad:
            more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
            raise NonFiniteError(
                f"debug: the gradients of {', '.join(bad[:_SHOWN])}{more} ({len(bad)} of {len(names)} parameters) are "
                "not finite, though every module's output was: look at the loss (ratios, advantages) and at backward "
                "of the last of these modules"
            )
        return norm(grads)

    return checked


def _check_output(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    for tensor in _tensors(output):
        if bad := _count(tensor):
            weights = [key for key, p in module.named_parameters(recurse=False) if _count(p)]
            where = torch.isfinite(tensor.detach()).logical_not().nonzero()[0].tolist()
            before = "not finite" if any(_count(t) for t in _tensors(inputs)) else "finite"
            cause = f"its {', '.join(weights)} not finite" if weights else "its own weights are finite"
            raise NonFiniteError(
                f"debug: {name} ({type(module).__name__}) is the first module with an output that is not finite: "
                f"{bad} of {tensor.numel()} numbers, first at {where} of shape {list(tensor.shape)}; its inputs are "
                f"{before}, {cause}"
            )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _count(tensor: Tensor) -> int:
    """Numbers that are not finite."""
    if not tensor.is_floating_point():
        return 0
    return int(torch.isfinite(tensor.detach()).logical_not().sum())
