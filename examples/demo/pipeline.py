"""The demo from the first docstring to the report; each part prints what it found.

    data -> ragged training -> the same steps padded -> compile report -> export -> report

Invariant: the ragged and the padded run see the same batches with the same weights; the run fails where their losses
differ, where the training step compiled more than once, or where the exported model answers differently.
"""

from __future__ import annotations

import platform
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from examples.demo.console import progress, section, table
from examples.demo.data import (
    Corpus,
    batches,
    length_histogram,
    load_docstrings,
    majority_accuracy,
    padded_occupancy,
    split,
)
from examples.demo.model import Build, Classifier, PaddedClassifier, padded_batch, ragged_batch
from examples.demo.package import compare
from examples.demo.records import DemoFacts, Pair
from examples.demo.report import write_report
from examples.demo.train import BATCH, Run, loader, loss, schedule, train
from tdc.compile.train_step import train_step
from tdc.interop.pytrees import to_state_dict
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
    share = padded_occupancy(corpus.lengths, batches(corpus, training, BATCH, seed=seed, epoch=0))
    show_data(corpus, training, share)

    section("Training on ragged batches: forward, loss, backward and AdamW in one compiled graph")
    plan = list(islice(schedule(corpus, training, seed), steps or STEPS))
    ragged = fit("ragged", corpus, plan, seed, device)
    section(f"The first {min(COMPARED, len(plan))} steps again, padded: same weights, batches and optimiser")
    padded = fit("padded", corpus, plan[:COMPARED], seed, device)

    section("Export: an AOTInductor package with dynamic batch and length")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    model = Classifier(len(corpus.classes)).eval()
    model.load_state_dict(to_state_dict(ragged.state["params"]))
    exported, logits = compare(model, corpus, test, folder / "model.pt2")
    labels = torch.tensor([corpus.labels[i] for i in test])
    (batch,) = loader(corpus, plan[:1], ragged_batch, "cpu")
    where = {"device": device, "processor": platform.machine(), "threads": str(torch.get_num_threads())}
    pairs = tuple(map(Pair, ragged.steps, padded.steps))
    facts = DemoFacts(
        versions={"Python": platform.python_version(), "torch": torch.__version__, **where},
        classes={name: corpus.labels.count(i) for i, name in enumerate(corpus.classes)},
        lengths=corpus.lengths,
        occupancy=share,
        tree_html=batch._repr_html_(),
        batch_text=repr(batch),
        steps=ragged.steps,
        test_accuracy=float((logits.argmax(1) == labels).float().mean()),
        majority_accuracy=majority_accuracy(corpus),
        comparison=pairs[1:] or pairs,  # the first step compiled, so it is left out where there are others
        peak_bytes_ragged=ragged.peak,
        peak_bytes_padded=padded.peak,
        compiled=(ragged.counts, padded.counts),
        export=exported,
    )
    show_results(facts)
    page = write_report(folder, facts)
    section(f"The report is {page}   ({time.perf_counter() - begin:.0f} s in all)")
    return verdict(facts)


def fit(kind: str, corpus: Corpus, plan: Plan, seed: int, device: str) -> Run:
    """Train a new model on ragged or on padded batches, and count what compiling did."""
    torch.manual_seed(seed)
    model: torch.nn.Module = Classifier(len(corpus.classes)).to(device)
    build: Build = ragged_batch
    if kind == "padded":
        model, build = PaddedClassifier(model), padded_batch  # type: ignore[arg-type]  # it is a Classifier
    step = train_step(model, loss, adamw(2e-3))
    with progress(kind, len(plan)) as show:
        done = train(step, step.init(), plan, corpus, build, device, show)
    return replace(done, counts=replace(done.counts, name=f"{kind} training step"))


def show_data(corpus: Corpus, training: tuple[int, ...], share: float) -> None:
    """Counts, the length histogram, and the share of real tokens if padded."""
    ordered = sorted(corpus.lengths)
    table([
        ("examples", f"{len(corpus):,} in {len(corpus.classes)} classes, {len(training):,} to train on"),
        ("bytes", f"{sum(ordered):,}; median {ordered[len(ordered) // 2]}, p90 {ordered[len(ordered) * 9 // 10]}"),
        ("if padded", f"{share:.0%} of the tokens in a batch of {BATCH} would be real"),
    ])  # fmt: skip
    edges, counts = length_histogram(ordered, 8)
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        print(f"  {low:>4}-{high:<4} {'█' * round(40 * count / max(counts))} {count}")


def show_results(facts: DemoFacts) -> None:
    """Time, memory and losses of the two runs, what compiling did, and the test accuracy of the package."""
    ragged, padded, export = facts.peak_bytes_ragged / 1e6, facts.peak_bytes_padded / 1e6, facts.export
    section("Ragged against padded")
    table([
        ("time", f"a padded step takes {facts.speedup:.2f} times as long (median of {len(facts.comparison)})"),
        ("memory", f"{padded:.0f} MB padded, {ragged:.0f} MB ragged: peaks of their last steps"),
        ("losses", f"differ by at most {facts.apart:.1e}"),
    ])  # fmt: skip
    section("What compiling did")
    for c in facts.compiled:
        counted_here = f"graphs {c.graphs}, breaks {c.breaks}, compiles {c.compiles}, kernels {c.kernels}"
        print(f"  {c.name}: {counted_here}, {c.seconds:.0f} s")
    section("The package")
    times = facts.test_accuracy / facts.majority_accuracy
    table([
        ("file", f"{export.path}, {export.bytes / 1e6:.1f} MB, {export.seconds:.0f} s"),
        ("against eager", f"{export.equal_predictions} of {export.total} answers equal, "
                          f"logits within {export.max_abs_difference:.1e}"),
        ("test accuracy", f"{facts.test_accuracy:.1%}, {times:.2f} times that of always guessing the largest class"),
    ])  # fmt: skip


def verdict(facts: DemoFacts) -> int:
    """0 where the demo kept its promises; otherwise says which it broke."""
    counts, export = facts.compiled[0], facts.export
    found = f"{counts.graphs} graphs, {counts.breaks} breaks, {counts.compiles} compiles"
    promises = {
        f"the training step took {found}": (counts.graphs, counts.breaks, counts.compiles) == (1, 0, 1),
        f"ragged and padded losses differ by {facts.apart:.1e}": facts.apart <= LOSS_TOLERANCE,
        f"{export.total - export.equal_predictions} answers of the package differ from eager":
            export.equal_predictions == export.total,
    }  # fmt: skip
    for line, kept in promises.items():
        if not kept:
            print(f"  FAILED: {line}")
    return int(not all(promises.values()))
