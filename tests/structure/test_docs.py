"""Generated pages equal what generates them; the README's tree equals the source."""

import re
from pathlib import Path

from covey import metrics
from covey.config.reference import reference_markdown

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "covey"


def tree() -> dict[str, str]:
    """File -> phrase of the README's tree below src/covey/."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^src/covey/\n((?:  .*\n)+)", text, flags=re.MULTILINE)
    assert block, "README.md needs the tree of the source: a line `src/covey/`, then one indented line a file"
    files: dict[str, str] = {}
    folders: list[str] = []
    for line in block[1].splitlines():
        match = re.fullmatch(r"((?:  )+)(\S+)(?: +(\S.*))?", line)
        assert match, f"README.md, tree: cannot read {line!r}; write two spaces a level, the name, and a phrase"
        depth, entry, phrase = len(match[1]) // 2, match[2], match[3] or ""
        folders = folders[: depth - 1]
        if entry.endswith("/"):
            folders.append(entry)
        else:
            files["".join(folders) + entry] = phrase
    return files


def test_readme_tree_is_the_source():
    source = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if path.name not in {"__init__.py", "__main__.py"}
    }
    listed = tree()
    missing, gone = sorted(source - listed.keys()), sorted(listed.keys() - source)
    assert not missing, f"README.md, tree: add a line with one phrase for {', '.join(missing)}"
    assert not gone, f"README.md, tree: remove {', '.join(gone)}, no such file"
    bare = [file for file, phrase in listed.items() if not phrase]
    assert not bare, f"README.md, tree: say in one phrase what is in {', '.join(bare)}"


def test_config_reference_is_up_to_date():
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == reference_markdown(), "run `make docs`"


def test_metrics_reference_is_up_to_date():
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics.reference(), "run `make docs`"


def test_documents_name_files_that_exist():
    """Relative links of Markdown pages."""
    broken = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                broken.append(f"{page.name} -> {target}")
    assert not broken, broken
