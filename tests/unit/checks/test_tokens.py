"""Planted disagreements about ids, each found by its check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from transformers import AddedToken, AutoTokenizer

from covey.checks.tokens import check_eos, check_pad_bos, check_prompt_ids, check_turn_end
from covey.data import preprocess

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def _chat(place: Path, *, template: str = TEMPLATE) -> None:
    """Give the tokenizer a chat template whose turns end with a token of its own, 263."""
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(place / "model")


def test_a_sound_run_has_no_finding(make):
    material = make()
    for check in (check_eos, check_pad_bos, check_prompt_ids):
        assert check(material).severity == "ok", check.__name__
    assert check_turn_end(material).severity == "skipped"  # no chat template


def test_a_tokenizer_with_another_eos_is_found(place, make, edit_json):
    """Qwen2.5: the base model's tokenizer beside the Instruct model, or the other way round."""
    edit_json(place / "model" / "config.json", eos_token_id=7)
    edit_json(place / "model" / "generation_config.json", eos_token_id=7)
    found = check_eos(make())
    assert found.severity == "failure" and found.evidence["tokenizer"] == 1 and found.evidence["config"] == [7]
    assert "tokenizer: 1 (<eos>)" in found.found and "config: 7" in found.found


def test_config_and_generation_config_that_differ_are_a_warning(place, make, edit_json):
    edit_json(place / "model" / "config.json", eos_token_id=[1, 7])
    assert check_eos(make()).severity == "warning"
    edit_json(place / "model" / "generation_config.json", eos_token_id=[1, 7])
    assert check_eos(make()).severity == "ok"


def test_data_prepared_with_another_eos_is_found(place, make, edit_json):
    settings = place / "data.yaml"
    settings.write_text(
        f"input: {place / 'train.jsonl'}\ntokenizer_name_or_path: {place / 'model'}\noutput_prefix: {place / 'made'}\n"
        "handler_name: AlpacaStyleInstructionHandler\nmap_keys: {prompt: problem, query: '', response: answer}\n"
        "prompt_type: empty\nworkers: 1\n"
    )
    preprocess.run(settings, [], quiet=True)
    data = {"train": str(place / "made")}
    assert check_eos(make(data=data)).severity == "ok"
    (manifest,) = place.glob("made*.manifest.json")
    edit_json(manifest, tokenizer={**make(data=data).manifests()[data["train"]]["tokenizer"], "eos_token_id": 0})
    found = check_eos(make(data=data))
    assert found.severity == "failure" and "<pad>" in found.found and "covey preprocess again" in found.fix


def test_an_end_of_turn_that_does_not_stop_a_response_is_found(place, make, edit_json):
    _chat(place)
    edit_json(place / "model" / "config.json", vocab_size=264)
    found = check_turn_end(make())
    assert found.severity == "failure" and found.evidence["ids"][0] == 263
    assert found.fix == "set rollout.stop_token_ids: [263]"
    assert check_turn_end(make(rollout={"stop_token_ids": [263]})).severity == "ok"


def test_pad_and_bos_ids_that_differ_or_do_not_exist_are_found(place, make, edit_json):
    config = place / "model" / "config.json"
    edit_json(config, pad_token_id=5)
    found = check_pad_bos(make())
    assert found.severity == "warning" and "pad differs" in found.found
    edit_json(config, pad_token_id=0, bos_token_id=900)
    assert check_pad_bos(make()).severity == "failure"


def test_a_prompt_that_begins_with_bos_twice_is_found(place, make):
    material = make()
    material.tokenizer.bos_token = "<pad>"
    table = material.prompts.train.table
    ids = pa.array([[0, 0, *row] for row in table["input_ids"].to_pylist()], type=table["input_ids"].type)
    index = table.column_names.index("input_ids")
    doubled = replace(material.prompts.train, table=table.set_column(index, "input_ids", ids))
    found = check_pad_bos(replace(material, prompts=replace(material.prompts, train=doubled)))
    assert found.severity == "warning" and "bos twice" in found.found


def _with_ids(material, change):
    train = material.prompts.train
    index = train.table.column_names.index("input_ids")
    column = train.table["input_ids"]
    ids = pa.array([change(row) for row in column.to_pylist()], type=column.type)
    changed = replace(train, table=train.table.set_column(index, "input_ids", ids))
    return replace(material, prompts=replace(material.prompts, train=changed))


def test_ids_that_spell_another_text_are_found(make):
    found = check_prompt_ids(_with_ids(make(), lambda row: row[::-1]))
    assert found.severity == "failure" and "16 of 16 prompts: ids spell" in found.found


def test_ids_outside_the_vocabulary_are_found(make):
    found = check_prompt_ids(_with_ids(make(), lambda row: [*row, 263]))
    assert found.severity == "failure" and "outside the vocabulary of 263" in found.found


def test_a_template_that_gives_another_text_every_time_is_found(place, make):
    _chat(place)
    material, turns = make(), iter(range(10_000))
    apply = material.tokenizer.apply_chat_template

    def changing(messages, **options):
        return f"{next(turns)} {apply(messages, **options)}"

    material.tokenizer.apply_chat_template = changing
    material.model.config.vocab_size = 264
    found = check_prompt_ids(material)
    assert found.severity == "failure" and "rendered again" in found.found


def test_a_template_with_the_date_is_a_warning(place, make):
    _chat(place, template="{% if false %}{{ strftime_now('%Y') }}{% endif %}" + TEMPLATE)
    material = make()
    material.model.config.vocab_size = 264
    found = check_prompt_ids(material)
    assert found.severity == "warning" and "date" in found.found
