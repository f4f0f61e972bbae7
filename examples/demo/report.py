"""The demo's report: one HTML page, with pictures where matplotlib is installed.

The page needs no script, no network, no file beside it and no font of its own; it follows the reader's light or dark
preference and reads on a phone. Each picture stands with the table of its numbers, so that nothing is lost without it.

Invariant: every text from outside is escaped, except `DemoFacts.tree_html`, which the library wrote.
"""

import statistics
from collections.abc import Iterable, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path

from examples.demo import plots
from examples.demo.data import length_histogram
from examples.demo.records import DemoFacts, ExportRecord, spread
from examples.demo.theme import DARK, LIGHT
from tdc.compile.report.record import table_html
from tdc.tensordict.nbytes import bytes_text

_DASH, _TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_NO_PICTURES = '<p class="note">The pictures need matplotlib: <code>pip install torch-tdc[viz]</code></p>'


def write_report(out: Path, facts: DemoFacts) -> Path:
    """Write `index.html` into the folder `out`, over an earlier one, and return its path."""
    out.mkdir(parents=True, exist_ok=True)
    pictures = plots.draw(facts) if find_spec("matplotlib") else {}
    parts = [part(facts, pictures) for part in (_data, _training, _comparison, _compiled)]
    parts += [_exported(facts.export), _code(facts.code)]
    machine = _table("Machine and versions", (), facts.versions.items(), text=True)
    light, dark = (" ".join([f"--{name}: {colour};" for name, colour in t._asdict().items()]) for t in (LIGHT, DARK))
    page = beside("report.html").format(
        style=beside("report.css").replace("LIGHT", light).replace("DARK", dark),
        examples=_count(len(facts.lengths)),
        classes=_count(len(facts.classes)),
        figures=_figures(facts),
        hint="" if pictures else _NO_PICTURES,
        sections="\n".join([*parts, _next(), _section("Where this ran", machine)]),
    )
    path = out / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def beside(name: str) -> str:
    """A file of this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


# Sections: facts, and the pictures where there are any -> HTML.


def _data(facts: DemoFacts, pictures: dict[str, str]) -> str:
    lengths = sorted(facts.lengths)
    edges, counts = length_histogram(lengths, 16)
    bins = [
        (f"{low + 1}{_DASH}{high}", _count(count)) for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]
    classes = sorted(facts.classes.items(), key=lambda item: (-item[1], item[0]))
    total = sum(facts.classes.values())
    by_class = [(name, _count(count), _percent(count / total)) for name, count in classes]
    real = _percent(facts.occupancy)
    return _section(
        "The data",
        f"<p>Half of the docstrings have at most {_count(statistics.median(lengths))} bytes; the longest has "
        f"{_count(lengths[-1])}. A padded batch gives each of them the room of its longest, so only {real} of it "
        "would be text. A ragged batch stores the text and where each docstring ends.</p>",
        _picture(pictures, "lengths", "Lengths of all docstrings in bytes, and how full batches of them would be."),
        _folded("Lengths as a table", _table("Docstrings by length", ("Bytes", "Docstrings"), bins)),
        _folded(
            f"The {len(classes)} classes", _table("Docstrings by class", ("Class", "Docstrings", "Share"), by_class)
        ),
        "<h3>One batch</h3>",
        f'<div class="tree">{facts.tree_html}</div>',
        f"<pre>{escape(facts.batch_text)}</pre>",
    )


def _training(facts: DemoFacts, pictures: dict[str, str]) -> str:
    stride = max(1, len(facts.steps) // 16)
    rows = [
        (_count(row.step), f"{row.loss:.3f}", _percent(row.accuracy), _count(row.tokens), _seconds(row.seconds))
        for row in dict.fromkeys([*facts.steps[::stride], facts.steps[-1]])
    ]
    caption = f"Every {stride}. step and the last" if stride > 1 else "Every step"
    tokens, seconds = sum(row.tokens for row in facts.steps), sum(row.seconds for row in facts.steps)
    return _section(
        "Training",
        f"<p>{_count(len(facts.steps))} steps over {_count(tokens)} tokens in {_seconds(seconds)}. On docstrings it "
        f"has never seen, the model names the right module {_percent(facts.test_accuracy)} of the time; always giving "
        f"the commonest answer would be right {_percent(facts.majority_accuracy)} of the time.</p>",
        _picture(
            pictures,
            "loss",
            "Loss and accuracy of each training batch (faint) and their running mean (strong).",
        ),
        _folded("The run as a table", _table(caption, ("Step", "Loss (nats)", "Accuracy", "Tokens", "Time"), rows)),
    )


def _comparison(facts: DemoFacts, pictures: dict[str, str]) -> str:
    rows, left_out = facts.comparison, len(facts.comparison) - len(facts.warm)
    head = ("Step", "Loss, ragged", "Loss, padded", "Time, ragged", "Time, padded", "Tokens")
    steps = []
    for pair in rows:
        losses = [f"{x.loss:.5f}" for x in pair]
        times = [_seconds(x.seconds) + (" compiled" if x.compiled else "") for x in pair]
        steps.append((_count(pair.ragged.step), *losses, *times, _count(pair.ragged.tokens)))
    return _section(
        "Ragged and padded",
        f"<p>The same model, the same weights, the same {_count(len(rows))} batches: each step ragged and padded, one "
        f"after the other in the same process. {_count(left_out)} of them compiled on one side or both, and are left "
        f"out of the times. {_verdict(facts)} The two losses are never more than {_small(facts.apart)} apart.</p>",
        _picture(
            pictures,
            "throughput",
            "Every dot is one step, the bar holds the middle half, the line is the median. "
            "Padding does not count as tokens.",
        ),
        _sides(facts),
        _folded("Every step as a table", _table("Loss and time of each step", head, steps)),
    )


def _sides(facts: DemoFacts) -> str:
    """Ragged and padded as the two rows of one table."""
    table = []
    peaks = (facts.peak_bytes_ragged, facts.peak_bytes_padded)
    for name, steps, peak in zip(("Ragged", "Padded"), zip(*facts.warm, strict=True), peaks, strict=True):
        each = spread([step.seconds for step in steps])
        ends = [f"{_seconds(a)} {_DASH} {_seconds(b)}" for a, b in ((each.first, each.third), (each.low, each.high))]
        rate = statistics.median([step.tokens / step.seconds for step in steps])
        table.append((name, _seconds(each.median), *ends, _count(rate), bytes_text(peak)))
    head = ("", "Median", "Middle half", "Range", "Tokens / s", "Peak memory")
    return _table("Time for one step, without compiling", head, table)


def _compiled(facts: DemoFacts, pictures: dict[str, str]) -> str:
    rows = []
    for row in facts.compiled:
        counts = (row.graphs, row.breaks, row.compiles, row.kernels)
        rows.append((row.name, *[_DASH if n is None else _count(n) for n in counts], _seconds(row.seconds)))
    head = ("Function", "Graphs", "Graph breaks", "Compilations", "Kernels", "Compile time")
    told = [f"The {c.name} compiled {_count(c.compiles)} {_plural(c.compiles, 'time')}." for c in facts.compiled]
    return _section(
        "What was compiled",
        "<p>Every batch has other lengths, and the last one of an epoch has fewer docstrings. "
        f"{escape(' '.join(told))} One graph that is compiled once serves all of these sizes.</p>",
        _table("Counted over the whole run", head, rows),
        _picture(pictures, "compiled", "The trained model on batches of several sizes: its compiles, and a warm call."),
    )


def _exported(export: ExportRecord) -> str:
    rows = (
        ("File", export.path),
        ("Size", bytes_text(export.bytes)),
        ("Time to export", _seconds(export.seconds)),
        ("Equal predictions", f"{_count(export.equal_predictions)} / {_count(export.total)}"),
        ("Largest difference of an output", _small(export.max_abs_difference)),
    )
    return _section(
        "The exported model",
        "<p>The trained model was written to a file, loaded again without its Python code, and asked about "
        "the whole test set.</p>",
        _table("The exported model against the one it came from", (), rows, text=True),
    )


def _code(code: str) -> str:
    lead = "<p>The model, its loss and its training, ragged:</p>"
    return _section("The code", lead, f"<pre>{escape(code)}</pre>") if code else ""


def _next() -> str:
    """Pages and commands to go on with."""
    steps = (
        ("docs/start/first_batch.md", "builds a program like this one in three pages"),
        ("tdc doctor", "says what this machine has and lacks"),
        ("docs/index.md", "lists guides by task: text, images, graphs, data on disk, serving"),
        ("docs/benchmarks.md", "has the figures of larger models, losses included"),
    )
    return _section("Next", _table("Where to go from here", (), steps, text=True))


def _figures(facts: DemoFacts) -> str:
    """The row of key figures at the top."""
    ragged, export = facts.compiled[0], facts.export
    figures = [
        (_percent(facts.test_accuracy), f"test accuracy; {_percent(facts.majority_accuracy)} by one answer always"),
        (_percent(facts.occupancy), "of a padded batch would be real tokens"),
        (f"{facts.speedup:.2f}{_TIMES}", f"the speed of padding, median of {len(facts.warm)} steps"),
        (
            _count(ragged.compiles),
            f"{_plural(ragged.compiles, 'compilation')} of the {ragged.name}, "
            f"{_count(ragged.breaks)} graph {_plural(ragged.breaks, 'break')}",
        ),
        (_count(export.equal_predictions), f"of {_count(export.total)} predictions equal in the exported model"),
    ]
    return "\n".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for value, label in figures)


def _verdict(facts: DemoFacts) -> str:
    """Says who won, whoever won."""
    speedup = facts.speedup
    if 0.98 <= speedup <= 1.02:
        return "Both take the same time, within 2%."
    if speedup > 1:
        return f"Ragged is {speedup:.2f} times as fast."
    return f"Padded is {1 / speedup:.2f} times as fast."


# Pieces of HTML. Texts come in plain and go out escaped; `parts` and `body` are HTML already.


def _section(title: str, *parts: str) -> str:
    name = title.lower().replace(" ", "-")
    body = "\n".join(part for part in parts if part)
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{escape(title)}</h2>\n{body}\n</section>'


def _picture(pictures: dict[str, str], name: str, caption: str) -> str:
    if name not in pictures:
        return ""
    return f'<div class="scroll" tabindex="0">{pictures[name]}</div><p class="note">{escape(caption)}</p>'


def _table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, text: bool = False) -> str:
    """A table whose first column names the rows; `text` cells read from the left, others are figures."""
    table = table_html(caption, headings, rows)
    return f'<div class="text">{table}</div>' if text else table


def _folded(summary: str, body: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


# Numbers as people read them.


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else noun + "s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _small(value: float) -> str:
    """With a power of ten: no break in the middle of the number, and zero only for exactly zero."""
    if value == 0:
        return "0"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}{_TIMES}10{str(int(power)).translate(_SUPERSCRIPT)}"


def _seconds(value: float) -> str:
    """Three digits, in the unit that suits; above two minutes, minutes."""
    if value >= 120:
        return f"{value / 60:.1f} min"
    if value >= 0.9995:
        return f"{value:.1f} s"
    scaled, unit = (value * 1e3, "ms") if value >= 0.9995e-3 else (value * 1e6, "µs")
    return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"
