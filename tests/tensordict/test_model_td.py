"""TensorDict against a model: nested plain dicts of tensors, and batch sizes worked out by hand.

A test draws a tree and then one operation after another. Each operation is written twice: as users write it, and as a
recursion over plain dicts. After each step both must hold the same keys, values, dtypes and batch size. The values are
small whole numbers in float64, so that equal means equal.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils import _pytree as pytree

from tdc import Static, TensorDict

settings.register_profile("model", deadline=None, max_examples=250, database=None, derandomize=True)

Tree = dict[str, Any]
Path = tuple[str, ...]
State = tuple[TensorDict, Tree, tuple[int, ...]]
Draw = Callable[[Any], Any]

KEYS = st.sampled_from("abcd")
PATHS = st.lists(KEYS, min_size=1, max_size=3).map(tuple)
LARGEST = 200


# -- plain nested dicts


def mapped(tree: Tree, fn: Callable[..., Any], *others: Tree) -> Tree:
    """`fn` of each tensor; strings, which are static values, stay."""
    out: Tree = {}
    for key, x in tree.items():
        rest = [other[key] for other in others]
        if isinstance(x, dict):
            out[key] = mapped(x, fn, *rest)
        else:
            out[key] = fn(x, *rest) if isinstance(x, Tensor) else x
    return out


def paths(tree: Tree, above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every path, of leaves and of inner nodes."""
    for key, x in tree.items():
        yield (*above, key), x
        if isinstance(x, dict):
            yield from paths(x, (*above, key))


def put(tree: Tree, path: Path, value: Any) -> Tree:
    if len(path) == 1:
        return {**tree, path[0]: value}
    return {**tree, path[0]: put(tree.get(path[0], {}), path[1:], value)}


def without(tree: Tree, path: Path) -> Tree:
    if len(path) > 1:
        return {**tree, path[0]: without(tree[path[0]], path[1:])}
    return {key: x for key, x in tree.items() if key != path[0]}


def at(tree: Tree, path: Path) -> Any:
    return at(tree[path[0]], path[1:]) if path else tree


def free(tree: Tree, path: Path) -> bool:
    """Whether a value can be put at a path: nothing on the way there is a leaf."""
    for _ in path[1:]:
        if path[0] not in tree or not isinstance(tree, dict):
            return True
        tree, path = tree[path[0]], path[1:]
        if not isinstance(tree, dict):
            return False
    return True


def whole(tree: Tree) -> Tree:
    """The entries of a tree as its flat paths give them back: without inner nodes that hold nothing."""
    out: Tree = {}
    for path, x in paths(tree):
        if not isinstance(x, dict):
            out = put(out, path, x)
    return out


