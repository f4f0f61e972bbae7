"""The same ragged batch and the same computation for each candidate of `bench_nested`.

raw            packed values, and for the encoder linears on them with one SDPA for each example, by hand
tdc            NestedTensor in the stock modules
padded         (B, longest, D) with a padding mask in the stock modules
danling        DanLing's NestedTensor in the stock modules
torch.nested   jagged layout; in the encoder a functional twin, as nn.MultiheadAttention refuses it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.nested_chain import values_of
from tdc import NestedTensor, offsets_of

Model = Callable[[Any], Any]


@dataclass
class Ragged:
    """Rows of given lengths, in the form of each candidate; all are made of one leaf."""

    values: Tensor
    lengths: list[int]

    def __post_init__(self) -> None:
        torch._dynamo.maybe_mark_dynamic(self.values, 0)
        self.offsets = offsets_of(torch.tensor(self.lengths)).to(self.values.device)
        longest = torch.arange(max(self.lengths), device=self.values.device)
        self.padding = longest >= self.offsets.diff()[:, None]
        self.nested = NestedTensor(self.values, self.offsets, max_length=max(self.lengths))

    @property
    def occupancy(self) -> float:
        return sum(self.lengths) / self.padding.numel()

    def builders(self, danling: ModuleType | None) -> dict[str, Model]:
        """By candidate: packed values -> its batch, on a structure that is ready."""
        longest = max(self.lengths)

        def jagged(v: Tensor) -> Any:
            return torch.nested.nested_tensor_from_jagged(v, self.offsets, max_seqlen=longest, min_seqlen=1)

        def pad(v: Tensor) -> Tensor:
            return nn.utils.rnn.pad_sequence(list(v.split(self.lengths)), batch_first=True)

        found: dict[str, Model] = {"raw": lambda v: v, "tdc": self.nested.with_values, "padded": pad}
        if danling:
            theirs = danling.NestedTensor(*self.values.detach().split(self.lengths), ragged_dims=(0,))
            found["danling"] = theirs.packed_like
        return found | {"torch.nested": jagged}

    def real(self, name: str, y: Any) -> Tensor:
        """The packed values of a result."""
        return y[~self.padding] if name == "padded" else values_of(name, y)


def chain(weight: Tensor) -> Model:
    """Four operations: relu, add, gelu, layer_norm."""
    shape = tuple(weight.shape)
    return lambda x: F.layer_norm(F.gelu(F.relu(x) + 0.5), shape, weight)


def encoder(features: int, heads: int, wide: int, device: str) -> nn.TransformerEncoder:
    """Two stock layers without dropout."""
    layer = nn.TransformerEncoderLayer(features, heads, wide, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)


def encoders(model: nn.TransformerEncoder, batch: Ragged) -> dict[str, Model]:
    """The encoder as each candidate runs it, with the same weights."""

    def padded(x: Tensor) -> Tensor:
        return model(x, src_key_padding_mask=batch.padding)

    def raw(x: Any) -> Any:
        return by_layers(model, x, lambda attn, y: packed_attention(attn, y, batch.lengths))

    def twin(x: Any) -> Any:
        return by_layers(model, x, jagged_attention)

    return {"raw": raw, "tdc": model, "padded": padded, "danling": model, "torch.nested": twin}


def by_layers(model: nn.TransformerEncoder, x: Any, attend: Callable[[Any, Any], Any]) -> Any:
    """The encoder's layers by hand, norm last, with an attention of one's own."""
    for layer in model.layers:
        y: Any = layer
        x = y.norm1(x + attend(y.self_attn, x))
        x = y.norm2(x + y.linear2(F.relu(y.linear1(x))))
    return x


def packed_attention(attn: nn.MultiheadAttention, x: Tensor, lengths: list[int]) -> Tensor:
    """Self-attention of packed values `(N, D)`: one projection, and one SDPA for each example."""
    packed = F.linear(x, attn.in_proj_weight, attn.in_proj_bias).unflatten(-1, (3, attn.num_heads, -1))
    outs = []
    for part in packed.split(lengths):
        q, k, v = part.permute(1, 2, 0, 3)[:, None]
        outs.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
    return attn.out_proj(torch.cat(outs).flatten(1))


def jagged_attention(attn: nn.MultiheadAttention, x: Any) -> Any:
    """Self-attention of torch's nested tensors; they need contiguous q, k and v, so three projections."""
    weights, biases = attn.in_proj_weight.chunk(3), attn.in_proj_bias.chunk(3)
    q, k, v = [
        F.linear(x, w, b).unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)
        for w, b in zip(weights, biases, strict=True)
    ]
    return attn.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
