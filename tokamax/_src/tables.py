"""Tables that people look at: as text that fits the terminal, and as HTML in a notebook."""

import abc
import html
import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

_GAP = "  "
_NARROWEST = 8


def terminal_width() -> int | None:
    """Returns the columns of the terminal that is written to; None where stdout is none, for a file say."""
    shown = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if shown else None


def _fitted(widths: Sequence[int], limit: int) -> list[int]:
    """Narrows the widest columns until the whole fits the limit, as far as that goes."""
    fitted = list(widths)
    while sum(fitted) + len(_GAP) * (len(fitted) - 1) > limit and max(fitted) > _NARROWEST:
        fitted[fitted.index(max(fitted))] -= 1
    return fitted


def _wrapped(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Returns a row as one or more lines."""
    cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
    lines = itertools.zip_longest(*cells, fillvalue="")
    return [_GAP.join(part.ljust(w) for part, w in zip(line, widths, strict=True)).rstrip() for line in lines]


def format_table(rows: Iterable[Iterable[str]], *, width: int | None = None) -> str:
    """Aligns rows of text in columns; the first row is the header.

    Args:
      rows: the cells.
      width: the columns to fit into: cells of the widest columns are then broken. By default those of the terminal;
        without one a row is one line.
    """
    rows = [tuple(row) for row in rows]
    limit = terminal_width() if width is None else width
    widths = [max(1, *map(len, column)) for column in zip(*rows, strict=True)]
    if limit is None:
        body = [_GAP.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([body[0], _GAP.join("-" * w for w in widths), *body[1:]])
    widths = _fitted(widths, limit)
    head, *body = (_wrapped(row, widths) for row in rows)
    return "\n".join([*head, _GAP.join("-" * w for w in widths), *itertools.chain(*body)])


def html_table(rows: Iterable[Iterable[str]], caption: str) -> str:
    """Returns a table as HTML, with every cell escaped; the first row is the header."""
    head, *body = ([html.escape(cell) for cell in row] for row in rows)
    lines = [
        f"<caption>{html.escape(caption)}</caption>",
        "<tr>" + "".join(f'<th scope="col">{c}</th>' for c in head) + "</tr>",
    ]
    lines += ["<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in body]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


class Report(abc.ABC):
    """What a terminal shows as a table of text, a notebook as one of HTML, and a program reads with `to_dict`."""

    @abc.abstractmethod
    def table(self) -> list[tuple[str, ...]]:
        """Returns the rows, the header first."""

    @abc.abstractmethod
    def total(self) -> str:
        """Returns what stands below the table."""

    @abc.abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data."""

    def __str__(self) -> str:
        return f"{format_table(self.table())}\n{self.total()}"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_table(self.table(), self.total())
