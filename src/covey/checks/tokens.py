"""Do tokenizer, model, template and data mean the same ids? A response that never ends is the usual sign that not.

The known case: Qwen2.5 base ends texts with 151643 (<|endoftext|>), its Instruct models with 151645 (<|im_end|>).
"""

from __future__ import annotations

import re
from typing import Any

import torch

from covey.checks.material import SAMPLE, Material, as_ids
from covey.data.load import load_prompts
from covey.findings import Finding
from covey.models.packing import pack
from covey.types import Group, Response

_WHY_EOS = "a response ends at one of these ids and is trained to; with another one it runs on to the length limit"


def check_eos(material: Material) -> Finding:
    """The eos of tokenizer, config.json, generation_config.json and preprocessed data."""
    model, tokenizer = material.model, material.tokenizer
    generation = as_ids(getattr(getattr(model, "generation_config", None), "eos_token_id", None))
    ids: dict[str, Any] = {
        "tokenizer": tokenizer.eos_token_id,
        "config": sorted(as_ids(model.config.eos_token_id)),
        "generation_config": sorted(generation),
        "template": material.prompts.train.stop_token_ids if material.prompts is not None else [],
    }
    ids |= {f"data {source}": made["tokenizer"]["eos_token_id"] for source, made in material.manifests().items()}
    found = "; ".join(f"{where}: {_spell(tokenizer, value)}" for where, value in ids.items())
    expected = "the tokenizer's eos among the model's, and the one that the data was prepared with"
    known = as_ids(model.config.eos_token_id) | generation
    other = [source for source, value in ids.items() if source.startswith("data ") and value != ids["tokenizer"]]
    if ids["tokenizer"] is not None and known and ids["tokenizer"] not in known:
        fix = "use model.path's own tokenizer (remove model.tokenizer), or correct eos_token_id in its files"
        return Finding("eos", "failure", found, expected, _WHY_EOS, fix, ids)
    if other:
        fix = "run covey preprocess again with the run's tokenizer, or set model.tokenizer to the one of the data"
        return Finding("eos", "failure", found, expected, _WHY_EOS, fix, ids)
    if generation and not as_ids(model.config.eos_token_id) <= generation:
        fix = "add the id to generation_config.json if the model ends texts with it; engines read only that file"
        return Finding("eos", "warning", found, expected, _WHY_EOS, fix, ids)
    return Finding("eos", "ok", found, expected, _WHY_EOS, "", ids)


def check_turn_end(material: Material) -> Finding:
    """What the chat template puts after an answer must end a response."""
    tokenizer, prompts = material.tokenizer, material.prompts
    expected, why = "an id that ends a response", "the model was tuned to end answers so; rollout would not notice"
    if prompts is None or prompts.train.prompt_type != "chat":
        return Finding("turn_end", "skipped", "no chat template in use", expected, why, "")
    answer = "ANSWER"
    messages = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": answer}]
    tail = str(tokenizer.apply_chat_template(messages, tokenize=False)).rpartition(answer)[2]
    ids = tokenizer.encode(tail, add_special_tokens=False)
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    stops = material.stop_ids()
    evidence = {"tail": tail, "ids": ids, "stop_ids": stops}
    if not ids or ids[0] not in special:
        return Finding("turn_end", "ok", f"no token of its own after an answer ({tail!r})", expected, why, "", evidence)
    found = f"{_spell(tokenizer, ids[0])} after an answer; responses end at {_spell(tokenizer, stops)}"
    if ids[0] in stops:
        return Finding("turn_end", "ok", found, expected, why, "", evidence)
    return Finding("turn_end", "failure", found, expected, why, f"set rollout.stop_token_ids: [{ids[0]}]", evidence)


def check_pad_bos(material: Material) -> Finding:
    """Pad and bos ids: inside the vocabulary, the same in tokenizer and config, bos once at the start of a prompt."""
    tokenizer, config = material.tokenizer, material.model.config
    ids = {
        name: (getattr(tokenizer, f"{name}_token_id"), getattr(config, f"{name}_token_id", None))
        for name in ("pad", "bos")
    }
    found = "; ".join(f"{name}: tokenizer {_spell(tokenizer, a)}, config {b}" for name, (a, b) in ids.items())
    expected = "equal where both are set, inside the vocabulary; bos at most once in a prompt"
    why = "masks come from lengths, so pad does not matter to training, but to whoever loads the exported model; a "
    why += "model that expects bos, or sees it twice, continues worse"
    outside = [name for name, pair in ids.items() for i in pair if i is not None and not 0 <= i < config.vocab_size]
    if outside:
        fix = f"correct {outside[0]}_token_id in config.json and the tokenizer's files"
        return Finding("pad_bos", "failure", found, expected, why, fix, {"ids": ids})
    problems = [f"{name} differs" for name, (a, b) in ids.items() if None not in (a, b) and a != b]
    fix = "set the tokenizer's ids in config.json" if problems else ""
    if (bos := ids["bos"][0]) is not None and material.prompts is not None:
        starts = [prompt.input_ids[:2] for prompt in material.sample()]
        if any(start == [bos, bos] for start in starts):
            problems.append("prompts begin with bos twice")
            fix = "the template adds bos to a text that has it: take it out of the data or the template"
        elif tokenizer.encode("a")[:1] == [bos] and not any(start[:1] == [bos] for start in starts):
            problems.append("no prompt begins with bos, which this tokenizer adds to texts")
            fix = "choose a data.prompt_type whose prompts begin with bos"
    severity = "warning" if problems else "ok"
    return Finding("pad_bos", severity, "; ".join([found, *problems]), expected, why, fix, {"ids": ids})


