"""Figures of a report, drawn from the plain data of `content`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tokamax._src.report.svg import COLOURS, SHADES, WIDTH_INCHES, svg

SLOWEST = 2.0
"""Slowdown from which on a heat map is at its palest."""

LEAST_LOSS = 0.1
"""Per cent of loss that the curves end at: what is less is noise as a rule."""

_LEAST_GAP = 0.13
"""Share of an axis that two of its labels need between them."""

CURVES: Mapping[str, tuple[str, str, str]] = {
    "model": ("model", "-", "o"),
    "5 nearest": ("nearest-5", "--", "s"),
    "nearest shape": ("nearest", "-.", "^"),
    "best single": ("single", "--", "D"),
    "decision tree": ("tree", ":", "v"),
    "heuristic": ("heuristic", "-.", "x"),
    "random": ("random", ":", "."),
}
"""Chooser -> colour, dashes, marker."""


def _ratio_text(value: float, _: Any = None) -> str:
    return f"{value:.3g}x"


def _ratio_axis(axis: Any, most: float) -> None:
    """Puts ticks of ratios on a logarithmic axis that begins at 1."""
    from matplotlib import ticker

    ticks = [1.0]
    for tick in (1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 300, 1000, 3000, 10_000):
        if tick <= most and math.log(tick / ticks[-1]) >= _LEAST_GAP * math.log(most):
            ticks.append(tick)
    axis.set_major_locator(ticker.FixedLocator(ticks))
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(_ratio_text)


def times(name: str, op: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Draws, per shape, the time of every config over the fastest one's."""
    marks: dict[str, list[tuple[float, int]]] = {mark: [] for mark in ("configs", "default", "chosen", "fastest")}
    for y, row in enumerate(rows):
        marks["configs"] += [(slowdown, y) for slowdown in row["slowdowns"]]
        for mark in ("default", "chosen", "fastest"):
            if row[f"{mark}_ms"] is not None:
                marks[mark].append((row[f"{mark}_ms"] / row["fastest_ms"], y))
    looks = {"configs": ("o", 16), "default": ("D", 34), "chosen": ("o", 62), "fastest": ("|", 150)}
    most = max([1.1, *(x for points in marks.values() for x, _ in points)])

    def draw(axes: Any) -> None:
        for mark, points in marks.items():
            colour, (marker, size) = COLOURS[mark], looks[mark]
            hollow = mark == "chosen"
            axes.scatter(
                [x for x, _ in points],
                [y for _, y in points],
                marker=marker,
                s=size,
                label=mark,
                gid=f"{name}-{mark}",
                color="none" if hollow else colour,
                edgecolors=colour if hollow else None,
                linewidths=2 if hollow or mark == "fastest" else 0,
                alpha=0.55 if mark == "configs" else None,
                zorder={"configs": 2, "default": 3, "fastest": 4, "chosen": 5}[mark],
                clip_on=False,
            )
        for y, row in enumerate(rows):
            axes.axhline(y, color=COLOURS["grid"], linewidth=0.8, zorder=1)
            axes.text(0, y - 0.27, _cut(row["label"]), fontsize=9, transform=axes.get_yaxis_transform())
        axes.set_xscale("log")
        axes.set_xlim(1, most * 1.02)
        axes.set_ylim(len(rows) - 0.6, -0.75)
        _ratio_axis(axes.xaxis, most)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("time over that of the fastest config (log scale)")
        axes.legend(
            loc="lower left", bbox_to_anchor=(-0.03, 1.0), ncols=4, frameon=False, handletextpad=0.1, columnspacing=0.9
        )

    told = (
        f"For each of {len(rows)} shapes of {op}, every config's time over the fastest one's; the table has the times."
    )
    return svg(name, f"Times of the configs of {op}", told, 1.0 + 0.44 * len(rows), (0.12, 0.5, 0.15, 0.3), draw)


