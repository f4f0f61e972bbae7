"""What do a ResNet and single layers cost on images of different sizes against padding and a loop over images?

ResNet-18 and ResNet-50 of stock modules, 16 images with sides between 64 and 224, at occupancies of 43, 68 and 91 %:

    tdc       the network on a NestedTensor (B, 3, -1, -1), eager
    padded    the network on the rectangle (B, 3, H, W), whose zeros change the results at borders and in statistics
    last      the same rectangle with channels innermost
    loop      the network on one image after another

Inference is eval mode without autograd. Training is train mode, sum of squares of the logits, and backward to all
weights; a loop has other statistics in batch norm, and is timed only. In eval mode the logits are those of each image
alone to 1e-5 of the largest, which is checked before anything is timed. torchvision is no dependency: the network is
spelled out here.

Single layers take 32 feature maps of 64 channels at 43 %, with sides of a quarter to those of the images, and 32
sequences, in the memory formats that convolutions of the respective kind leave; training is the sum of the result and
the gradient of input and weights. Results are those of each example alone to 1e-5. The limit is on tdc over padded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from bench._timing import Report, arguments, in_turns, interleaved, ratio, spread
from tdc.compile import peak_bytes

B, LEAST, MOST = 16, 64, 224
LIMITS = {0.43: (0.65, 0.8), 0.68: (0.85, 0.95), 0.91: (1.05, 1.1)}  # occupancy: inference, training
EXACT, MEMORY = 1e-5, 1.0
LAYER_LIMIT = 0.8
LAYERS: dict[str, nn.Module] = {
    "conv_transpose2d": nn.ConvTranspose2d(64, 32, 4, 2, 1),
    "conv_transpose2d, kernel 2": nn.ConvTranspose2d(64, 32, 2, 2),
}
SEQUENCES: dict[str, tuple[nn.Conv1d, int]] = {  # and how long the longest one is
    "conv1d, 64 channels": (nn.Conv1d(64, 64, 3, padding=1), 256),
    "conv1d, 64 channels, long": (nn.Conv1d(64, 64, 9, padding=4), 1024),
    "conv1d, 256 channels": (nn.Conv1d(256, 256, 3, padding=1), 256),
}


class Block(nn.Module):
    """A residual block: two kernels of 3, or in a bottleneck one of 3 between two of 1."""

    def __init__(self, channels: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        plan = [(3, stride, width), (3, 1, width)]
        if bottleneck:
            plan = [(1, 1, width), (3, stride, width), (1, 1, 4 * width)]
        layers: list[nn.Module] = []
        inside = channels
        for kernel, step, out in plan:
            layers += [nn.Conv2d(inside, out, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            inside = out
        self.body = nn.Sequential(*layers[:-1])
        self.side = nn.Sequential()
        if stride > 1 or channels != inside:
            self.side = nn.Sequential(nn.Conv2d(channels, inside, 1, stride, bias=False), nn.BatchNorm2d(inside))

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.side(x))


def resnet(depth: int) -> nn.Sequential:
    """A ResNet of 6, 18 or 50 layers, with weights as at the beginning of training."""
    found = {6: ((1, 1, 0, 0), False), 18: ((2, 2, 2, 2), False), 50: ((3, 4, 6, 3), True)}
    counts, bottleneck = found[depth]
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for stage, count in enumerate(counts):
        for i in range(count):
            width = 64 << stage
            layers.append(Block(channels, width, 2 if stage and not i else 1, bottleneck))
            channels = width * (4 if bottleneck else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def sides(occupancy: float) -> list[tuple[int, int]]:
    """Heights and widths between LEAST and MOST that fill their rectangle so far."""
    order = torch.randperm(B, generator=torch.Generator().manual_seed(0))
    even = torch.linspace(0, 1, B, dtype=torch.float64)
    low, high, side = 0.0, 20.0, even.long()
    for _ in range(50):  # the more the power is, the smaller the images
        power = (low + high) / 2
        side = (LEAST + (MOST - LEAST) * even**power).round().long()
        if float((side * side[order]).sum()) / (B * MOST * MOST) > occupancy:
            low = power
        else:
            high = power
    return list(zip(side.tolist(), side[order].tolist(), strict=True))


def measure(report: Report, depth: int, occupancy: float, rounds: int) -> None:
    """Inference, training and the most bytes alive in it at one occupancy."""
    torch.manual_seed(0)
    images = [torch.randn(3, h, w) for h, w in sides(occupancy)]
    net, packed = resnet(depth).to(report.device), tdc.pack(images, ragged_dim=(2, 3)).to(report.device)
    rectangle = torch.stack([F.pad(x, (0, MOST - x.shape[2], 0, MOST - x.shape[1])) for x in images]).to(report.device)
    inner = rectangle.to(memory_format=torch.channels_last)
    alone = [x.unsqueeze(0).to(report.device) for x in images]
    runs: dict[str, Callable[[], Tensor]] = {
        "tdc": lambda: net(packed),
        "padded": lambda: net(rectangle),
        "last": lambda: net(inner),
        "loop": lambda: torch.cat([net(x) for x in alone]),
    }
    weights = list(net.parameters())
    real = packed.values.shape[1] / rectangle[:, 0].numel()
    report.note(f"ResNet-{depth}: {B} images, {real:.0%} real")

    def inference(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return torch.inference_mode()(run)

    def training(run: Callable[[], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(run().square().sum(), weights)

    for mode, wrap, limit in zip(("inference", "training"), (inference, training), LIMITS[occupancy], strict=True):
        net.train(mode == "training")
        if mode == "inference":
            ours, theirs = inference(runs["tdc"])(), inference(runs["loop"])()
            off = float((ours - theirs).abs().max() / theirs.abs().max())
            report.note(f"ResNet-{depth} {occupancy:.0%}: logits off by {off:.1e} of the largest")
            assert off <= EXACT, off
        times = in_turns({name: wrap(run) for name, run in runs.items()}, rounds)
        what = f"ResNet-{depth} {occupancy:.0%} {mode}"
        report.row(what, times, "padded")
        report.limit(f"{what}: tdc to padded", ratio(times["tdc"], times["padded"]), limit)
    found = {name: peak_bytes(training(runs[name])) for name in ("tdc", "padded")}
    report.note(f"ResNet-{depth} {occupancy:.0%}: {', '.join([f'{n} {b / 2**20:.0f} MiB' for n, b in found.items()])}")
    figure = spread([found["tdc"] / found["padded"]])
    report.limit(f"memory of ResNet-{depth} {occupancy:.0%} training: tdc to padded", figure, MEMORY)


def layer(report: Report, name: str, net: nn.Module, parts: list[Tensor], rounds: int) -> None:
    """Inference and training of one layer."""
    net = net.to(report.device)
    n = parts[0].ndim - 1
    most = [max([x.shape[d] for x in parts]) for d in range(1, n + 1)]
    packed = tdc.pack([x.to(report.device) for x in parts], ragged_dim=tuple(range(2, n + 2)))
    packed = packed.with_values(packed.values.t().contiguous().t()).requires_grad_()
    padded = packed.detach().to_padded().data.contiguous().requires_grad_()
    alone = [x.unsqueeze(0).to(report.device).requires_grad_() for x in parts]
    weights = list(net.parameters())
    results = zip(net(packed).unbind(), [net(x)[0] for x in alone], strict=True)
    off = max([float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in results])
    report.note(f"{name}: {tuple(most)} at {packed.values[0].numel() / padded[:, 0].numel():.0%}, off by {off:.1e}")
    assert off <= EXACT, off

    def values(out: Any) -> Tensor:
        return out if isinstance(out, Tensor) else out.values

    forward: dict[str, Callable[[], Any]] = {
        "tdc": lambda: net(packed),
        "padded": lambda: net(padded),
        "loop": lambda: [net(x) for x in alone],
    }
    training: dict[str, Callable[[], Any]] = {
        "tdc": lambda: torch.autograd.grad(values(net(packed)).sum(), [packed.values, *weights]),
        "padded": lambda: torch.autograd.grad(net(padded).sum(), [padded, *weights]),
        "loop": lambda: [torch.autograd.grad(net(x).sum(), [x, *weights]) for x in alone],
    }
    for mode, calls in (("forward", {k: torch.no_grad()(run) for k, run in forward.items()}), ("training", training)):
        times = interleaved(calls, rounds=rounds, burst=0.02, device=report.device)
        report.row(f"{name} {mode}", times, "padded")
        report.limit(f"{name} {mode}: tdc to padded", ratio(times["tdc"], times["padded"]), LAYER_LIMIT)


def layers(report: Report, rounds: int) -> None:
    """All layers, on maps of quarter the sides of the images and on sequences."""
    generator = torch.Generator().manual_seed(0)
    maps = [torch.randn(64, h // 4, w // 4, generator=generator) for h, w in [*sides(0.43), *sides(0.43)]]
    for name, net in LAYERS.items():
        layer(report, name, net, maps, rounds)
    for name, (net, most) in SEQUENCES.items():
        lengths = (most * torch.linspace(0.02, 1, 32) ** 1.5).long().clamp(min=4).tolist()
        layer(report, name, net, [torch.randn(net.in_channels, n, generator=generator) for n in lengths], rounds)


def main() -> None:
    args = arguments("bench_vision")
    question = "What do a ResNet and single layers cost on images of different sizes against padding and a loop?"
    report = Report("bench_vision", question, args.device, args.quick)
    layers(report, 5 if args.quick else 21)
    for depth in (18,) if args.quick else (18, 50):
        for occupancy in LIMITS:
            measure(report, depth, occupancy, 3 if args.quick else 7)
    report.write()


if __name__ == "__main__":
    main()
