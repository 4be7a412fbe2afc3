"""Environment variables of a run, chosen before anything imports torch: an Ascend or CUDA runtime reads them once.

A variable that the shell has set stays. After it the YAML's `environment` counts, then what `debug` and `deterministic`
ask for, then the defaults of the device. Sources: documentation of torch_npu and CANN (TASK_QUEUE_ENABLE,
PYTORCH_NPU_ALLOC_CONF, HCCL_*, HCCL_DETERMINISTIC), of MindSpeed (CUDA_DEVICE_MAX_CONNECTIONS) and of cuBLAS.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEBUG_ENVIRONMENT = {"CUDA_LAUNCH_BLOCKING": "1", "ASCEND_LAUNCH_BLOCKING": "1"}

# What suits a process that trains and samples. A server that only samples wants TASK_QUEUE_ENABLE=1 (docs/npu.md).
DEFAULTS: dict[str, dict[str, str]] = {
    "npu": {
        "TASK_QUEUE_ENABLE": "2",  # the host prepares the next kernels while the device works
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",  # lengths change every step: less fragmentation
        "HCCL_CONNECT_TIMEOUT": "1800",  # seconds; ranks arrive late after a rollout, the default of 120 ends the run
        "HCCL_EXEC_TIMEOUT": "1800",
        "HCCL_EVENT_TIMEOUT": "2400",  # has to be longer than HCCL_EXEC_TIMEOUT
    }
}
DETERMINISTIC: dict[str, dict[str, str]] = {
    "npu": {
        "HCCL_DETERMINISTIC": "true",
        "LCCL_DETERMINISTIC": "1",
        "CLOSE_MATMUL_K_SHIFT": "1",
        "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
        "ATB_LLM_LCOC_ENABLE": "0",
    },
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
}


@dataclass
class Environment:
    """variables: to set now. kept: variables of the shell that differ from what was wanted, as (name, wanted)."""

    variables: dict[str, str] = field(default_factory=dict)
    kept: list[tuple[str, str]] = field(default_factory=list)


def environment_of(config: Any, present: Mapping[str, str] | None = None) -> Environment:
    """The variables of a run with this Config or SftRunConfig; ValueError when some of them contradict each other."""
    present = os.environ if present is None else present
    devices = _devices(config.device)
    wanted: dict[str, str] = {}
    for device in devices:
        wanted |= DEFAULTS.get(device, {})
    if config.deterministic:
        for device in devices:
            wanted |= DETERMINISTIC.get(device, {})
    if config.debug:
        wanted |= DEBUG_ENVIRONMENT
        wanted.pop("TASK_QUEUE_ENABLE", None)  # launches that wait have no queue
    given = {name: _text(value) for name, value in config.environment.items()}
    wanted |= given
    chosen = Environment()
    for name, value in wanted.items():
        if present.get(name, value) == value:
            chosen.variables[name] = value
        elif name in given:
            chosen.kept.append((name, value))
    check_environment({**present, **chosen.variables}, several=int(present.get("WORLD_SIZE", "1")) > 1)
    return chosen


def check_environment(variables: Mapping[str, str], *, several: bool) -> None:
    """ValueError for variables that contradict each other or the run; several: it has more than one process."""
    if several and variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ValueError(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 lines up computation and communication one after the other, which sharded "
            "weights (FSDP2) need side by side: unset it, it is a setting of Megatron"
        )
    event, execute = (_seconds(variables, f"HCCL_{name}_TIMEOUT") for name in ("EVENT", "EXEC"))
    if event is not None and execute is not None and 0 < event <= execute:
        raise ValueError(
            f"HCCL_EVENT_TIMEOUT={event} is not longer than HCCL_EXEC_TIMEOUT={execute}: the event would give up "
            f"before the operation that it waits for; set it to {execute + 600} or more"
        )
    visible = variables.get("ASCEND_RT_VISIBLE_DEVICES", "")
    numbers = [int(part) for part in visible.split(",") if part.strip().isdigit()]
    if numbers != sorted(set(numbers)):
        raise ValueError(
            f"ASCEND_RT_VISIBLE_DEVICES={visible}: the numbers must rise, or the runtime finds no device at all; "
            f"set it to {','.join(map(str, sorted(set(numbers))))}"
        )
    if variables.get("ASCEND_LAUNCH_BLOCKING") == "1" and variables.get("TASK_QUEUE_ENABLE", "0") != "0":
        raise ValueError(
            f"ASCEND_LAUNCH_BLOCKING=1 has no effect beside TASK_QUEUE_ENABLE={variables['TASK_QUEUE_ENABLE']}: "
            "unset TASK_QUEUE_ENABLE while looking for a fault, or unset ASCEND_LAUNCH_BLOCKING"
        )


def _devices(kind: str) -> list[str]:
    """Kinds of device whose variables are worth setting."""
    if kind != "auto":
        return [kind]
    return ["npu"] if importlib.util.find_spec("torch_npu") is not None else ["cuda"]


def _seconds(variables: Mapping[str, str], name: str) -> int | None:
    value = variables.get(name)
    if value is None:
        return None
    if not value.strip().isdigit():
        raise ValueError(f"{name}={value} is not a whole number of seconds")
    return int(value)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
