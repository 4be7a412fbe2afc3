"""Captures of real steps: hooks change no bit, two processes give the numbers of one, bundles replay and stay small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import harness
from transformers import AutoModelForCausalLM

from covey.config.load import LoadedConfig
from covey.config.schema import Config
from covey.learner import make_learner
from covey.rollout.native import NativeEngine
from covey.setup import load_run_parts, make_scorer
from covey.tools import tiny
from covey.tools.align.bundle import Bundle, read_bundle
from covey.tools.align.capture import capture
from covey.tools.align.compare import compare
from covey.tools.align.fixed_set import Source
from covey.trainer import train


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("material")
    tiny.make_model(directory / "model", seed=0)
    tiny.make_data(directory, seed=0)
    capture(config(directory), directory / "a", source=Source(prompts=3))
    return directory


def config(directory: Path, **changes: dict[str, Any]) -> Config:
    data: dict[str, Any] = {
        "model": {"path": str(directory / "model")},
        "data": {"train": str(directory / "train.jsonl")},
        "rollout": {"num_samples": 2, "max_response_length": 10},
        "reward": {"functions": [{"name": "math"}]},
        "train": {"steps": 2, "batch_size": 3, "lr": 1e-3},
        "output_dir": str(directory / "run"),
        "device": "cpu",
    }
    for section, values in changes.items():
        data[section] = {**data.get(section, {}), **values}
    return Config.model_validate(data)


def test_hooks_change_no_bit_of_the_update(material: Path) -> None:
    """The same step without align: Learner.learn alone, on the set of the bundle."""
    bundle = read_bundle(material / "a")
    settings = config(material)
    parts = load_run_parts(settings)
    learner = make_learner(settings, parts, make_scorer(settings, parts))
    learner.learn(bundle.groups(), bundle.scores())
    learner.scorer.close()
    from covey.tools.align.fingerprint import fingerprint

    after = {name: fingerprint(p)["sha256"] for name, p in parts.policy.model.named_parameters()}
    assert after == {name: values["after"]["sha256"] for name, values in bundle.meta["parameters"].items()}


def test_activations_are_those_of_transformers(material: Path) -> None:
    """Embedding, layer outputs, final norm and logits of the first sequence, from output_hidden_states."""
    bundle = read_bundle(material / "a")
    group = bundle.groups()[0]
    ids = [*group.prompt.input_ids, *group.responses[0].token_ids[:-1]]
    model = AutoModelForCausalLM.from_pretrained(material / "model", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    expected = {
        ("embedding", "embed_tokens"): out.hidden_states[0],
        ("layer 0", "output"): out.hidden_states[1],
        ("final norm", "norm"): out.hidden_states[2],
    }
    for key, tensor in expected.items():
        found = bundle.values(*key)
        assert found is not None
        torch.testing.assert_close(found[: len(ids)], tensor[0], rtol=1e-4, atol=1e-5)
    logits = bundle.values("logits", "logits")
    inside = [(i, row) for i, row in enumerate(bundle.tensors["logit_rows"].tolist()) if row < len(ids)]
    assert logits is not None and inside
    for i, row in inside:
        torch.testing.assert_close(logits[i], out.logits[0, row], rtol=1e-4, atol=1e-4)
    start, size = len(group.prompt.input_ids) - 1, len(group.responses[0].token_ids)
    logprobs = out.logits[0, start:].log_softmax(-1)[range(size), group.responses[0].token_ids]
    torch.testing.assert_close(bundle.tensors["logprobs"][:size], logprobs, rtol=1e-4, atol=1e-5)


def test_other_numbers_pass_by_their_profile_only(material: Path) -> None:
    capture(config(material, model={"dtype": "bfloat16"}), material / "bf16", source=Source(bundle=material / "a"))
    assert compare(material / "a", material / "bf16", profile="bf16")["pass"]
    first = compare(material / "a", material / "bf16", profile="fp32")["first_divergence"]
    assert first["rung"] == "embedding" and first["cause"].startswith("reduced precision: float32 in A, bfloat16 in B")


def test_native_engine_samples_what_transformers_generates(material: Path) -> None:
    for engine in ("native", "hf"):
        capture(config(material), material / engine, source=Source(greedy=True, engine=engine, prompts=3))
    result = compare(material / "native", material / "hf", profile="fp32")
    assert result["pass"], result["first_divergence"]
    assert all(len(group.responses) == 2 for group in read_bundle(material / "hf").groups())


def test_an_engine_that_draws_other_tokens_is_seen(material: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = NativeEngine.generate

    def other_start(self: Any, prompts: Any, sampling: Any, **options: Any) -> Any:
        groups = original(self, prompts, sampling, **options)
        groups[1].responses[0].token_ids[0] += 1
        return groups

    capture(config(material), material / "native", source=Source(greedy=True, prompts=3))
    monkeypatch.setattr(NativeEngine, "generate", other_start)
    capture(config(material), material / "other", source=Source(greedy=True, prompts=3))
    result = compare(material / "native", material / "other")
    assert result["first_divergence"]["rung"] == "ids" and result["first_divergence"]["name"] == "response"
    assert result["first_divergence"]["cause"].startswith("sampling: response 1 differs from its token 0")


def _capture_on_rank(directory: str, out: str) -> dict[str, Any]:
    directory_path = Path(directory)
    return capture(config(directory_path), Path(out), source=Source(bundle=directory_path / "a"))


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(material: Path) -> None:
    results = harness.run(2, _capture_on_rank, str(material), str(material / "two"))
    assert results[0]["details"] and results[1] == {}
    assert read_bundle(material / "two").facts["environment"]["processes"] == "2"
    result = compare(material / "a", material / "two", profile="fp32")
    assert result["pass"], result["first_divergence"]
    assert {row["rung"] for row in result["rungs"]} >= {"layer 0", "layer 1", "logits", "gradients", "update"}


def test_budget_bounds_the_bundle_and_keeps_a_prefix(material: Path) -> None:
    source = Source(bundle=material / "a")
    whole = read_bundle(material / "a")
    for budget, details in ((600_000, True), (260_000, False)):
        result = capture(config(material), material / "small", source=source, budget_bytes=budget)
        assert sum(path.stat().st_size for path in (material / "small").iterdir()) == result["bytes"] <= budget
        assert result["rows"] < result["of_rows"] and result["details"] == details
        small = read_bundle(material / "small")
        assert small.tensors["rows"][:4].tolist() == [0, 1, 2, 3]
        ours, its = small.values("layer 1", "output"), whole.values("layer 1", "output")
        assert ours is not None and its is not None
        assert torch.equal(ours, its[small.tensors["rows"]])
        assert compare(material / "a", material / "small")["pass"]
    with pytest.raises(ValueError, match="--budget 20000 bytes: this set needs at least"):
        capture(config(material), material / "small", source=source, budget_bytes=20_000)


def test_given_rows_and_recorded_steps_are_sets(material: Path) -> None:
    rows = capture(config(material), material / "rows", source=Source(data=material / "train.jsonl", prompts=2))
    assert rows["grad_norm"] > 0
    bundle = read_bundle(material / "rows")
    first, second = bundle.groups()
    assert first.responses[0].token_ids == second.responses[1].token_ids  # the next row's answer, as a wrong one
    assert bundle.tensors["rewards"].tolist() == [[1.0, 0.0], [1.0, 0.0]]
    run = config(material)
    train(LoadedConfig(run, {}, "test"), quiet=True)
    capture(run, material / "recorded", source=Source(records=material / "run", step=1))
    recorded = read_bundle(material / "recorded")
    lines = [json.loads(line) for line in (material / "run" / "metrics.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["step"] == 1]
    if "rewards 1 and 0" not in recorded.meta["origin"]:  # then it is the step that the run trained
        assert recorded.meta["stats"]["actor/grad_norm"] == pytest.approx(line["actor/grad_norm"], rel=1e-5)
    assert recorded.meta["stats"]["actor/entropy"] == pytest.approx(line["actor/entropy"], rel=1e-6)
    with pytest.raises(ValueError, match="--step 9: not recorded"):
        capture(run, material / "recorded", source=Source(records=material / "run", step=9))


def test_a_bundle_is_whole_or_refused(material: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(ValueError, match="holds other files"):
        capture(config(material), tmp_path, source=Source(bundle=material / "a"))
    assert (tmp_path / "mine.txt").exists()
    with pytest.raises(ValueError, match="so not a bundle"):
        read_bundle(tmp_path)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "bundle.json").write_text((material / "a" / "bundle.json").read_text())
    (damaged / "tensors.safetensors").write_bytes((material / "a" / "tensors.safetensors").read_bytes()[:1000])
    with pytest.raises(ValueError, match="a damaged bundle"):
        read_bundle(damaged)


def test_a_set_travels_through_the_bundle(material: Path) -> None:
    """What --from runs is what was captured: ids, sizes, rewards."""
    bundle = read_bundle(material / "a")
    groups, scores = bundle.groups(), bundle.scores()
    assert [len(group.responses) for group in groups] == [2, 2, 2]
    assert sum(len(r.token_ids) for g in groups for r in g.responses) == len(bundle.tensors["logprobs"])
    assert isinstance(bundle, Bundle) and scores.total.shape == (3, 2)
