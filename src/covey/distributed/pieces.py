"""Which rectangle of every weight this rank holds, so that a checkpoint of one layout can be read by another.

FSDP2 cuts the first dimension as `torch.chunk` does: pieces of ceil(n / ranks), the last ones smaller or empty. Tensor
parallelism cuts a weight before that (`Cut`). So a rank's piece is a rectangle, and torch.distributed.checkpoint writes
and reads rectangles of whatever overlaps; `Piece` and the two planners say so in its terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from covey.distributed.fsdp import local_tensor
from covey.distributed.mesh import Mesh


@dataclass(frozen=True)
class Cut:
    """How tensor parallelism cut a weight: this rank has [start, start + its size) of `total` along `dim`."""

    dim: int
    start: int
    total: int


@dataclass(frozen=True)
class Place:
    """A rectangle of a whole tensor: where it starts, and the whole's shape."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A local tensor and its place. The double-underscore methods are what torch.distributed.checkpoint asks for."""

    tensor: Tensor
    place: Place

    def size(self) -> torch.Size:
        """Shape of the whole tensor."""
        return torch.Size(self.place.shape)

    def __create_write_items__(self, name: str, piece: Any) -> list[WriteItem]:  # noqa: N807
        if not self.tensor.numel():
            return []
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(self.place.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=self._chunk(),
                    properties=TensorProperties(dtype=self.tensor.dtype),
                    size=self.size(),
                ),
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:  # noqa: N807
        return [self._chunk()] if self.tensor.numel() else []

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.place.offsets), sizes=self.tensor.shape)


class PieceSavePlanner(DefaultSavePlanner):
    """Writes a flat dictionary of pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The tensor to write."""
        return self.state_dict[index.fqn].tensor


class PieceLoadPlanner(DefaultLoadPlanner):
    """Reads into a flat dictionary of pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Take the dictionary as it is; the default looks for tensors in it."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor to fill."""
        return self.state_dict[index.fqn].tensor


def places(model: nn.Module, mesh: Mesh, cuts: Mapping[str, Cut] | None = None) -> dict[str, Place]:
    """The place of this rank's piece of every parameter of `model`, by name (tied ones once)."""
    found: dict[str, Place] = {}
    fsdp_size = mesh.dp_shard * mesh.cp
    for name, parameter in model.named_parameters():
        local = local_tensor(parameter)
        offsets, shape = [0] * parameter.dim(), list(parameter.shape)
        if isinstance(parameter, DTensor):
            rank_in_weights = mesh.rank // mesh.tp % fsdp_size
            chunk = -(-parameter.shape[0] // fsdp_size)
            offsets[0] = min(rank_in_weights * chunk, parameter.shape[0])
            assert local.shape[0] == min(chunk, parameter.shape[0] - offsets[0]), name
        cut = (cuts or {}).get(name)
        if cut is not None:
            offsets[cut.dim] += cut.start
            shape[cut.dim] = cut.total
        found[name] = Place(tuple(offsets), tuple(shape))
    return found
