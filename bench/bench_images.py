"""What do moves, sorts, scans and reductions of images of different sizes cost against a loop over images?

32 images (3, h, w) with sides between 64 and 256. `tdc` is the operation on a NestedTensor (B, 3, -1, -1), eager, whose
result is a batch again; `loop` is the same on one image after another, whose results are a list of contiguous tensors.
`packed` is the loop with its results packed, for what goes on with a batch. Each call takes another of 8 batches of
these sizes, which are more than the caches hold: a program moves an image once. Sums are forward and backward of a
crop. The limit is on tdc over the loop. Operations on small images are in `bench.bench_nested`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

import tdc
from bench._timing import Report, arguments, interleaved, ratio

B, LEAST, MOST, BATCHES = 32, 64, 256, 8
LIMIT = 1.5
Run = Callable[[Any], Any]
OPERATIONS: dict[str, tuple[Run, Run]] = {  # of a batch, and of one image
    "a border cut off": (lambda x: x[:, :, 4:-4, 4:-4], lambda r: r[:, 4:-4, 4:-4]),
    "a corner": (lambda x: x[:, :, :64, -64:], lambda r: r[:, :64, -64:]),
    "every other position": (lambda x: x[:, :, ::2, ::2], lambda r: r[:, ::2, ::2]),
    "mirrored": (lambda x: x.flip(3), lambda r: r.flip(2)),
    "mirrored both ways": (lambda x: x.flip(2, 3), lambda r: r.flip(1, 2)),
    "transposed": (lambda x: x.transpose(2, 3), lambda r: r.transpose(1, 2)),
    "shifted": (lambda x: x.roll(5, 3), lambda r: r.roll(5, 2)),
    "lines sorted": (lambda x: x.sort(3).values, lambda r: r.sort(2).values),
    "columns sorted": (lambda x: x.sort(2).values, lambda r: r.sort(1).values),
    "lines summed up": (lambda x: x.cumsum(3), lambda r: r.cumsum(2)),
    "softmax of columns": (lambda x: x.softmax(2), lambda r: r.softmax(1)),
    "means of lines": (lambda x: x.mean(3), lambda r: r.mean(2)),
    "largest of columns": (lambda x: x.max(2).values, lambda r: r.max(1).values),
}


def measure(report: Report, name: str, batches: list[list[Tensor]]) -> None:
    """One operation."""
    packed, (ours, theirs) = [tdc.pack(images, ragged_dim=(2, 3)) for images in batches], OPERATIONS[name]
    ragged = tuple(range(2, ours(packed[0]).ndim))
    for a, b in zip(ours(packed[0]).unbind(), batches[0], strict=True):
        assert torch.equal(a, theirs(b)), name
    batch, images = cycle(packed), cycle(batches)
    calls: dict[str, Callable[[], Any]] = {
        "tdc": lambda: ours(next(batch)),
        "loop": lambda: [theirs(x).contiguous() for x in next(images)],
        "packed": lambda: tdc.pack([theirs(x) for x in next(images)], ragged_dim=ragged),
    }
    times = interleaved(calls, rounds=5 if report.quick else 21, burst=0.05, device=report.device)
    report.row(name, times, "loop")
    report.limit(f"{name}: tdc to loop", ratio(times["tdc"], times["loop"]), LIMIT)


def gradients(report: Report, images: list[Tensor]) -> None:
    """A crop, its sum of squares, and the gradient of the images."""
    batch = tdc.pack(images, ragged_dim=(2, 3)).requires_grad_()
    leaves = [x.clone().requires_grad_() for x in images]
    run, alone = OPERATIONS["a border cut off"]
    calls: dict[str, Callable[[], Any]] = {
        "tdc": lambda: torch.autograd.grad(run(batch).values.square().sum(), batch.values),
        "loop": lambda: [torch.autograd.grad(alone(x).square().sum(), x) for x in leaves],
    }
    times = interleaved(calls, rounds=5 if report.quick else 21, burst=0.05, device=report.device)
    report.row("gradient of a border cut off", times, "loop")
    report.limit("gradient of a border cut off: tdc to loop", ratio(times["tdc"], times["loop"]), LIMIT)


def main() -> None:
    args = arguments("bench_images")
    question = "What do moves, sorts, scans and reductions of images cost against a loop over images?"
    report = Report("bench_images", question, args.device, args.quick)
    generator = torch.Generator().manual_seed(0)
    sides = torch.randint(LEAST, MOST + 1, (B, 2), generator=generator).tolist()
    batches = [[torch.randn(3, h, w, generator=generator).to(args.device) for h, w in sides] for _ in range(BATCHES)]
    for name in OPERATIONS:
        measure(report, name, batches)
    gradients(report, batches[0])
    report.write()


if __name__ == "__main__":
    main()
