"""The documents are true: their links lead somewhere, their examples run, the design names the rooms there are."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_structure import LAYERS, ROOM_OF_FILE, known_rooms

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    ROOT.glob("docs/*.md")
)


def code_blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(encoding="utf-8"), flags=re.S | re.M)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    relative = [link.split("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    missing = [link for link in relative if not (document.parent / link).exists()]
    assert not missing


def headings(notebook: Path) -> set[str]:
    """A notebook's headings as the ends of links to them, as JupyterLab writes them: spaces are dashes."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return {heading.strip().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", text, flags=re.M)}


def test_each_statement_of_the_article_leads_to_where_it_is_measured():
    text = (ROOT / "docs/article.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 20
    lessons = set()
    for _, statement, where, how, caveat, _ in rows:
        links = re.findall(r"\]\(\.\./notebooks/([\w.]+)#([^)\s]+)\)", where)
        assert len(links) == max(1, where.count("](")), f"{statement.strip()}: a link without a section"
        assert all((how.strip(), caveat.strip())), f"{statement.strip()}: how, or the caveat, is missing"
        for name, heading in links:
            assert heading in headings(ROOT / "notebooks" / name), f"{statement.strip()}: {name} has no {heading}"
            lessons.add(name[:2])
    assert lessons == {f"{n:02}" for n in range(14)}, "every lesson but the capstone checks a statement"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document):
    """`labkit/x.py`, `tests/...` and the like, wherever the text names them in code type."""
    named = re.findall(
        r"`((?:labkit|tests|benchmarks|docs|data|notebooks|\.ci)/[\w./-]+)`", document.read_text("utf-8")
    )
    missing = [name for name in named if not (ROOT / name).exists() and name != "labkit/data"]
    assert not missing


def test_the_example_of_a_new_component_works():
    (example,) = code_blocks(ROOT / "CONTRIBUTING.md", "python")
    use = "\nfrom labkit.registry import components, find\ncomponent, config = find('sampler', 'cautious')\n"
    check = (
        "assert component.build(config).temperature == 0.3\nassert components('sampler')[-1].options[0].high == 1.0\n"
    )
    subprocess.run([sys.executable, "-c", example + use + check], cwd=ROOT, check=True)


def test_the_readmes_library_example_uses_names_that_exist():
    import labkit

    (example,) = code_blocks(ROOT / "README.md", "python")
    used = {
        node.attr
        for node in ast.walk(ast.parse(example))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "labkit"
    }
    assert used
    assert all(hasattr(labkit, name) for name in used)


def test_the_chinese_readme_has_what_the_english_one_has():
    """The same lessons, commands and library example: the words differ, the code does not."""
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
    lessons = re.compile(r"^\| \[\d\d .*?\]\((notebooks/\d\d_\w+\.ipynb)\)", flags=re.M)
    assert lessons.findall(chinese) == lessons.findall(english)
    commands = re.compile(r"^((?:labkit|make) [^#\n]*?) +#", flags=re.M)
    assert commands.findall(chinese) == commands.findall(english)
    (example, other) = (
        [line.split("#")[0].rstrip() for line in code_blocks(ROOT / name, "python")[0].splitlines()]
        for name in ("README.md", "README.zh-CN.md")
    )
    assert example == other
    assert "make badges REPO=owner/name -->" in chinese, "where the badges go"


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_the_commands_in_the_readme_exist(readme):
    text = (ROOT / readme).read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.M))
    assert set(re.findall(r"`?\bmake ([a-z]+)\b", text)) <= targets
    shown = subprocess.run([sys.executable, "-m", "labkit.cli", "--help"], capture_output=True, text=True, cwd=ROOT)
    for command in set(re.findall(r"^labkit ([a-z]+)", text, flags=re.M)):
        assert command in shown.stdout


def test_the_design_names_the_rooms_that_the_test_enforces():
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    (drawing,) = [
        block for block in code_blocks(ROOT / "docs/design.md", "") if "perf.timer" in block and "ui" in block
    ]
    drawn = [set(re.findall(r"[a-z_.]+", re.sub(r"\(.*?\)", "", line))) for line in drawing.splitlines()]
    assert [row for row in drawn if row] == list(reversed(LAYERS))
    for room in known_rooms() | set(ROOM_OF_FILE):
        assert f"`{room}" in text, f"docs/design.md does not introduce {room}"
