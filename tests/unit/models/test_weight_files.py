"""Checkpoints read in rectangles, and models built without memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from covey.models.weight_files import WeightFiles, allocate, without_memory


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


def _files(directory: Path) -> tuple[WeightFiles, dict[str, torch.Tensor]]:
    tensors = {"a": torch.arange(24.0).view(6, 4).bfloat16(), "b": torch.arange(5.0)}
    save_file(tensors, directory / "model.safetensors")
    files = WeightFiles.of(str(directory))
    assert files is not None
    return files, tensors


def test_rectangles_are_those_of_the_whole_tensors(tmp_path: Path) -> None:
    files, tensors = _files(tmp_path)
    found = dict(files.read({"a": (slice(2, 5), slice(1, 3)), "b": (slice(4, 5),)}))
    assert torch.equal(found["a"], tensors["a"][2:5, 1:3])
    assert found["a"].dtype == torch.bfloat16
    assert found["b"].tolist() == [4.0]
    assert files.lacks(["a", "c"]) == ["c"]


def test_an_index_that_names_an_absent_file_is_an_error(tmp_path: Path) -> None:
    assert WeightFiles.of(str(tmp_path)) is None
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ValueError, match=r"gone\.safetensors"):
        WeightFiles.of(str(tmp_path))


def test_parameters_without_memory_stay_tied_and_buffers_are_real() -> None:
    with without_memory():
        module = _Tied()
    assert module.embed.weight.is_meta
    assert module.head.weight is module.embed.weight
    assert module.angles.tolist() == [0, 1, 2, 3]  # type: ignore[operator]
    assert not _Tied().embed.weight.is_meta


def test_allocating_keeps_what_is_real() -> None:
    with without_memory():
        module = nn.Linear(2, 2)
    module.register_buffer("angles", torch.arange(4.0))
    module.bias = nn.Parameter(torch.tensor([1.0, 2.0]))
    allocate(module, torch.device("cpu"))
    assert not module.weight.is_meta
    assert module.bias.tolist() == [1, 2]
    assert module.angles.tolist() == [0, 1, 2, 3]  # type: ignore[operator]
