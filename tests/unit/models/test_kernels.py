"""Which back end a device gets and what it refuses; the arguments of torch's variable-length flash kernel."""

from __future__ import annotations

import pytest
import torch

from covey.models import kernels
from covey.models.kernels import backend_for, fused_ops

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_float32_on_cuda_is_computed_by_matrix_products_and_16_bits_by_the_flash_kernel() -> None:
    assert "matrix products" in backend_for(CUDA, torch.float32).name
    assert "flash" in backend_for(CUDA, torch.bfloat16).name


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_the_reference_is_matrix_products_everywhere(device: torch.device) -> None:
    assert "matrix products" in backend_for(device, torch.bfloat16, reference=True).name


@pytest.mark.parametrize(
    ("size", "heads", "why"),
    [
        (320, (8, 2), "head size is 320, over 256"),
        (76, (8, 2), "not a multiple of 8"),
        (64, (6, 4), "6 query heads are not a multiple of 4"),
    ],
)
def test_what_the_flash_kernel_cannot_run_is_refused_with_the_reason(
    size: int, heads: tuple[int, int], why: str
) -> None:
    backend = backend_for(CUDA, torch.bfloat16)
    refusal = backend.refusal(torch.bfloat16, head_dim=size, num_heads=heads[0], num_kv_heads=heads[1])
    assert why in (refusal or "")
    assert backend.refusal(torch.bfloat16, head_dim=128, num_heads=8, num_kv_heads=2) is None


def test_the_start_up_line_names_kernel_numbers_and_limits() -> None:
    line = backend_for(CUDA, torch.bfloat16).describe()
    assert "flash" in line
    assert "bfloat16, float16; head size up to 256" in line


def test_variable_length_flash_takes_our_arguments_and_gives_our_shapes() -> None:
    """Under meta tensors: torch's own schema and shape functions of the kernel that runs on CUDA."""
    meta = torch.device("meta")
    lengths = kernels._flash_prepare([3, 5], [4, 9], causal=True, device=CPU)
    assert lengths.queries.tolist() == [0, 3, 8]
    assert lengths.keys.tolist() == [0, 4, 13]
    assert (lengths.queries.dtype, lengths.max_q, lengths.max_k) == (torch.int32, 5, 9)
    lengths = kernels._flash_prepare([3, 5], [4, 9], causal=True, device=meta)
    q = torch.empty(8, 4, 64, dtype=torch.bfloat16, device=meta)
    k, v = (torch.empty(13, 2, 64, dtype=torch.bfloat16, device=meta) for _ in range(2))
    out, lse = kernels._flash_forward(q, k, v, lengths, 0.125)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (8, 4), torch.float32)
    grads = kernels._flash_backward(out, q, k, v, out, lse, lengths, 0.125)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_nothing_is_fused_on_cpu() -> None:
    assert fused_ops(CPU) == {}
