"""Sums of half precision, which may be larger than it holds, and integers where torch takes none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from versions import refused

import tdc
from tdc import DtypeError, TensorDict
from tdc.core.dtypes import FLOATING
from tdc.core.rules import DISPATCH

HALF = (torch.float16, torch.bfloat16)
TALL: Any = tdc.pack([torch.full((3000, 1), 30.0), torch.full((2500, 1), -30.0)])
WIDE: Any = tdc.pack([torch.linspace(0, 60, 3000)[None], torch.linspace(0, 50, 2000)[None]], ragged_dim=2)
LONG: Any = tdc.pack([torch.zeros(70000), torch.zeros(3)])  # more elements than float16 has numbers
INTEGERS: Any = tdc.pack([torch.arange(3), torch.arange(2)])

OVER_ROWS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "mean": (TALL, lambda x: x.mean(1)),
    "mean of two dims": (TALL, lambda x: x.mean((1, 2))),
    "sum of two dims": (
        tdc.pack([torch.cat([torch.full((1, 3000), 30.0), torch.full((1, 3000), -30.0)])]),
        lambda x: x.sum((1, 2)),
    ),
    "nanmean": (TALL, lambda x: x.nanmean(1)),
    "std": (TALL, lambda x: x.std(1)),
    "norm": (TALL, lambda x: x.norm(dim=1)),
    "softmax": (LONG, lambda x: x.softmax(1).amax(1)),
    "log_softmax": (LONG, lambda x: x.log_softmax(1).amax(1)),
    "logsumexp": (LONG, lambda x: x.logsumexp(1)),
    "adaptive_avg_pool1d": (WIDE, lambda x: F.adaptive_avg_pool1d(x, 1)),
}
OF_ALL: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "mse_loss": (TALL, lambda x: F.mse_loss(x, x * 0)),
    "l1_loss": (TALL, lambda x: F.l1_loss(x, x * 0)),
    "instance_norm": (WIDE, F.instance_norm),
    "group_norm": (WIDE, lambda x: F.group_norm(x, 1)),
    "batch_norm": (WIDE, lambda x: F.batch_norm(x, None, None, training=True)),
}


def real(x: Any) -> torch.Tensor:
    """The elements of a result."""
    x = x.to_packed() if isinstance(x, tdc.MaskedBatch) else x
    return x.values if isinstance(x, tdc.NestedTensor) else x


@pytest.mark.parametrize("kind", ["nested", "masked"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", [*OVER_ROWS, *OF_ALL])
def test_half_precision_is_rounded_once(name: str, dtype: torch.dtype, kind: str):
    x, run = {**OVER_ROWS, **OF_ALL}[name]
    x = x.to(dtype)
    want = real(run(x.float())).to(dtype)
    out = real(run(x if kind == "nested" else x.to_padded()))
    assert out.dtype == dtype
    small = torch.finfo(dtype).eps if name in OF_ALL else torch.finfo(dtype).tiny
    torch.testing.assert_close(out, want, rtol=torch.finfo(dtype).eps, atol=small)


@pytest.mark.parametrize("name", OVER_ROWS)
def test_gradients_of_half_precision_are_half(name: str):
    x, run = OVER_ROWS[name]
    values = x.values.half().requires_grad_()
    run(x.with_values(values)).sum().backward()
    assert values.grad is not None
    assert values.grad.dtype == torch.float16
    assert values.grad.isfinite().all()


def test_a_bag_of_many_embeddings():
    weight = torch.full((4, 2), 30.0).half()
    many: Any = tdc.pack([torch.zeros(3000, dtype=torch.int64)])
    assert torch.equal(F.embedding_bag(many, weight), weight[:1])


def batches() -> list[Any]:
    return [INTEGERS, INTEGERS.to_padded(), INTEGERS > 0]


NEEDS_FLOATS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: x.mean(1), "nanmean": lambda x: x.nanmean(1), "std": lambda x: x.std(1),
    "var": lambda x: torch.var(x, 1), "std_mean": lambda x: torch.std_mean(x, 1), "norm": lambda x: x.norm(dim=1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=1), "softmax": lambda x: F.softmax(x, dim=1),
    "log_softmax": lambda x: x.log_softmax(1), "softmin": lambda x: F.softmin(x, dim=1),
    "quantile": lambda x: x.quantile(0.5, dim=1), "normalize": lambda x: F.normalize(x),
    "dist": lambda x: torch.dist(x, x), "l1_loss": lambda x: F.l1_loss(x.int(), x.int()),
}  # fmt: skip


@pytest.mark.parametrize("x", batches(), ids=["nested", "masked", "bool"])
@pytest.mark.parametrize("name", NEEDS_FLOATS)
def test_integers_are_refused(name: str, x: Any):
    row = x.unbind()[0]
    with pytest.raises((RuntimeError, NotImplementedError)):
        NEEDS_FLOATS[name](row[None])
    with pytest.raises(DtypeError) as error:
        NEEDS_FLOATS[name](x)
    expected = f"tdc.{name}: expected a floating point dtype, got {type(x).__name__} "
    lines = str(error.value).splitlines()
    assert lines[0].startswith(expected)
    assert lines[1:] == ["hint: x.float()"]
    NEEDS_FLOATS["mean" if name == "l1_loss" else name](x.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 2, None])
def test_quantiles_of_half_precision_are_refused_along_all_dims(dim: int | None, dtype: torch.dtype):
    """As torch refuses them."""
    packed = tdc.pack([torch.ones(n, 2, dtype=dtype) for n in (3, 2)])
    for x in (packed, packed.to_padded()):
        with pytest.raises(DtypeError, match=r"quantile: expected float32 or float64, got .*\nhint: x.float\(\)"):
            x.quantile(0.5, dim)


def test_leaves_of_integers_are_named():
    td: Any = TensorDict({"a": torch.arange(3), "b": {"c": torch.ones(3, dtype=torch.bool), "d": torch.ones(3)}}, [3])
    for run in (lambda: td.mean(0), lambda: td.softmax(0), lambda: td.quantile(0.5, dim=0), lambda: td.std()):
        with pytest.raises(DtypeError) as error:
            run()
        at = ["at a: Tensor int64[3]", "at b.c: Tensor bool[3]"]
        assert str(error.value).splitlines()[1:] == [*at, "hint: td.float()"]
    assert td.float().mean(0)["a"] == 1


def test_a_dtype_or_a_float_beside_makes_floats():
    for x in (INTEGERS, INTEGERS.to_padded()):
        assert x.mean(1, dtype=torch.float32).tolist() == [1, 0.5]
        assert x.softmax(1, dtype=torch.float64).dtype == torch.float64
        assert F.softmax(x, 1, 3, torch.float64).dtype == torch.float64
        assert torch.dist(x, x.float() + 1).item() == pytest.approx(5**0.5)
        with pytest.raises(DtypeError, match=r"tdc.mean: .*\n.*x.float"):
            x.mean(1, dtype=torch.int32)


def test_sums_of_integers_are_integers():
    for x in (INTEGERS, INTEGERS.to_padded()):
        assert (x.sum(1).dtype, x.prod(1).dtype, x.cumsum(1).dtype) == (torch.int64,) * 3
        assert x.sum(1, dtype=torch.int32).dtype == torch.int32
        assert (x > 0).sum(1).tolist() == [2, 1]


def test_the_refusal_is_in_graphs_too():
    with pytest.raises(Exception, match=r"tdc\.mean: expected a floating point dtype"):
        torch.compile(lambda x: x.mean(1), backend="eager", fullgraph=True)(INTEGERS)


def test_every_name_in_the_table_has_a_rule():
    assert not [op for op in FLOATING if op not in DISPATCH["nested"] or op not in DISPATCH["masked"]]


@pytest.mark.parametrize("name", ["nansum", "nanmean", "count_nonzero"])
def test_reductions_made_of_others_name_themselves(name: str):
    x = INTEGERS.float()
    for batch, dim in ((x, 0), (x, 7), (x.to_padded(), 7)):
        with pytest.raises(tdc.ShapeError, match=rf"tdc\.{name}: "):
            getattr(batch, name)(dim)


IN_FLOAT32: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "prod": (1, lambda x: x.prod(1)), "prod of features": (1, lambda x: torch.prod(x, dim=2)),
    "prod of all": (1, lambda x: x.prod()), "quantile": (1, lambda x: x.quantile(0.5, 1)),
    "nanquantile": (1, lambda x: torch.nanquantile(x, 0.5, dim=2)), "avg_pool3d": (3, lambda x: F.avg_pool3d(x, 2)),
    "max_pool3d": (3, lambda x: F.max_pool3d(x, 2)), "adaptive_avg_pool3d": (3, lambda x: F.adaptive_avg_pool3d(x, 1)),
    "adaptive_max_pool3d": (3, lambda x: F.adaptive_max_pool3d(x, 1)),
}  # fmt: skip


@pytest.mark.cases(9, 2)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", IN_FLOAT32)
def test_autocast_in_float32(name: str, compiled: bool):
    """As torch has it, in a dtype that holds the result: 300 squared is too large for float16."""
    dims, fn = IN_FLOAT32[name]
    rows = [torch.full((2, *[n] * dims), 300.0, dtype=torch.float16) for n in (3, 2)]
    x: Any = tdc.pack(rows, ragged_dim=tuple(range(2, 2 + dims)))
    x = x if dims > 1 else x.transpose(1, 2)
    alone = rows if dims > 1 else [row.T for row in rows]
    run = torch.compile(fn, backend="aot_eager", fullgraph=True) if compiled else fn
    with torch.autocast("cpu", torch.float16), refused("nanquantile", when=compiled and name == "nanquantile"):
        found, want = run(x), [fn(row[None])[0] for row in alone] if name != "prod of all" else fn(x.values)
        torch.testing.assert_close(found if isinstance(want, torch.Tensor) else list(found.unbind()), want)


def test_autocast_of_leaves_on_any_device():
    td = TensorDict({"a": torch.full((2, 3), 300.0, dtype=torch.float16)}, batch_size=(2,))
    with torch.autocast("cpu", torch.float16):
        assert td.prod(0)["a"].tolist() == td["a"].prod(0).tolist()
