"""Does the demo's training step compile once for all batches?

Twenty batches of real docstrings, of different lengths and batch sizes, go through forward, loss, backward and AdamW in
one compiled function. Packed totals lie on both sides of 4096, where Inductor's own CPU backend compiles again.
Counted: graphs, breaks and compiles, which are exact. The padded model is no peer here: torch compiles it once for each
width and batch size and gives up at the eighth; `python -m tdc demo` compares the two on batches of one size.
"""

from __future__ import annotations

from bench._timing import Report, arguments, exact
from examples.demo.data import Corpus, load_docstrings, split
from examples.demo.pipeline import sides

BATCHES = 20


def batches(corpus: Corpus) -> list[tuple[int, ...]]:
    """Twenty batches of 8 to 40 texts, from both ends of the order by length."""
    train, _ = split(corpus)
    order = sorted(train, key=lambda i: (len(corpus.texts[i]), i))
    sizes = [8 + (13 * k) % 33 for k in range(BATCHES)]
    starts = [(k * len(order)) // (BATCHES + 1) for k in range(BATCHES)]
    return [tuple(order[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


def main() -> None:
    args = arguments("demo_step")
    report = Report("demo_step", "Does the demo's training step compile once for all batches?", args.device, args.quick)
    corpus = load_docstrings()
    plan = batches(corpus)
    totals = [sum(len(corpus.texts[i]) for i in indices) for indices in plan]
    report.note(f"{BATCHES} batches of {min(map(len, plan))} to {max(map(len, plan))} texts, "
                f"{min(totals)} to {max(totals)} tokens, {len(set(totals))} different totals")  # fmt: skip
    ragged, _ = sides(corpus, 0, args.device)
    warm = [step.seconds for step in map(ragged.take, plan) if not step.compiled]
    counts, peak = ragged.counts, ragged.peak(plan[-1])
    report.row("training step", {"ragged": warm}, "ragged", kernels=counts.kernels, peak_MB=round(peak / 1e6, 1))
    for what, limit in (("graphs", 1), ("breaks", 0), ("compiles", 1)):
        figure = exact(getattr(counts, what))
        report.limit(f"ragged training step over {BATCHES} batches: {what}", figure, limit, unit="")
    report.write()


if __name__ == "__main__":
    main()
