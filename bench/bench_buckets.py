"""What do graphs of fixed sizes cost: how many, how much filling, how exact, and the time of a step?

    python -m bench.bench_buckets

200 batches of 32 docstrings of the standard library, drawn in random order, go through one training step of a small
transformer with batch norm, made with `buckets="auto"` and without. Counted are graphs and filling; compared are the
losses of all batches and the parameters at the end, from equal states. On CPU there are no CUDA graphs, so filling can
only cost time: the table says how much.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from bench._timing import Report, arguments, exact, interleaved
from examples.demo.data import load_docstrings
from tdc.compile import train_step
from tdc.optim import sgd

ROWS, BATCHES, WIDTH = 32, 200, 64


class Net(nn.Module):
    """Bytes to classes: an encoder layer, batch norm over positions, a mean of each text."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, ids: tdc.NestedTensor) -> Tensor:
        x = self.encoder(self.embed(ids))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x.mean(1))


def loss(net: nn.Module, batch: tdc.TensorDict) -> Tensor:
    return F.cross_entropy(net(batch["ids"]), batch["label"])


def main() -> None:
    args = arguments("bench_buckets")
    report = Report("bench_buckets", "What do graphs of fixed sizes cost?", args.device, args.quick)
    torch.manual_seed(0)
    corpus, count = load_docstrings(), 30 if args.quick else BATCHES
    order = torch.randperm(len(corpus), generator=torch.Generator().manual_seed(0)).repeat(2)[: count * ROWS]
    batches = []
    for part in order.split(ROWS):
        ids = tdc.pack([torch.tensor(list(corpus.texts[i])) for i in part.tolist()])
        batches.append(tdc.TensorDict({"ids": ids, "label": torch.tensor(corpus.labels)[part]}, [ROWS]).to(args.device))
    totals = [batch["ids"].values.shape[0] for batch in batches]
    report.note(f"{count} batches of {ROWS} texts, {min(totals)} to {max(totals)} bytes")
    net = Net(len(corpus.classes)).to(args.device)
    plain, filled = train_step(net, loss, sgd(0.05)), train_step(net, loss, sgd(0.05), buckets="auto")
    a, b, off = plain.init(), filled.init(), 0.0
    for batch in batches:
        (a, x), (b, y) = plain(a, batch), filled(b, batch)
        off = max(off, (x["loss"] - y["loss"]).abs().item() / x["loss"].abs().item())
    apart = max(
        [
            (p - q).abs().max().item()
            for p, q in zip(a["params"].values(True, True), b["params"].values(True, True), strict=True)
        ]
    )
    report.note(f"largest difference of a loss {off:.1e} of it; of a parameter after all steps {apart:.1e}")
    counts = filled.counts
    for i in range(0, len(batches), max(len(batches) // 5, 1)):
        times = interleaved({"plain": lambda i=i: plain(a, batches[i]), "buckets": lambda i=i: filled(b, batches[i])},
                            rounds=5 if args.quick else 21)  # fmt: skip
        report.row(f"step of {totals[i]} bytes", times, "plain", buckets=counts.buckets, compiles=counts.compiles)
    report.limit("graphs of fixed sizes", exact(counts.buckets), 8, unit="")
    report.limit("filling", exact(counts.filling), 0.08, unit="")
    report.limit("difference of losses, relative", exact(off), 1e-5, unit="")
    report.write()


if __name__ == "__main__":
    main()
