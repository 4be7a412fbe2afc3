"""Is the model what its files say? Shapes, tied head, numbers, norm and rotary settings; only headers are read.

The known case: an rms_norm_eps of 1e-6 on one device and 1e-7 on the other, found after 1500 steps of falling reward.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers.utils.hub import cached_file

from covey.checks.material import Material
from covey.findings import Finding
from covey.models.load import FAMILIES, load_skeleton
from covey.models.weight_files import WeightFiles

_ROWS = 64  # rows of embedding and head that are compared
_TOLERANCE = 1e-5  # of rotary frequencies, relative
_BITS = {"F64": 64, "F32": 32, "BF16": 16, "F16": 16}


def check_weights(material: Material) -> Finding:
    """Every parameter is in the files with its shape: transformers fills what is missing with random numbers."""
    expected = "every parameter of the model, and nothing else"
    why = "a weight that is not in the files is random in the run, one that has no place is lost"
    files, model = WeightFiles.of(material.config.model.path), material.model
    if files is None or model.config.model_type not in FAMILIES:
        reason = "not stored as safetensors" if files is None else f"model_type {model.config.model_type} may rename"
        return Finding("weights", "skipped", reason, expected, why, "")
    stored = _with_prefix(files.forms(), model)
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    missing = sorted(wanted.keys() - stored.keys())
    shapes = sorted(name for name in wanted.keys() & stored.keys() if stored[name][1] != wanted[name])
    known = wanted.keys() | model.state_dict().keys()
    lost = sorted(name for name in stored if name not in known and "rotary_emb" not in name)
    evidence = {"missing": missing, "other_shape": shapes, "without_place": lost}
    if missing or shapes:
        found = "; ".join(
            f"{len(names)} {what.replace('_', ' ')}: {', '.join(names[:3])}"
            for what, names in evidence.items()
            if names
        )
        fix = "take the files of the model that config.json describes, or correct config.json"
        return Finding("weights", "failure", found, expected, why, fix, evidence)
    if lost:
        found = f"{len(lost)} tensors have no place: {', '.join(lost[:3])}"
        return Finding(
            "weights", "warning", found, expected, why, "check architecture and biases in config.json", evidence
        )
    return Finding("weights", "ok", f"{len(wanted)} tensors", expected, why, "", evidence)


def check_vocabulary(material: Material) -> Finding:
    """Ids that the tokenizer can make, vocab_size, and rows of the stored embedding."""
    tokenizer, model = material.tokenizer, material.model
    size = model.config.vocab_size
    largest = max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)
    files = WeightFiles.of(material.config.model.path)
    rows = None if files is None else _rows(_with_prefix(files.forms(), model), _embedding_name(model))
    evidence = {"tokenizer": largest, "vocab_size": size, "embedding_rows": rows}
    found = f"tokenizer {largest} ids, vocab_size {size}, embedding {'not read' if rows is None else f'{rows} rows'}"
    expected = "tokenizer <= vocab_size = rows of the embedding"
    why = "an id without an embedding stops the run; another size means another model's files"
    if largest > size or rows not in (None, size):
        fix = "use the tokenizer of model.path; after adding tokens resize the embeddings and save the model again"
        return Finding("vocabulary", "failure", found, expected, why, fix, evidence)
    return Finding("vocabulary", "ok", found, expected, why, "", evidence)


def check_tied_embeddings(material: Material) -> Finding:
    """config.json's tie_word_embeddings against whether the files hold a head, and another one than the embedding."""
    model, files = material.model, WeightFiles.of(material.config.model.path)
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    expected = "tied: no head in the files, or the embedding once more; not tied: a head"
    why = "a tied model ignores the stored head, and one that is not tied starts with a random head when it is missing"
    if files is None:
        return Finding("tied_embeddings", "skipped", "not stored as safetensors", expected, why, "")
    stored = _with_prefix(files.forms(), model)
    head, embedding = _head_name(model), _embedding_name(model)
    has_head = head in stored
    equal = has_head and embedding in stored and _same_rows(files, stored, embedding, head, model)
    evidence = {"tie_word_embeddings": tied, "head_in_files": has_head, "head_equals_embedding": equal}
    found = f"tie_word_embeddings {str(tied).lower()}, "
    found += "no head in the files" if not has_head else f"a head {'equal to' if equal else 'other than'} the embedding"
    if tied and has_head and not equal:
        fix = "set tie_word_embeddings: false in config.json (the head was trained by itself)"
        return Finding("tied_embeddings", "failure", found, expected, why, fix, evidence)
    if not tied and not has_head:
        fix = f"set tie_word_embeddings: true in config.json, or take files that have {head}"
        return Finding("tied_embeddings", "failure", found, expected, why, fix, evidence)
    return Finding("tied_embeddings", "ok", found, expected, why, "", evidence)


