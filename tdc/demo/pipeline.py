"""The demo from the first docstring to the report; each part prints what it found.

    data -> ragged training -> the same steps padded -> compile report -> export -> report

Invariant: the ragged and the padded run see the same batches with the same weights; the run fails where their losses
differ, where the training step compiled more than once, or where the exported model answers differently.
"""

from __future__ import annotations

import platform
import statistics
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from tdc.compile.counts import Counts
from tdc.demo.console import progress, section, table
from tdc.demo.data import Corpus, batches, length_histogram, load_docstrings, majority_accuracy, padded_occupancy, split
from tdc.demo.model import Build, Classifier, PaddedClassifier, padded_batch, ragged_batch
from tdc.demo.package import compare, trained
from tdc.demo.records import ComparisonRecord, DemoFacts, ExportRecord
from tdc.demo.report import write_report
from tdc.demo.train import BATCH, Run, loader, schedule, step_of, train
from tdc.optim import adamw

COMPARED = 40
STEPS = 414
LOSS_TOLERANCE = 1e-3
Plan = list[tuple[int, ...]]


def run(*, steps: int | None, seed: int, device: str, out: str) -> int:
    """Run the demo.

    Args:
        steps: training steps; three epochs when None.
        seed: of weights and batches.
        device: where to train, as torch names it; export and its test run on CPU.
        out: folder of the report.

    Returns:
        0, or 1 where a promise of the demo did not hold.
    """
    begin = time.perf_counter()
    section("The data: docstrings of Python's standard library, one token per byte")
    corpus = load_docstrings()
    training, test = split(corpus)
    plan = list(islice(schedule(corpus, training, seed), steps or STEPS))
    show_data(corpus, training, seed)

    section("Training on ragged batches: forward, loss, backward and AdamW in one compiled graph")
    ragged_counts, ragged = fit("ragged", corpus, plan, seed, device)
    section(f"The first {min(COMPARED, len(plan))} steps again, padded: same weights, batches and optimiser")
    padded_counts, padded = fit("padded", corpus, plan[:COMPARED], seed, device)
    rows = side_by_side(ragged, padded)
    apart = max(abs(r.loss_ragged - r.loss_padded) for r in rows)
    show_comparison(rows, ragged, padded, apart)

    section("What compiling did")
    counts = (ragged_counts, padded_counts)
    show_counts(counts)

    section("Export: an AOTInductor package with dynamic batch and length")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    model = trained(Classifier(len(corpus.classes)), ragged.state["params"])
    exported, logits = compare(model, corpus, test, folder / "model.pt2")
    accuracy = float((logits.argmax(1) == torch.tensor([corpus.labels[i] for i in test])).float().mean())
    majority = majority_accuracy(corpus)
    show_export(exported, accuracy, majority)

    facts = gather(corpus, plan, ragged, padded, rows, counts, exported, accuracy, majority, device)
    page = write_report(folder, facts)
    section(f"The report is {page}   ({time.perf_counter() - begin:.0f} s in all)")
    return verdict(ragged_counts, apart, exported)


def fit(kind: str, corpus: Corpus, plan: Plan, seed: int, device: str) -> tuple[Counts, Run]:
    """Train a new model on ragged or on padded batches, and count what compiling did."""
    torch.manual_seed(seed)
    model: torch.nn.Module = Classifier(len(corpus.classes)).to(device)
    build: Build = ragged_batch
    if kind == "padded":
        model, build = PaddedClassifier(model), padded_batch  # type: ignore[arg-type]  # it is a Classifier
    step = step_of(model, adamw(2e-3))
    with progress(kind, len(plan)) as show:
        done = train(step, step.init(model), plan, corpus, build, device, show)
    return replace(step.counts, name=f"{kind} training step"), done


def show_data(corpus: Corpus, training: tuple[int, ...], seed: int) -> None:
    """Counts, the length histogram, and the share of real tokens if padded."""
    lengths = corpus.lengths
    ordered = sorted(lengths)
    share = occupancy(corpus, training, seed)
    table([
        ("examples", f"{len(corpus):,} in {len(corpus.classes)} classes, {len(training):,} to train on"),
        ("bytes", f"{sum(lengths):,}; median {ordered[len(ordered) // 2]}, p90 {ordered[len(ordered) * 9 // 10]}"),
        ("if padded", f"{share:.0%} of the tokens in a batch of {BATCH} would be real"),
    ])  # fmt: skip
    edges, counts = length_histogram(lengths, 8)
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        print(f"  {low:>4}-{high:<4} {'█' * round(40 * count / max(counts))} {count}")


