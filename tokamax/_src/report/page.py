"""The page of a report: one HTML file that holds its figures, their numbers and its style, and asks no network."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokamax._src.report import figures
from tokamax._src.report.style import STYLE
from tokamax._src.report.sweeps import SHAPES_DRAWN
from tokamax._src.tables import html_table

DATA = "data"
"""Id of the element that holds the data of the page as JSON."""

_NO_FIGURES = "further ops have no figures; give `tokamax report` a result of those alone to see them"


def page(data: Mapping[str, Any]) -> str:
    """Returns the page as HTML.

    Args:
      data: what it shows, see `content.content`.

    Raises:
      MissingExtraError: if matplotlib is not installed.
    """
    title = html.escape(data["title"])
    parts = [
        f'<h1>{title}</h1><p class="muted">{html.escape(", ".join(data["device_kinds"]))}</p>',
        _tiles(data),
        *_coverage(data["coverage"]),
        *_ops(data["ops"]),
        *_failures(data["failures"], data["untunable"]),
        _environment(data["environment"]),
    ]
    content = json.dumps(data, allow_nan=False).replace("<", "\\u003c")  # No text of an entry can end the script early.
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>\n"
        + "\n".join(parts)
        + f'\n</main><script type="application/json" id="{DATA}">{content}</script></body></html>\n'
    )


def _tiles(data: Mapping[str, Any]) -> str:
    totals = data["totals"]
    failed = sum(totals["configs_failed"].values())
    tiles = {
        "shapes tuned": f"{totals['with_a_config']:,}",
        "configs measured": f"{totals['configs_measured']:,}",
        "configs failed": f"{failed:,}",
        "speed-up over the defaults": _ratio(totals["geometric_mean_speedup"]),
    }
    if (coverage := data["coverage"]) is not None and coverage["ops"]:
        exact = coverage["totals"].get("exact", {"share_of_calls": 0.0, "share_of_time": 0.0})
        by_time = any(found["share_of_time"] is not None for found in coverage["totals"].values())
        name = "of the ops' time runs measured" if by_time else "of the calls run measured"
        tiles[name] = f"{100 * (exact['share_of_time' if by_time else 'share_of_calls'] or 0.0):.0f} %"
    return '<dl class="tiles">' + "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in tiles.items()) + "</dl>"


def _coverage(told: Mapping[str, Any] | None) -> list[str]:
    if told is None or not told["ops"]:
        return []
    totals = told["totals"]
    rows = {"calls": {source: found["share_of_calls"] for source, found in totals.items()}}
    if any(found["share_of_time"] is not None for found in totals.values()):
        rows["time"] = {source: found["share_of_time"] or 0.0 for source, found in totals.items()}
    table = [("op", "arguments", "config", "source", "expected slowdown", "time", "detail")]
    for op in told["ops"]:
        arguments = op["arguments"].removeprefix(f"{op['op']}(").removesuffix(")")
        time = f"{op['time_ms']:.3g} ms" if "time_ms" in op else "-"
        told_config, detail = op.get("config", "-"), op.get("detail", op.get("error", ""))
        table.append(
            (op["op"], arguments, told_config, op["source"], _ratio(op.get("expected_slowdown")), time, detail)
        )
    figure = figures.shares("coverage", "Which configs run, by source", rows)
    return [
        "<h2>Which configs run</h2>",
        _figure(
            figure,
            "Coverage by source",
            f"Where the configs of {len(told['ops'])} calls come from on {told['device_kind']}: exact is measured, "
            "model is predicted, heuristic is the op's default.",
            table,
        ),
    ]


def _ops(ops: Sequence[Mapping[str, Any]]) -> list[str]:
    if not ops:
        return []
    table = [("op", "device", "shapes", "configs", "speed-up", "largest")]
    for op in ops:
        counts = f"{op['shapes']:,}", f"{op['configs']:,}"
        table.append((op["op"], op["device_kind"], *counts, _ratio(op["speedup"]), _ratio(op["largest_speedup"])))
    drawn = [op for op in ops if "times" in op]
    parts = [
        "<h2>Ops</h2>",
        "<p class=\"muted\">Speed-up is the default's time over the chosen config's, geometric mean over shapes.</p>",
        f'<div class="card wide">{html_table(table, f"{len(ops)} ops and devices")}</div>',
    ]
    for number, op in enumerate(drawn):
        parts += [f"<h3>{html.escape(op['op'])}</h3>", f'<p class="muted">{html.escape(op["device_kind"])}</p>']
        parts += ['<div class="cards">', *_figures_of(f"op{number}", op), "</div>"]
    if len(drawn) < len(ops):
        parts += [f'<p class="muted">{len(ops) - len(drawn)} {_NO_FIGURES}.</p>']
    return parts


def _figures_of(name: str, op: Mapping[str, Any]) -> list[str]:
    """Returns the cards of an op."""
    rows = op["times"]
    drawn = rows[:SHAPES_DRAWN]
    which = (
        f"The {len(drawn)} of {len(rows)} shapes whose default loses most" if len(drawn) < len(rows) else "Each shape"
    )
    text = f"{which}: the time of every config over that of the fastest one. Chosen is what dispatch uses."
    parts = [_figure(figures.times(f"{name}-times", op["op"], drawn), "Times of the configs", text, _times_table(rows))]
    for i, knobs in enumerate(op["knobs"]):
        a, b = knobs["knobs"]
        text = "The best such config's time over the fastest one's, geometric mean over the shapes that have one."
        figure = figures.heat_map(f"{name}-knobs{i}", op["op"], knobs)
        parts.append(_figure(figure, f"{a} and {b}", text, _knobs_table(knobs)))
    return parts + _model(name, op["op"], op["model"])


def _times_table(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    table = [("arguments", "default", "chosen", "fastest", "speed-up", "measured", "failed")]
    for row in rows:
        cells = [
            f"{row[name]}: {row[f'{name}_ms']:.3g} ms" if row[name] is not None else "-"
            for name in ("default", "chosen", "fastest")
        ]
        both = row["default_ms"] and row["chosen_ms"]
        speedup = _ratio(row["default_ms"] / row["chosen_ms"]) if both else "-"
        table.append((row["arguments"], *cells, speedup, str(row["measured"]), str(row["failed"])))
    return table


def _knobs_table(knobs: Mapping[str, Any]) -> list[tuple[str, ...]]:
    a, b = knobs["knobs"]
    table = [(f"{a} \\ {b}", *knobs["columns"])]
    for label, values, counts in zip(knobs["rows"], knobs["slowdown"], knobs["shapes"], strict=True):
        cells = (
            "-" if value is None else f"{value:.3f} ({count})" for value, count in zip(values, counts, strict=True)
        )
        table.append((label, *cells))
    return table


def _model(name: str, op: str, judged: Mapping[str, Any]) -> list[str]:
    if judged["kind"] == "none":
        return [f'<div class="card"><b>Predictions</b><p class="muted">{html.escape(judged["note"])}</p></div>']
    data = judged["predicted"]
    table = [("shapes", "configs", "rank correlation by shape", "median error")]
    error, order = data["median_error"], data["rank_correlation"]
    table.append(
        (
            str(data["shapes"]),
            str(data["configs"]),
            "-" if order is None else f"{order:.3f}",
            "-" if error is None else f"{100 * error:.1f} %",
        )
    )
    figure = figures.predictions(f"{name}-predicted", op, data)
    parts = [_figure(figure, "Predicted against measured", judged["note"], table)]
    if (regret := judged.get("regret")) is not None:
        figure = figures.regret(f"{name}-regret", op, regret)
        text = "The best of the first k configs of each chooser's order, on held-out shapes: lower is better."
        table = [("chooser", "first choice that runs", *(f"best of {k}" for k in regret["measured"]))]
        table += [
            (chooser, f"{regret['chosen'][chooser]:.3f}", *(f"{e:.3f}" for e in curve))
            for chooser, curve in regret["efficiency"].items()
        ]
        parts.append(_figure(figure, "What choosing without measuring all costs", text, table, "Efficiencies"))
    return parts


def _failures(failures: Mapping[str, Any], untunable: Sequence[Mapping[str, Any]]) -> list[str]:
    parts = ["<h2>Failures</h2>"]
    if not failures["stages"]:
        parts.append('<p class="muted">No config failed.</p>')
    else:
        table = [("op", "stage", "reason", "configs")]
        table += [(f["op"], f["stage"], f["reason"], str(f["configs"])) for f in failures["reasons"]]
        more = f" The {failures['further_reasons']} rarest reasons are left out." if failures["further_reasons"] else ""
        figure = figures.counts("failures", "Configs that failed, by stage", failures["stages"])
        parts.append(_figure(figure, "Configs that failed, by stage", f"Reasons stand below.{more}", table, "Reasons"))
    if untunable:
        table = [("op", "arguments", "error"), *((u["op"], u["arguments"], str(u["error"])) for u in untunable)]
        parts.append(f'<div class="card wide">{html_table(table, "could not be tuned at all")}</div>')
    return parts


def _environment(environment: Mapping[str, Mapping[str, int]]) -> str:
    table = [("part", "value", "entries")]
    table += [(name, value, f"{n:,}") for name, values in environment.items() for value, n in values.items()]
    caption = "where and how it was measured"
    return f'<h2>Environment</h2><div class="card wide">{html_table(table, caption)}</div>'


def _figure(svg: str, title: str, text: str, table: Sequence[Iterable[str]], summary: str = "Numbers") -> str:
    caption = f"<figcaption><b>{html.escape(title)}</b><span>{html.escape(text)}</span></figcaption>"
    numbers = f'<details><summary>{summary}</summary><div class="wide">{html_table(table, title)}</div></details>'
    return f'<figure class="card">{caption}{svg}{numbers}</figure>'


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
