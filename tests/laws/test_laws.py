"""Laws that hold for every input: inverses, and operations that commute with taking a batch apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils import _pytree as pytree

import tdc
from tdc import NestedTensor, TensorDict

settings.register_profile("laws", deadline=None, max_examples=40, database=None, derandomize=True)
settings.load_profile("laws")

KEYS = st.sampled_from("abcd")
PATHS = st.lists(KEYS, min_size=1, max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.int64, torch.bool])


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 9, shape, generator=g).to(dtype)


@st.composite
def rows(draw: st.DrawFn, ragged: int | None = None) -> tuple[list[Tensor], tuple[int, ...]]:
    """Examples that differ in 1 to 3 neighbouring dims, and those dims."""
    count = ragged or draw(st.integers(1, 3))
    before = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    behind = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    sizes = draw(st.lists(st.tuples(*[st.integers(0, 4)] * count), min_size=1, max_size=5))
    dtype = draw(DTYPES)
    made = [filled((*before, *size, *behind), dtype, i) for i, size in enumerate(sizes)]
    return made, tuple(range(len(before) + 1, len(before) + 1 + count))


@st.composite
def trees(draw: st.DrawFn) -> TensorDict:
    """TensorDicts with random keys, batch dims, features and dtypes."""
    size = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    td = TensorDict(batch_size=size)
    for i, path in enumerate(draw(st.lists(PATHS, min_size=1, max_size=6, unique=True))):
        if not any(path[:n] in td and n < len(path) and not isinstance(td[path[:n]], TensorDict) for n in range(1, 4)):
            features = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
            td = td.set(path, filled((*size, *features), draw(DTYPES), i))
    return td


@st.composite
def indexed(draw: st.DrawFn) -> tuple[TensorDict, Any]:
    """A TensorDict and an index into its batch dims."""
    td = draw(trees())
    parts: list[Any] = []
    for n in td.batch_size[: draw(st.integers(0, td.ndim))]:
        part = st.one_of(
            st.integers(-n, n - 1),
            st.slices(n).filter(lambda s: s.step is None or s.step > 0),
            st.lists(st.integers(-n, n - 1), min_size=2, max_size=2).map(torch.tensor),
        )
        parts.append(draw(part))
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), None)
    return td, tuple(parts)


def equal(a: Any, b: Any) -> bool:
    """Equal class, treedef, batch size and values."""
    if type(a) is not type(b) or a.batch_size != b.batch_size or pytree.tree_structure(a) != pytree.tree_structure(b):
        return False
    pairs = list(zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True))
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def equal_rows(a: Any, b: Any) -> bool:
    a, b = list(a), list(b)
    return [x.shape for x in a] == [y.shape for y in b] and all(map(torch.equal, a, b))


# -- NestedTensor and MaskedBatch


@given(rows())
def test_unpack_after_pack(drawn: tuple[list[Tensor], tuple[int, ...]]):
    given_rows, dims = drawn
    x = tdc.validate(tdc.pack(given_rows, ragged_dim=dims))
    assert equal_rows(x.unbind(), given_rows)
    assert equal(tdc.pack(x.unbind(), ragged_dim=dims), x)


@given(rows(), st.sampled_from([0, 1, 7]))
def test_packing_after_padding(drawn: tuple[list[Tensor], tuple[int, ...]], fill: int):
    given_rows, dims = drawn
    x = tdc.pack(given_rows, ragged_dim=dims)
    padded = x.to_padded(fill)
    assert equal(padded.to_packed(), x)
    assert equal_rows(padded.unbind(), given_rows)
    assert equal(padded.to_packed().to_padded(fill), padded)


@given(rows())
def test_unflatten_after_flatten(drawn: tuple[list[Tensor], tuple[int, ...]]):
    x = tdc.pack(drawn[0], ragged_dim=drawn[1])
    for y in (x, x.to_padded()):
        leaves, spec = pytree.tree_flatten(y)
        assert equal(pytree.tree_unflatten(leaves, spec), y)
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


ROWWISE: list[Callable[[Any], Any]] = [
    lambda x: x.neg() if x.dtype != torch.bool else x.logical_not(), lambda x: x * 3 + 1, lambda x: x == 0,
    lambda x: x.to(torch.float32).exp(), lambda x: torch.where(x > 0, x, 5),
]  # fmt: skip


@given(rows(), st.sampled_from(ROWWISE))
def test_operations_commute_with_unbind(drawn: tuple[list[Tensor], tuple[int, ...]], op: Callable[[Any], Any]):
    x = tdc.pack(drawn[0], ragged_dim=drawn[1])
    want = [op(row) for row in drawn[0]]
    assert equal_rows(op(x).unbind(), want)
    assert equal_rows(op(x.to_padded()).unbind(), want)


@given(rows(1), st.sampled_from(["sum", "amax", "any"]))
def test_reductions_commute_with_unbind(drawn: tuple[list[Tensor], tuple[int, ...]], name: str):
    kept = [row.float() for row in drawn[0] if row.shape[drawn[1][0] - 1]]
    if not kept:
        return
    x, d = tdc.pack(kept, ragged_dim=drawn[1]), drawn[1][0]
    want = torch.stack([getattr(row, name)(d - 1) for row in kept])
    assert torch.equal(getattr(x, name)(d), want)
    assert torch.equal(getattr(x.to_padded(), name)(d), want)


@given(rows(), st.data())
def test_indexing_rows(drawn: tuple[list[Tensor], tuple[int, ...]], data: st.DataObject):
    given_rows, dims = drawn
    n = len(given_rows)
    x = tdc.pack(given_rows, ragged_dim=dims)
    picks = data.draw(st.lists(st.integers(-n, n - 1), max_size=4))
    assert equal_rows(x[picks].unbind(), [given_rows[i] for i in picks])
    assert equal_rows(x.to_padded()[picks].unbind(), [given_rows[i] for i in picks])
    part = data.draw(st.slices(n))
    assert equal_rows(x[part].unbind(), given_rows[part])


@given(rows(1), st.integers(-5, 5) | st.none(), st.integers(-5, 5) | st.none())
def test_slicing_rows(drawn: tuple[list[Tensor], tuple[int, ...]], start: int | None, stop: int | None):
    given_rows, (d,) = drawn
    index = (*[slice(None)] * (d - 1), slice(start, stop))
    x = tdc.pack(given_rows, ragged_dim=d)[(slice(None), *index)]
    assert isinstance(x, NestedTensor)
    assert equal_rows(tdc.validate(x).unbind(), [row[index] for row in given_rows])


@given(rows(), st.data())
def test_cat_of_parts_is_the_whole(drawn: tuple[list[Tensor], tuple[int, ...]], data: st.DataObject):
    x = tdc.pack(drawn[0], ragged_dim=drawn[1])
    k = data.draw(st.integers(0, len(x)))
    assert equal_rows(torch.cat([x[:k], x[k:]]).unbind(), drawn[0])


# -- TensorDict


@given(trees())
def test_flatten_and_unflatten_a_tree(td: TensorDict):
    leaves, spec = pytree.tree_flatten(td)
    assert equal(pytree.tree_unflatten(leaves, spec), td)
    assert equal(TensorDict(td.to_dict(), td.batch_size), td)


@given(trees(), st.sampled_from([".", "/", "__"]))
def test_unflatten_keys_after_flatten_keys(td: TensorDict, separator: str):
    flat = td.flatten_keys(separator)
    assert all(isinstance(key, str) for key in flat.keys(True, True))
    assert equal(flat.unflatten_keys(separator), td)


@given(indexed())
def test_indexing_is_leafwise(drawn: tuple[TensorDict, Any]):
    td, index = drawn
    out = td[index]
    assert out.keys(True) == td.keys(True)
    for key in td.keys(True, True):
        want = td[key][index]
        assert torch.equal(out[key], want)
        assert out.batch_size == want.shape[: want.ndim - (td[key].ndim - td.ndim)]


@given(indexed())
def test_at_reads_back_what_it_wrote(drawn: tuple[TensorDict, Any]):
    td, index = drawn
    assert equal(td.at[index].set(td[index]), td)
    twice = td.at[index].set(1).at[index].set(1)
    assert equal(twice, td.at[index].set(1))
    assert all(leaf.eq(1).all() for leaf in twice[index].values(True, True))


@given(trees(), PATHS, PATHS)
def test_set_and_delete(td: TensorDict, one: tuple[str, ...], other: tuple[str, ...]):
    def free(td: TensorDict, path: tuple[str, ...]) -> bool:
        return all(isinstance(td.get(path[:n], td), TensorDict) for n in range(1, len(path)))

    if one[: len(other)] == other[: len(one)] or not (free(td, one) and free(td, other)):
        return
    x, y = torch.zeros(td.batch_size), torch.ones(td.batch_size)
    new = td.set(one, x)
    assert new[one] is x
    assert one in new
    assert one not in new.delete(one)
    assert equal(new.set(one, x), new)
    assert equal(td.set(one, y).set(one, x), new)
    assert equal(new.set(other, y), td.set(other, y).set(one, x))
    untouched = [k for k in td.keys(True, True) if (k if isinstance(k, tuple) else (k,))[: len(one)] != one]
    assert all(new[k] is td[k] for k in untouched)
    if one not in td and one[:-1] in (*[()], *[p if isinstance(p, tuple) else (p,) for p in td.keys(True)]):
        assert equal(new.delete(one), td)


@given(trees(), st.data())
def test_joining_and_splitting(td: TensorDict, data: st.DataObject):
    dim = data.draw(st.integers(0, td.ndim - 1))
    assert equal(torch.stack(td.unbind(dim), dim), td)
    assert equal(torch.cat(td.split(data.draw(st.integers(1, 3)), dim), dim), td)
    assert equal(td.flatten().reshape(td.batch_size), td)


@given(trees())
def test_map_of_the_identity(td: TensorDict):
    assert equal(td.apply(lambda x: x), td)
    assert equal(td.apply(lambda x, _: x, td), td)
    assert equal(pytree.tree_map(lambda x: x, td), td)
