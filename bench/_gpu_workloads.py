"""The workloads of `bench.gpu`: the same computation in the form of each candidate.

    operators      eight of a transformer, 32 rows of up to 512 positions with 768 features, at 35 %
    encoder        `nn.TransformerEncoder`, 6 layers of 512 features with 8 heads, 32 rows of up to 512 positions
    decoder        `nn.TransformerDecoder`, the same sizes, causal; sources are as ragged as targets
    transformer    `nn.Transformer`, 6 and 6 layers
    resnet50       64 images with sides between 64 and 224
    text           an encoder of the shape of BERT-large, 24 layers of 1024 features with 16 heads, 32 reviews of
                   8,192 tokens in all, the longest of 2,048

    padded         the rectangle, with masks; `last` is one of images with channels innermost
    raw            packed values by hand: `torch.nn.attention.varlen`, in half precision
    tdc            the stock modules on a NestedTensor
    danling        the stock modules on DanLing's NestedTensor
    torch.nested   jagged layout; in encoders a functional twin, as nn.MultiheadAttention refuses it

Dropout is 0: all candidates compute the same. `TINY` sizes are for a run on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

import tdc
from bench._nested_rows import Ragged, by_layers, jagged_attention
from bench.bench_nested import lengths_at
from bench.bench_vision import resnet, sides
from bench.nested_chain import values_of

OCCUPANCIES = (0.20, 0.35, 0.77)
HALF = (torch.bfloat16, torch.float16)
Values = Callable[[Any, Tensor | None], Tensor]


class Sizes(NamedTuple):
    """How large workloads are."""

    rows: int = 32
    longest: int = 512
    wide: int = 768  # features of operators
    layers: int = 6
    features: int = 512
    heads: int = 8
    text: tuple[int, int, int, int, int] = (24, 1024, 16, 2048, 8192)  # layers, features, heads, longest, tokens
    depth: int = 50  # of a ResNet
    images: int = 64
    shrink: int = 1  # parts of the sides of images


TINY = Sizes(4, 16, 16, 1, 16, 2, (1, 16, 2, 24, 40), 6, 4, 7)


class Setup(NamedTuple):
    """Parts of workloads: devices of batches and of modules, their dtype, the library of a peer, and sizes."""

    device: str
    modules: str
    dtype: torch.dtype
    danling: ModuleType | None = None
    sizes: Sizes = Sizes()


class Candidate(NamedTuple):
    """One form of a computation.

    Attributes:
        module, inputs: what is called, and with what.
        values: real elements of a result, given `hidden`; zeros stand for others.
        hidden: True on padding of a rectangle (B, longest, 1).
        leaves: what training differentiates by, if the module has no weights.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    values: Values
    hidden: Tensor | None = None
    leaves: tuple[Any, ...] = ()

    def wanted(self) -> list[Any]:
        """Tensors that training differentiates by."""
        return [*self.module.parameters()] or [*self.leaves]


class Workload(NamedTuple):
    """One row of the table: a computation, and its candidates by name."""

    name: str
    candidates: dict[str, Candidate]


