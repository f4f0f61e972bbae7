"""A compile report as text and as HTML: the same sections, each a title and a table.

The page needs no script: tables have captions and headings, long lists are `<details>`, wide tables scroll.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from tdc.tensordict.display import shortened

SHOWN = 8  # guards in the text
WIDE = 60  # characters of a kernel's name
LONG = 160  # characters of what torch says
STYLE = """\
.tdc-report{font:1rem/1.5 system-ui,sans-serif;max-width:70rem;color-scheme:light dark}
.tdc-report h1{font-size:1.5rem}.tdc-report table{border-collapse:collapse;margin:1rem 0}
.tdc-report caption{text-align:left;font-weight:600}.tdc-report .wide{overflow-x:auto}
.tdc-report th,.tdc-report td{text-align:left;vertical-align:top;padding:.2rem 1.25rem .2rem 0}
.tdc-report th,.tdc-report td{border-bottom:1px solid #8884}.tdc-report summary{cursor:pointer}
"""
PAGE = """\
<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>body{{margin:2rem}}</style></head>
<body><main>
{body}
</main></body>
</html>
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A titled table; what is long is `folded` in HTML and cut in text."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    folded: bool = False


Figures = Sequence[tuple[str, str]]  # numbers, each with its name


def report_text(title: str, figures: Figures, sections: Sequence[Section]) -> str:
    """A report as text: tables where columns are short, else one block for each row."""
    names = max([len(name) for name, _ in figures])
    lines = [title, *[f"  {name.ljust(names)}  {value}" for name, value in figures]]
    for section in sections:
        rows = section.rows[:SHOWN] if section.folded else section.rows
        shown = BLOCKS.get(section.title, aligned)(section.head, rows)
        lines += ["", section.title, *[f"  {line}" for line in shown]]
        if len(rows) < len(section.rows):
            lines.append(f"  ... and {len(section.rows) - len(rows)} more, in report.guards")
    return "\n".join(lines)


def break_lines(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Graph breaks: reason, line, hint."""
    lines = []
    for reason, where, hint in rows:
        lines.append(shortened(reason, LONG))
        lines += [f"  at {where}"] * bool(where) + [f"  hint: {shortened(hint, LONG)}"] * bool(hint)
    return lines


def kernel_lines(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Kernels: name and kind, operations, lines."""
    lines = []
    for name, language, stage, calls, ops, where in rows:
        kind = [language] * (language != "library") + [stage] + [f"{calls} calls"] * (calls != "1")
        lines.append(f"{shortened(name, WIDE)} ({', '.join(kind)})")
        lines += [f"  {ops}"] * bool(ops) + [f"  at {line}" for line in where.split("\n") if line]
    return lines


def aligned(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A table as lines of equal columns; one column goes without its heading."""
    table = [*([head] if len(head) > 1 else []), *[tuple([shortened(text, LONG) for text in row]) for row in rows]]
    widths = [max([len(line[i]) for line in table]) for i in range(len(head))]
    return ["  ".join([text.ljust(width) for text, width in zip(line, widths, strict=True)]).rstrip() for line in table]


BLOCKS = {"graph breaks": break_lines, "generated kernels": kernel_lines, "library calls": kernel_lines}


def report_html(title: str, figures: Figures, sections: Sequence[Section], page: bool = False) -> str:
    """A report as HTML: a fragment for a notebook, or a page of its own."""
    level = "h1" if page else "strong"
    parts = [f"<{level}>{escape(title)}</{level}>", table_html("figures", (), figures)]
    for section in sections:
        table = table_html(section.title, section.head, section.rows)
        if section.folded:
            table = f"<details><summary>{escape(section.title)} ({len(section.rows)})</summary>{table}</details>"
        parts.append(table)
    body = f'<div class="tdc-report"><style>{STYLE}</style>\n' + "\n".join(parts) + "\n</div>"
    return PAGE.format(title=escape(title), body=body) if page else body


def table_html(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a caption; the first column heads its row."""
    columns = "".join([f'<th scope="col">{escape(name)}</th>' if name else "<td></td>" for name in head])
    top = f"<thead><tr>{columns}</tr></thead>" if head else ""
    body = "".join([row_html(row) for row in rows])
    label = escape(caption)
    frame = f'<div class="wide" role="region" aria-label="{label}" tabindex="0">'
    return f"{frame}<table><caption>{label}</caption>{top}<tbody>{body}</tbody></table></div>"


def row_html(row: Sequence[str]) -> str:
    """A row of a table; lines within a cell stay lines."""
    first, *rest = [escape(text).replace("\n", "<br>") for text in row]
    return f'<tr><th scope="row">{first}</th>{"".join([f"<td>{text}</td>" for text in rest])}</tr>'