def check_dtype(material: Material) -> Finding:
    """Numbers of the files against those of the run; fp32 products in full."""
    assert material.device is not None
    compute = str(material.device.dtype).removeprefix("torch.")
    files = WeightFiles.of(material.config.model.path)
    kinds = sorted({kind for kind, _ in files.forms().values()}) if files is not None else []
    short = material.device.reduced_precision()
    evidence = {"files": kinds, "run": compute, "reduced_precision": short}
    found = f"files {', '.join(kinds) or 'not read'}, run {compute}"
    found += f", fp32 products shortened by {', '.join(short)}" if short else ", fp32 products in full"
    expected = "one kind of 16 or 32 bit numbers that the run's hold, and TF32/HF32 off"
    why = "weights that are rounded on loading, or products of 10 bits, differ from what was compared before"
    if other := [kind for kind in kinds if kind not in _BITS]:
        fix = f"take the unquantised model ({other[0]} cannot be trained)"
        return Finding("dtype", "failure", found, expected, why, fix, evidence)
    if len(kinds) > 1:
        fix = "convert the files to one kind; a layer in fewer bits than the others is often an accident"
        return Finding("dtype", "warning", found, expected, why, fix, evidence)
    if kinds == ["F16"] and compute == "bfloat16":
        fix = "use a bfloat16 or float32 version of the weights: 3 of 10 bits of float16 are lost"
        return Finding("dtype", "warning", found, expected, why, fix, evidence)
    if short:
        return Finding("dtype", "warning", found, expected, why, f"unset {', '.join(short)}", evidence)
    return Finding("dtype", "ok", found, expected, why, "", evidence)


def check_norm_eps(material: Material) -> Finding:
    """rms_norm_eps: in config.json, in every norm of the model that runs, and in the reference's config."""
    model = material.network if material.network is not None else material.model
    raw = _config_json(material.config.model.path).get("rms_norm_eps")
    used = sorted({float(m.variance_epsilon) for m in model.modules() if hasattr(m, "variance_epsilon")})
    reference = _reference_config(material)
    evidence = {"config.json": raw, "model": used, "reference": getattr(reference, "rms_norm_eps", None)}
    found = f"config.json {raw}, norms {', '.join(map(str, used)) or 'of another kind'}"
    found += f", reference {evidence['reference']}" if reference is not None else ""
    expected = "one value, written in config.json"
    why = "a norm with another epsilon than in training is off a little in every layer; reward falls after many steps"
    if any(value != material.model.config.rms_norm_eps for value in used) or (
        raw is not None and used and raw not in used
    ):
        fix = "load the model through its config.json, and change rms_norm_eps only there"
        return Finding("norm_eps", "failure", found, expected, why, fix, evidence)
    if reference is not None and evidence["reference"] != material.model.config.rms_norm_eps:
        fix = "give model.ref_path the config.json of the same family as the policy"
        return Finding("norm_eps", "failure", found, expected, why, fix, evidence)
    if raw is None and used:
        fix = f"write rms_norm_eps: {used[0]} into config.json, so that no other program takes its own default"
        return Finding("norm_eps", "warning", found, expected, why, fix, evidence)
    return Finding("norm_eps", "ok", found, expected, why, "", evidence)


