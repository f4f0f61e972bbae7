"""Decoding with a cache of ragged rows: prompts of any lengths, one token of each row at a time, no padding.

    python examples/decode.py

    greedy        rows that end make place for the next prompts: eight at a time, forty in all
    sampling      of each row's own distribution
    beam          the best of four ways to go on, whose caches change places
    speculative   a small network guesses four tokens, the large one reads all of them at once and keeps what is right

Each is compared with the loop over prompts that recomputes everything, and greedy decoding with the loop over a padded
batch. The network is random: what it says means nothing, how it is made is what is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from tdc.nn import KVCache

TOKENS, WIDTH, HEADS, LONGEST, END = 50, 64, 4, 160, 0
SIZE = WIDTH // HEADS
Caches = list[KVCache]


class Layer(nn.Module):
    """Attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any, attend: Callable[[Any, Any, Any], Any]) -> Any:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, SIZE)).unbind(2)
        x = x + self.out(attend(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """Tokens to the scores of those that follow; what is read of other positions `attend(layer, q, k, v)` says."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Any, places: Any, attend: Callable[..., Any]) -> Any:
        x = self.tokens(tokens) + self.places(places)
        for i, layer in enumerate(self.layers):
            x = layer(x, lambda q, k, v, i=i: attend(i, q, k, v))
        return self.head(x)


def step(net: Decoder, caches: Caches, tokens: Any) -> tuple[Any, Caches]:
    """Scores behind each of the new tokens, ragged or (B, n), and the caches with them."""
    kept: Caches = []

    def attend(i: int, q: Any, k: Any, v: Any) -> Any:
        kept.append(caches[i].append_(k, v))
        return kept[i].attend(q)

    return net(tokens, caches[0].positions(tokens), attend), kept


def allocate(net: Decoder, rows: int) -> Caches:
    return [KVCache.allocate(rows, LONGEST, heads=HEADS, head_dim=SIZE) for _ in net.layers]


def shorter(caches: Caches, length: Tensor) -> Caches:
    return [cache.truncate_to(length) for cache in caches]


def greedy(net: Decoder, prompts: list[Tensor], most: int, rows: int = 8) -> list[list[int]]:
    """The likeliest tokens behind each prompt, `most` of them or until END; who is done makes place for the next."""
    found: list[list[int]] = [[] for _ in prompts]
    waiting, there = list(range(len(prompts))), [-1] * rows  # which prompt is in which row
    caches, nothing = allocate(net, rows), torch.zeros(0, dtype=torch.int64)
    tokens = torch.zeros(rows, 1, dtype=torch.int64)
    while True:
        new = [nothing] * rows
        for row, prompt in enumerate(there):
            if prompt < 0 and waiting:
                there[row] = waiting.pop(0)
                new[row] = prompts[there[row]]
        begins = torch.tensor([len(x) > 0 for x in new])
        if bool(begins.any()):  # their rows begin anew, the others get nothing
            caches = shorter(caches, caches[0].length.masked_fill(begins, 0))
            scores, caches = step(net, caches, tdc.pack(new))
            last = torch.stack([x[-1] if len(x) else x.new_zeros(TOKENS) for x in scores.unbind()])
            tokens = torch.where(begins[:, None], last.argmax(-1, keepdim=True), tokens)
        if max(there) < 0:
            return found
        for row, prompt in enumerate(there):
            if prompt >= 0:
                found[prompt].append(int(tokens[row]))
                if len(found[prompt]) == most or found[prompt][-1] == END:
                    there[row] = -1
        free = torch.tensor([prompt < 0 for prompt in there])
        if not bool(free.all()):
            caches = shorter(caches, caches[0].length.masked_fill(free, 0))
            scores, caches = step(net, caches, tokens)
            tokens = scores[:, -1].argmax(-1, keepdim=True)


def sampled(net: Decoder, prompts: list[Tensor], most: int, generator: torch.Generator) -> Tensor:
    """Tokens drawn from what the network says, (B, most)."""
    scores, caches = step(net, allocate(net, len(prompts)), tdc.pack(prompts))
    last, found = scores[:, -1], []
    for _ in range(most):
        found.append(torch.multinomial(last.softmax(-1), 1, generator=generator))
        scores, caches = step(net, caches, found[-1])
        last = scores[:, -1]
    return torch.cat(found, 1)


def beams(net: Decoder, prompts: list[Tensor], most: int, width: int) -> tuple[Tensor, Tensor]:
    """The best of `width` ways behind each prompt, (B, most), and how likely it is: its log probability."""
    many = len(prompts)
    scores, caches = step(net, allocate(net, many * width), tdc.pack([p for p in prompts for _ in range(width)]))
    last = scores[:, -1].log_softmax(-1).view(many, width, TOKENS)
    total = torch.full((many, width), -torch.inf).index_fill(1, torch.tensor([0]), 0.0)  # all are alike at first
    ways = torch.zeros(many, width, 0, dtype=torch.int64)
    for i in range(most):
        total, best = (total[..., None] + last).flatten(1).topk(width)
        parent, token = best // TOKENS, best % TOKENS
        ways = torch.cat([ways.gather(1, parent[..., None].expand_as(ways)), token[..., None]], 2)
        if i < most - 1:
            rows = (parent + torch.arange(many)[:, None] * width).flatten()
            caches = [tdc.copy_(cache, cache[rows]) for cache in caches]
            scores, caches = step(net, caches, token.view(-1, 1))
            last = scores[:, -1].log_softmax(-1).view(many, width, TOKENS)
    return ways[:, 0], total[:, 0]


def speculative(net: Decoder, small: Decoder, prompts: list[Tensor], most: int, guesses: int) -> tuple[Tensor, float]:
    """The tokens of `greedy`, and how many of them each call of the network gives."""
    many = len(prompts)
    scores, caches = step(net, allocate(net, many), tdc.pack(prompts))
    _, drafts = step(small, allocate(small, many), tdc.pack(prompts))
    found = [[int(x)] for x in scores[:, -1].argmax(-1)]
    calls = 1
    while min(len(x) for x in found) < most:
        known, tokens = caches[0].length, torch.tensor([[x[-1]] for x in found])
        guessed, draft = [tokens], drafts
        for _ in range(guesses):
            said, draft = step(small, draft, guessed[-1])
            guessed.append(said[:, -1].argmax(-1, keepdim=True))
        guess = torch.cat(guessed, 1)  # (B, guesses + 1), the first of them known
        scores, caches = step(net, caches, guess)
        truth, calls = scores.argmax(-1), calls + 1
        right = (truth[:, :-1] == guess[:, 1:]).long().cumprod(1).sum(1)
        caches = shorter(caches, known + 1 + right)
        _, drafts = step(small, shorter(draft, known), guess)  # of which it has not read the last one yet
        drafts = shorter(drafts, known + 1 + right)
        for row, (n, own) in enumerate(zip(right.tolist(), truth.tolist(), strict=True)):
            found[row] += own[: n + 1]
    return torch.tensor([x[:most] for x in found]), sum([len(x) for x in found]) / many / calls


def whole(net: Decoder, tokens: Tensor) -> Tensor:
    """Scores behind the last of the tokens (B, n), everything computed anew."""

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)

    return net(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), attend)[:, -1]


def alone(net: Decoder, prompt: Tensor, most: int) -> list[int]:
    """What `greedy` gives, without a cache."""
    found: list[int] = []
    while len(found) < most and END not in found:
        found.append(int(whole(net, torch.cat([prompt, torch.tensor(found, dtype=torch.int64)])[None]).argmax()))
    return found


def padded(net: Decoder, prompts: list[Tensor], most: int) -> Tensor:
    """Greedy decoding of prompts that are padded on the left, with keys and values of a rectangle, (B, most)."""
    longest = max([len(p) for p in prompts])
    begin = torch.tensor([longest - len(p) for p in prompts])
    tokens, at = torch.stack([F.pad(p, (longest - len(p), 0)) for p in prompts]), torch.arange(longest)
    memory = [[torch.zeros(len(prompts), HEADS, LONGEST, SIZE) for _ in range(2)] for _ in net.layers]
    found: list[Tensor] = []
    for t in range(longest, longest + most):
        columns = torch.arange(t)
        mask = (columns >= begin[:, None, None]) & (columns <= at[:, None]) | (columns == at[:, None])

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor, t: int = t, mask: Tensor = mask) -> Tensor:
            for x, new in zip(memory[i], (k, v), strict=True):
                x[:, :, t - new.shape[1] : t] = new.transpose(1, 2)
            keys, values = (x[:, :, :t] for x in memory[i])
            return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask[:, None]).transpose(1, 2)

        tokens = net(tokens, (at - begin[:, None]).clamp(min=0), attend)[:, -1].argmax(-1, keepdim=True)
        found.append(tokens)
        at = torch.tensor([t])
    return torch.cat(found, 1)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and the seconds that it takes once it is warm."""
    call()
    begin = time.perf_counter()
    return call(), time.perf_counter() - begin


def main() -> None:
    torch.manual_seed(0)
    net, small = Decoder(3).eval(), Decoder(3).eval()
    small.load_state_dict({name: x + 0.02 * torch.randn_like(x) for name, x in net.state_dict().items()})
    prompts = [torch.randint(1, TOKENS, (n,)) for n in torch.randint(2, 80, (40,)).tolist()]
    with torch.no_grad():
        expected = [alone(net, p, 24) for p in prompts]
        found, seconds = timed(lambda: greedy(net, prompts, 24))
        count = sum([len(x) for x in found])
        print(f"greedy: {count / seconds:.0f} tokens/s, as each prompt alone: {found == expected}")
        few = prompts[:8]
        rows, seconds = timed(lambda: padded(net, few, 24))
        ours, own = timed(lambda: greedy(net, few, 24))
        same = all([a[: len(b)].tolist() == b for a, b in zip(rows, ours, strict=True)])
        speeds = f"{rows.numel() / seconds:.0f} tokens/s padded, {sum([len(x) for x in ours]) / own:.0f} ragged"
        print(f"eight at once: {speeds}, the same: {same} (bench/bench_decode.py has the sizes where it counts)")
        drawn = [sampled(net, few, 24, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
        print(f"sampling: repeated {torch.equal(*drawn[:2])}, differs with the seed {not torch.equal(*drawn[1:])}")
        likely = [beams(net, few, 12, width)[1].sum() for width in (1, 4)]
        first = beams(net, few, 12, 1)[0]
        same = all([a[: len(b)].tolist() == b[:12] for a, b in zip(first, ours, strict=True)])
        print(f"beam: one is greedy {same}, four are likelier {bool(likely[1] >= likely[0])}")
        guessed, each = speculative(net, small, few, 24, 4)
        same = all([a[: len(b)].tolist() == b for a, b in zip(guessed, ours, strict=True)])
        print(f"speculative: {each:.1f} tokens of each call, as greedy: {same}")


if __name__ == "__main__":
    main()
