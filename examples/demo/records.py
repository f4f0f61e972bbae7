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
from tdc.compile.report.record import Report


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step: its batch's mean loss (nats) and accuracy (0..1), its tokens, its wall time (seconds)."""

    step: int
    loss: float
    accuracy: float
    tokens: int
    seconds: float
    compiled: bool = False  # the time is mostly the compiler's


class Pair(NamedTuple):
    """One step of the same model on the same batch, ragged and padded."""

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
    """Everything the report shows."""

    versions: Mapping[str, str]  # what ran where, in the order to show
    classes: Mapping[str, int]  # examples by class name
    lengths: tuple[int, ...]  # of every example, in tokens
    occupancy: float  # the share of real tokens if the training batches were padded
    tree_html: str  # the tree of one batch as trusted, already escaped HTML
    batch_text: str  # the repr of one batch, plain text
    steps: tuple[StepRecord, ...]  # the training run, in order
    test_accuracy: float  # 0..1, on the test split
    majority_accuracy: float  # the same by always giving one answer
    comparison: tuple[Pair, ...]  # steps that were taken ragged and padded, one after the other
    peak_bytes_ragged: int  # of device memory, on one side of the comparison
    peak_bytes_padded: int
    compiled: tuple[Counts, ...]  # one row for each compiled function, the ragged training step first
    export: ExportRecord  # the exported model against the trained one
    code: str = ""  # the program that trained
    report: Report | None = None  # of the trained model, compiled for batches of several lengths
    batch_size: int = 32

    @property
    def warm(self) -> tuple[Pair, ...]:
        """Steps at which neither side compiled; all of them where there is none."""
        return tuple(pair for pair in self.comparison if not any(x.compiled for x in pair)) or self.comparison

    @property
    def apart(self) -> float:
        """The largest difference of a loss between the two runs."""
        return max(abs(pair.ragged.loss - pair.padded.loss) for pair in self.comparison)

    @property
    def speedup(self) -> float:
        """The median over warm steps of padded time / ragged time: above 1 ragged is faster."""
        return statistics.median([pair.padded.seconds / pair.ragged.seconds for pair in self.warm])


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
