"""Plants faults and asks `covey align compare` what it sees: the table of docs/alignment.md.

    python -m covey.tools.align.faults --write docs/alignment.md

Two kinds. In the files: config.json, tokenizer or weights of B are others, as after a wrong conversion. In the running:
B loads the same files and computes otherwise, as a wrong kernel does, and no fact gives it away.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.config.schema import Config
from covey.models.attention import PackedPlan
from covey.setup import Parts
from covey.tools import tiny
from covey.tools.align import plants
from covey.tools.align.capture import capture
from covey.tools.align.compare import compare
from covey.tools.align.fixed_set import Source

_START, _END = "<!-- planted faults -->", "<!-- end of planted faults -->"


@dataclass(frozen=True)
class Fault:
    """What is planted, and what has to be said about it."""

    name: str
    rung: str  # of first_divergence; "" when there must be none
    step: str
    kind: str  # beginning of the cause
    files: Callable[[Path], None] = lambda model: None
    around: Callable[[Parts], AbstractContextManager[None]] = lambda parts: nullcontext()
    settings: dict[str, Any] = field(default_factory=dict)
    path: str = "packed"
    profile: str = "fp32"


def config_of(directory: Path, model: Path, settings: dict[str, Any]) -> Config:
    """A small run on the CPU."""
    data: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(directory / "train.jsonl")},
        "rollout": {"num_samples": 3, "max_response_length": 12},
        "reward": {"functions": [{"name": "math"}]},
        "train": {"lr": 1e-3},
        "output_dir": str(directory / "run"),
        "device": "cpu",
    }
    for section, values in settings.items():
        data[section] = {**data.get(section, {}), **values}
    return Config.model_validate(data)


def make_material(directory: Path) -> None:
    """The data, A's model and its bundle; norms and biases are away from 1 and 0, which would hide a dropped one."""
    tiny.make_model(directory / "model", seed=0)
    tiny.make_data(directory, seed=0)
    generator = torch.Generator().manual_seed(0)

    def shake(weights: dict[str, Tensor]) -> None:
        for weight in weights.values():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))

    plants.edit_weights(shake)(directory / "model")
    capture(config_of(directory, directory / "model", {}), directory / "A", source=Source(prompts=3))


def plant(fault: Fault, directory: Path) -> dict[str, Any]:
    """Capture B with the fault on A's ids, and compare: what `covey align compare --json` prints."""
    model = directory / "faulty"
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(directory / "model", model)
    fault.files(model)
    config = config_of(directory, model, fault.settings)
    capture(config, directory / "B", source=Source(bundle=directory / "A"), path=fault.path, around=fault.around)
    return compare(directory / "A", directory / "B", profile=fault.profile)


def named_right(fault: Fault, result: dict[str, Any]) -> bool:
    """Whether the first divergence is the planted one, by rung, step and cause."""
    first = result["first_divergence"]
    if not fault.rung or first is None:
        return not fault.rung and first is None
    return (first["rung"], first["name"]) == (fault.rung, fault.step) and first["cause"].startswith(fault.kind)


def table(directory: Path) -> tuple[str, bool]:
    """(Markdown of every fault and what was said, whether all were named right)."""
    make_material(directory)
    lines = ["| planted in B | first divergence | cause that compare names |", "|---|---|---|"]
    right = True
    for fault in FAULTS:
        result = plant(fault, directory)
        first, good = result["first_divergence"], named_right(fault, result)
        right &= good
        said = ("none", "pass") if first is None else (f"{first['rung']}, `{first['name']}`", first["cause"])
        lines.append(f"| {fault.name}{'' if good else ' **(named wrong)**'} | {said[0]} | {said[1]} |")
    return "\n".join(lines), right


def main(arguments: list[str]) -> int:
    """Print the table, or write it between the marks of a file; 1 when a fault was named wrong."""
    with tempfile.TemporaryDirectory() as directory:
        text, right = table(Path(directory))
    if arguments[:1] == ["--write"]:
        page = Path(arguments[1])
        before, _, rest = page.read_text(encoding="utf-8").partition(_START)
        page.write_text(f"{before}{_START}\n{text}\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")
    else:
        sys.stdout.write(text + "\n")
    return 0 if right else 1


_BF16 = {"model": {"dtype": "bfloat16"}}
_Q, _K, _CORE = "self_attn.q_proj", "self_attn.k_proj", "self_attn.attention"
_NORM, _MODELING = "input_layernorm", plants.modeling()

