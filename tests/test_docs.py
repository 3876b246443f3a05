"""The documentation runs, its links lead somewhere, it builds without a warning, and every public name has some."""

import ast
import importlib.util
import pathlib
import re
import subprocess
import sys
import types

import pytest

import tokamax

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if path.exists()]

MODULES = (tokamax, tokamax.autotuning, tokamax.benchmarking, tokamax.config, tokamax.costmodel)


def public(module: types.ModuleType) -> dict[str, object]:
    """The public values of a module, which are those that it imports from `tokamax._src`, by their full names."""
    tree = ast.parse(pathlib.Path(module.__file__).read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module != "tokamax"]
    names = [alias.asname for node in imports for alias in node.names]
    return {f"{module.__name__}.{name}": getattr(module, name) for name in names}


PUBLIC = {name: value for module in MODULES for name, value in public(module).items()}

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


LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#]*)(?:#(?P<heading>[^)]+))?\)")


def prose(path: pathlib.Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path: pathlib.Path) -> set[str]:
    """Names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


FOLDERS = [path for path in (ROOT / name / "README.md" for name in ("data", "examples", "models")) if path.exists()]


@pytest.mark.parametrize("path", [*PAGES, *FOLDERS], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_links_lead_somewhere(path):
    for link in LINK.finditer(prose(path)):
        target = path.parent / link["path"] if link["path"] else path
        assert target.exists(), f"{path}: {link[0]}"
        assert link["heading"] is None or link["heading"] in anchors(target), f"{path}: {link[0]}"


@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="needs pip install '.[docs]'")
@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="no docs here")
def test_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-P", "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", ROOT / "docs", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "reference.html").read_text()
    assert not [name for name in PUBLIC if f'id="{name}"' not in reference]
    assert 'id="tokamax.Op._fwd"' in reference
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    index = (tmp_path / "index.html").read_text()
    assert all(f'href="{page}.html"' in index for page in pages)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_documented(name):
    doc = PUBLIC[name].__doc__
    # A dataclass without a docstring shows its signature instead.
    assert doc and not doc.startswith(f"{name.rpartition('.')[2]}("), f"{name} needs a docstring"