def fresh(draw: Draw, size: tuple[int, ...]) -> Tensor:
    features = tuple(draw(st.lists(st.integers(0, 2), max_size=2)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    return torch.randint(-9, 10, (*size, *features), generator=g).double()


def over_batch(x: Tensor, leaf: Tensor) -> Tensor:
    """A tensor over the batch, extended over the features of a leaf."""
    return x.view([*x.shape, *[1] * (leaf.ndim - x.ndim)])


COPIES: list[Callable[[Any], Any]] = [
    lambda td: pickle.loads(pickle.dumps(td)), copy.deepcopy, torch.clone, lambda td: pytree.tree_map(torch.clone, td),
    lambda td: TensorDict(td, td.batch_size), lambda td: td.apply(lambda x: x), lambda td: td.mutate().finish(),
]  # fmt: skip
PARTS: list[Callable[[Any, int], Any]] = [
    lambda x, d: x.unbind(d)[-1],
    lambda x, d: x.split(2, d)[0],
    lambda x, d: x.chunk(2, d)[-1],
    lambda x, d: x.split([1, x.shape[d] - 1], d)[1],
]
POINTWISE: list[Callable[[Any], Any]] = [
    lambda x: x * 2 - 1, lambda x: -x, lambda x: 3 - x, lambda x: x.clamp(-5, 5), lambda x: abs(x) % 7,
    lambda x: (x > 0).to(torch.float64), lambda x: torch.maximum(x, x * -1), lambda x: torch.where(x > 1, x, x * 0),
]  # fmt: skip


# -- operations: each takes a state and gives the next, or None where it does not apply


def set_leaf(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    path, value = draw(PATHS), fresh(draw, size)
    if not free(tree, path):
        return None
    return td.set(path, value), put(tree, path, value), size


def set_node(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    key, value = draw(KEYS), {"x": fresh(draw, size), "y": {}}
    if not isinstance(tree.get(key, {}), dict):
        return None
    return td.set(key, value), put(tree, (key,), value), size


def update(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    key, value = draw(KEYS), fresh(draw, size)
    if not isinstance(tree.get(key, {}), dict):
        return td.update({key: {"u": value}}), put(tree, (key,), {"u": value}), size
    return td.update({key: {"u": value}}), put(tree, (key, "u"), value), size


def remove(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    found = [path for path, _ in paths(tree)]
    if not found:
        return None
    path, how = draw(st.sampled_from(found)), draw(st.sampled_from(["delete", "exclude", "pop"]))
    out = {"delete": lambda: td.delete(path), "exclude": lambda: td.exclude(path), "pop": lambda: td.pop(path)[1]}
    return out[how](), without(tree, path), size


def select(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    if not tree:
        return None
    kept = draw(st.lists(st.sampled_from(sorted(tree)), min_size=1, unique=True))
    return td.select(*kept), {key: tree[key] for key in kept}, size


def rename(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    old, new = draw(KEYS), draw(KEYS)
    if old not in tree or new in tree:
        return None
    return td.rename_keys({old: new}), put(without(tree, (old,)), (new,), tree[old]), size


def inner(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    """Down into an inner node."""
    nodes = [path for path, x in paths(tree) if isinstance(x, dict)]
    if not nodes:
        return None
    path = draw(st.sampled_from(nodes))
    return td[path], at(tree, path), size


def flat_and_back(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State:
    flat = td.flatten_keys("/")
    assert all(isinstance(key, str) for key in flat.keys(True))
    return flat.unflatten_keys("/"), whole(tree), size


def copied(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State:
    return draw(st.sampled_from(COPIES))(td), tree, size


def index(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    idx = drawn_index(draw, size)
    if not size:
        return None
    return td[idx], mapped(tree, lambda x: x[idx]), torch.empty(size)[idx].shape


def drawn_index(draw: Draw, size: tuple[int, ...]) -> tuple[Any, ...]:
    parts: list[Any] = []
    for n in size[: draw(st.integers(0, len(size)))]:
        kinds = [st.builds(slice, st.integers(-n - 1, n + 1), st.integers(-n - 1, n + 1), st.integers(1, 2))]
        kinds += [st.lists(st.booleans(), min_size=n, max_size=n).map(lambda m: torch.tensor(m, dtype=torch.bool))]
        if n:
            kinds += [st.integers(-n, n - 1), st.lists(st.integers(-n, n - 1), max_size=3).map(positions)]
        parts.append(draw(st.one_of(*kinds)))
    tensors = [i for i, p in enumerate(parts) if isinstance(p, Tensor)]
    for i in tensors[1:]:  # two of them would have to broadcast
        parts[i] = slice(None)
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), None)
    return tuple(parts)


def positions(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def mask(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    if not size:
        return None
    g = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    chosen = torch.rand(size, generator=g) < 0.5
    return td[chosen], mapped(tree, lambda x: x[chosen]), (int(chosen.sum()),)


def write_at(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    if not size:
        return None
    idx, number = drawn_index(draw, size), draw(st.integers(-3, 3))

    def written(x: Tensor) -> Tensor:
        x = x.clone()
        x[idx] = number
        return x

    return td.at[idx].set(number), mapped(tree, written), size


def reshape(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    if not size:
        return None
    k, total = len(size), prod(size)
    new = draw(st.sampled_from([(total,), (1, total), (total, 1), tuple(reversed(size)), (*size, 1)]))
    return td.reshape(new), mapped(tree, lambda x: x.reshape([*new, *x.shape[k:]])), new


def permute(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    if not size:
        return None
    order, k = draw(st.permutations(range(len(size)))), len(size)
    new = mapped(tree, lambda x: x.permute([*order, *range(k, x.ndim)]))
    return td.permute(*order), new, tuple(size[d] for d in order)


def unsqueeze(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State:
    d = draw(st.integers(0, len(size)))
    return td.unsqueeze(d - len(size) - 1), mapped(tree, lambda x: x.unsqueeze(d)), (*size[:d], 1, *size[d:])


def squeeze(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State:
    k, new = len(size), tuple(n for n in size if n != 1)
    return td.squeeze(), mapped(tree, lambda x: x.reshape([*new, *x.shape[k:]])), new


def flatten(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    if len(size) < 2:
        return None
    d = draw(st.integers(0, len(size) - 2))
    new = (*size[:d], size[d] * size[d + 1], *size[d + 2 :])
    return td.flatten(d, d + 1), mapped(tree, lambda x: x.flatten(d, d + 1)), new


def expand(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    if prod(size) > LARGEST or len(size) > 3:
        return None
    return td.expand(2, *size), mapped(tree, lambda x: x.expand(2, *x.shape)), (2, *size)


def stack(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    if prod(size) > LARGEST or len(size) > 3:
        return None
    d = draw(st.integers(0, len(size)))
    new = mapped(tree, lambda x: torch.stack([x, x + 1, x], d))
    return torch.stack([td, td + 1, td], d), new, (*size[:d], 3, *size[d:])


def cat(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    if prod(size) > LARGEST or not size:
        return None
    d = draw(st.integers(0, len(size) - 1))
    new = mapped(tree, lambda x: torch.cat([x, -x], d))
    return torch.cat([td, -td], d - len(size)), new, (*size[:d], 2 * size[d], *size[d + 1 :])


def part(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    """One of what `unbind`, `split` or `chunk` give."""
    dims = [d for d, n in enumerate(size) if n]
    if not dims:
        return None
    d = draw(st.sampled_from(dims))
    how = draw(st.sampled_from(PARTS))
    return how(td, d), mapped(tree, lambda x: how(x, d)), how(torch.empty(size), d).shape


def pointwise(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State:
    how = draw(st.sampled_from(POINTWISE))
    return how(td), mapped(tree, how), size


def with_tensor(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State:
    x = torch.arange(float(prod(size)), dtype=torch.float64).view(size)
    return td + x, mapped(tree, lambda leaf: leaf + over_batch(x, leaf)), size


def apply(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State:
    out = td.apply(lambda x, y: x + 2 * y, td + 1)
    return out, mapped(tree, lambda x: x + 2 * (x + 1)), size


def reduced(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    if not size:
        return None
    d, keep = draw(st.integers(0, len(size) - 1)), draw(st.booleans())
    out = torch.empty(size).sum(d, keepdim=keep).shape
    return td.sum(d, keepdim=keep), mapped(tree, lambda x: x.sum(d, keepdim=keep)), out


def vmapped(draw: Draw, td: TensorDict, tree: Tree, size: Any) -> State | None:
    if not size or not prod(size) or not any(isinstance(x, Tensor) for _, x in paths(tree)):
        return None
    return torch.vmap(lambda row: row + 1)(td), mapped(tree, lambda x: x + 1), size


OPERATIONS = (
    set_leaf, set_node, update, remove, select, rename, inner, flat_and_back, copied, index, mask, write_at, reshape,
    permute, unsqueeze, squeeze, flatten, expand, stack, cat, part, pointwise, with_tensor, apply, reduced, vmapped,
)  # fmt: skip


@st.composite
def starts(draw: st.DrawFn) -> State:
    """A tree of random keys, features and batch dims, sometimes with a static value."""
    size = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    tree: Tree = {}
    for path in draw(st.lists(PATHS, max_size=5)):
        if free(tree, path):
            tree = put(tree, path, fresh(draw, size))
    td = TensorDict(tree, size)
    if draw(st.booleans()):
        td, tree = td.set("s", Static("train")), put(tree, ("s",), "train")
    return td, tree, size


def differences(got: Tree, want: Tree) -> list[str]:
    """Every path that is not the same in both."""
    here, there = dict(paths(got)), dict(paths(want))
    wrong = [str(path) for path in here.keys() ^ there.keys()]
    for path in here.keys() & there.keys():
        a, b = here[path], there[path]
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        else:
            same = type(a) is type(b) and (isinstance(a, dict) or a == b)
        wrong += [] if same else [f"{path}: {a} and {b}"]
    return wrong


@settings(settings.get_profile("model"))
@given(starts(), st.data())
def test_a_sequence_of_operations(start: State, data: st.DataObject):
    td, tree, size = start
    for _ in range(data.draw(st.integers(1, 10))):
        op = data.draw(st.sampled_from(OPERATIONS))
        before = td.to_dict()
        state = op(data.draw, td, tree, size)
        assert differences(td.to_dict(), before) == [], f"{op.__name__} changed its source"
        if state is not None:
            td, tree, size = state
            assert td.batch_size == torch.Size(size), op.__name__
            assert differences(td.to_dict(), tree) == [], op.__name__
            assert type(td.batch_size) is torch.Size


@pytest.mark.parametrize("op", [
    lambda td: td.reshape(()), lambda td: td.view(()), lambda td: td.permute(()), lambda td: td.expand(()),
    lambda td: td.repeat(()), lambda td: td.t(),
])  # fmt: skip
def test_shapes_without_any_dim(op: Callable[[Any], Any]):
    assert op(TensorDict({"a": torch.tensor(1.0)}))["a"] == 1


def test_differences_are_found():
    x = torch.ones(2)
    assert differences({"a": x, "b": {"c": x}}, {"a": x, "b": {"c": x}}) == []
    assert len(differences({"a": x, "b": {"c": x}}, {"a": x + 1, "b": {"d": x}})) == 3
    assert differences({"a": x}, {"a": x.double()})
    assert differences({"a": {}}, {"a": x})
