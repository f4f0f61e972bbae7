"""The report's pictures, drawn with matplotlib where it is installed.

Each picture is a function from facts and theme to a figure. Figures are built from objects: no pyplot, no global
settings, no display. Every picture is drawn twice, for a light and a dark page.

Invariants: axes carry names and units; no point is dropped without a line that counts it; the same facts give the
same picture.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from examples.demo.data import length_histogram
from examples.demo.records import DemoFacts, spread
from examples.demo.theme import DARK, LIGHT, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 7.4  # inches; with _DPI twice the pixels the page shows
_DPI = 220
_SMALL, _TEXT = 8.5, 9.5  # points
_BINS = 32


def draw(out: Path, facts: DemoFacts) -> dict[str, tuple[str, str]]:
    """Write the pictures into `out`; returns their file names for a light and a dark page, by name."""
    drawn = {}
    for name, picture in (("lengths", _lengths), ("loss", _loss), ("throughput", _throughput)):
        drawn[name] = (f"{name}.png", f"{name}-dark.png")
        for file, theme in zip(drawn[name], (LIGHT, DARK), strict=True):
            # without the version in the metadata, the same facts give the same bytes
            picture(facts, theme).savefig(out / file, dpi=_DPI, metadata={"Software": None})
    return drawn


def _lengths(facts: DemoFacts, theme: Theme) -> "Figure":
    figure, (axes,) = _figure(theme, height=2.7, columns=1)
    edges, counts = length_histogram(facts.lengths, _BINS)
    width = edges[1] - edges[0]
    axes.bar(edges[:-1], counts, width=width * 0.86, align="edge", color=theme.ragged, linewidth=0)
    _name(axes, theme, "length (bytes)", f"docstrings per {width} bytes")
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, max(counts) * 1.22)
    ordered = sorted(facts.lengths)
    for label, value in (("median", statistics.median(ordered)), ("90th percentile", ordered[len(ordered) * 9 // 10])):
        axes.axvline(value, color=theme.ink, linewidth=0.9, linestyle=(0, (3, 3)))
        side, shift = ("left", 5) if value < edges[-1] * 0.6 else ("right", -5)
        spot = {"xy": (value, 0.97), "xycoords": ("data", "axes fraction")}
        offset = {"xytext": (shift, 0), "textcoords": "offset points"}
        text = f"{label}: {value:,.0f}"
        axes.annotate(text, **spot, **offset, ha=side, va="top", color=theme.ink, fontsize=_TEXT)
    return figure


def _loss(facts: DemoFacts, theme: Theme) -> "Figure":
    figure, (left, right) = _figure(theme, height=3.0, columns=2)
    steps = [row.step for row in facts.steps]
    losses, accuracies = [row.loss for row in facts.steps], [100 * row.accuracy for row in facts.steps]
    window = max(1, len(steps) // 20)
    for axes, values in ((left, losses), (right, accuracies)):
        axes.plot(steps, values, color=theme.ragged, linewidth=0.7, alpha=0.35)
        axes.plot(steps, _running_mean(values, window), color=theme.ragged, linewidth=1.8)
        axes.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
    _name(left, theme, "step", "training loss (nats)")
    guess = math.log(max(2, len(facts.classes)))
    _level(left, theme, guess, f"guessing: ln {len(facts.classes)} = {guess:.2f}", theme.muted)
    left.set_ylim(0, max(left.get_ylim()[1], guess * 1.15))
    _name(right, theme, "step", "accuracy (%)")
    right.set_ylim(0, 105)
    test, majority = 100 * facts.test_accuracy, 100 * facts.majority_accuracy
    _level(right, theme, test, f"test at the end: {test:.1f}", theme.ink, side="left")
    _level(right, theme, majority, f"one answer always: {majority:.1f}", theme.muted)
    return figure


def _throughput(facts: DemoFacts, theme: Theme) -> "Figure":
    figure, (left, right) = _figure(theme, height=2.5, columns=2)
    sides = dict(zip(("ragged", "padded"), zip(*facts.warm, strict=True), strict=True))
    milliseconds = {name: [1000 * step.seconds for step in steps] for name, steps in sides.items()}
    rates = {name: [step.tokens / step.seconds / 1000 for step in steps] for name, steps in sides.items()}
    _strips(left, theme, milliseconds, "time per step (ms)")
    _strips(right, theme, rates, "thousand real tokens / s")
    right.set_yticklabels([])
    return figure


def _figure(theme: Theme, *, height: float, columns: int) -> "tuple[Figure, tuple[Axes, ...]]":
    """An empty figure with `columns` quiet axes: two spines, a faint grid, no ticks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.06)
    figure = Figure(figsize=(_WIDTH, height), facecolor=theme.panel, layout=layout)
    FigureCanvasAgg(figure)
    every = tuple(figure.add_subplot(1, columns, column + 1, facecolor=theme.panel) for column in range(columns))
    for axes in every:
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(theme.rule)
        axes.grid(axis="y", color=theme.rule, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(colors=theme.muted, labelsize=_SMALL, length=0, pad=5)
    return figure, every


def _strips(axes: "Axes", theme: Theme, groups: Mapping[str, Sequence[float]], label: str) -> None:
    """One row per group: every value as a dot, the quartiles as a bar, the median as a labelled mark."""
    spreads = {name: spread(values) for name, values in groups.items()}
    # one stalled step must not squeeze all others into a corner: what lies beyond is counted in the label
    end = 1.08 * max(min(each.high, 3 * each.third) for each in spreads.values())
    beyond = sum(value > end for values in groups.values() for value in values)
    for row, (name, values) in enumerate(groups.items()):
        colour = theme.ragged if name == "ragged" else theme.padded
        # the golden ratio spreads neighbours apart, and the same way every time
        heights = [row + 0.26 * ((index * 0.618034) % 1 - 0.5) for index in range(len(values))]
        axes.scatter(values, heights, s=7, color=colour, alpha=0.35, linewidths=0)
        each = spreads[name]
        axes.plot([each.first, each.third], [row, row], color=colour, linewidth=5, solid_capstyle="butt", alpha=0.8)
        axes.plot([each.median] * 2, [row - 0.22, row + 0.22], color=theme.ink, linewidth=1.6)
        text = f"{each.median:,.1f}" if each.median < 1000 else f"{each.median:,.0f}"
        side = "left" if each.median < end * 0.1 else "right" if each.median > end * 0.9 else "center"
        bold = {"color": theme.ink, "fontsize": _TEXT, "fontweight": "bold"}
        axes.text(each.median, row - 0.28, text, ha=side, va="bottom", **bold)
    axes.set_yticks(range(len(groups)), list(groups))
    axes.set_ylim(len(groups) - 0.55, -0.62)
    axes.set_xlim(0, end)
    _name(axes, theme, label + (f"; {beyond} beyond the edge" if beyond else ""), "")
    axes.tick_params(axis="y", labelsize=_TEXT, labelcolor=theme.ink)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=theme.rule, linewidth=0.7)


def _name(axes: "Axes", theme: Theme, horizontal: str, vertical: str) -> None:
    axes.set_xlabel(horizontal, color=theme.muted, fontsize=_TEXT, labelpad=6)
    axes.set_ylabel(vertical, color=theme.muted, fontsize=_TEXT, labelpad=6)


def _level(axes: "Axes", theme: Theme, value: float, text: str, colour: str, *, side: str = "right") -> None:
    """A dashed line across, labelled at the end that the curve leaves free."""
    axes.axhline(value, color=colour, linewidth=0.9, linestyle=(0, (3, 3)))
    spot = {"xy": (float(side == "right"), value), "xycoords": ("axes fraction", "data")}
    shift = {"xytext": (4 if side == "left" else 0, 3), "textcoords": "offset points"}
    behind = {"facecolor": theme.panel, "alpha": 0.75, "linewidth": 0, "pad": 0.8}
    axes.annotate(text, **spot, **shift, ha=side, va="bottom", color=colour, fontsize=_SMALL, bbox=behind)


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last `window` values, of fewer at the start."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
