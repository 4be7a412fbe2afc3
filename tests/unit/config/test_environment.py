"""Variables of a run: what wins over what, and the combinations that cannot work, by the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covey.config.environment import check_environment, environment_of
from covey.config.load import load_config
from covey.config.schema import Config
from covey.config.yaml_tree import ConfigError


def config(**values: Any) -> Config:
    base = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"functions": ["math"]}, "output_dir": "o"}
    return Config.model_validate(base | values)


def test_a_cpu_run_needs_none() -> None:
    assert environment_of(config(device="cpu"), {}).variables == {}


def test_an_npu_run_gets_time_to_meet_and_a_queue() -> None:
    chosen = environment_of(config(device="npu"), {}).variables
    assert chosen["TASK_QUEUE_ENABLE"] == "2"
    assert int(chosen["HCCL_CONNECT_TIMEOUT"]) >= 1800
    assert int(chosen["HCCL_EVENT_TIMEOUT"]) > int(chosen["HCCL_EXEC_TIMEOUT"])


def test_the_shell_wins_over_the_file_and_the_file_over_the_default() -> None:
    wanted = config(device="npu", environment={"TASK_QUEUE_ENABLE": 1, "HCCL_BUFFSIZE": 100, "X": True})
    chosen = environment_of(wanted, {"TASK_QUEUE_ENABLE": "0", "HCCL_CONNECT_TIMEOUT": "600"})
    assert "TASK_QUEUE_ENABLE" not in chosen.variables
    assert chosen.kept == [("TASK_QUEUE_ENABLE", "1")]  # a default that the shell replaces is not worth a note
    assert chosen.variables["HCCL_BUFFSIZE"] == "100"
    assert chosen.variables["X"] == "true"
    assert "HCCL_CONNECT_TIMEOUT" not in chosen.variables


def test_deterministic_asks_each_device_in_its_words() -> None:
    assert environment_of(config(device="npu", deterministic=True), {}).variables["HCCL_DETERMINISTIC"] == "true"
    assert environment_of(config(device="cuda", deterministic=True), {}).variables == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8"
    }


def test_debug_launches_one_by_one_without_a_queue() -> None:
    chosen = environment_of(config(device="npu", debug=True), {}).variables
    assert chosen["ASCEND_LAUNCH_BLOCKING"] == "1"
    assert "TASK_QUEUE_ENABLE" not in chosen


@pytest.mark.parametrize(
    ("variables", "several", "message"),
    [
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, True, "CUDA_DEVICE_MAX_CONNECTIONS=1 .*FSDP2.*unset it"),
        ({"HCCL_EVENT_TIMEOUT": "1800", "HCCL_EXEC_TIMEOUT": "1800"}, False, "set it to 2400 or more"),
        ({"HCCL_EXEC_TIMEOUT": "half an hour"}, False, "HCCL_EXEC_TIMEOUT=half an hour is not a whole number"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "1,0"}, False, "must rise.*set it to 0,1"),
        ({"ASCEND_LAUNCH_BLOCKING": "1", "TASK_QUEUE_ENABLE": "2"}, False, "unset TASK_QUEUE_ENABLE"),
    ],
)
def test_contradictions_name_the_variable_and_the_fix(variables: dict[str, str], several: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_environment(variables, several=several)


def test_one_process_may_keep_a_setting_of_megatron() -> None:
    check_environment({"CUDA_DEVICE_MAX_CONNECTIONS": "1", "HCCL_EVENT_TIMEOUT": "0"}, several=False)


def test_a_contradiction_in_a_file_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {path: m}\ndata: {train: d}\nreward: {functions: [math]}\noutput_dir: o\ndevice: npu\n"
        "environment:\n  HCCL_EVENT_TIMEOUT: 60\n"
    )
    with pytest.raises(ConfigError, match=r"run\.yaml.*HCCL_EVENT_TIMEOUT=60 is not longer"):
        load_config(path)


def test_the_file_s_variables_travel_with_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("B", "shell")
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {path: m}\ndata: {train: d}\nreward: {functions: [math]}\noutput_dir: o\ndevice: cpu\n"
        "environment: {A: 1, B: 2}\n"
    )
    loaded = load_config(path)
    assert loaded.environment == {"A": "1"}
    assert loaded.notes == ["the shell has B=shell, which stays; the file wants 2"]
