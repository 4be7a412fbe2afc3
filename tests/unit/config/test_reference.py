"""The reference of all keys and the effective configuration as text."""

from __future__ import annotations

from pathlib import Path

from covey.config.fields import list_fields
from covey.config.load import load_config
from covey.config.reference import effective_yaml, reference_markdown, reference_rows, reference_text
from covey.config.schema import Config

ROOT = Path(__file__).parents[3]


def test_docs_config_md_is_what_the_schema_says() -> None:
    assert (ROOT / "docs/config.md").read_text() == reference_markdown(), (
        "run: python -m covey config reference --markdown > docs/config.md"
    )


def test_every_leaf_of_the_schema_is_in_the_reference_with_a_meaning() -> None:
    def leaves(schema: dict, defs: dict, prefix: str) -> set[str]:
        """Walk pydantic's JSON schema, an independent description of the same models."""
        found: set[str] = set()
        for name, field in schema["properties"].items():
            options = [field, *field.get("anyOf", []), *field.get("allOf", [])]
            refs = [o["$ref"] for o in options if "$ref" in o]
            items = [o["items"]["$ref"] for o in options if "$ref" in o.get("items", {})]
            if refs or items:
                target = defs[(refs or items)[0].rpartition("/")[2]]
                found |= leaves(target, defs, f"{prefix}{name}{'[]' if items else ''}.")
            else:
                found.add(prefix + name)
        return found

    schema = Config.model_json_schema()
    fields = {item.key: item for item in list_fields(Config)}
    assert set(fields) == leaves(schema, schema["$defs"], "")
    assert [key for key, item in fields.items() if not item.meaning] == []
    text = reference_text()
    assert all(f"  {key}: " in text for key in fields)


def test_types_and_bounds_are_told_in_words() -> None:
    rows = {row["key"]: row for row in reference_rows() if "train`" in row["file"]}
    assert rows["train.steps"]["expects"] == "whole number above 0"
    assert rows["train.lr"]["expects"] == "number at least 0"
    assert rows["rollout.top_p"]["expects"] == "number above 0 and at most 1"
    assert rows["device"]["expects"] == "one of: auto, cpu, cuda, npu"
    assert rows["data.train"]["expects"] == "text or list of text"
    assert rows["rollout.kv_cache_bytes"]["unit"] == "bytes"
    assert rows["model.path"]["required"] is True


def test_the_effective_configuration_is_a_file_that_loads_to_the_same_run(tmp_path: Path) -> None:
    source = tmp_path / "run.yaml"
    source.write_text(
        "model: {path: m}\ndata: {train: [a, '1e-6'], system: \"two\\nlines # no comment\"}\n"
        "reward: {functions: [{name: math, options: {x: 1e-3, y: '1e-3'}}, {name: 'a:b', weight: 0.5}]}\n"
        "output_dir: 'o: x'\ntrain: {lr: 1e-6}\n"
    )
    loaded = load_config(source, ["train.steps=3"])
    text = effective_yaml(loaded)
    again = tmp_path / "full.yaml"
    again.write_text(text)
    assert load_config(again).config == loaded.config
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert lines["steps"].endswith("# --set")
    assert lines["lr"].endswith(f"# {source}:5")
    assert lines["weight_decay"].endswith("# default")
