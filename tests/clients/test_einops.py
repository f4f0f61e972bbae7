"""einops 0.8.2 on packed and padded batches and on TensorDicts: each result is that of the loop over examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Counter
from torch import Tensor
from torch.testing import assert_close

import tdc
from tdc.einops import register

einops: Any = pytest.importorskip("einops")
pytestmark = pytest.mark.clients
register()
KINDS = ("packed", "padded")
LENGTHS = ((4, 2, 0), (2, 6), (8, 4, 4, 2))
SIZES = (((4, 5), (2, 7)), ((3, 3), (1, 2), (6, 1)), ((2, 2), (5, 4)))


def tokens(lengths: Any = LENGTHS[0], dim: int = 8) -> list[Tensor]:
    return [torch.randn(n, dim) for n in lengths]


def images(sizes: Any = SIZES[0]) -> list[Tensor]:
    return [torch.randn(6, *n) for n in sizes]


def batch(rows: list[Tensor], kind: str) -> Any:
    """Rows of (T, D) or (C, H, W), packed, or padded with what must not be read."""
    x = tdc.pack(rows, ragged_dim=1 if rows[0].ndim == 2 else (2, 3))
    return x if kind == "packed" else x.to_padded(float("nan"))


def row_pattern(pattern: str) -> str:
    """A pattern of a batch `b ...` as that of one example."""
    return " -> ".join([side.strip().removeprefix("b ") for side in pattern.split("->")])


def results(x: Any) -> list[Tensor]:
    return list(x.unbind())


REARRANGE: dict[str, tuple[Callable[..., list[Tensor]], dict[str, int]]] = {
    "b t (h d) -> b h t d": (tokens, {"h": 4}), "b t (h d) -> b t h d": (tokens, {"d": 4}),
    "b t (h d) -> b (h t) d": (tokens, {"h": 4}), "b (t p) d -> b t (p d)": (tokens, {"p": 2}),
    "b (p t) d -> b t p d": (tokens, {"p": 2}), "b t d -> b d t 1": (tokens, {}), "b t d -> b (t d)": (tokens, {}),
    "b t d -> b (d t)": (tokens, {}), "b c h w -> b (h w) c": (images, {}), "b c h w -> b c (h w)": (images, {}),
    "b c h w -> b w h c": (images, {}), "b c h w -> b h (w c)": (images, {}), "b c h w -> b h w c 1": (images, {}),
    "b (g c) h w -> b g (h w) c": (images, {"g": 2}), "b c ... -> b ... c": (images, {}),
    "b ... -> b (...)": (images, {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", REARRANGE)
def test_rearrange(pattern: str, kind: str):
    make, sizes = REARRANGE[pattern]
    rows = [row.requires_grad_() for row in make()]
    out = results(einops.rearrange(batch(rows, kind), pattern, **sizes))
    want = [einops.rearrange(row, row_pattern(pattern), **sizes) for row in rows]
    assert_close(out, want)
    got, expected = [torch.autograd.grad([y.square().sum() for y in ys], rows) for ys in (out, want)]
    assert_close(got, expected)


REDUCE: dict[str, tuple[Callable[..., list[Tensor]], dict[str, int]]] = {
    "b t d -> b d": (tokens, {}), "b (t p) d -> b t d": (tokens, {"p": 2}), "b t (h d) -> b t h": (tokens, {"h": 2}),
    "b c h w -> b c": (images, {}), "b c h w -> b c h": (images, {}), "b c h w -> b (h w)": (images, {}),
    "b (g c) h w -> b g": (images, {"g": 3}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["mean", "sum", "max", "min", "prod"])
@pytest.mark.parametrize("pattern", REDUCE)
def test_reduce(pattern: str, operation: str, kind: str):
    make, sizes = REDUCE[pattern]
    rows = [row.requires_grad_() for row in (make((4, 2)) if make is tokens else make())]
    out = results(einops.reduce(batch(rows, kind), pattern, operation, **sizes))
    want = [einops.reduce(row, row_pattern(pattern), operation, **sizes) for row in rows]
    assert_close(out, want)
    got, expected = [torch.autograd.grad([y.square().sum() for y in ys], rows) for ys in (out, want)]
    assert_close(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_reduce_of_all_examples_and_by_a_function(kind: str):
    rows = tokens((4, 2))
    x = batch(rows, kind)
    assert_close(einops.reduce(x, "b t d -> d", "mean"), torch.cat(rows).mean(0))
    assert einops.reduce(batch([row > 9 for row in rows], "packed"), "b t d -> b", "any").tolist() == [False, False]
    spread = einops.reduce(x, "b t d -> b d", lambda y, dims: y.std(dims))
    assert_close(spread, torch.stack([row.std(0) for row in rows]))


@pytest.mark.parametrize("kind", KINDS)
def test_repeat(kind: str):
    rows = tokens()
    x = batch(rows, kind)
    for pattern in ("b t d -> b (t r) d", "b t d -> b (r t) d", "b t d -> b t r d", "b t d -> b t (d r)"):
        want = [einops.repeat(row, row_pattern(pattern), r=3) for row in rows]
        assert_close(results(einops.repeat(x, pattern, r=3)), want)
    assert_close(results(einops.repeat(x, "b t d -> (r b) t d", r=2)), rows + rows)
    assert_close(results(einops.repeat(x, "b t d -> (b r) t d", r=2)), [row for row in rows for _ in range(2)])
    assert einops.repeat(x, "b t d -> r b t d", r=2).shape[:2] == (2, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_einsum(kind: str):
    rows, w = tokens(), torch.randn(8, 3)
    x = batch(rows, kind)
    for out in (einops.einsum(x, w, "b t d, d e -> b t e"), einops.einsum(w, x, "d e, b t d -> b t e")):
        assert_close(results(out), [row @ w for row in rows])


def test_pack_puts_a_token_in_front_or_behind():
    rows, token = tokens(), torch.randn(3, 8)
    x = batch(rows, "packed")
    front, _ = einops.pack([token, x], "b * d")
    assert_close(results(front), [torch.cat([t[None], row]) for t, row in zip(token, rows, strict=True)])
    behind, _ = einops.pack([x, token], "b * d")
    assert_close(results(behind), [torch.cat([row, t[None]]) for t, row in zip(token, rows, strict=True)])


@pytest.mark.parametrize("kind", KINDS)
def test_pack_and_unpack_of_static_dims(kind: str):
    rows = tokens()
    x = batch(rows, kind)
    y = einops.rearrange(x, "b t (h d) -> b t h d", h=2)
    both, shapes = einops.pack([x, y], "b t *")
    assert_close(results(both), [torch.cat([row, row], -1) for row in rows])
    again = einops.unpack(both, shapes, "b t *")
    assert_close([results(z) for z in again], [rows, [row.unflatten(-1, (2, 4)) for row in rows]])


COMPILED: dict[str, Callable[[Any], Any]] = {
    "heads": lambda x: einops.rearrange(x, "b t (h d) -> b h t d", h=4),
    "heads in front": lambda x: einops.rearrange(x, "b t (h d) -> b (h t) d", h=4),
    "chunks": lambda x: einops.rearrange(x, "b (t p) d -> b t (p d)", p=2),
    "mean": lambda x: einops.reduce(x, "b t d -> b d", "mean"),
    "repeat": lambda x: einops.repeat(x, "b t d -> b (t r) d", r=2),
    "einsum": lambda x: einops.einsum(x, x.mean(1), "b t d, b d -> b t"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", COMPILED)
def test_one_graph_for_all_lengths(name: str, kind: str):
    torch._dynamo.reset()
    fn, counter = COMPILED[name], Counter()
    compiled = torch.compile(fn, backend=counter, fullgraph=True)
    for lengths in ((4, 2), (2, 6, 4), (8, 4, 4, 2)):
        x = batch(tokens(lengths), kind).requires_grad_()
        leaf = x.values if kind == "packed" else x.data
        out, want = results(compiled(x)), results(fn(x))
        assert_close(out, want)
        got, expected = [torch.autograd.grad([y.square().sum() for y in ys], leaf) for ys in (out, want)]
        assert_close(got, expected)
    assert counter.graphs == 1


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_for_all_images(kind: str):
    torch._dynamo.reset()
    counter = Counter()

    def tokens_of(x: Any) -> Any:
        return einops.rearrange(x, "b (g c) h w -> b (h w) g c", g=2)

    compiled = torch.compile(tokens_of, backend=counter, fullgraph=True)
    for sizes in SIZES:
        rows = images(sizes)
        want = [einops.rearrange(row, "(g c) h w -> (h w) g c", g=2) for row in rows]
        assert_close(results(compiled(batch(rows, kind))), want)
    assert counter.graphs == 1


def test_batch_dims_of_a_tensordict():
    x, y = torch.randn(6, 4, 2), torch.randn(6, 4)
    td = tdc.TensorDict({"x": x, "y": y}, (6, 4))
    turned = einops.rearrange(td, "(b c) t -> t b c", c=2)
    assert turned.batch_size == (4, 3, 2)
    assert_close(turned["x"], einops.rearrange(x, "(b c) t d -> t b c d", c=2))
    assert_close(einops.rearrange(td, "b t -> (b t)")["y"], y.flatten())
    assert_close(einops.reduce(td, "b t -> b", "mean")["x"], x.mean(1))
    assert_close(einops.repeat(td, "b t -> b r t", r=2)["y"], einops.repeat(y, "b t -> b r t", r=2))
    compiled = torch.compile(lambda d: einops.rearrange(d, "b t -> t b"), backend="aot_eager", fullgraph=True)
    assert_close(compiled(td)["x"], x.transpose(0, 1))
    leaf = td.apply(lambda v: einops.rearrange(v, "b t ... -> t b ..."), batch_size=(4, 6))
    assert_close(leaf["x"], x.transpose(0, 1))


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "examples in one dim": (lambda x: einops.rearrange(x, "b t d -> (b t) d"), "with the batch"),
    "examples in two dims": (lambda x: einops.rearrange(x, "(b n) t d -> b n t d", n=3), "dim 0"),
    "a number that does not divide": (lambda x: einops.rearrange(x, "b (t p) d -> b t p d", p=3), "3 divides"),
    "parts of a ragged dim": (lambda x: einops.unpack(x, [(1,), (1,)], "b * d"), "could not split axis"),
    "a batch of another size": (lambda x: einops.rearrange(x, "b t (h d) -> (b h) t d", b=3, h=2), "neighbouring dims"),
}
OF_IMAGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "patches": (lambda x: einops.rearrange(x, "b c (h p) (w q) -> b (h w) (p q c)", p=1, q=1), "side by side"),
    "a dim between ragged dims": (lambda x: einops.rearrange(x, "b c h w -> b h c w"), "side by side"),
    "one ragged dim of two, the other moved": (lambda x: einops.reduce(x, "b c h w -> b w c", "sum"), "side by side"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*REFUSED, *OF_IMAGES])
def test_refused(name: str, kind: str):
    call, text = (REFUSED | OF_IMAGES)[name]
    with pytest.raises((tdc.TdcError, einops.EinopsError), match=text):
        call(batch(tokens((4, 2)) if name in REFUSED else images(), kind))


def test_tensors_are_as_before():
    x = torch.randn(2, 3, 4)
    assert_close(einops.rearrange(x, "a b c -> c (a b)"), x.permute(2, 0, 1).flatten(1))
    register()
    assert len([b for b in einops._backends.TorchBackend.__subclasses__() if b.framework_name == "tdc"]) == 1


def test_parts_of_a_ragged_dim_are_taken_by_an_index():
    rows = tokens((4, 2))
    both, shapes = einops.pack([batch(rows, "packed")] * 2, "b * d")
    assert_close(results(both), [torch.cat([row, row]) for row in rows])
    with pytest.raises(tdc.ShapeError, match="parts of a static dim"):
        einops.unpack(both, shapes, "b * d")


@pytest.mark.parametrize("kind", KINDS)
def test_layers_refuse_packed_batches(kind: str):
    torch_layers: Any = pytest.importorskip("einops.layers.torch")
    heads, x = torch_layers.Rearrange("b t (h d) -> b h t d", h=4), batch(tokens((4, 2)), kind)
    if kind == "padded":
        assert_close(results(heads(x)), results(einops.rearrange(x, "b t (h d) -> b h t d", h=4)))
        return
    with pytest.raises(tdc.ShapeError, match="that of a ragged dim, whose rows differ"):
        heads(x)
