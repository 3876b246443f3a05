"""SVG text in the page's colours, drawn by matplotlib.

Colours are names of the page's style: matplotlib draws in stand-ins, which become `var(--ink)` and the like, so that a
figure follows the reader's light or dark theme. Text stays text. Groups of marks carry an id, `NAME-default` say.
"""

import html
import io
import re
from collections.abc import Callable
from typing import Any

from tokamax._src import errors

WIDTH_INCHES = 4.7
"""About the width of a phone at natural size, so that the text stays readable there."""

SHADES = 7
"""Shades of a heat map, `--heat-0` for slow to `--heat-6` for the fastest."""

_NAMES = ("ink", "muted", "grid", "paper", "configs", "default", "chosen", "fastest")
_NAMES += ("model", "heuristic", "single", "nearest", "nearest-5", "tree", "random")
_NAMES += ("pinned", "exact", "tuned", "estimate", "error", *(f"heat-{i}" for i in range(SHADES)))
COLOURS = {name: f"#{0xFE0100 + i:06x}" for i, name in enumerate(_NAMES)}
"""Name -> the colour that stands for it while matplotlib draws."""


def _figure_class() -> Any:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise errors.MissingExtraError(
            "matplotlib must be installed to draw reports; try: pip install 'tokamax[report]'"
        ) from error
    return matplotlib, Figure


def svg(
    name: str, title: str, description: str, inches: float, box: tuple[float, float, float, float], draw: Callable
) -> str:
    """Returns a figure that `draw(axes)` fills, as SVG text: the same for the same content.

    Args:
      name: what its ids begin with.
      title: for those who do not see it.
      description: what it shows, in a sentence.
      inches: its height.
      box: room left of, below, right of and above the axes, in inches.
      draw: fills the axes.
    """
    matplotlib, figure_class = _figure_class()
    ink, muted = COLOURS["ink"], COLOURS["muted"]
    settings = {
        **dict.fromkeys(("text.color", "axes.labelcolor"), ink),
        **dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor"), muted),
        **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), ink),
        "svg.hashsalt": name,
        "svg.fonttype": "none",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9.5,
    }
    left, below, right, above = box
    with matplotlib.rc_context(settings):
        figure = figure_class(figsize=(WIDTH_INCHES, inches))
        axes = figure.add_axes(
            (left / WIDTH_INCHES, below / inches, 1 - (left + right) / WIDTH_INCHES, 1 - (below + above) / inches)
        )
        axes.patch.set_visible(False)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        buffer = io.StringIO()
        parts = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=parts)
    return _fit_for_the_page(buffer.getvalue(), name, title, description)


def _fit_for_the_page(text: str, name: str, title: str, description: str) -> str:
    """Returns SVG text with the page's colours and fonts, described for screen readers, with ids that are its own."""
    text = text[text.index("<svg") :]
    for colour, stand_in in COLOURS.items():
        text = text.replace(stand_in, f"var(--{colour})")
    text = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = text.replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans'")
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    text = re.sub(
        r' id="([^"]+)"',
        lambda m: m[0] if m[1] in used or m[1].startswith(f"{name}-") else "",
        text,
    )
    box = re.search(r'viewBox="[^"]+"', text)
    assert box is not None, "matplotlib writes a viewBox"
    head = (
        f'<svg id="{name}" role="img" aria-labelledby="{name}-title {name}-description" {box[0]} '
        f'xmlns:xlink="http://www.w3.org/1999/xlink"><title id="{name}-title">{html.escape(title)}</title>'
        f'<desc id="{name}-description">{html.escape(description)}</desc>'
    )
    return re.sub(r"^<svg[^>]*>", lambda _: head, text).strip()
