"""The style of a report's page: light and dark, wide and narrow, and on paper."""

_LIGHT = {
    "ink": "#1c2128",
    "muted": "#57606a",
    "grid": "#d8dee4",
    "paper": "#ffffff",
    "ground": "#f3f5f8",
    "configs": "#7d8590",
    "default": "#c2410c",
    "chosen": "#0b62b8",
    "fastest": "#0a7a45",
    "model": "#0b62b8",
    "heuristic": "#c2410c",
    "single": "#8a5a00",
    "nearest": "#0a7a45",
    "nearest-5": "#00788a",
    "tree": "#7a3fb0",
    "random": "#6e7781",
    "pinned": "#7a3fb0",
    "exact": "#0a7a45",
    "tuned": "#00788a",
    "estimate": "#8a5a00",
    "error": "#b42343",
}
_DARK = {
    "ink": "#e8edf3",
    "muted": "#9aa4b0",
    "grid": "#333c47",
    "paper": "#161b22",
    "ground": "#0d1117",
    "configs": "#8b949e",
    "default": "#ff9a5c",
    "chosen": "#6cb6ff",
    "fastest": "#4cd28b",
    "model": "#6cb6ff",
    "heuristic": "#ff9a5c",
    "single": "#e3b341",
    "nearest": "#4cd28b",
    "nearest-5": "#4fd1d9",
    "tree": "#cba6f7",
    "random": "#9aa4b0",
    "pinned": "#cba6f7",
    "exact": "#4cd28b",
    "tuned": "#4fd1d9",
    "estimate": "#e3b341",
    "error": "#ff7b8f",
}
# From slow to fast, of one hue, evenly in lightness: what stands out on light paper stands out on dark paper too.
_LIGHT_HEAT = ("#eef3fa", "#d9e6f5", "#bcd3ee", "#93b8e2", "#5f94d0", "#3173ba", "#0f539c")
_DARK_HEAT = ("#1d2633", "#213449", "#254663", "#2d5e88", "#4b88bd", "#74b0e6", "#a8d3ff")


def _variables(colours: dict[str, str], heat: tuple[str, ...]) -> str:
    named = {**colours, **{f"heat-{i}": colour for i, colour in enumerate(heat)}}
    return " ".join(f"--{name}: {colour};" for name, colour in named.items())


STYLE = f"""
:root {{ color-scheme: light dark; {_variables(_LIGHT, _LIGHT_HEAT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK, _DARK_HEAT)} }} }}
@media print {{ :root {{ {_variables(_LIGHT, _LIGHT_HEAT)} }} }}
* {{ box-sizing: border-box; }}
body {{ background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 0; }}
main {{ max-width: 78rem; margin: 0 auto; padding: 1rem 1rem 4rem; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: 1rem 0 .25rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.25rem; margin: 2.75rem 0 .75rem; }}
h3 {{ font-size: 1.05rem; margin: 2rem 0 .75rem; overflow-wrap: anywhere; }}
p {{ margin: .5rem 0; max-width: 48rem; }}
a {{ color: var(--chosen); }}
:focus-visible {{ outline: 2px solid var(--chosen); outline-offset: 2px; }}
.muted {{ color: var(--muted); }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 1.25rem 0; }}
.tiles div {{ background: var(--paper); border: 1px solid var(--grid); border-radius: .6rem; padding: .7rem .9rem; }}
.tiles dt {{ color: var(--muted); font-size: .85rem; }}
.tiles dd {{ font-size: 1.5rem; font-weight: 600; line-height: 1.25; margin: 0; font-variant-numeric: tabular-nums; }}
.cards {{ align-items: start; display: grid; gap: 1rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(23rem, 100%), 1fr)); }}
@media (min-width: 52rem) {{ .tall {{ grid-row: span 2; }} }}
.card {{ background: var(--paper); border: 1px solid var(--grid); border-radius: .6rem; break-inside: avoid;
  margin: 0; min-width: 0; padding: .9rem 1rem; }}
figcaption {{ font-size: .95rem; margin-bottom: .5rem; }}
figcaption b {{ display: block; }}
figcaption span {{ color: var(--muted); font-size: .85rem; }}
svg {{ display: block; width: 100%; height: auto; max-width: 34rem; overflow: visible; }}
.wide {{ overflow-x: auto; }}
details {{ margin-top: .6rem; }}
summary {{ color: var(--chosen); cursor: pointer; font-size: .9rem; }}
table {{ border-collapse: collapse; width: max-content; font-size: .85rem; font-variant-numeric: tabular-nums; }}
caption {{ color: var(--muted); padding: .4rem 0; text-align: left; }}
th, td {{ border-bottom: 1px solid var(--grid); padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top; }}
th {{ white-space: nowrap; }}
td {{ max-width: 22rem; overflow-wrap: break-word; }}
nav a {{ display: inline-block; font-size: .9rem; margin: .25rem 1rem .25rem 0; }}
@media print {{ details:not([open]) > *:not(summary) {{ display: none; }} }}
"""
