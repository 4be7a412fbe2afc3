"""A sound run, and what tests plant in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.checks.material import Material, gather
from covey.config.schema import Config
from covey.tools import tiny

Make = Callable[..., Material]


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model`, `train.jsonl`, `eval.jsonl`."""
    directory = tmp_path_factory.mktemp("sound")
    tiny.make_model(directory / "model", seed=0)
    tiny.make_data(directory, seed=0)
    return directory


@pytest.fixture
def place(sound: Path, tmp_path: Path) -> Path:
    """A copy of it to plant faults in."""
    return shutil.copytree(sound, tmp_path / "run")


@pytest.fixture
def edit_json() -> Callable[..., None]:
    """Change keys of a JSON file; None removes one."""

    def edit(path: Path, **changes: Any) -> None:
        values = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return edit


@pytest.fixture
def make(place: Path) -> Iterator[Make]:
    """The material of a configuration over `place`, with some sections changed; its workers end with the test."""
    made: list[Material] = []

    def material(**changes: dict[str, Any]) -> Material:
        made.append(gather(_config(place, **changes)))
        return made[-1]

    yield material
    for one in made:
        one.close()


def _config(place: Path, **changes: Any) -> Config:
    data: dict[str, Any] = {
        "model": {"path": str(place / "model")},
        "data": {"train": str(place / "train.jsonl")},
        "rollout": {"num_samples": 4, "max_response_length": 40, "kv_cache_bytes": 2**20},
        "reward": {"functions": [{"name": "math"}], "num_workers": 0},
        "train": {"steps": 5, "batch_size": 6, "logits_chunk_bytes": 2**20},
        "output_dir": str(place / "out"),
        "device": "cpu",
    }
    for section, values in changes.items():
        data[section] = {**data.get(section, {}), **values} if isinstance(values, dict) else values
    return Config.model_validate(data)
