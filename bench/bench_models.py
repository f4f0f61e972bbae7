"""What do whole models cost on ragged batches, against the same models on padding?

    tagger          embedding, bidirectional LSTM, linear, cross entropy. B=32, longest 128 at 35 %, 128 features
    graphs          the network of `examples/graphs.py`: attention over neighbours. B=24, 2 to 30 points
    autoencoder     a masked autoencoder: a quarter of the patches of each image through an encoder, all of them through
                    a decoder. B=16, 16 to 64 patches a side by 8, 128 features
    convnet         convolutions, batch norm, max pooling and global pooling of images. B=8, 48 to 160 pixels a side

`padded` is the same model on rectangles, with padding left out of attention, statistics and losses. Inference runs
without autograd; training is forward, loss, and backward to the weights. Each with one thread and with two, eagerly and
as one graph by Inductor (`counted`, which also takes sizes that follow from data, as those of pairs of positions do).
The figures decide which operators of our own stay: docs/benchmarks.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from bench._timing import Call, Report, arguments, interleaved, ratio
from bench.nested_chain import lengths_for
from examples.graphs import Network, graphs, loss
from tdc.compile import counted

LIMIT = 1.15
Pair = tuple[nn.Module, dict[str, Callable[[Any], Tensor]]]  # weights, and losses by candidate; each takes the net


class Tagger(nn.Module):
    def __init__(self, words: int = 1000, width: int = 128, tags: int = 20) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(width, tags)

    def forward(self, ids: Any) -> Any:
        return self.head(self.lstm(self.embed(ids))[0])


def tagger(generator: random.Random) -> Pair:
    lengths = lengths_for(32, 128, 0.35).tolist()
    ids = tdc.pack([torch.randint(1000, (n,)) for n in lengths])
    tags = ids.with_values(ids.values % 20)
    wide, targets = ids.to_padded().data, tags.to_padded().filled(-100)

    def padded(net: Any) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(net.embed(wide), torch.tensor(lengths), True, enforce_sorted=False)
        out = nn.utils.rnn.pad_packed_sequence(net.lstm(packed)[0], batch_first=True)[0]
        return F.cross_entropy(net.head(out).flatten(0, 1), targets.flatten())

    def rectangle(net: Any) -> Tensor:
        return F.cross_entropy(net(wide).flatten(0, 1), targets.flatten())

    def ragged(net: Any) -> Tensor:
        return F.cross_entropy(net(ids).transpose(1, 2), tags)  # type: ignore[arg-type]  # a batch

    return Tagger(), {"rectangle": rectangle, "packed": padded, "tdc": ragged}


def clouds(generator: random.Random) -> Pair:
    batch = graphs(24, torch.Generator().manual_seed(0))
    points, charges, largest = [batch[name].to_padded() for name in ("points", "charges", "largest")]
    real = points.mask[..., 0]
    near = (points.data.unsqueeze(1) - points.data.unsqueeze(2)).square().sum(-1) < 0.09
    near = near & real[:, None, :] & real[:, :, None]

    def padded(net: Any) -> Tensor:
        x, found = net.embed(charges.data.unsqueeze(-1)), []
        for value, score in zip(net.attention.values, net.attention.scores, strict=True):
            h = value(x)
            mine, other = score(h).unbind(-1)
            scores = F.leaky_relu(mine.unsqueeze(2) + other.unsqueeze(1), 0.2).masked_fill(~near, -1e9)
            found.append(scores.softmax(2) @ h)
        out = net.head(torch.cat([x, *found], -1)).squeeze(-1)
        return (out - largest.data).masked_fill(~real, 0).square().sum() / real.sum()

    return Network(), {"rectangle": padded, "tdc": lambda net: loss(net, batch)}


class Autoencoder(nn.Module):
    def __init__(self, patch: int = 48, width: int = 128) -> None:
        super().__init__()
        self.embed, self.mask = nn.Linear(patch, width), nn.Parameter(torch.zeros(width))
        self.encoder, self.decoder = [
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(width, 4, 256, 0.0, batch_first=True), 2, enable_nested_tensor=False
            )
            for _ in range(2)
        ]
        self.head = nn.Linear(width, patch)


def autoencoder(generator: random.Random) -> Pair:
    lengths = [generator.randint(2, 8) * generator.randint(2, 8) for _ in range(16)]
    patches = tdc.pack([torch.randn(n, 48) for n in lengths])
    order = tdc.pack([torch.randperm(n) for n in lengths])
    few = [max(1, n // 4) for n in lengths]
    seen = tdc.pack([row[:k] for row, k in zip(order.unbind(), few, strict=True)])
    ends = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))[:-1]
    where = torch.cat([row + begin for row, begin in zip(seen.unbind(), ends, strict=True)])
    data, real = patches.to_padded().data, patches.to_padded().mask[..., 0]
    at, kept = seen.to_padded().data, seen.to_padded().mask

    def ragged(net: Any) -> Tensor:
        x = net.embed(patches)
        encoded = net.encoder(seen.with_values(x.values[where]))
        whole = net.mask.expand(x.values.shape).index_put((where,), encoded.values)
        return F.mse_loss(net.head(net.decoder(patches.with_values(whole))), patches)  # type: ignore[arg-type]  # batches

    def padded(net: Any) -> Tensor:
        x = net.embed(data)
        index = at.unsqueeze(-1).expand(*at.shape, x.shape[-1])
        encoded = net.encoder(x.gather(1, index), src_key_padding_mask=~kept)
        rows = torch.arange(len(at))[:, None].expand_as(at)
        whole = net.mask.expand(x.shape).index_put((rows[kept], at[kept]), encoded[kept])
        out = net.head(net.decoder(whole, src_key_padding_mask=~real))
        return (out - data).masked_fill(~real[..., None], 0).square().sum() / (real.sum() * data.shape[-1])

    return Autoencoder(), {"rectangle": padded, "tdc": ragged}


def convnet(generator: random.Random) -> Pair:
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, 1, 1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 10),
    )  # fmt: skip
    sizes = [(generator.randint(48, 160), generator.randint(48, 160)) for _ in range(8)]
    images = tdc.pack([torch.randn(3, *size) for size in sizes], ragged_dim=(2, 3))
    wide, labels = images.to_padded().data, torch.randint(10, (8,))
    return net, {  # statistics of the rectangle are those of padding, too
        "rectangle": lambda net: F.cross_entropy(net(wide), labels),
        "tdc": lambda net: F.cross_entropy(net(images), labels),
    }


MODELS = {"tagger": tagger, "graphs": clouds, "autoencoder": autoencoder, "convnet": convnet}


def calls_of(
    net: nn.Module, losses: dict[str, Callable[[Any], Tensor]], compiled: bool, learns: bool
) -> dict[str, Call]:
    """Candidates by name, of inference or of a training step that returns gradients."""
    weights = list(net.parameters())

    def call(name: str, loss_of: Callable[[Any], Tensor]) -> Call:
        if not compiled:
            run: Any = loss_of
        elif name == "tdc":  # one operator for an LSTM, which torch by itself unrolls, or leaves out of its graph
            run = torch._dynamo.config.patch(allow_rnn=True)(counted(loss_of))
        else:
            run = torch.compile(loss_of)

        def inference() -> Any:
            with torch.no_grad():
                return run(net)

        return (lambda: torch.autograd.grad(run(net), weights)) if learns else inference

    return {name: call(name, loss_of) for name, loss_of in losses.items()}


def measure(report: Report, name: str, threads: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    for compiled in (False, True):
        for learns in (False, True):
            torch.compiler.reset()
            net, losses = MODELS[name](random.Random(0))
            calls = calls_of(net.train(learns), losses, compiled, learns)
            for call in calls.values():
                call()
            times = interleaved(calls, rounds=5 if report.quick else 15, burst=0.05)
            mode, what = "compiled" if compiled else "eager", "training" if learns else "inference"
            report.row(f"{name}, {mode} {what}, {threads} threads", times, "rectangle")
            if learns:
                figure = ratio(times["tdc"], times["rectangle"])
                report.limit(f"{name}, {mode} {what}, {threads} threads", figure, LIMIT)
    torch.set_num_threads(1)


def main() -> None:
    given = arguments("bench_models")
    report = Report("bench_models", "What do whole models cost on ragged batches?", given.device, given.quick)
    for threads in (1, 2):
        for name in MODELS:
            measure(report, name, threads)
    report.write()


if __name__ == "__main__":
    main()
