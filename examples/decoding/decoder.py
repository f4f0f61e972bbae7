"""A decoder whose layers read other positions by a cache, and the two loops that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    """Scores of the token behind each token. `attend(layer, q, k, v)` reads the other positions."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Any, positions: Any, attend: Callable[..., Any]) -> Any:
        x = self.tokens(tokens) + self.positions(positions)
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


def whole(net: Decoder, tokens: Tensor) -> Tensor:
    """Scores behind the last of the tokens (B, n), everything computed anew."""

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)

    return net(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), attend)[:, -1]


def alone(net: Decoder, prompt: Tensor, most: int) -> list[int]:
    """Tokens of `greedy`, without a cache."""
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
