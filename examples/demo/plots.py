"""The report's pictures, drawn with matplotlib where it is installed, in the colours of `tdc.viz`.

Lengths and the compile report are pictures of `tdc.viz`; losses and times are drawn here. Each is an SVG in the page,
which follows its light or dark theme. No point is dropped without a line that counts it.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from examples.demo.records import DemoFacts, spread
from tdc.viz.compiled import report
from tdc.viz.data import lengths
from tdc.viz.figure import PADDING, QUIET, REAL, empty, to_html

_ALT = {
    "lengths": "Histogram of docstring lengths in bytes, and the share of real bytes of padded and of packed batches.",
    "loss": "Two line charts: training loss falling and training accuracy rising over the steps.",
    "throughput": "Two dot plots, ragged above padded: time per step, and tokens per second.",
    "compiled": "A bar for each compile of the trained model, and how a warm call spends its time.",
}


def draw(facts: DemoFacts) -> dict[str, str]:
    """The pictures of a report as HTML, by name."""
    figures = {
        "lengths": lengths(torch.tensor(facts.lengths), batch_size=facts.batch_size),
        "loss": _loss(facts),
        "throughput": _throughput(facts),
    }
    if facts.report is not None:
        figures["compiled"] = report(facts.report)
    return {name: to_html(figure, _ALT[name]) for name, figure in figures.items()}


def _loss(facts: DemoFacts) -> Any:
    figure, (left, right) = empty("demo", 2, (8.0, 3.0), ("training loss (nats)", "accuracy (%)"))
    steps = [row.step for row in facts.steps]
    losses, accuracies = [row.loss for row in facts.steps], [100 * row.accuracy for row in facts.steps]
    window = max(1, len(steps) // 20)
    for axes, values in ((left, losses), (right, accuracies)):
        axes.plot(steps, values, color=REAL, linewidth=0.7, alpha=0.35)
        axes.plot(steps, _running_mean(values, window), color=REAL, linewidth=1.8)
        axes.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
        axes.set_xlabel("step")
    guess = math.log(max(2, len(facts.classes)))
    _level(left, guess, f"guessing: ln {len(facts.classes)} = {guess:.2f}")
    left.set_ylim(0, max(left.get_ylim()[1], guess * 1.15))
    right.set_ylim(0, 105)
    test, majority = 100 * facts.test_accuracy, 100 * facts.majority_accuracy
    _level(right, test, f"test at the end: {test:.1f}", side="left")
    _level(right, majority, f"one answer always: {majority:.1f}")
    return figure


def _throughput(facts: DemoFacts) -> Any:
    sides = dict(zip(("ragged", "padded"), zip(*facts.warm, strict=True), strict=True))
    milliseconds = {name: [1000 * step.seconds for step in steps] for name, steps in sides.items()}
    rates = {name: [step.tokens / step.seconds / 1000 for step in steps] for name, steps in sides.items()}
    figure, (left, right) = empty("demo", 2, (8.0, 2.5), ("time per step (ms)", "thousand real tokens / s"))
    _strips(left, milliseconds)
    _strips(right, rates)
    right.set_yticklabels([])
    return figure


def _strips(axes: Any, groups: Mapping[str, Sequence[float]]) -> None:
    """One row per group: every value as a dot, the quartiles as a bar, the median as a labelled mark."""
    spreads = {name: spread(values) for name, values in groups.items()}
    # one stalled step must not squeeze all others into a corner: what lies beyond is counted in the label
    end = 1.08 * max(min(each.high, 3 * each.third) for each in spreads.values())
    beyond = sum(value > end for values in groups.values() for value in values)
    for row, (name, values) in enumerate(groups.items()):
        colour = REAL if name == "ragged" else PADDING
        # the golden ratio spreads neighbours apart, and the same way every time
        heights = [row + 0.26 * ((index * 0.618034) % 1 - 0.5) for index in range(len(values))]
        axes.scatter(values, heights, s=7, color=colour, alpha=0.35, linewidths=0)
        each = spreads[name]
        axes.plot([each.first, each.third], [row, row], color=colour, linewidth=5, solid_capstyle="butt", alpha=0.8)
        axes.plot([each.median] * 2, [row - 0.22, row + 0.22], color="black", linewidth=1.6)
        text = f"{each.median:,.1f}" if each.median < 1000 else f"{each.median:,.0f}"
        side = "left" if each.median < end * 0.1 else "right" if each.median > end * 0.9 else "center"
        axes.text(each.median, row - 0.28, text, ha=side, va="bottom", fontsize=9, fontweight="bold")
    axes.set_yticks(range(len(groups)), list(groups))
    axes.set_ylim(len(groups) - 0.55, -0.62)
    axes.set_xlim(0, end)
    axes.set_xlabel(f"{beyond} beyond the edge" if beyond else "")
    axes.grid(axis="x", color=QUIET, alpha=0.4, linewidth=0.7)


def _level(axes: Any, value: float, text: str, *, side: str = "right") -> None:
    """A dashed line across, labelled at the end that the curve leaves free."""
    axes.axhline(value, color=QUIET, linewidth=0.9, linestyle=(0, (3, 3)))
    spot = {"xy": (float(side == "right"), value), "xycoords": ("axes fraction", "data")}
    shift = {"xytext": (4 if side == "left" else 0, 3), "textcoords": "offset points"}
    axes.annotate(text, **spot, **shift, ha=side, va="bottom", fontsize=8)


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last `window` values, of fewer at the start."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