class Form(nn.Module):
    """`run(net, *inputs)` as a module."""

    def __init__(self, net: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.run = net, run

    def forward(self, *inputs: Any) -> Any:
        return self.run(self.net, *inputs)


def on_rectangle(y: Tensor, hidden: Tensor | None) -> Tensor:
    return y if hidden is None else y.masked_fill(hidden, 0)


def candidate(kind: str, module: nn.Module, inputs: tuple[Any, ...], batch: Ragged, **more: Any) -> Candidate:
    """A candidate whose result is as ragged as a batch."""
    if kind == "padded":
        return Candidate(module, inputs, on_rectangle, batch.padding.unsqueeze(-1), **more)
    return Candidate(module, inputs, READ[kind], **more)


def reading(kind: str) -> Values:
    """The packed values of one kind of result."""
    return lambda y, hidden: values_of(kind, y)


READ: dict[str, Values] = {kind: reading(kind) for kind in ("raw", "tdc", "danling", "torch.nested")}


def rows_of(lengths: list[int], features: int, setup: Setup) -> Ragged:
    """Rows of normal numbers."""
    return Ragged(torch.randn(sum(lengths), features, device=setup.device, dtype=setup.dtype), lengths)


def rows_at(occupancy: float, features: int, setup: Setup) -> Ragged:
    """Rows of normal numbers that fill so much of their rectangle."""
    return rows_of(lengths_at(occupancy, setup.sizes.rows, setup.sizes.longest), features, setup)


def operators(setup: Setup) -> Iterator[Workload]:
    """Eight operations of a transformer; training differentiates by weights, or by the values where there are none."""
    wide = setup.sizes.wide
    batch = rows_at(0.35, wide, setup)
    ids = Ragged(torch.randint(1000, (batch.values.shape[0],), device=setup.device), batch.lengths)
    with torch.device(setup.modules):
        product = Form(nn.Linear(wide, wide, bias=False), lambda net, x: torch.matmul(x, net.weight))
        modules: dict[str, nn.Module] = {
            "linear": nn.Linear(wide, wide), "layer_norm": nn.LayerNorm(wide), "relu": nn.ReLU(), "gelu": nn.GELU(),
            "softmax": nn.Softmax(-1), "embedding": nn.Embedding(1000, wide), "matmul": product,
            "add": Form(nn.Identity(), lambda net, x: torch.add(x, x)),
        }  # fmt: skip
    for name, module in modules.items():
        x = ids if name == "embedding" else batch
        module, forms, found = module.to(setup.dtype), x.builders(setup.danling), {}
        for kind, build in forms.items():
            given = build(x.values)
            leaf = not [*module.parameters()]
            given = given.detach().requires_grad_() if leaf else given
            by = (given.values if kind == "tdc" else given,) if leaf else ()
            found[kind] = candidate(kind, module, (given,), x, leaves=by)
        yield Workload(name, found)


def encoder(setup: Setup) -> Iterator[Workload]:
    """Encoders at three occupancies, with the same weights."""
    sizes = setup.sizes
    modules = forms_of(encoder_of(sizes.layers, sizes.features, sizes.heads, setup))
    for occupancy in OCCUPANCIES:
        yield encoded(f"{occupancy:.0%}", modules, rows_at(occupancy, sizes.features, setup), setup.danling)


def text(setup: Setup) -> Iterator[Workload]:
    """Texts whose lengths are as those of reviews: a quarter of a thousand tokens on average, one of thousands."""
    layers, features, heads, longest, tokens = setup.sizes.text
    rows = setup.sizes.rows
    lengths = lengths_at((tokens - longest) / (rows - 1) / longest, rows, longest)
    lengths[1] += tokens - sum(lengths)
    modules = forms_of(encoder_of(layers, features, heads, setup))
    yield encoded("texts", modules, rows_of(lengths, features, setup), setup.danling)


def encoder_of(layers: int, features: int, heads: int, setup: Setup) -> nn.TransformerEncoder:
    with torch.device(setup.modules):
        layer = nn.TransformerEncoderLayer(features, heads, 4 * features, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(setup.dtype)


def forms_of(net: nn.TransformerEncoder) -> dict[str, nn.Module]:
    """An encoder as each candidate calls it."""
    return {
        "padded": Form(net, lambda net, x, hidden: net(x, src_key_padding_mask=hidden)),
        "raw": Form(net, lambda net, x, *ends: by_layers(net, x, partial(varlen, ends=ends))),
        "tdc": net,
        "torch.nested": Form(net, lambda net, x: by_layers(net, x, jagged_attention)),
        "danling": net,
    }


def encoded(name: str, modules: dict[str, nn.Module], batch: Ragged, danling: ModuleType | None) -> Workload:
    """An encoder on one batch."""
    more: dict[str, tuple[Any, ...]] = {
        "padded": (batch.padding,),
        "raw": (batch.offsets.to(torch.int32), max(batch.lengths)),
    }
    found: dict[str, Candidate] = {}
    for kind, build in batch.builders(danling).items():
        if kind != "raw" or batch.values.dtype in HALF:
            inputs = (build(batch.values), *more.get(kind, ()))
            found[kind] = candidate(kind, modules[kind], inputs, batch)
    return Workload(name, found)


def varlen(attn: nn.MultiheadAttention, x: Tensor, ends: tuple[Any, ...]) -> Tensor:
    """Self-attention of packed values (N, D) by torch's kernel for them."""
    packed = F.linear(x, attn.in_proj_weight, attn.in_proj_bias).unflatten(-1, (3, attn.num_heads, -1))
    q, k, v = packed.unbind(1)
    starts, longest = ends
    out: Any = varlen_attn(q, k, v, starts, starts, longest, longest)
    return attn.out_proj(out.flatten(1))


def decoder(setup: Setup) -> Iterator[Workload]:
    """Causal decoders beside sources that are as ragged."""
    sizes, wide = setup.sizes, setup.sizes.features
    with torch.device(setup.modules):
        layer = nn.TransformerDecoderLayer(wide, sizes.heads, 4 * wide, dropout=0.0, batch_first=True)
        net = nn.TransformerDecoder(layer, sizes.layers).to(setup.dtype)
    yield from with_sources(net, ("memory", "tgt"), setup)


def transformer(setup: Setup) -> Iterator[Workload]:
    """Encoders and causal decoders."""
    _, _, _, layers, wide, heads, *_ = setup.sizes
    with torch.device(setup.modules):
        net = nn.Transformer(wide, heads, layers, layers, 4 * wide, dropout=0.0, batch_first=True).to(setup.dtype)
    net.encoder.enable_nested_tensor = False
    yield from with_sources(net, ("src", "tgt"), setup)


def with_sources(net: nn.Module, names: tuple[str, str], setup: Setup) -> Iterator[Workload]:
    """A net of sources and targets, at three occupancies of both."""
    first, second = names

    def run(net: nn.Module, source: Any, target: Any, causal: Tensor, hidden: Any = None, own: Any = None) -> Any:
        masks = {} if own is None else {f"{first}_key_padding_mask": hidden, f"{second}_key_padding_mask": own}
        if own is not None and first == "src":
            masks["memory_key_padding_mask"] = hidden
        return net(**{first: source, second: target}, tgt_mask=causal, tgt_is_causal=True, **masks)

    module = Form(net, run)
    for occupancy in OCCUPANCIES:
        source, target = [rows_at(occupancy, setup.sizes.features, setup) for _ in range(2)]
        causal = torch.ones(setup.sizes.longest, setup.sizes.longest, dtype=torch.bool, device=setup.device).triu(1)
        sources, targets = [batch.builders(setup.danling) for batch in (source, target)]
        found: dict[str, Candidate] = {}
        for kind in [k for k in sources if k in ("padded", "tdc", "danling")]:
            hidden = (source.padding, target.padding) if kind == "padded" else ()
            inputs = (sources[kind](source.values), targets[kind](target.values), causal, *hidden)
            found[kind] = candidate(kind, module, inputs, target)
        yield Workload(f"{occupancy:.0%}", found)


def resnet50(setup: Setup) -> Iterator[Workload]:
    """ResNet-50 of stock modules; zeros of the rectangle change its results at borders and in statistics."""
    sizes = setup.sizes
    with torch.device(setup.modules):
        net = resnet(sizes.depth).to(setup.dtype)
    for occupancy in (0.43, 0.68, 0.91):
        drawn = [(h // sizes.shrink, w // sizes.shrink) for h, w in sides(occupancy) * 4][: sizes.images]
        images = [torch.randn(3, h, w, device=setup.device, dtype=setup.dtype) for h, w in drawn]
        packed = tdc.pack(images, ragged_dim=(2, 3))
        rectangle = packed.to_padded().data
        last = rectangle.to(memory_format=torch.channels_last)
        inputs: dict[str, Any] = {"padded": rectangle, "last": last, "tdc": packed}
        if setup.danling:
            inputs["danling"] = setup.danling.NestedTensor(*images)
        yield Workload(f"{occupancy:.0%}", {k: Candidate(net, (x,), on_rectangle) for k, x in inputs.items()})


PARTS: dict[str, Callable[[Setup], Iterator[Workload]]] = {
    "operators": operators, "encoder": encoder, "decoder": decoder, "transformer": transformer, "resnet50": resnet50,
    "text": text,
}  # fmt: skip