def check_rope(material: Material) -> Finding:
    """Rotary base and scaling: config.json, the frequencies that the model rotates by, and the reference."""
    raw = _config_json(material.config.model.path)
    written = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = written.get("rope_theta", raw.get("rope_theta"))
    kind = written.get("rope_type", written.get("type", "default"))
    used = dict(getattr(material.model.config, "rope_parameters", None) or {})
    reference = _reference_config(material)
    evidence: dict[str, Any] = {"rope_theta": theta, "kind": kind, "used": used}
    found = f"config.json: base {theta}, {kind}; used: base {used.get('rope_theta')}, {used.get('rope_type')}"
    expected, fix = "the base and scaling of config.json, in policy and reference", ""
    why = "other frequencies move every position; short texts hide it"
    problem = None
    if theta is not None and not math.isclose(theta, float(used.get("rope_theta", math.nan))):
        problem, fix = "another base is used", "keep rope_theta where this version of transformers reads it"
    elif (deviation := _frequency_error(material, used)) is not None and not deviation <= _TOLERANCE:
        evidence["deviation"] = deviation
        problem = f"the model's frequencies are off by {deviation:.2g}"
        fix = "load the model through its config.json; a buffer inv_freq in the files must not replace it"
    elif reference is not None and dict(getattr(reference, "rope_parameters", None) or {}) != used:
        evidence["reference"] = dict(reference.rope_parameters)
        problem, fix = "the reference has another", "give model.ref_path a model of the policy's family"
    if problem is not None:
        return Finding("rope", "failure", f"{found}; {problem}", expected, why, fix, evidence)
    if theta is None and used:
        fix = f"write rope_theta: {used.get('rope_theta')} into config.json"
        return Finding("rope", "warning", found, expected, why, fix, evidence)
    return Finding("rope", "ok", found, expected, why, "", evidence)


def _frequency_error(material: Material, used: dict[str, Any]) -> float | None:
    """Largest relative deviation of inv_freq from base^(-2i / dim); None where another formula holds."""
    model = material.network if material.network is not None else material.model
    rotary = getattr(model.base_model, "rotary_emb", None)
    text = material.model.config.get_text_config()
    if rotary is None or used.get("rope_type") != "default" or used.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    if rotary.inv_freq.is_meta:
        rotary = type(rotary)(text)
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    exponent = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    wanted = float(used["rope_theta"]) ** -exponent
    actual = rotary.inv_freq.detach().double().cpu()
    return math.inf if actual.shape != wanted.shape else float(((actual - wanted) / wanted).abs().max())


def _reference_config(material: Material) -> Any:
    """The config of model.ref_path where there is one and it is used; None otherwise."""
    config = material.config
    if not config.model.ref_path or not config.algorithm.kl_coef:
        return None
    return load_skeleton(config.model.ref_path, trust_remote_code=config.model.trust_remote_code).config


def _config_json(path: str) -> dict[str, Any]:
    found = cached_file(path, "config.json", _raise_exceptions_for_missing_entries=False)
    return {} if found is None else json.loads(Path(found).read_text(encoding="utf-8"))


def _with_prefix(stored: dict[str, Any], model: Any) -> dict[str, Any]:
    """Names as the causal model has them, also of files that were saved from the model without its head."""
    prefix = f"{model.base_model_prefix}."
    if any(name.startswith(prefix) for name in stored):
        return stored
    return {name if name == _head_name(model) else prefix + name: form for name, form in stored.items()}


def _name_of(model: Any, module: Any) -> str:
    return next(name for name, found in model.named_modules() if found is module) + ".weight"


def _embedding_name(model: Any) -> str:
    return _name_of(model, model.get_input_embeddings())


def _head_name(model: Any) -> str:
    return _name_of(model, model.get_output_embeddings())


def _rows(stored: dict[str, Any], name: str) -> int | None:
    return stored[name][1][0] if name in stored else None


def _same_rows(files: WeightFiles, stored: dict[str, Any], embedding: str, head: str, model: Any) -> bool:
    """Whether first, middle and last rows of both are equal."""
    if stored[embedding][1] != stored[head][1]:
        return False
    names = {
        embedding: embedding if not files.lacks([embedding]) else embedding.removeprefix(f"{model.base_model_prefix}.")
    }
    rows, width = stored[head][1]
    for start in {0, max(0, rows // 2 - _ROWS // 2), max(0, rows - _ROWS)}:
        place = (slice(start, start + _ROWS), slice(0, width))
        read = dict(files.read({names[embedding]: place, head: place}))
        if not torch.equal(read[names[embedding]], read[head]):
            return False
    return True
