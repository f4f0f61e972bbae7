"""A compile report: numbers, compiles, breaks and kernels, shown as text and as HTML: sections of a title and a table.

The page needs no script: tables have captions and headings, long lists are `<details>`, wide tables scroll.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tdc.compile.report.reasons import Break, Kernel
from tdc.tensordict.display import shortened
from tdc.tensordict.nbytes import bytes_text

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


UNTOLD = "not told by this backend"  # what only Inductor tells


@dataclass(frozen=True, slots=True)
class Compile:
    """One compile of one graph.

    Attributes:
        graph: which of the pieces of the function, counted from 0.
        ops: operations in the graph.
        seconds: spent in the backend.
        causes: why the compiles before it could not be used; none for the first.
        guards: conditions that each call is checked for.
        kernels: what the backend generated and what it calls; only Inductor tells.
        bytes_moved: read and written by its kernels, estimated for the sizes it was compiled with; None if unknown.
    """

    graph: int
    ops: int
    seconds: float
    causes: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    bytes_moved: int | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The compilation of a function over some examples. `str` is a table, `html()` a page, `save(path)` writes it.

    Attributes:
        name, backend: of the function and of what compiled it.
        examples: how many there were.
        breaks: each line where the function was cut, once.
        compiles: all compiles, in order.
        call_us, raw_us: microseconds of a warm call, and of the compiled graphs alone on flat tensors; medians.
        peak_bytes: most bytes alive during a warm call beyond what was alive before; of the largest example.
    """

    name: str
    backend: str
    examples: int
    breaks: tuple[Break, ...]
    compiles: tuple[Compile, ...]
    call_us: float | None = None
    raw_us: float | None = None
    peak_bytes: int | None = None

    @property
    def newest(self) -> tuple[Compile, ...]:
        """The newest compile of each graph."""
        return tuple({c.graph: c for c in self.compiles}.values())

    @property
    def graphs(self) -> int:
        """Pieces the function was cut into; 1: it compiled whole."""
        return len(self.newest)

    @property
    def recompiles(self) -> tuple[Compile, ...]:
        """Compiles of a graph that had been compiled before."""
        seen: set[int] = set()
        return tuple([c for c in self.compiles if c.graph in seen or seen.add(c.graph)])

    @property
    def guards(self) -> tuple[str, ...]:
        """Conditions that a call is checked for."""
        return tuple([guard for c in self.newest for guard in c.guards])

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Kernels generated for a call."""
        return tuple([k for c in self.newest for k in c.kernels if k.generated])

    @property
    def externs(self) -> tuple[Kernel, ...]:
        """Functions of libraries that a call uses, such as a matrix product."""
        return tuple([k for c in self.newest for k in c.kernels if not k.generated])

    @property
    def bytes_moved(self) -> int | None:
        """Bytes that the kernels of a call read and write, estimated; None where the backend does not tell."""
        known = [c.bytes_moved for c in self.newest if c.bytes_moved is not None]
        return sum(known) if known else None

    @property
    def overhead_us(self) -> float | None:
        """Microseconds of a warm call beyond the compiled graphs: guards, taking containers apart, building results."""
        return None if self.call_us is None or self.raw_us is None else self.call_us - self.raw_us

    def __str__(self) -> str:
        return report_text(title(self), figures(self), sections(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return report_html(title(self), figures(self), sections(self))

    def html(self) -> str:
        """A page of its own, without scripts; tables with headings, long lists open by mouse or keyboard."""
        return report_html(title(self), figures(self), sections(self), page=True)

    def save(self, path: Any) -> None:
        """Write the page to a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.html())


def sections(r: Report) -> list[Section]:
    """Sections of a report, without empty ones."""
    compiles = []
    for n, c in enumerate(r.compiles):
        cause = "; ".join(c.causes) or ("unknown" if c in r.recompiles else "first")
        counts = (n + 1, c.graph, c.ops, len(c.guards), sum([k.generated for k in c.kernels]))
        compiles.append((*[f"{count}" for count in counts], f"{c.seconds:.1f}", cause))
    head = ("kernel", "language", "stage", "calls", "fused operations", "lines")
    found = [
        Section("graph breaks", ("reason", "where", "hint"), [(b.reason, b.where, b.hint) for b in r.breaks]),
        Section("compiles", ("compile", "graph", "ops", "guards", "kernels", "seconds", "cause"), compiles),
        Section("generated kernels", head, [row_of(k) for k in r.kernels]),
        Section("library calls", ("function", *head[1:4], "operations", "lines"), [row_of(k) for k in r.externs]),
        Section("guards of a call", ("condition",), [(guard,) for guard in r.guards], folded=True),
    ]
    return [section for section in found if section.rows]


def row_of(k: Kernel) -> tuple[str, ...]:
    """A kernel as the texts of its columns."""
    return k.name, k.language, k.stage, f"{k.calls}", ", ".join(k.ops), "\n".join(k.where)


def figures(r: Report) -> list[tuple[str, str]]:
    """The numbers of a report, each with its name."""
    told = r.bytes_moved is not None or not r.compiles
    found = [
        ("graphs", f"{r.graphs}"),
        ("graph breaks", f"{len(r.breaks)}"),
        ("compiles", f"{len(r.compiles)}"),
        ("recompiles", f"{len(r.recompiles)}"),
        ("guards", f"{len(r.guards)}"),
        ("generated kernels", f"{len(r.kernels)}" if r.kernels or told else UNTOLD),
        ("library calls", f"{len(r.externs)}" if r.externs or told else UNTOLD),
        ("bytes moved", UNTOLD if r.bytes_moved is None else f"about {bytes_text(r.bytes_moved)}"),
    ]
    if r.peak_bytes is not None:
        found.append(("peak memory", bytes_text(r.peak_bytes)))
    if r.call_us is not None and r.raw_us is not None:
        parts = f"{r.call_us:.1f} µs, the graphs alone {r.raw_us:.1f} µs"
        found.append(("warm call", f"{parts}: overhead {r.overhead_us:.1f} µs"))
    return found


def title(r: Report) -> str:
    """One line: function, backend, examples."""
    return f"{r.name}: {r.examples} example{'s' * (r.examples != 1)}, backend {r.backend}"