# In the order of the ladder. "files": B's checkpoint or settings are others; "kernel": B computes otherwise.
FAULTS = (
    Fault("nothing", "", "", ""),
    Fault("nothing; transformers' eager attention, padded batch", "", "", "", path="padded"),
    Fault("nothing; transformers' eager attention, one sequence at a time", "", "", "", path="sequence"),
    Fault("nothing; bfloat16, by profile bf16", "", "", "", settings=_BF16, profile="bf16"),
    Fault("bfloat16, by profile fp32", "embedding", "embed_tokens", "reduced precision", settings=_BF16),
    Fault("files: another eos (generation_config)", "ids", "eos", "eos",
          files=plants.edit_json("generation_config.json", eos_token_id=2)),
    Fault("files: another eos, by profile bf16", "ids", "eos", "eos",
          files=plants.edit_json("generation_config.json", eos_token_id=2), profile="bf16"),
    Fault("files: rope theta 1e6 for 1e4", "rope", "cos", "rope",
          files=plants.edit_json("config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
    Fault("kernel: rotates neighbouring channels", "layer 0", _CORE, "rope",
          around=plants.replaced(_MODELING, "apply_rotary_pos_emb", plants.rotate_neighbours)),
    Fault("kernel: no rotary embedding", "layer 0", _CORE, "rope",
          around=plants.replaced(_MODELING, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))),
    Fault("files: rms_norm_eps 1e-5 for 1e-6", "layer 0", _NORM, "eps",
          files=plants.edit_json("config.json", rms_norm_eps=1e-5)),
    Fault("files: rms_norm_eps 1e-5 for 1e-6, by profile bf16", "layer 0", _NORM, "eps",
          files=plants.edit_json("config.json", rms_norm_eps=1e-5), profile="bf16"),
    Fault("kernel: norms with eps 1e-5", "layer 0", _NORM, "eps",
          around=plants.forwards(plants.norms, plants.other_eps)),
    Fault("files: q_proj of layer 1 transposed", "layer 1", _Q, "transposed weight",
          files=plants.edit_weights(plants.transpose)),
    Fault("kernel: q_proj of layer 1 read the other way round", "layer 1", _Q, "wrong weight",
          around=plants.forwards(lambda m: iter([m.base_model.layers[1].self_attn.q_proj]), plants.turned)),
    Fault("files: k_proj of layer 0 without bias", "layer 0", _K, "dropped bias",
          files=plants.edit_weights(plants.zero_bias)),
    Fault("kernel: k_proj of layer 1 forgets its bias", "layer 1", _K, "dropped bias",
          around=plants.forwards(lambda m: iter([m.base_model.layers[1].self_attn.k_proj]), plants.without_bias)),
    Fault("files: the two norms of layer 1 exchanged", "layer 1", _NORM, "wrong weight",
          files=plants.edit_weights(plants.swap_norms)),
    Fault("kernel: attention scale 1.0", "layer 0", _CORE, "attention scale",
          around=plants.replaced(PackedPlan, "attend", plants.scale_one)),
    Fault("kernel: attention scale 1.0, by profile bf16", "layer 0", _CORE, "attention scale",
          around=plants.replaced(PackedPlan, "attend", plants.scale_one), settings=_BF16, profile="bf16"),
    Fault("kernel: no causal mask", "layer 0", _CORE, "mask", path="sequence",
          around=plants.replaced(_MODELING, "create_causal_mask", lambda **options: None)),
    Fault("kernel: responses of a packed row see each other", "layer 0", _CORE, "mask",
          around=plants.replaced(PackedPlan, "attend", plants.one_row)),
    Fault("kernel: layer 1 in bfloat16", "layer 1", _Q, "reduced precision",
          around=plants.forwards(plants.linears, plants.half)),
    Fault("kernel: layer 1 with 10-bit mantissas (TF32, HF32)", "layer 1", _Q, "reduced precision",
          around=plants.forwards(plants.linears, plants.tf32)),
    Fault("settings: rollout.temperature 0.7", "logprobs", "logprobs", "temperature",
          settings={"rollout": {"temperature": 0.7}}),
    Fault("settings: advantage group_center", "advantages", "advantages", "settings",
          settings={"algorithm": {"advantage": "group_center"}}),
    Fault("settings: entropy_coef 0.1", "loss", "actor/loss", "settings",
          settings={"algorithm": {"entropy_coef": 0.1}}),
    Fault("kernel: gradients are means over two ranks", "gradients", "model.norm.weight", "scale",
          around=plants.halved_gradient),
    Fault("settings: train.lr 2e-3 for 1e-3", "update", "moved weights", "settings",
          settings={"train": {"lr": 2e-3}}),
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
