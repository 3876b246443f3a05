"""The page of a report: one HTML file that holds its figures, their numbers and its style, and asks no network."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokamax._src.report import figures
from tokamax._src.report.content import OPS_DRAWN
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
        '<div class="cards">',
        *_coverage(data["coverage"]),
        *_speedups(data["ops"]),
        "</div>",
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
        _figure(
            figure,
            "Which configs run, by source",
            f"Where the configs of {len(told['ops'])} calls come from on {told['device_kind']}: exact is measured, "
            "model is predicted, heuristic is the op's default.",
            table,
        ),
    ]


def _speedups(ops: Sequence[Mapping[str, Any]]) -> list[str]:
    known = [op for op in ops if op["speedup"] is not None]
    if not known:
        return []
    devices = len({op["device_kind"] for op in ops}) > 1
    table = [("op", *(["device"] if devices else []), "shapes", "configs", "speed-up", "largest")]
    for op in ops:
        names = (op["op"], op["device_kind"]) if devices else (op["op"],)
        counts = f"{op['shapes']:,}", f"{op['configs']:,}"
        table.append((*names, *counts, _ratio(op["speedup"]), _ratio(op["largest_speedup"])))
    which = f" The {OPS_DRAWN} of {len(known)} that gain most." if len(known) > OPS_DRAWN else ""
    text = f"The default's time over the chosen config's: geometric mean over shapes (bar) and largest (dot).{which}"
    figure = figures.speedups("speedups", known[:OPS_DRAWN])
    return [_figure(figure, "Speed-up over the defaults, by op", text, table)]


def _ops(ops: Sequence[Mapping[str, Any]]) -> list[str]:
    drawn = [op for op in ops if "times" in op]
    links = (f'<a href="#op{i}">{html.escape(op["op"])}</a>' for i, op in enumerate(drawn))
    parts = ["<h2>Ops</h2>", f'<nav aria-label="Ops">{"".join(links)}</nav>'] if drawn else []
    for number, op in enumerate(drawn):
        facts = f"{op['device_kind']}, {op['shapes']:,} shapes, {op['configs']:,} configs measured"
        parts += [f'<h3 id="op{number}">{html.escape(op["op"])}</h3>', f'<p class="muted">{html.escape(facts)}</p>']
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
    figure = figures.times(f"{name}-times", op["op"], drawn)
    parts = [_figure(figure, "Times of the configs", text, _times_table(rows), tall=True)]
    for i, knobs in enumerate(op["knobs"]):
        a, b = knobs["knobs"]
        text = "The best such config's time over the fastest one's, geometric mean over the shapes that have one."
        figure = figures.heat_map(f"{name}-knobs{i}", op["op"], knobs)
        parts.append(_figure(figure, f"{a} and {b}", text, _knobs_table(knobs)))
    return parts + _model(name, op["op"], op["model"])


def _times_table(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [("arguments", "default", "chosen", "fastest", "speed-up", "measured", "failed")]
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
    order, error = data["rank_correlation"], data["median_error"]
    cells = "-" if order is None else f"{order:.3f}", "-" if error is None else f"{100 * error:.1f} %"
    table = [("shapes", "configs", "rank correlation by shape", "median error")]
    table.append((str(data["shapes"]), str(data["configs"]), *cells))
    text = f"{judged['note']} Rank correlation by shape {cells[0]}, median error {cells[1]}."
    figure = figures.predictions(f"{name}-predicted", op, data)
    parts = [_figure(figure, "Predicted against measured", text, table)]
    if (regret := judged.get("regret")) is not None:
        parts.append(_regret(f"{name}-regret", op, regret))
    return parts


def _regret(name: str, op: str, regret: Mapping[str, Any]) -> str:
    table = [("efficiency", "choice that runs", *(f"best of {k}" for k in regret["measured"]))]
    table += [
        (chooser, f"{regret['chosen'][chooser]:.3f}", *(f"{e:.3f}" for e in curve))
        for chooser, curve in regret["efficiency"].items()
    ]
    text = (
        "How far the best of the first k configs is from the best of all, on held-out shapes: lower is better. The "
        "heuristic goes on in the order of the space."
    )
    return _figure(figures.regret(name, op, regret), "Loss by number of configs measured", text, table)


def _failures(failures: Mapping[str, Any], untunable: Sequence[Mapping[str, Any]]) -> list[str]:
    parts = ["<h2>Failures</h2>"]
    if not failures["stages"]:
        parts.append('<p class="muted">No config failed.</p>')
    else:
        stages = [("stage", "configs"), *((stage, str(n)) for stage, n in failures["stages"].items())]
        figure = figures.counts("failures", "Configs that failed, by stage", failures["stages"])
        table = [("reason", "stage", "op", "configs")]
        table += [(f["reason"], f["stage"], f["op"], str(f["configs"])) for f in failures["reasons"]]
        left_out = failures["further_reasons"]
        caption = "by reason" + (f", the {left_out} rarest left out" if left_out else "")
        parts += ['<div class="cards">', _figure(figure, "By stage", "Configs that failed, and where.", stages)]
        parts += [f'<div class="card wide">{html_table(table, caption)}</div></div>']
    if untunable:
        table = [("op", "arguments", "error"), *((u["op"], u["arguments"], str(u["error"])) for u in untunable)]
        parts.append(f'<div class="card wide">{html_table(table, "could not be tuned at all")}</div>')
    return parts


def _environment(environment: Mapping[str, Mapping[str, int]]) -> str:
    table = [("part", "value", "entries")]
    table += [(name, value, f"{n:,}") for name, values in environment.items() for value, n in values.items()]
    caption = "where and how it was measured"
    return f'<h2>Environment</h2><div class="card wide">{html_table(table, caption)}</div>'


def _figure(svg: str, title: str, text: str, table: Sequence[Iterable[str]], *, tall: bool = False) -> str:
    caption = f"<figcaption><b>{html.escape(title)}</b><span>{html.escape(text)}</span></figcaption>"
    numbers = f'<details><summary>Numbers</summary><div class="wide">{html_table(table, title)}</div></details>'
    return f'<figure class="card{" tall" if tall else ""}">{caption}{svg}{numbers}</figure>'


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
