"""Operations that an Ascend NPU (A2, A3) refuses, or runs on the host or the slow AI CPU, from torch_npu's tables.

Source: Ascend/pytorch docs/zh/api/native_api (torch.md, torch-Tensor.md, for torch 2.7 to 2.12) and the profiler
advisor's list of AI CPU patterns. An operation not named here has a kernel. fp64 is refused by the device itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BF16, INT64 = torch.bfloat16, torch.int64
_TYPES = {torch.float16: 5, torch.float32: 6, torch.int64: 4, torch.int32: 3, torch.int16: 2, torch.bfloat16: 15}


@dataclass(frozen=True)
class Rule:
    """One line of the tables."""

    op: str
    dtypes: tuple[torch.dtype, ...]  # of the first tensor; none: any
    why: str
    allowed: str = ""  # why it is nevertheless let through, and counted; empty: it is refused

    @property
    def type_numbers(self) -> list[int]:
        """As c10::ScalarType counts."""
        return [_TYPES[dtype] for dtype in self.dtypes]


RULES = [
    Rule("aten::cumsum", (BF16,), "no bfloat16 kernel"),
    Rule("aten::sort", (BF16,), "no bfloat16 kernel"),
    Rule("aten::sort", (INT64,), "int64 sorts run on the AI CPU"),
    Rule("aten::gather", (BF16,), "no bfloat16 kernel listed"),
    Rule("aten::index_add", (BF16,), "no bfloat16 kernel"),
    Rule("aten::index_add_", (BF16,), "no bfloat16 kernel"),
    Rule("aten::multinomial", (BF16,), "no bfloat16 kernel"),
    Rule("aten::logsumexp", (BF16,), "no bfloat16 kernel"),
    Rule("aten::masked_select", (BF16,), "no bfloat16 kernel"),
    Rule("aten::index_copy", (BF16, torch.float16), "float32 only"),
    Rule("aten::index_copy_", (BF16, torch.float16), "float32 only"),
    Rule("aten::histc", (BF16, INT64, torch.int32), "floating point only"),
    Rule("aten::index_put", (), "IndexPutV2 runs on the AI CPU: use index_select, where or slices"),
    Rule("aten::index_put_", (), "IndexPutV2 runs on the AI CPU: use index_select, where or slices"),
    Rule("aten::_index_put_impl_", (), "IndexPutV2 runs on the AI CPU: use index_select, where or slices"),
    Rule("aten::nonzero", (), "its result's size is read on the host: take lengths that the host knows"),
    Rule("aten::index", (), "Index runs on the AI CPU: use index_select"),
    *(
        Rule(f"aten::{op}{ending}", (), "always runs on the host")
        for op in ("acosh", "copysign", "trunc", "index_reduce", "linalg_slogdet")
        for ending in ("", "_")
    ),
    *(
        Rule(f"aten::{op}", (), "may run on the host", allowed="a result, not a step's hot path, may wait for it")
        for op in ("scatter", "scatter_", "std", "var")
    ),
    Rule("aten::_nested_tensor_from_tensor_list", (), "torch.nested is not supported"),
]
