"""The demo from the first docstring to the report; each part prints what it found.

    data -> training, ragged and for the first steps padded, too -> compile report -> export -> report

Invariant: the ragged and the padded training see the same batches with the same weights, in turns; the run fails where
their losses differ, where the ragged step compiled more than once, or where the exported model answers differently.
"""

from __future__ import annotations

import inspect
import platform
import time
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
from examples.demo.model import Classifier, PaddedClassifier, padded_batch, ragged_batch
from examples.demo.package import compare
from examples.demo.records import DemoFacts, Pair
from examples.demo.report import write_report
from examples.demo.train import BATCH, Training, loader, loss, schedule
from tdc.compile.report.build import report as compile_report
from tdc.compile.report.record import Report
from tdc.interop.pytrees import to_state_dict
from tdc.tensordict.tensordict import TensorDict

COMPARED = 40
STEPS = 414
LOSS_TOLERANCE = 1e-3
Plan = list[tuple[int, ...]]
LOOP = """\
step = train_step(model, loss, adamw(2e-3))
state = step.init()
for texts, labels in batches:
    batch = TensorDict({"tokens": tdc.pack(texts), "label": labels}, [len(texts)])
    state, metrics = step(state, batch)
"""


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

    plan = list(islice(schedule(corpus, training, seed), steps or STEPS))
    both = min(COMPARED, len(plan))
    section(f"Training on ragged batches, one compiled graph; the first {both} steps padded, too, in turns")
    ragged, padded = learn(corpus, plan, both, seed, device)

    section("Export: an AOTInductor package with dynamic batch and length")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    model = Classifier(len(corpus.classes)).eval()
    model.load_state_dict(to_state_dict(ragged.state["params"]))
    exported, logits = compare(model, corpus, test, folder / "model.pt2")
    labels = torch.tensor([corpus.labels[i] for i in test])
    (batch,) = loader(corpus, plan[:1], ragged_batch, "cpu")
    where = {"device": device, "processor": platform.machine(), "threads": str(torch.get_num_threads())}
    facts = DemoFacts(
        versions={"Python": platform.python_version(), "torch": torch.__version__, **where},
        classes={name: corpus.labels.count(i) for i, name in enumerate(corpus.classes)},
        lengths=corpus.lengths,
        occupancy=share,
        tree_html=batch._repr_html_(),
        batch_text=repr(batch),
        steps=tuple(ragged.records),
        test_accuracy=float((logits.argmax(1) == labels).float().mean()),
        majority_accuracy=majority_accuracy(corpus),
        comparison=tuple(map(Pair, ragged.records[:both], padded.records)),
        peak_bytes_ragged=ragged.peak(plan[both - 1]),
        peak_bytes_padded=padded.peak(plan[both - 1]),
        compiled=(ragged.counts, padded.counts),
        export=exported,
        code=program(),
        report=reported(model, list(loader(corpus, plan[:3], ragged_batch, "cpu"))),
        batch_size=BATCH,
    )
    show_results(facts)
    page = write_report(folder, facts)
    section(f"The report is {page}   ({time.perf_counter() - begin:.0f} s in all)")
    return verdict(facts)


def sides(corpus: Corpus, seed: int, device: str) -> tuple[Training, Training]:
    """Ragged and padded training of the same weights."""
    torch.manual_seed(seed)
    model = Classifier(len(corpus.classes))
    ragged = Training("ragged", model, ragged_batch, corpus, device)
    return ragged, Training("padded", PaddedClassifier(model), padded_batch, corpus, device)


def learn(corpus: Corpus, plan: Plan, both: int, seed: int, device: str) -> tuple[Training, Training]:
    """Train ragged on the whole plan, and padded on its first steps, in an order that alternates."""
    ragged, padded = sides(corpus, seed, device)
    with progress("ragged", len(plan)) as show:
        for n, indices in enumerate(plan):
            turns = [ragged, padded][:: 1 if n % 2 else -1] if n < both else [ragged]
            for training in turns:
                training.take(indices)
            show(ragged.records[-1])
    return ragged, padded


def reported(model: Classifier, batches: list[TensorDict]) -> Report:
    """The compile report of the trained model."""
    with torch.no_grad():
        return compile_report(model, *batches, repeats=5)


def program() -> str:
    """The code of the ragged model, its loss, and its training."""
    parts = [inspect.getsource(part) for part in (Classifier, loss)]
    return "\n\n".join([*parts, LOOP]).rstrip()


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
        ("time", f"a padded step takes {facts.speedup:.2f} times as long (median of {len(facts.warm)})"),
        ("memory", f"{padded:.0f} MB padded, {ragged:.0f} MB ragged: peaks of the same step"),
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
