"""A vision transformer on images of their own sizes, packed, as NaViT trains it: one graph for all sizes.

    python examples/vit.py

Images of stripes are 16 to 48 pixels high and wide; their class is the angle of the stripes. Patches of all images are
one packed sequence, so that no image is resized and nothing is padded. Each image gets the table of positions at the
size of its own grid, and in training a random quarter of its patches is left out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from tdc import TensorDict
from tdc.compile import train_step
from tdc.ops import random_masking
from tdc.optim import adamw

PATCH, CLASSES, STEPS, IMAGES = 4, 4, 40, 16


class Vit(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 1, side: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, PATCH)
        self.places = nn.Parameter(torch.randn(width, side, side) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Any, dropped: float = 0.0) -> Any:
        grid: Any = self.patches(images)  # (B, D, -1, -1)
        tables: Any = tdc.pack([self.places] * IMAGES, ragged_dim=(2, 3))
        grid = grid + F.interpolate(tables, size=grid, mode="bilinear", antialias=True)
        tokens = grid.flatten(2).transpose(1, 2)  # (B, -1, D)
        if dropped:
            tokens, _, _ = random_masking(tokens, dropped)
        return self.head(self.encoder(tokens).mean(1))


def batch(generator: torch.Generator) -> TensorDict:
    """Stripes of a class, with noise."""
    sizes = torch.randint(16, 49, (IMAGES, 2), generator=generator).tolist()
    classes = torch.randint(CLASSES, (IMAGES,), generator=generator)
    images = []
    for (high, wide), angle in zip(sizes, (classes * math.pi / CLASSES).tolist(), strict=True):
        y, x = torch.meshgrid(torch.arange(float(high)), torch.arange(float(wide)), indexing="ij")
        phase = 6.0 * torch.rand((), generator=generator)
        stripes = torch.sin((x * math.cos(angle) + y * math.sin(angle)) * 0.9 + phase)
        images.append((stripes + 0.3 * torch.randn(high, wide, generator=generator))[None])
    return TensorDict({"images": tdc.pack(images, ragged_dim=(2, 3)), "classes": classes}, [IMAGES])


def loss(model: Any, b: TensorDict) -> Tensor:
    return F.cross_entropy(model(b["images"], 0.25), b["classes"])


def main() -> None:
    torch.manual_seed(0)
    generator, net = torch.Generator().manual_seed(0), Vit()
    step = train_step(net, loss, adamw(3e-3))
    state = step.init()
    for i in range(STEPS):
        state, metrics = step(state, batch(generator))
        if i % 20 == 0 or i == STEPS - 1:
            print(f"step {i:3d}  loss {metrics['loss']:.3f}")
    step.load_into(net, state)
    test = batch(generator)
    with torch.no_grad():
        right = (net(test["images"]).argmax(1) == test["classes"]).float().mean()
    counts = step.counts
    print(f"right {right:.0%}, graphs {counts.graphs}, breaks {counts.breaks}, compiles {counts.compiles}")
    assert right > 0.7, "it has not learned"


if __name__ == "__main__":
    main()