def occupancy(corpus: Corpus, training: tuple[int, ...], seed: int) -> float:
    """The share of real tokens if the first epoch's batches were padded."""
    return padded_occupancy(corpus.lengths, batches(corpus, training, BATCH, seed=seed, epoch=0))


def side_by_side(ragged: Run, padded: Run) -> tuple[ComparisonRecord, ...]:
    """The steps that both runs took; the first compiled, so it is left out where there are others."""
    pairs = list(zip(ragged.steps, padded.steps, strict=False))
    return tuple(
        ComparisonRecord(a.step, a.loss, b.loss, a.seconds, b.seconds, a.tokens)
        for a, b in (pairs[1:] if len(pairs) > 1 else pairs)
    )


def show_comparison(rows: tuple[ComparisonRecord, ...], ragged: Run, padded: Run, apart: float) -> None:
    """Time, memory and losses of the two runs."""
    ratio = statistics.median(r.seconds_padded / r.seconds_ragged for r in rows)
    table([
        ("time", f"a padded step takes {ratio:.2f} times as long (median of {len(rows)})"),
        ("memory", f"{padded.peak / 1e6:.0f} MB padded, {ragged.peak / 1e6:.0f} MB ragged: peaks of their last steps"),
        ("losses", f"differ by at most {apart:.1e}"),
    ])  # fmt: skip


def show_counts(counts: tuple[Counts, ...]) -> None:
    """Graphs, breaks, compiles and kernels of every compiled function."""
    for c in counts:
        counted_here = f"graphs {c.graphs}, breaks {c.breaks}, compiles {c.compiles}, kernels {c.kernels}"
        print(f"  {c.name}: {counted_here}, {c.seconds:.0f} s")


def show_export(exported: ExportRecord, accuracy: float, majority: float) -> None:
    """The package, and the test accuracy of what it answers."""
    table([
        ("package", f"{exported.path}, {exported.bytes / 1e6:.1f} MB, {exported.seconds:.0f} s"),
        ("against eager", f"{exported.equal_predictions} of {exported.total} answers equal, "
                          f"logits within {exported.max_abs_difference:.1e}"),
        ("test accuracy", f"{accuracy:.1%}, {accuracy / majority:.2f} times that of always guessing the largest class"),
    ])  # fmt: skip


def gather(
    corpus: Corpus, plan: Plan, ragged: Run, padded: Run, rows: tuple[ComparisonRecord, ...], counts: tuple[Counts,
    ...], exported: ExportRecord, accuracy: float, majority: float, device: str,
) -> DemoFacts:  # fmt: skip
    """Everything the report shows."""
    (batch,) = loader(corpus, plan[:1], ragged_batch, "cpu")
    by_class = [corpus.labels.count(i) for i in range(len(corpus.classes))]
    training, _ = split(corpus)
    versions = {"Python": platform.python_version(), "torch": torch.__version__, "device": device}
    return DemoFacts(
        versions={**versions, "processor": platform.machine(), "threads": str(torch.get_num_threads())},
        classes=dict(zip(corpus.classes, by_class, strict=True)),
        lengths=corpus.lengths,
        occupancy=occupancy(corpus, training, 0),
        tree_html=batch._repr_html_(),
        batch_text=repr(batch),
        steps=ragged.steps,
        test_accuracy=accuracy,
        majority_accuracy=majority,
        comparison=rows,
        peak_bytes_ragged=ragged.peak,
        peak_bytes_padded=padded.peak,
        compiled=counts,
        export=exported,
    )


def verdict(counts: Counts, apart: float, exported: ExportRecord) -> int:
    """0 where the demo kept its promises; otherwise says which it broke."""
    broken = []
    if (counts.graphs, counts.breaks, counts.compiles) != (1, 0, 1):
        broken.append(
            f"the training step took {counts.graphs} graphs, {counts.breaks} breaks, {counts.compiles} compiles"
        )
    if apart > LOSS_TOLERANCE:
        broken.append(f"ragged and padded losses differ by {apart:.1e}")
    if exported.equal_predictions != exported.total:
        broken.append(f"{exported.total - exported.equal_predictions} answers of the package differ from eager")
    for line in broken:
        print(f"  FAILED: {line}")
    return 1 if broken else 0
