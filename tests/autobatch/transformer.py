"""The transformer that Matchbox was tested with, as one writes it for one example: (T, D) in, (T, D) out."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdc

D, HEADS, WORDS = 8, 2, 11


class LayerNorm(nn.Module):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.rand(D) + 0.5), nn.Parameter(torch.rand(D))
        self.eps = eps

    @tdc.batch
    def forward(self, x):
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.gamma * (x - mean) / (std + self.eps) + self.beta


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    @tdc.batch
    def forward(self, x):
        return self.linear2(F.relu(self.linear1(x)))


class ResidualBlock(nn.Module):
    def __init__(self, layer: nn.Module, drop: float = 0.0) -> None:
        super().__init__()
        self.layer, self.norm, self.dropout = layer, LayerNorm(), nn.Dropout(drop)

    @tdc.batch
    def forward(self, x, *rest):
        return self.norm(x + self.dropout(self.layer(x, *rest)))


class Attention(nn.Module):
    """Scores, softmax, weights; a causal one sees no later key."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal

    @tdc.batch
    def forward(self, query, key, value):
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
        if self.causal:
            later = torch.ones_like(scores).triu(1) > 0
            scores = scores.masked_fill(later, -math.inf)
        return torch.matmul(scores.softmax(-1), value)


class MultiHead(nn.Module):
    """Heads in front, as `unflatten` and `transpose` put them."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.wq, self.wk, self.wv, self.wo = [nn.Linear(D, D, bias=False) for _ in range(4)]

    @tdc.batch
    def forward(self, query, key, value):
        q = self.wq(query).unflatten(-1, (HEADS, -1)).transpose(0, 1)
        k = self.wk(key).unflatten(-1, (HEADS, -1)).transpose(0, 1)
        v = self.wv(value).unflatten(-1, (HEADS, -1)).transpose(0, 1)
        return self.wo(self.attention(q, k, v).transpose(0, 1).flatten(-2))


class MultiHeadByChunks(nn.Module):
    """Matchbox's: one head after the other."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.wq, self.wk, self.wv, self.wo = [nn.Linear(D, D, bias=False) for _ in range(4)]

    @tdc.batch
    def forward(self, query, key, value):
        q, k, v = self.wq(query), self.wk(key), self.wv(value)
        q, k, v = q.chunk(HEADS, -1), k.chunk(HEADS, -1), v.chunk(HEADS, -1)
        heads = []
        for a, b, c in zip(q, k, v):  # noqa: B905  # as people write it
            heads.append(self.attention(a, b, c))
        return self.wo(torch.cat(heads, -1))


class SelfAttention(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.attention = MultiHead(Attention(causal))

    @tdc.batch
    def forward(self, x):
        return self.attention(x, x, x)


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHead(Attention())

    @tdc.batch
    def forward(self, x, memory):
        return self.attention(x, memory, memory)


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feedforward = ResidualBlock(SelfAttention()), ResidualBlock(FeedForward())

    @tdc.batch
    def forward(self, x):
        return self.feedforward(self.attention(x))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = ResidualBlock(SelfAttention(causal=True)), ResidualBlock(CrossAttention())
        self.feedforward = ResidualBlock(FeedForward())

    @tdc.batch
    def forward(self, x, memory):
        return self.feedforward(self.cross(self.own(x), memory))


@tdc.batch
def positional_encodings(x):
    """Sines and cosines of the positions of an example (T, D)."""
    position = (torch.ones_like(x[:, :1]).cumsum(0) - 1).detach()
    rate = torch.exp(torch.arange(0, D, 2) * (-math.log(10000.0) / D))
    angle = position * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


class Encoder(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([EncoderLayer() for _ in range(layers)])

    @tdc.batch
    def forward(self, x):
        x = x + positional_encodings(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Decoder(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DecoderLayer() for _ in range(layers)])

    @tdc.batch
    def forward(self, x, memory):
        x = x + positional_encodings(x)
        for layer in self.layers:
            x = layer(x, memory)
        return x


class Transformer(nn.Module):
    """From words (S,) and the words so far (T,) to the loss of each next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(WORDS, D), nn.Linear(D, WORDS)
        self.encoder, self.decoder = Encoder(1), Decoder(1)

    @tdc.batch
    def forward(self, source, target):
        memory = self.encoder(self.embedding(source) * math.sqrt(D))
        states = self.decoder(self.embedding(target[:-1]) * math.sqrt(D), memory)
        return F.cross_entropy(self.out(states), target[1:], reduction="none")


class StockEncoder(nn.Module):
    """torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, HEADS)
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.feedforward = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
        self.conv = nn.Conv1d(D, D, 3, padding=1)

    @tdc.batch
    def forward(self, x):
        found, _ = self.attention(x, x, x, need_weights=False)
        x = self.norm1(x + found)
        x = self.norm2(x + self.feedforward(x))
        return self.conv(x.transpose(0, 1)).transpose(0, 1).mean(0)


@tdc.batch
def fused(x, y):
    return F.scaled_dot_product_attention(x, y, y), F.scaled_dot_product_attention(x, x, x, is_causal=True)


def words(count: int) -> Tensor:
    return torch.randint(0, WORDS, (count,))


def rows(count: int) -> Tensor:
    return torch.randn(count, D, dtype=torch.float64, requires_grad=True)


CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {  # what makes the function, and what draws its arguments
    "fused attention": (lambda: fused, (rows, rows)),
    "heads by chunks": (lambda: MultiHeadByChunks(Attention()), (rows, rows, "the second")),
    "encoder": (Encoder, (rows,)),
    "transformer": (Transformer, (words, words)),  # with all other modules as parts
    "stock encoder": (StockEncoder, (rows,)),
}
