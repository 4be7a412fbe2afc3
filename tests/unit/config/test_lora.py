"""Section `lora`: defaults of a new adapter, what a stored one decides, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from covey.config.schema import Config, SftRunConfig

RUN: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"train": "d.jsonl"},
    "reward": {"functions": ["math"]},
    "output_dir": "out",
}


def _lora(section: Any, **others: Any) -> Any:
    return Config.model_validate({**RUN, "lora": section, **others}).lora


def test_without_the_section_all_weights_are_trained() -> None:
    assert Config.model_validate(RUN).lora is None
    assert _lora(None) is None


@pytest.mark.parametrize(
    ("given", "rank", "alpha"),
    [({}, 16, 32), ({"rank": 4}, 4, 8), ({"alpha": 5}, 16, 5), ({"rank": 64, "alpha": 16}, 64, 16)],
)
def test_a_new_adapter_has_rank_16_and_twice_its_rank_as_alpha(given: Any, rank: int, alpha: int) -> None:
    lora = _lora(given)
    assert (lora.rank, lora.alpha, lora.target_modules, lora.path) == (rank, alpha, None, None)


def test_a_stored_adapter_decides_its_sizes() -> None:
    lora = _lora({"path": "runs/before/adapter"})
    assert (lora.rank, lora.alpha) == (None, None)


def test_a_cold_start_takes_the_section_too() -> None:
    run = SftRunConfig.model_validate({"model": {"path": "m"}, "sft": {"data": "d"}, "output_dir": "o", "lora": {}})
    assert run.lora is not None
    assert run.lora.rank == 16


@pytest.mark.parametrize("section", [{"rank": 0}, {"target_modules": []}, {"dropout": 0.1}, {"alpha": -1}])
def test_what_is_no_adapter_is_refused(section: Any) -> None:
    with pytest.raises(ValidationError):
        _lora(section)


def test_a_reference_cannot_follow_an_adapter() -> None:
    with pytest.raises(ValidationError, match="sync_every=5 with lora"):
        _lora({}, algorithm={"kl_coef": 0.1}, reference={"sync_every": 5})


def test_the_base_model_as_reference_has_no_copy_to_offload() -> None:
    settings: dict[str, Any] = {"algorithm": {"kl_coef": 0.1}, "reference": {"offload": True}}
    with pytest.raises(ValidationError, match="no second copy"):
        _lora({}, **settings)
    assert _lora({}, **settings, model={"path": "m", "ref_path": "other"}).rank == 16
