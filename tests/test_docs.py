"""The documentation runs, and every public name has some."""

import ast
import pathlib
import re
import sys
import types

import pytest

import tokamax

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if path.exists()]

# A block and, where one stands on the line before it, the reason why it is not run.
BLOCK = re.compile(r"^(?:<!-- skip: (?P<reason>.+?) -->\n+)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path: pathlib.Path) -> list[str]:
    """Python of a page, block by block, moved down so that line numbers are those of the page."""
    text = path.read_text()
    return [
        "\n" * text.count("\n", 0, block.start("code")) + block["code"]
        for block in BLOCK.finditer(text)
        if block["reason"] is None
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A module like any other, so that classes and functions of the page have a home to be looked up in.
    module = types.ModuleType("page_" + re.sub(r"\W", "_", path.stem))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(path):
        exec(compile(block, str(path), "exec"), module.__dict__)


def test_blocks_are_found_and_skipped(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n```python\nx = 1\n```\n<!-- skip: needs a GPU -->\n```python\ny = 2\n```\n```shell\nls\n```\n")
    assert blocks(page) == ["\n\nx = 1\n"]


def test_every_symptom_in_trust_names_tests_that_exist():
    page = ROOT / "docs" / "trust.md"
    if not page.exists():
        pytest.skip("docs/ is not installed")
    rows = re.findall(r"^\| (?!symptom)[^|-].*\|$", page.read_text(), re.MULTILINE)
    named = [re.findall(r"`([\w/]+\.py)::(\w+)`", row) for row in rows]
    assert len(rows) > 40 and all(named), [row for row, tests in zip(rows, named, strict=True) if not tests]
    tests = pathlib.Path(__file__).resolve().parent
    missing = {place for row in named for place in row if f"def {place[1]}(" not in (tests / place[0]).read_text()}
    assert not missing


def public_names() -> list[str]:
    tree = ast.parse(pathlib.Path(tokamax.__file__).read_text())
    return [alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]


@pytest.mark.parametrize("name", public_names())
def test_public_name_is_documented(name):
    doc = getattr(tokamax, name).__doc__
    # A dataclass without a docstring shows its signature instead.
    assert doc and not doc.startswith(f"{name}("), f"tokamax.{name} needs a docstring"
