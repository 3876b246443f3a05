import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamax._src import tables

ROWS = [("op", "arguments", "n"), ("toy", "x=f32[8,4], w=f32[4,6], scale=2.0, activation=relu", "1")]


class Shown(tables.Report):
    def table(self):
        return [("name", "value"), ("<b>", "a & b")]

    def total(self):
        return "1 > 0"

    def to_dict(self):
        return {}


def test_without_a_terminal_a_row_is_a_line():
    assert len(tables.format_table(ROWS).splitlines()) == 3


@pytest.mark.parametrize("width", [40, 50, 80])
def test_a_table_fits_its_width_and_loses_nothing(width):
    lines = tables.format_table(ROWS, width=width).splitlines()
    assert max(map(len, lines)) <= width
    text = "".join(lines)
    assert all(word in text for cell in ROWS[1] for word in cell.split(" "))


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1), st.integers(20, 100))
def test_any_text_fits(rows, width):
    tables.format_table(rows, width=width)


def test_the_terminal_decides(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((40, 24)))
    assert max(map(len, tables.format_table(ROWS).splitlines())) <= 40


def test_html_is_escaped():
    html = Shown()._repr_html_()
    assert "<td>&lt;b&gt;</td><td>a &amp; b</td>" in html and "<caption>1 &gt; 0</caption>" in html
    assert repr(Shown()) == str(Shown()) and str(Shown()).endswith("1 > 0")
