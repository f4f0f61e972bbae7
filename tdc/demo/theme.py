"""The look of the demo's report: one palette in two shades, for the style sheet and the plots alike.

Teal is ragged and amber is padded wherever either is shown; everything else is ink on paper.
"""

from dataclasses import asdict, dataclass

__all__ = ["DARK", "LIGHT", "Theme", "stylesheet"]


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours as `#rrggbb`."""

    paper: str
    panel: str
    ink: str
    muted: str
    rule: str
    ragged: str
    padded: str


LIGHT = Theme("#faf9f7", "#ffffff", "#1f2328", "#5f6670", "#e5e1da", "#0f766e", "#a3520f")
DARK = Theme("#14171a", "#1b1f23", "#e8e6e1", "#9aa2ab", "#31373d", "#4fbfae", "#e6a15c")


def stylesheet() -> str:
    """The report's CSS: follows the reader's light or dark preference and fits a phone."""
    light, dark = (" ".join(f"--{name}: {value};" for name, value in asdict(theme).items()) for theme in (LIGHT, DARK))
    root = f":root {{ color-scheme: light dark; {light} }}"
    return f"{root}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{_CSS}"


_CSS = """\
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif; }
header, main, footer { max-width: 54rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: clamp(2rem, 7vw, 4.5rem); }
.eyebrow { margin: 0; color: var(--ragged); font-size: .875rem; font-weight: 600; letter-spacing: .02em; }
h1 { margin: .4rem 0 1rem; font-size: clamp(1.75rem, 5.5vw, 2.75rem); font-weight: 650; line-height: 1.12;
  letter-spacing: -.022em; text-wrap: balance; }
h2 { margin: 0 0 .5rem; font-size: 1.375rem; font-weight: 650; line-height: 1.25; letter-spacing: -.012em; }
h3 { margin: 2rem 0 .5rem; font-size: 1rem; font-weight: 650; }
p { margin: 0 0 1rem; max-width: 42rem; text-wrap: pretty; }
.lede { color: var(--muted); font-size: 1.125rem; }
section { margin-top: 3.5rem; padding-top: 2rem; border-top: 1px solid var(--rule); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: 1.75rem 1.5rem;
  margin: 2.5rem 0 0; }
.figures div { display: flex; flex-direction: column; padding-top: .75rem; border-top: 2px solid var(--ragged); }
.figures dt { order: 2; color: var(--muted); font-size: .8125rem; line-height: 1.4; }
.figures dd { order: 1; margin: 0 0 .25rem; font-size: 1.75rem; font-weight: 600; line-height: 1.2;
  letter-spacing: -.02em; font-variant-numeric: tabular-nums; white-space: nowrap; }
figure { margin: 1.75rem 0; }
.scroll { overflow-x: auto; }
figure .scroll, .tree, pre, details { border: 1px solid var(--rule); border-radius: .5rem; background: var(--panel); }
img { display: block; width: 100%; min-width: 34rem; height: auto; border-radius: .5rem; }
figcaption, caption, .note { color: var(--muted); font-size: .875rem; line-height: 1.5; }
figcaption { margin-top: .6rem; max-width: 42rem; }
.share { display: flex; height: 2rem; margin: 0; border-radius: .375rem; overflow: hidden; }
.share span { background: var(--ragged); }
.share span + span { flex: 1; opacity: .85;
  background: repeating-linear-gradient(135deg, var(--padded) 0 2px, transparent 2px 7px); }
table { width: 100%; border-collapse: collapse; font-size: .9375rem; font-variant-numeric: tabular-nums; }
.wide { margin: 1.5rem 0; overflow-x: auto; }
caption { padding: 0 0 .5rem; text-align: left; }
th, td { padding: .5rem 0 .5rem 1.25rem; border-bottom: 1px solid var(--rule); text-align: right;
  vertical-align: baseline; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
thead th { color: var(--muted); font-size: .8125rem; font-weight: 600; }
tbody th { font-weight: 500; }
tbody tr:last-child > * { border-bottom: 0; }
.text td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.text th { width: 13rem; }
details { margin: 1rem 0; }
summary { padding: .6rem 1rem; cursor: pointer; font-size: .9375rem; font-weight: 500; }
details > .wide { margin: 0; padding: .25rem 1rem 1rem; max-height: 26rem; overflow-y: auto; }
pre, code { font: .8125rem/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
pre, .tree { margin: .75rem 0; padding: 1rem; overflow-x: auto; }
.tree { font-size: .875rem; }
.tree details { border: 0; margin: 0; }
.tree summary { padding: 0; }
.tree ul { margin: .25rem 0 .25rem .3rem; padding-left: 1.1rem; border-left: 1px solid var(--rule); list-style: none; }
.tree li { margin: .2rem 0; }
.tree small { color: var(--muted); }
.ragged { color: var(--ragged); } .padded { color: var(--padded); }
footer { margin-top: 3.5rem; padding-bottom: 3rem; color: var(--muted); font-size: .875rem; }
footer p { padding-top: 1.25rem; border-top: 1px solid var(--rule); max-width: none; }
a { color: var(--ragged); }
@media (max-width: 32rem) {
  .figures { grid-template-columns: 1fr 1fr; } .figures dd { font-size: 1.5rem; }
  section { margin-top: 2.5rem; padding-top: 1.5rem; } .text th { width: 8rem; white-space: normal; }
}
"""