def check_prompt_ids(material: Material) -> Finding:
    """The ids of a prompt: inside the vocabulary, the ids of its text, the same every time and in the update."""
    tokenizer = material.tokenizer
    expected = "ids that spell the prompt's text and are what rollout and update both run on"
    why = "with ids of another tokenizer the model reads another text than the reward and the log show"
    sample = material.sample()
    vocab = material.model.config.vocab_size
    places = [prompt.uid for prompt in sample]
    if bad := [p for p in sample if not p.input_ids or max(p.input_ids) >= vocab or min(p.input_ids) < 0]:
        found = f"prompt {bad[0].uid} has ids outside the vocabulary of {vocab}"
        fix = "preprocess the data again with the model's tokenizer"
        return Finding("prompt_ids", "failure", found, expected, why, fix, {"prompts": places})
    groups = [Group(prompt, [Response([0], [0.0])]) for prompt in sample]
    packed = pack(groups, max_tokens=2**30, device=torch.device("cpu"))
    rows = [b.input_ids[s.start : s.end].tolist() for b in packed for s in b.segments if s.prompt is None]
    if sorted(rows) != sorted(prompt.input_ids for prompt in sample):
        found, fix = "the update packs other ids than the rollout gets", "this is a fault of Covey: report it"
        return Finding("prompt_ids", "failure", found, expected, why, fix, {"prompts": places})
    other = [p for p in sample if _squeeze(_decode(tokenizer, p.input_ids)) != _squeeze(p.text)]
    if other:
        found = f"{len(other)} of {len(sample)} prompts: ids spell {_short(_decode(tokenizer, other[0].input_ids))}, "
        found += f"the text is {_short(other[0].text)}"
        fix = "preprocess the data again with the run's tokenizer and template"
        return Finding("prompt_ids", "failure", found, expected, why, fix, {"prompts": [p.uid for p in other]})
    assert material.prompts is not None
    if changed := _rendered_otherwise(material):
        found, fix = f"rendered again, {changed[0]}", "use a chat template that gives the same text every time"
        return Finding("prompt_ids", "failure", found, expected, why, fix, {"prompts": places})
    template = str(tokenizer.chat_template) if material.prompts.train.prompt_type == "chat" else ""
    if re.search(r"strftime_now|\bnow\(", template):
        found = "the chat template puts the date into prompts"
        fix = "give a fixed date in data.chat_template_options (date_string), or another template"
        why = "prompts change overnight: a run cannot be resumed or compared"
        return Finding("prompt_ids", "warning", found, expected, why, fix, {"prompts": places})
    return Finding("prompt_ids", "ok", f"{len(sample)} prompts looked at", expected, why, "", {"prompts": places})


def _rendered_otherwise(material: Material) -> list[str]:
    """Prompts of the first rows whose ids differ when they are made again from the data's files."""
    assert material.prompts is not None
    data, train = material.config.data, material.prompts.train
    again = load_prompts(data.train, material.tokenizer, data, limit=SAMPLE)
    first = {train[i].row.get("prompt"): train[i].input_ids for i in range(min(2 * SAMPLE, len(train)))}
    return [
        f"the prompt of {_short(str(prompt.row['prompt']))} has other ids"
        for prompt in again
        if first.get(prompt.row.get("prompt"), prompt.input_ids) != prompt.input_ids
    ]


def _spell(tokenizer: Any, ids: int | list[int] | None) -> str:
    if ids is None or ids == []:
        return "none"
    several = [ids] if isinstance(ids, int) else ids
    return ", ".join(f"{i} ({tokenizer.convert_ids_to_tokens(i)})" for i in several)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _squeeze(text: str) -> str:
    """Without white space, which some tokenizers add or drop at borders."""
    return "".join(text.split())


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}")
