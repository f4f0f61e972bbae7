"""tdc.compile.dynamic: dims by name and by number, for each key, with bounds."""

from __future__ import annotations

import pytest
import torch
from texts import said

import tdc
from tdc.compile import counted, dynamic

SIZES = ((3, 2), (5, 1, 2), (4, 4, 4, 4))


def packed(*lengths: int) -> tdc.NestedTensor:
    return tdc.pack([torch.ones(n, 3) for n in lengths])


def compiles(fn, *examples) -> int:
    f = counted(fn, backend="eager")
    for x in examples:
        f(x)
    return f.counts.compiles


def indices(x: torch.Tensor) -> set[int]:
    """Dims marked in any way."""
    return getattr(x, "_dynamo_weak_dynamic_indices", set()) | getattr(x, "_dynamo_dynamic_indices", set())


@pytest.mark.parametrize("dims", ["batch", 0, -1, (0,), ["batch"], {"x": 0}, {"x": "batch"}])
def test_batch_of_a_tensordict(dims):
    tds = [dynamic(tdc.TensorDict({"x": torch.ones(n, 4)}, [n]), dims) for n in (3, 5, 7)]
    assert compiles(lambda td: td["x"].sum(0), *tds) == 1


def test_two_batch_dims():
    td = tdc.TensorDict({"x": torch.ones(3, 4, 5)}, [3, 4])
    assert indices(dynamic(td)["x"]) == {0, 1}
    td = tdc.TensorDict({"x": torch.ones(3, 4, 5)}, [3, 4])
    assert indices(dynamic(td, 1)["x"]) == {1}


def test_features_by_key():
    images = [torch.ones(2, n, n + 1) for n in (4, 6, 8)]
    tds = [dynamic(tdc.TensorDict({"deep": {"image": x}}, [2]), {("deep", "image"): (1, 2)}) for x in images]
    assert compiles(lambda td: td["deep", "image"].sum(), *tds) == 1


def test_trees():
    trees = [dynamic({"a": torch.ones(n, 2), "b": [torch.ones(n)]}) for n in (3, 5, 7)]
    assert compiles(lambda tree: tree["a"].sum(0) + tree["b"][0].sum(), *trees) == 1
    x = torch.ones(2, 3)
    assert dynamic(x, -1) is x
    assert indices(x) == {1}


def test_packed_and_padded_dims():
    x = packed(3, 2)
    dynamic(x, (2, "length", "batch"))
    assert (indices(x.values), indices(x.offsets)) == ({0, 1}, {0})
    m = packed(3, 2).to_padded()
    dynamic(m, 2)
    assert indices(m.data) == {0, 1, 2}


def test_bounds():
    xs = [dynamic(dynamic(packed(*n), "length", min=1, max=64), "batch", max=8) for n in SIZES]
    assert xs[0].offsets._dynamo_dynamic_indices == {0}
    assert compiles(lambda x: x.to_padded().data.sum(1), *xs) == 1
    plain = [dynamic(torch.ones(n), 0, min=1, max=8) for n in (3, 5, 8, 1)]
    assert compiles(lambda x: x * 2, *plain[:3]) == 1
    assert compiles(lambda x: x + 2, *plain) == 2


def test_a_function_of_one_size_is_an_error_with_bounds():
    f = counted(lambda x: x + torch.ones(3), backend="eager")
    with pytest.raises(Exception, match=r"marked L\['x'\].size\(\)\[0\] as dynamic"):
        f(dynamic(torch.ones(3), 0, max=8))


# Wrong inputs


def test_sizes_outside():
    assert said(tdc.ShapeError, lambda: dynamic(torch.ones(9), 0, min=2, max=8)) == (
        "tdc.compile.dynamic: expected a size in [2, 8], got 9 at dim 0 of Tensor float32[9]\n"
        "hint: give the bounds of all batches to come"
    )
    text = said(tdc.ShapeError, lambda: dynamic(packed(3, 2), "batch", min=3))
    assert text.startswith("tdc.compile.dynamic: expected a size in [3, ...], got 2 at dim 0 of Tensor int64[3]")


def test_bounds_of_nothing():
    text = said(tdc.ShapeError, lambda: dynamic(torch.ones(3), 0, min=4, max=4))
    assert text.startswith("tdc.compile.dynamic: expected 0 <= min < max, got min=4, max=4")


@pytest.mark.parametrize("dim", [5, -4, "length"])
def test_no_such_dim(dim):
    assert said(tdc.ShapeError, lambda: dynamic(torch.ones(3, 2, 1), dim)) == (
        f"tdc.compile.dynamic: expected a dim of x, got dim {dim!r} of Tensor float32[3, 2, 1]\n"
        "hint: 'batch', 'length', or an int"
    )


def test_no_such_dim_of_containers():
    for x in (packed(2, 1), tdc.TensorDict({"x": torch.ones(2, 3)}, [2])):
        assert "expected a dim of x, got dim 3" in said(tdc.ShapeError, lambda x=x: dynamic(x, 3))


def test_other_names():
    assert said(tdc.KeyPathError, lambda: dynamic(torch.ones(3), "time")) == (
        "tdc.compile.dynamic: expected 'batch' or 'length', got 'time'\nhint: an int for another dim"
    )


def test_no_such_key():
    td = tdc.TensorDict({"x": torch.ones(2)}, [2])
    assert said(tdc.KeyPathError, lambda: dynamic(td, {"y": 0})) == (
        "tdc.compile.dynamic: expected an existing key, got 'y' for TensorDict [2]\nhint: dims={'key': 'length'}"
    )


def test_dims_of_another_type():
    text = said(tdc.DtypeError, lambda: dynamic(torch.ones(3), 1.5))
    assert text.startswith("tdc.compile.dynamic: expected dims as names or ints, got float")
