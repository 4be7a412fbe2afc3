"""YAML with places: numbers, duplicate keys, syntax errors, overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.config.yaml_tree import ConfigError, apply_override, parse_path, parse_tree, read_tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("5E+3", 5000.0),
        ("-.5", -0.5),
        ("1_000", 1000),
        ("0x1f", 31),
        ("12", 12),
        ("2024-01-01", "2024-01-01"),  # dates and base-60 numbers are text: nobody means them in a configuration
        ("12:30", "12:30"),
        ("1.2.3", "1.2.3"),
        ("'1e-6'", "1e-6"),
        ("none", "none"),
        ("~", None),
    ],
)
def test_scalars_read_as_people_mean_them(text: str, value: object) -> None:
    data = parse_tree(f"key: {text}", "f").data["key"]
    assert data == value
    assert type(data) is type(value)


def test_every_key_knows_its_line() -> None:
    tree = parse_tree("a:\n  b: 1\n  c:\n    - x\n    - d: 2\n", "f.yaml")
    assert tree.places[("a", "b")] == "f.yaml:2"
    assert tree.places[("a", "c", 1, "d")] == "f.yaml:5"
    assert tree.place(("a", "c", 9)) == "f.yaml:3"


def test_duplicate_keys_are_all_reported_with_both_lines() -> None:
    tree = parse_tree("a: 1\nb: {c: 1, c: 2}\na: 2\n", "f")
    assert sorted((p.place, p.key) for p in tree.problems) == [("f:2", "b.c"), ("f:3", "a")]
    assert "line 1" in next(p.reason for p in tree.problems if p.key == "a")


def test_merge_keys_keep_what_the_map_says_itself() -> None:
    tree = parse_tree("base: &base {lr: 1, steps: 2}\ntrain:\n  <<: *base\n  lr: 3\n", "f")
    assert tree.data["train"] == {"lr": 3, "steps": 2}
    assert not tree.problems


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: [1", "f:1", "not valid YAML"),
        ("a:\n\tb: 1", "f:2", "no tabs"),
        ("ok: 1\na: b: c", "f:2", "column 5"),
        ("a: &x [*x]", "f:1", "refers to itself"),
        ("a: 1\nb: !!python/object:os.system x", "f:2", "tag"),
        ("a: 1\n---\nb: 1", "f:2", "another document"),
        ("a: \x00", "f", "special characters"),
    ],
)
def test_syntax_errors_name_line_and_cause(text: str, place: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tree(text, "f")
    problem = caught.value.problems[0]
    assert problem.place == place
    assert words in problem.reason


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "near.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match=r"no such file; YAML files there: near\.yaml"):
        read_tree(tmp_path / "far.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        read_tree(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: caf\xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_tree(tmp_path / "latin.yaml")


def test_paths_with_list_indices() -> None:
    assert parse_path("reward.functions[0].weight") == ("reward", "functions", 0, "weight")
    assert parse_path("a[1][2]") == ("a", 1, 2)
    assert parse_path("a..b") is None
    assert parse_path("a b") is None


def test_an_override_replaces_a_value_and_all_its_places() -> None:
    tree = parse_tree("a:\n  b: {x: 1, y: 2}\nlist: [{w: 1}]\n", "f")
    apply_override(tree, "a.b={x: 1e-3}")
    apply_override(tree, "list[0].w=2")
    apply_override(tree, "new.deep.key=text")
    assert tree.data == {"a": {"b": {"x": 1e-3}}, "list": [{"w": 2}], "new": {"deep": {"key": "text"}}}
    assert tree.places[("a", "b", "x")] == "--set"
    assert ("a", "b", "y") not in tree.places
    assert tree.places[("a",)] == "f:1"
    assert not tree.problems


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.lr", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("a.b.c=1", "a.b is not a map"),
        ("list[5].w=1", "list has no entry 5"),
        ("list[5]=1", "list has no entry 5"),
        ("a.b=[1", "not valid YAML"),
    ],
)
def test_bad_overrides_say_what_is_wrong(override: str, words: str) -> None:
    tree = parse_tree("a: {b: 1}\nlist: [{w: 1}]\n", "f")
    apply_override(tree, override)
    assert len(tree.problems) == 1
    assert "--set" in tree.problems[0].place
    assert words in str(tree.problems[0])
