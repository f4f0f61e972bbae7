"""What does decoding of ragged prompts cost, against the loop over a padded batch?

32 prompts of 16 to 512 tokens, which fill 20, 35 and 50 % of their rectangle, 128 new tokens of each, greedy, by 4
layers of 256 features with 8 heads. The prompts go through the network at once, then one token of each row at a time;
keys and values of all positions are kept.

    tdc                a ragged batch of prompts, `tdc.nn.KVCache`; a row attends to the positions that it has
    padded             prompts padded on the left; memory for all positions, of which a step reads those so far,
                       with a mask
    padded, joined     the same with `torch.cat` of keys and values in each step, as generation loops of libraries do
    compiled           both in two graphs, one for prompts and one for a token; the padded one reads all of its memory

All give the same tokens. Times are of everything: prompts and 128 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import tdc
from bench._timing import Report, arguments, interleaved, ratio, spread
from bench.nested_chain import lengths_for
from tdc.nn import KVCache

ROWS, SHORTEST, LONGEST, NEW = 32, 16, 512, 128
LAYERS, WIDTH, HEADS, TOKENS = 4, 256, 8, 1000
SIZE = WIDTH // HEADS
LIMIT, OCCUPANCIES = 0.5, (0.2, 0.35, 0.5)
Attend = Callable[[int, Any, Any, Any], Any]  # a layer's queries, keys and values to what each query reads


class Layer(nn.Module):
    """Attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any, attend: Callable[..., Any]) -> Any:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, SIZE)).unbind(2)
        x = x + self.out(attend(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    """Features of tokens and their positions. `attend(layer, q, k, v)` reads the other positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LONGEST + NEW, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Any, positions: Any, attend: Attend) -> Any:
        x = self.tokens(tokens) + self.positions(positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, lambda q, k, v, i=i: attend(i, q, k, v))
        return x

    def next(self, x: Tensor) -> Tensor:
        """The most likely token behind features (B, WIDTH)."""
        return self.head(self.norm(x)).argmax(-1)[:, None]


def ragged_step(net: Decoder, caches: list[KVCache], tokens: Any) -> tuple[Tensor, list[KVCache]]:
    """New tokens of each row, ragged or (B, 1), to the next ones (B, 1)."""
    kept: list[KVCache] = []

    def attend(i: int, q: Any, k: Any, v: Any) -> Any:
        kept.append(caches[i].append_(k, v))
        return kept[i].attend(q)

    x = net(tokens, caches[0].positions(tokens), attend)
    return net.next(x[:, -1]), kept


def ragged(net: Decoder, prompts: list[Tensor], step: Callable[..., Any]) -> Tensor:
    """All new tokens (B, NEW), by caches of ragged rows."""
    caches = [KVCache.allocate(ROWS, LONGEST + NEW, heads=HEADS, head_dim=SIZE) for _ in range(LAYERS)]
    tokens, caches = step(net, caches, tdc.pack(prompts))
    found = [tokens]
    for _ in range(NEW - 1):
        tokens, caches = step(net, caches, tokens)
        found.append(tokens)
    return torch.cat(found, 1)


def padded_step(
    net: Decoder, caches: list[tuple[Tensor, Tensor]], tokens: Tensor, begin: Tensor, at: Tensor, seen: int
) -> Tensor:
    """New tokens (B, n) at the columns `at` (n,); row b has nothing before column `begin[b]`. A token reads the first
    `seen` columns."""
    columns = torch.arange(seen)
    mask = (columns >= begin[:, None, None]) & (columns <= at[:, None])
    mask = mask | (columns == at[:, None])  # padding sees itself, so that it has a softmax

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for memory, new in zip(caches[i], (k, v), strict=True):
            memory.index_copy_(2, at, new.transpose(1, 2))
        keys, values = (x[:, :, :seen] for x in caches[i])
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask[:, None]).transpose(1, 2)

    x = net(tokens, (at - begin[:, None]).clamp(min=0), attend)
    return net.next(x[:, -1])


def on_the_left(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts (B, LONGEST), and where each begins."""
    begin = torch.tensor([LONGEST - len(p) for p in prompts])
    return torch.stack([F.pad(p, (LONGEST - len(p), 0)) for p in prompts]), begin


def padded(net: Decoder, prompts: list[Tensor], step: Callable[..., Any], whole: bool) -> Tensor:
    """All new tokens, by a rectangle; `whole`: each step reads all of the memory, so that its shapes are the same."""
    caches = [tuple([torch.zeros(ROWS, HEADS, LONGEST + NEW, SIZE) for _ in range(2)]) for _ in range(LAYERS)]
    tokens, begin = on_the_left(prompts)
    tokens = step(net, caches, tokens, begin, torch.arange(LONGEST), LONGEST)
    found = [tokens]
    for t in range(LONGEST, LONGEST + NEW - 1):
        tokens = step(net, caches, tokens, begin, torch.tensor([t]), LONGEST + NEW if whole else t + 1)
        found.append(tokens)
    return torch.cat(found, 1)


def joined(net: Decoder, prompts: list[Tensor]) -> Tensor:
    """All new tokens, by a rectangle that grows."""
    caches: list[tuple[Tensor, Tensor]] = []
    tokens, begin = on_the_left(prompts)
    at = torch.arange(LONGEST)
    found: list[Tensor] = []
    for t in range(LONGEST, LONGEST + NEW):
        columns = torch.arange(t)
        mask = (columns >= begin[:, None, None]) & (columns <= at[:, None]) | (columns == at[:, None])

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor = mask) -> Tensor:
            new = (k.transpose(1, 2), v.transpose(1, 2))
            if i < len(caches):
                caches[i] = torch.cat([caches[i][0], new[0]], 2), torch.cat([caches[i][1], new[1]], 2)
            else:
                caches.append(new)
            return F.scaled_dot_product_attention(q.transpose(1, 2), *caches[i], mask[:, None]).transpose(1, 2)

        tokens = net.next(net(tokens, (at - begin[:, None]).clamp(min=0), attend)[:, -1])
        found.append(tokens)
        at = torch.tensor([t])
    return torch.cat(found, 1)


def prompts_of(occupancy: float, seed: int) -> list[Tensor]:
    """Prompts that fill such a part of the rectangle, the shortest and the longest among them."""
    drawn = [max(SHORTEST, n) for n in lengths_for(ROWS, LONGEST, occupancy).tolist()]
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    return [torch.randint(TOKENS, (drawn[i],)) for i in order.tolist()]


def candidates(net: Decoder) -> dict[str, Callable[[list[Tensor]], Tensor]]:
    """Functions that are timed, by name."""
    ours, theirs = torch.compile(ragged_step, fullgraph=True), torch.compile(padded_step, fullgraph=True, dynamic=False)
    return {
        "padded": lambda prompts: padded(net, prompts, padded_step, False),
        "padded, joined": lambda prompts: joined(net, prompts),
        "tdc": lambda prompts: ragged(net, prompts, ragged_step),
        "padded, compiled": lambda prompts: padded(net, prompts, theirs, True),
        "tdc, compiled": lambda prompts: ragged(net, prompts, ours),
    }


def measure(report: Report, fns: dict[str, Callable[[list[Tensor]], Tensor]], occupancy: float) -> None:
    """Times at one occupancy; all candidates give the same tokens, in the graphs that they have."""
    prompts = prompts_of(occupancy, 0)
    filled = sum([len(p) for p in prompts]) / ROWS / LONGEST
    expected = fns["padded"](prompts)
    for name, fn in fns.items():
        same = (fn(prompts) == expected).float().mean().item()
        report.note(f"{filled:.0%}, {name}: {same:.1%} of the tokens as padded")
    rounds = 1 if report.quick else 3
    times = interleaved({name: partial(fn, prompts) for name, fn in fns.items()}, rounds=rounds, count=1)
    for end, others in (("", ("padded", "padded, joined")), (", compiled", ("padded, compiled",))):
        label = f"{filled:.0%} filled{end}"
        report.row(label, {name: times[name] for name in (*others, f"tdc{end}")}, others[0])
        for other in others:
            report.limit(f"{label}: tdc to {other}", ratio(times[f"tdc{end}"], times[other]), LIMIT)


def main() -> None:
    args = arguments("bench_decode")
    question = "What does decoding of ragged prompts cost, against the loop over a padded batch?"
    report = Report("bench_decode", question, quick=args.quick)
    torch.manual_seed(0)
    fns = candidates(Decoder().eval())
    with torch.no_grad():
        before = counters["stats"]["unique_graphs"]
        for occupancy in OCCUPANCIES:
            fns["tdc, compiled"](prompts_of(occupancy, 1))
        made = counters["stats"]["unique_graphs"] - before
        report.limit("graphs for prompts and tokens of three batches", spread([float(made)]), 2.0, unit="graphs")
        for occupancy in OCCUPANCIES:
            measure(report, fns, occupancy)
    report.write()


if __name__ == "__main__":
    main()
