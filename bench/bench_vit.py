"""What does a vision transformer on images of their own sizes cost packed, against padding?

One step of a small transformer, 256 features and two layers, on 16 images of up to 256 x 256 pixels in patches of 16,
at occupancies of about 20, 35 and 77 % of the rectangle. `padded` pads images to the largest and masks tokens. Training
is forward, cross-entropy and backward. Limits, on tdc over `padded`, are the occupancy and 0.15.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from bench._occupancy import against_padding, at_occupancies
from bench._timing import Call, Report, own

WIDTH, PATCH, SIDE, B = 256, 16, 16, 16


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Any) -> Any:
        return self.head(self.encoder(self.patches(images).flatten(2).transpose(1, 2)).mean(1))

    def padded(self, images: Tensor, real: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        out = self.encoder(tokens, src_key_padding_mask=~real).masked_fill(~real[..., None], 0)
        return self.head(out.sum(1) / real.sum(1, keepdim=True))


def sides_at(occupancy: float) -> list[tuple[int, int]]:
    """Heights and widths in patches: one of the largest, the others of that share of its area on average."""
    g, rest = torch.Generator().manual_seed(0), (occupancy * B - 1) / (B - 1)
    root = (rest**0.5) * SIDE
    drawn = (root * (0.75 + 0.5 * torch.rand(B - 1, 2, generator=g))).round().long().clamp(1, SIDE)
    return [(SIDE, SIDE), *[(h, w) for h, w in drawn.tolist()]]


def measure(report: Report, wanted: float) -> None:
    torch._dynamo.reset()
    sides = sides_at(wanted)
    occupancy = sum(h * w for h, w in sides) / (B * SIDE**2)
    images = [torch.randn(3, h * PATCH, w * PATCH) for h, w in sides]
    packed: Any = tdc.pack(images, ragged_dim=(2, 3))
    padded = packed.to_padded().data
    real = torch.stack([F.pad(torch.ones(h, w), (0, SIDE - w, 0, SIDE - h)) for h, w in sides]).flatten(1) > 0
    classes, net = torch.arange(B) % 10, Vit()
    weights: list[Any] = list(net.parameters())
    runs: dict[str, tuple[Any, Any]] = {
        "padded": (lambda images, real: net.padded(images, real), (padded, real)),
        "tdc": (lambda images: net(images), (packed,)),
    }
    calls: dict[str, Call] = {}
    for who, (run, given) in runs.items():
        compiled = torch.compile(own(run), fullgraph=True)
        for name, fn in ((who, run), (f"{who}, compiled", compiled)):
            calls[name] = training(fn, given, classes, weights)
    against_padding(report, f"vit, {wanted:.0%}", calls, occupancy)


def training(run: Any, given: tuple[Any, ...], classes: Tensor, weights: list[Tensor]) -> Call:
    def call() -> Any:
        return torch.autograd.grad(F.cross_entropy(run(*given), classes), weights)

    return call


def main() -> None:
    question = "What does a vision transformer on images of their own sizes cost packed, against padding?"
    at_occupancies("bench_vit", question, measure)


if __name__ == "__main__":
    main()