def _cut(text: str, limit: int = 54) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def heat_map(name: str, op: str, data: Mapping[str, Any]) -> str:
    """Draws the least slowdown that two knobs allow, geometric mean over shapes."""
    a, b = data["knobs"]
    cells = [
        (x, y, value)
        for y, values in enumerate(data["slowdown"])
        for x, value in enumerate(values)
        if value is not None
    ]
    rows, columns = data["rows"], data["columns"]
    left = 0.55 + 0.075 * max(map(len, rows))
    turned = len(columns) * 0.08 * (1 + max(map(len, columns))) > WIDTH_INCHES - left
    below = 0.65 if not turned else 0.5 + 0.09 * max(map(len, columns))

    def draw(axes: Any) -> None:
        from matplotlib.collections import PolyCollection

        corners = [[(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1)] for x, y, _ in cells]
        shades = [COLOURS[f"heat-{shade(value)}"] for _, _, value in cells]
        axes.add_collection(
            PolyCollection(corners, facecolors=shades, edgecolors=COLOURS["paper"], linewidths=1.5, gid=f"{name}-cells")
        )
        size = 9 if len(columns) <= 7 else 8
        for x, y, value in cells:
            colour = COLOURS["paper" if shade(value) >= SHADES // 2 + 1 else "ink"]
            axes.text(x + 0.5, y + 0.5, cell_text(value), ha="center", va="center", fontsize=size, color=colour)
        axes.set_xlim(0, len(columns))
        axes.set_ylim(len(rows), 0)
        axes.set_xticks([i + 0.5 for i in range(len(columns))], columns, rotation=90 if turned else 0)
        axes.set_yticks([i + 0.5 for i in range(len(rows))], rows)
        axes.tick_params(length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_xlabel(b)
        axes.set_ylabel(a)

    told = (
        f"For each pair of values of {a} and {b}, how much slower the best such config is than the fastest, as a "
        "geometric mean over the shapes that have one; the table has the numbers."
    )
    return svg(name, f"{op}: {a} against {b}", told, below + 0.15 + 0.36 * len(rows), (left, below, 0.1, 0.1), draw)


def shade(slowdown: float) -> int:
    """Returns the shade of a slowdown: the deeper the faster, evenly in its logarithm."""
    depth = 1 - min(1.0, math.log(max(slowdown, 1.0)) / math.log(SLOWEST))
    return min(SHADES - 1, int(depth * SHADES))


def cell_text(slowdown: float) -> str:
    """Returns what stands in a cell of a heat map."""
    return f"{slowdown:.2f}" if slowdown < 9.995 else f"{slowdown:.0f}"


def predictions(name: str, op: str, data: Mapping[str, Any]) -> str:
    """Draws predicted against measured slowdowns."""
    said, true = data["predicted"], data["measured"]
    most = 1.05 * max([1.1, *said, *true])

    def draw(axes: Any) -> None:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.plot([1, most], [1, most], color=COLOURS["muted"], linewidth=1, linestyle="--", zorder=1)
        axes.scatter(
            true, said, s=16, color=COLOURS["model"], alpha=0.45, linewidths=0, gid=f"{name}-points", clip_on=False
        )
        for axis, limit in ((axes.xaxis, axes.set_xlim), (axes.yaxis, axes.set_ylim)):
            limit(1, most)
            _ratio_axis(axis, most)
        axes.set_xlabel("measured slowdown (log scale)")
        axes.set_ylabel("predicted slowdown")

    told = f"Predicted against measured slowdowns of {len(said)} configs; on the dashed line both agree."
    return svg(name, f"Predictions for {op}", told, 3.6, (0.75, 0.55, 0.15, 0.12), draw)


def regret(name: str, op: str, data: Mapping[str, Any]) -> str:
    """Draws what is lost to the best config when the first k of each chooser's order are measured."""
    losses = {
        chooser: [loss_percent(e) for e in data["efficiency"][chooser]]
        for chooser in CURVES
        if chooser in data["efficiency"]
    }
    most = max(2.0, *(loss for curve in losses.values() for loss in curve))

    def draw(axes: Any) -> None:
        from matplotlib import ticker

        for chooser, curve in losses.items():
            colour, dashes, marker = CURVES[chooser]
            ours = chooser == "model"
            axes.plot(
                data["measured"],
                curve,
                color=COLOURS[colour],
                linestyle=dashes,
                marker=marker,
                markersize=4.5 if ours else 3.5,
                linewidth=2.4 if ours else 1.3,
                label=chooser,
                zorder=3 if ours else 2,
                gid=f"{name}-{colour}",
                clip_on=False,
            )
        axes.set_yscale("log")
        axes.set_ylim(LEAST_LOSS, most * 1.15)
        axes.yaxis.set_major_locator(
            ticker.FixedLocator([t for t in (0.1, 0.3, 1, 3, 10, 30, 100) if t <= most * 1.15])
        )
        axes.yaxis.set_minor_locator(ticker.NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.set_xlim(0.8, max(data["measured"]) + 0.2)
        axes.grid(axis="y", color=COLOURS["grid"], linewidth=0.8)
        axes.set_xlabel("configs measured, in the chooser's order")
        axes.set_ylabel("lost to the best (log scale)")
        axes.legend(
            loc="lower left", bbox_to_anchor=(-0.16, 1.0), ncols=3, frameon=False, handlelength=2.2, columnspacing=1.0
        )

    told = "How much slower than the best the best of the first k configs is, for the model and its rivals."
    return svg(name, f"What choosing costs for {op}", told, 3.9, (0.7, 0.55, 0.15, 0.75), draw)


def loss_percent(efficiency: float) -> float:
    """Returns the loss that a curve shows, at least `LEAST_LOSS`."""
    return max(LEAST_LOSS, 100 * (1 - efficiency))


def shares(name: str, title: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """Draws stacked bars of shares by source, one bar per row."""

    def draw(axes: Any) -> None:
        seen: set[str] = set()
        for y, row in enumerate(rows.values()):
            left = 0.0
            for source, share in row.items():
                colour = COLOURS[source]
                label = None if source in seen else source
                seen.add(source)
                bars = axes.barh(
                    y, 100 * share, left=left, height=0.62, color=colour, edgecolor=COLOURS["paper"], label=label
                )
                bars[0].set_gid(f"{name}-{y}-{source}")
                if share >= 0.1:
                    axes.text(
                        left + 50 * share, y, f"{100 * share:.0f} %", ha="center", va="center", color=COLOURS["paper"]
                    )
                left += 100 * share
        axes.set_xlim(0, 100)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} %")
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, frameon=False, handlelength=0.9, columnspacing=1.0
        )

    told = "; ".join(
        f"{row}: " + ", ".join(f"{source} {100 * share:.0f} %" for source, share in found.items())
        for row, found in rows.items()
    )
    return svg(name, title, told, 0.75 + 0.42 * len(rows), (0.65, 0.3, 0.25, 0.35), draw)


def speedups(name: str, ops: Sequence[Mapping[str, Any]]) -> str:
    """Draws the speed-up of each op over its default: geometric mean and largest."""
    most = max([1.1, *(op["largest_speedup"] for op in ops)])

    def draw(axes: Any) -> None:
        axes.set_xscale("log")
        for y, op in enumerate(ops):
            bars = axes.barh(y, op["speedup"] - 1, left=1, height=0.3, color=COLOURS["chosen"])
            bars[0].set_gid(f"{name}-{y}")
            axes.plot(
                [op["largest_speedup"]],
                [y],
                marker="o",
                markersize=5,
                color=COLOURS["muted"],
                gid=f"{name}-{y}-largest",
            )
            axes.text(1, y - 0.25, _cut(op["op"]), fontsize=9)
        axes.set_xlim(1, most * 1.03)
        axes.set_ylim(len(ops) - 0.6, -0.7)
        _ratio_axis(axes.xaxis, most)
        axes.set_yticks([])
        axes.set_xlabel("default time over chosen time (log scale)")

    told = "; ".join(f"{op['op']} {op['speedup']:.2f}x, at most {op['largest_speedup']:.2f}x" for op in ops)
    return svg(name, "Speed-up over the default, by op", told, 0.75 + 0.42 * len(ops), (0.12, 0.5, 0.2, 0.05), draw)


def counts(name: str, title: str, found: Mapping[str, int]) -> str:
    """Draws how often each of some things was seen."""

    def draw(axes: Any) -> None:
        for y, (what, number) in enumerate(found.items()):
            bars = axes.barh(y, number, height=0.6, color=COLOURS["error"])
            bars[0].set_gid(f"{name}-{what}")
            axes.text(number, y, f" {number}", va="center")
        axes.set_xlim(0, 1.12 * max(found.values()))
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.set_yticks(range(len(found)), list(found))
        axes.tick_params(axis="y", length=0)
        axes.set_xticks([])
        axes.spines[["left", "bottom"]].set_visible(False)

    told = ", ".join(f"{what} {number}" for what, number in found.items())
    return svg(name, title, told, 0.2 + 0.36 * len(found), (0.85, 0.1, 0.2, 0.1), draw)
