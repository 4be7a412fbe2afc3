"""A sharded model is read piece by piece: the numbers of a model that was loaded whole, and little host memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import cases
from tests.distributed.harness import run
from transformers import Qwen2Config, Qwen2ForCausalLM

from covey.distributed import mesh as meshes
from covey.models.adapters import add_adapter
from covey.models.load import load_model
from covey.parallel import ParallelModel
from covey.policy import ForwardLimits, Policy

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "dp": (2, {}),
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2}),
    "dp x tp": (4, {"tp": 2}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for family in cases.FAMILIES:
        cases.model(family, num_layers=3).to(torch.bfloat16).save_pretrained(directory / family, max_shard_size="60KB")
    return directory


def _load(directory: Path, families: tuple[str, ...], sizes: dict[str, int]) -> dict[str, Any]:
    m = meshes.start(communication="gloo", device=cases.CPU, **sizes)  # type: ignore[arg-type]
    found = {}
    for family in families:
        network = load_model(str(directory / family), dtype=torch.float32, device=cases.CPU, fill_later=True)
        assert all(p.is_meta for p in network.parameters())
        policy = cases.policy_of(network, m)
        found[family] = {
            "weights": {name: tensor.clone() for name, tensor in policy.weights()},
            "buffers": dict(policy.model.named_buffers()),
            "logprobs": policy.logprobs(cases.batch().groups),
            "tied": network.config.tie_word_embeddings,
        }
    meshes.stop()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_are_those_of_the_model_loaded_whole_bit_for_bit(layout: str, checkpoints: Path) -> None:
    world, sizes = LAYOUTS[layout]
    families = cases.FAMILIES if layout == "dp x tp" else ("qwen2",)
    ranks = run(world, _load, checkpoints, families, sizes)
    for family in families:
        whole = load_model(str(checkpoints / family), dtype=torch.float32, device=cases.CPU)
        expected = whole.state_dict()
        logprobs = cases.policy_of(whole, meshes.Mesh()).logprobs(cases.batch().groups)
        for rank in ranks:
            found = rank[family]
            assert found["weights"].keys() == expected.keys()
            assert all(torch.equal(found["weights"][name], expected[name]) for name in expected)
            buffers = dict(whole.named_buffers())
            assert buffers and found["buffers"].keys() == buffers.keys()
            assert all(torch.equal(found["buffers"][name], buffers[name]) for name in buffers)
            torch.testing.assert_close(found["logprobs"], logprobs, rtol=0, atol=5e-6)


def _load_with_adapter(path: str) -> dict[str, torch.Tensor]:
    m = meshes.start(communication="gloo", device=cases.CPU)
    network = load_model(path, dtype=torch.bfloat16, device=cases.CPU, fill_later=m.world > 1)
    add_adapter(network, base=path, rank=2, alpha=4, dtype=torch.float32, seed=5, device=cases.CPU)
    policy = cases.policy_of(network, m, compute_dtype=torch.bfloat16)
    weights = {name: policy.parallel.whole(name, p.detach()).clone() for name, p in network.named_parameters()}
    meshes.stop()
    return weights


def test_an_adapter_keeps_its_numbers_beside_layers_that_are_filled(checkpoints: Path) -> None:
    (expected,) = run(1, _load_with_adapter, str(checkpoints / "llama"))
    found = run(2, _load_with_adapter, str(checkpoints / "llama"))[1]
    assert {weight.dtype for weight in expected.values()} == {torch.bfloat16, torch.float32}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_in_another_form_are_loaded_whole_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = cases.model("llama")
    network.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    with caplog.at_level(logging.WARNING, logger="covey"):
        loaded = load_model(str(tmp_path), dtype=torch.float32, device=cases.CPU, fill_later=True)
    assert not any(p.is_meta for p in loaded.parameters())
    assert "not stored as safetensors" in caplog.text


def _peak_host_bytes(small: str, path: str, fill_later: bool) -> tuple[int, int]:
    """(growth of the peak of this process's memory until the sharded model has its numbers, bytes of its pieces)."""
    m = meshes.start(communication="gloo", device=cases.CPU)
    limits = ForwardLimits(max_tokens_per_micro_batch=64, logits_chunk_bytes=2**16)
    peak, run_once = 0, ParallelModel._run_once

    def look_then_run(self: ParallelModel) -> None:
        nonlocal peak
        peak = _status("VmHWM")
        run_once(self)

    ParallelModel._run_once = look_then_run  # type: ignore[method-assign]
    for one in (small, path):  # the first brings in what is imported on first use
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        before = _status("VmRSS")
        network = load_model(one, dtype=torch.float32, device=cases.CPU, fill_later=fill_later)
        policy = Policy(network, device=cases.CPU, temperature=1.0, limits=limits, mesh=m)
    pieces = sum(p.to_local().untyped_storage().nbytes() for p in policy.model.parameters())  # type: ignore[attr-defined]
    meshes.stop()
    return peak - before, pieces


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def test_a_process_never_holds_the_whole_model(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    small, large = str(tmp_path / "small"), str(tmp_path / "large")
    cases.model("qwen2").save_pretrained(small)
    large_model: Any = Qwen2ForCausalLM(config)
    large_model.to(torch.bfloat16).save_pretrained(large, max_shard_size="6MB")
    files = [file.stat().st_size for file in Path(large).glob("*.safetensors")]
    size = 2 * sum(files)  # in fp32
    assert size > 120e6
    for grown, pieces in run(2, _peak_host_bytes, small, large, True):
        assert pieces == pytest.approx(size / 2, rel=0.01)
        assert grown < pieces + max(files) + 0.1 * size
    for grown, _ in run(2, _peak_host_bytes, small, large, False):
        assert grown > 1.2 * size  # the model, and what is being cut
