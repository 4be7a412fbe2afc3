"""`covey plan`: memory and time of every layout before anything is started."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covey.commands.options import ConfigDirs, File, Json, Overrides, load, print_json

if TYPE_CHECKING:
    from covey.tools.time_model import Hardware

_UNITS = {"": 1, "B": 1, "GB": 10**9, "GIB": 2**30, "G": 2**30, "MB": 10**6, "MIB": 2**20, "M": 2**20}


Devices = Annotated[int, typer.Option("--devices", min=1, help="Devices in all.")]
Memory = Annotated[str, typer.Option("--memory", help="Memory of a device: 64GiB, 80GB.")]
DeviceName = Annotated[str, typer.Option("--device-name", help="Whose peaks to use: 910b, a100, h100, h200.")]
PerHost = Annotated[int, typer.Option("--per-host", min=1, help="Devices of a host.")]
PeakTflops = Annotated[float | None, typer.Option("--peak-tflops", min=0.001, help="16-bit peak of a device.")]
MemoryGbs = Annotated[float | None, typer.Option("--memory-gbs", min=0.001, help="Device memory, GB/s.")]
LinkGbs = Annotated[
    float | None, typer.Option("--bandwidth-gbs", min=0.001, help="Between devices of a host, GB/s a device.")
]
NetworkGbs = Annotated[float | None, typer.Option("--network-gbs", min=0.001, help="Between hosts, GB/s a device.")]
PromptTokens = Annotated[
    int | None, typer.Option("--prompt-tokens", min=1, help="Mean prompt; default: the longest allowed.")
]
ResponseTokens = Annotated[
    int | None, typer.Option("--response-tokens", min=1, help="Mean response; default: the longest allowed.")
]
ModelConfig = Annotated[
    str | None, typer.Option("--model-config", metavar="DIR", help="Directory with config.json, for model.path.")
]


def plan(
    file: File,
    devices: Devices = 16,
    memory: Memory = "64GiB",
    device_name: DeviceName = "910b",
    per_host: PerHost = 8,
    peak_tflops: PeakTflops = None,
    memory_gbs: MemoryGbs = None,
    bandwidth_gbs: LinkGbs = None,
    network_gbs: NetworkGbs = None,
    prompt_tokens: PromptTokens = None,
    response_tokens: ResponseTokens = None,
    model_config: ModelConfig = None,
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    as_json: Json = False,
) -> None:
    """Say which layouts of some devices fit their memory, how long a step takes, and why others do not.

    `covey plan run.yaml --devices 16 --memory 64GiB`; of the model only config.json is read. Exit code 1 when no
    layout fits.
    """
    config = load(file, overrides, "train", config_dir).config
    from covey.tools.plan import Request, print_plan
    from covey.tools.plan import plan as make
    from covey.tools.time_model import Lengths

    peaks = {"peak_tflops": peak_tflops, "memory_gbs": memory_gbs, "link_gbs": bandwidth_gbs}
    hardware = _hardware(device_name, per_host, peaks | {"network_gbs": network_gbs})
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    lengths = Lengths(prompt_tokens or prompt, response_tokens or response)
    result = make(config, Request(devices, parse_bytes(memory), hardware, lengths), model_path=model_config)
    if as_json:
        print_json(result)
    else:
        print_plan(result)
    if not result["layouts"]:
        raise typer.Exit(1)


def _hardware(name: str, per_host: int, given: dict[str, float | None]) -> Hardware:
    """A known device, with the peaks that were given in place of its own."""
    from covey.tools.time_model import HARDWARE

    if name not in HARDWARE:
        raise ValueError(
            f"--device-name {name!r} is not known ({', '.join(HARDWARE)}); take one of them and give its peaks "
            "by --peak-tflops, --memory-gbs, --bandwidth-gbs and --network-gbs"
        )
    changed: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    return replace(HARDWARE[name], **changed, name=f"{name}, changed" if changed else name, per_host=per_host)


def parse_bytes(text: str) -> int:
    """64GiB, 80GB, 512MiB or a number of bytes; ValueError for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"--memory {text!r} is no amount of memory: write it as 64GiB, 80GB or 68719476736")
    return int(float(match[1]) * _UNITS[match[2].upper()])
