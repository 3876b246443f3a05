import html.parser
import json
import math
import re

import pytest

import browser
import tokamax
from tokamax._src.autotuning.outcome import Failure
from tokamax._src.report import content, page
from toy import TableTimer, Toy, ToyConfig, arrays, by_block, data, entry


@pytest.fixture(scope="module")
def told():
    """What a page with every kind of figure shows."""
    bound = [Toy.bind(*arrays(m)) for m in (16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128)]
    result = tokamax.autotune(bound, timer=TableTimer(by_block), progress_bar=False, keep=False)
    hostile = Failure("run", "</script><script>alert(1)</script>")
    failed = entry(256, outcomes={ToyConfig(1): data(2.0), ToyConfig(2): data(1.0), ToyConfig(8): hostile})
    result = result | tokamax.AutotuningResult((failed,))
    with result:
        calls = tokamax.explain(bound)
    return content.content(result, calls, title="A <report>", held_out="yes")


class _Checker(html.parser.HTMLParser):
    """Notes elements that are closed out of order, and addresses."""

    def __init__(self):
        super().__init__()
        self.open, self.wrong, self.addresses, self.ids = [], [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.addresses += [found[name] for name in ("src", "href", "xlink:href") if name in found]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def test_the_page_is_whole_and_needs_no_network(told):
    text = page.page(told)
    checker = _Checker()
    checker.feed(text)
    assert checker.wrong == [] and checker.open == []
    assert all(address.startswith(("#", "data:")) for address in checker.addresses)
    assert len(checker.ids) == len(set(checker.ids))
    assert re.findall(r"url\((?!#|&quot;#|'#)[^)]*\)", text) == []


def test_equal_data_make_equal_pages(told):
    assert page.page(told) == page.page(json.loads(json.dumps(told)))


def test_text_of_entries_cannot_run(told):
    text = page.page(told)
    assert "<script>alert" not in text and text.count("</script>") == 1
    assert "A &lt;report&gt;" in text


def test_an_empty_result_has_a_page():
    text = page.page(content.content(tokamax.AutotuningResult(), None, title="nothing"))
    assert "No config failed." in text


_MARKS = "[...document.querySelectorAll('#{} path:not(defs path), #{} use')]"


@pytest.mark.skipif(browser.CHROMIUM is None, reason="Chromium is not installed")
def test_figures_in_a_browser_are_those_of_the_data(told, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page.page(told))
    with browser.browser(tmp_path / "profile") as tab:
        for width in (1280, 390):
            for dark in (False, True):
                tab.open(path, width=width, dark=dark)
                assert tab.requested() == [path.as_uri()] and tab.complaints() == []
                assert tab.evaluate("document.documentElement.scrollWidth") <= width
                picture = tab.screenshot(tmp_path / f"{width}-{dark}.png")
                assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
        shown = tab.evaluate("JSON.parse(document.getElementById('data').textContent)")
        assert shown == json.loads(json.dumps(told))
        (op,) = shown["ops"]
        _check_times(tab, op["times"])
        _check_heat_map(tab, op["knobs"][0])
        assert _count(tab, "op0-predicted-points") == len(op["model"]["predicted"]["measured"])
        for name in op["model"]["regret"]["efficiency"]:
            assert tab.evaluate(f"document.body.textContent.includes({json.dumps(name)})")
        assert _count(tab, "failures-run") == 1 and shown["failures"]["stages"] == {"run": 1}
        assert _width(tab, "coverage-0-exact") > 0 and set(shown["coverage"]["totals"]) == {"exact"}


def _count(tab, name):
    return tab.evaluate(_MARKS.format(name, name) + ".length")


def _width(tab, name):
    return tab.evaluate(f"document.getElementById('{name}').getBoundingClientRect().width")


def _check_times(tab, rows):
    """One mark per shape, and the distance of its default from its fastest as the data have it, on a log scale."""
    drawn = rows[:12]
    assert _count(tab, "op0-times-default") == _count(tab, "op0-times-chosen") == len(drawn)
    assert _count(tab, "op0-times-configs") == sum(len(row["slowdowns"]) for row in drawn)
    centres = {
        mark: tab.evaluate(
            _MARKS.format(f"op0-times-{mark}", f"op0-times-{mark}") + ".map(e => "
            "{const b = e.getBoundingClientRect(); return [b.top + b.height / 2, b.left + b.width / 2]})"
        )
        for mark in ("default", "fastest")
    }
    gaps = [d[1] - f[1] for d, f in zip(*(sorted(centres[m]) for m in ("default", "fastest")), strict=True)]
    logs = [math.log(row["default_ms"] / row["fastest_ms"]) for row in drawn]
    scale = gaps[0] / logs[0]
    assert gaps == pytest.approx([scale * log for log in logs], abs=2.0)


def _check_heat_map(tab, knobs):
    cells = [value for values in knobs["slowdown"] for value in values if value is not None]
    assert _count(tab, "op0-knobs0-cells") == len(cells)
    texts = tab.evaluate("[...document.querySelectorAll('svg text')].map(e => e.textContent.trim())")
    assert all(f"{value:.2f}" in texts for value in cells if value < 9.99)


def test_every_rung_of_the_ladder_has_a_colour():
    from tokamax._src.report import style, svg

    for source in ("pinned", "exact", "model", "tuned", "estimate", "heuristic"):
        assert source in svg.COLOURS and source in style._LIGHT and source in style._DARK
