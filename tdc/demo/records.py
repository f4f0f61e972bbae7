"""What the demo measured: the plain records that its report is written from.

The training job fills one `DemoFacts`; the page and the plots read it and measure nothing themselves. So a report
can be written again from old numbers, and tested without training. Seconds, bytes and tokens are plain numbers in
those units.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tdc.compile.counts import Counts


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step: its batch's mean loss (nats) and accuracy (0..1), its tokens, its wall time (seconds)."""

    step: int
    loss: float
    accuracy: float
    tokens: int
    seconds: float


class Pair(NamedTuple):
    """One step of the same model on the same batch, ragged and padded; the time of a warm step, without compiling."""

    ragged: StepRecord
    padded: StepRecord


@dataclass(frozen=True, slots=True)
class ExportRecord:
    """The exported model: its file, and how its outputs compare with the model it was exported from."""

    path: str
    bytes: int
    max_abs_difference: float
    equal_predictions: int
    total: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DemoFacts:
    """Everything the report shows.

    Args:
        versions: what ran where, in the order to show: Python, torch, processor, device.
        classes: examples by class name.
        lengths: the length of every example, in tokens.
        occupancy: the share of real tokens if the training batches were padded.
        tree_html: the tree of one batch as trusted, already escaped HTML.
        batch_text: the repr of one batch, plain text.
        steps: the training run, in order.
        test_accuracy, majority_accuracy: on the test split, 0..1; the second by always giving one answer.
        comparison: warm steps, ragged and padded.
        peak_bytes_ragged, peak_bytes_padded: peak device memory of one side of the comparison.
        compiled: one row for each compiled function.
        export: the exported model against the trained one.
    """

    versions: Mapping[str, str]
    classes: Mapping[str, int]
    lengths: tuple[int, ...]
    occupancy: float
    tree_html: str
    batch_text: str
    steps: tuple[StepRecord, ...]
    test_accuracy: float
    majority_accuracy: float
    comparison: tuple[Pair, ...]
    peak_bytes_ragged: int
    peak_bytes_padded: int
    compiled: tuple[Counts, ...]
    export: ExportRecord

    @property
    def apart(self) -> float:
        """The largest difference of a loss between the two runs."""
        return max(abs(pair.ragged.loss - pair.padded.loss) for pair in self.comparison)

    @property
    def speedup(self) -> float:
        """The median over steps of padded time / ragged time: above 1 ragged is faster."""
        return statistics.median([pair.padded.seconds / pair.ragged.seconds for pair in self.comparison])


class Spread(NamedTuple):
    """A median with its quartiles and extremes."""

    low: float
    first: float
    median: float
    third: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Summarise at least one value.

    Example:
        >>> spread([4.0, 1.0, 3.0, 2.0, 5.0])
        Spread(low=1.0, first=2.0, median=3.0, third=4.0, high=5.0)
    """
    ordered = sorted(values)
    first, median, third = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return Spread(ordered[0], first, median, third, ordered[-1])
