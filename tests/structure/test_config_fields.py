"""A setting that no code reads is a lie to the user."""

import ast
from pathlib import Path

import pytest
from pydantic import BaseModel

from covey.config import schema

SOURCE = Path(__file__).parents[2] / "src" / "covey"
# Files that handle every field alike do not count as readers.
GENERIC = {
    SOURCE / "config" / file
    for file in ("schema.py", "algorithm.py", "load.py", "fields.py", "reference.py", "yaml_tree.py")
}


def words(path: Path) -> tuple[set[str], set[str]]:
    """(attributes that the file reads, all names in it)."""
    attributes, names = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
            if isinstance(node.ctx, ast.Load):
                attributes.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add(node.name)
    return attributes, names


READERS = [words(path) for path in sorted(SOURCE.rglob("*.py")) if path not in GENERIC]
SECTIONS = [
    cls
    for cls in vars(schema).values()
    if isinstance(cls, type) and issubclass(cls, BaseModel) and cls is not schema.Section
]


def homes(section: type[BaseModel]) -> set[str]:
    """Names under which code gets hold of a section: its class, and the fields that hold it."""
    holders = {
        key
        for owner in SECTIONS
        for key, field in owner.model_fields.items()
        if section.__name__ in str(field.annotation)
    }
    return holders | {section.__name__}


@pytest.mark.parametrize(
    ("section", "key"),
    [(section, key) for section in SECTIONS for key in section.model_fields],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_field_is_read(section: type[BaseModel], key: str):
    assert any(key in attributes and names & homes(section) for attributes, names in READERS), (
        f"{section.__name__}.{key} is read nowhere in src/covey: honour it where it acts, or take it out of the schema"
    )
