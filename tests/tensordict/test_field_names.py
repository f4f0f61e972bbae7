"""Fields of a tensorclass with the names of builtins, methods and properties: nothing inside calls them."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import inspect
import keyword
import pickle
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

import tdc
from tdc import KeyPathError, TensorDict
from tdc.core.container import Absent


def may_be_a_field(name: str) -> bool:
    try:
        made([name])
    except KeyPathError:
        return False
    return True


def made(names: list[str], note: Any = Tensor) -> Any:
    name = f"Odd{len(globals())}"
    body = {"__annotations__": dict.fromkeys(names, note), "__module__": __name__}
    return globals().setdefault(name, tdc.tensorclass(type(name, (), body)))  # where pickle finds it


OF_PYTHON = ["self", "cls", "fields", "mro", "args", *[n for n in dir(builtins) if n.islower() and n[0] != "_"]]
OF_TORCH = [n for n in dir(TensorDict) + dir(Tensor) if not n.startswith("_")]
NAMES = sorted({n for n in OF_PYTHON + OF_TORCH if not keyword.iskeyword(n)})
USED = [
    "type", "len", "self", "isinstance", "ndim", "shape", "split", "size", "dim", "dtype", "keys", "items", "values",
]  # fmt: skip


@cache
def free() -> list[str]:
    """Names that may be fields; finding out makes hundreds of classes, which collecting tests need not."""
    return [n for n in NAMES if may_be_a_field(n)]


def doubled(row: Any) -> Any:
    return row * 2


# -- what is done with instances; results are compared with those of a plain TensorDict

i = torch.tensor([2, 0])
mask = torch.tensor([True, False, True])
USES: dict[str, Callable[[Any], Any]] = {
    "int": lambda x: x[1], "slice": lambda x: x[1:], "mask": lambda x: x[mask], "vector": lambda x: x[i],
    "rows": lambda x: list(x)[1], "None": lambda x: x[None, ..., 0], "unbind": lambda x: torch.unbind(x, 0)[1],
    "split": lambda x: torch.split(x, 2)[0], "chunk": lambda x: torch.chunk(x, 2, 1)[1],
    "tensor_split": lambda x: torch.tensor_split(x, 2)[0], "vsplit": lambda x: torch.vsplit(x, 3)[2],
    "stack": lambda x: torch.stack([x, x], 1), "cat": lambda x: torch.cat([x, x[:1]]),
    "vstack": lambda x: torch.vstack([x, x]), "hstack": lambda x: torch.hstack([x, x]),
    "column_stack": lambda x: torch.column_stack([x[:, 0], x[:, 1]]), "reshape": lambda x: torch.reshape(x, (6,)),
    "permute": lambda x: torch.permute(x, (1, 0)), "t": lambda x: torch.t(x), "flatten": lambda x: torch.flatten(x),
    "unflatten": lambda x: torch.unflatten(x, 1, (1, 2)), "movedim": lambda x: torch.movedim(x, 0, 1),
    "transpose": lambda x: torch.transpose(x, 0, 1), "squeeze": lambda x: torch.squeeze(x[:1], 0),
    "unsqueeze": lambda x: torch.unsqueeze(x, -1), "rot90": lambda x: torch.rot90(x),
    "flip": lambda x: torch.flip(x, (0,)), "fliplr": lambda x: torch.fliplr(x), "roll": lambda x: torch.roll(x, 1, 0),
    "tile": lambda x: torch.tile(x, (2,)), "atleast_3d": lambda x: torch.atleast_3d(x),
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, 3, 2)), "narrow": lambda x: torch.narrow(x, 0, 1, 2),
    "diagonal": lambda x: torch.diagonal(x), "repeat_interleave": lambda x: torch.repeat_interleave(x, 2, 0),
    "gather": lambda x: torch.gather(x, 0, torch.tensor([[0, 2]])),
    "index_select": lambda x: torch.index_select(x, 0, i),
    "take_along_dim": lambda x: torch.take_along_dim(x, torch.tensor([[1], [0], [1]]), 1),
    "masked_select": lambda x: torch.masked_select(x, mask[:, None]),
    "where": lambda x: torch.where(mask[:, None], x, x + 1), "index_copy": lambda x: torch.index_copy(x, 0, i, x[:2]),
    "at": lambda x: tdc.TensorDict.at.__get__(x)[0].set(x[1]), "add": lambda x: x + x * 2, "equal": lambda x: x == x,
    "abs": lambda x: -x, "sum": lambda x: torch.sum(x, 0), "max": lambda x: torch.max(x, 0).values,
    "cumsum": lambda x: torch.cumsum(x, 1), "softmax": lambda x: torch.softmax(x, 0),
    "sort": lambda x: torch.sort(x, 0)[0], "mean of all": lambda x: torch.mean(x),
    "norm": lambda x: torch.norm(x, dim=0), "clone": lambda x: torch.clone(x),
    "zeros_like": lambda x: torch.zeros_like(x), "apply": lambda x: x.apply(torch.sin),
    "to": lambda x: x.to(torch.float64), "set": lambda x: x.set(x._first, x[x._first] + 1),
    "update": lambda x: x.update({x._first: x[x._first] * 2}),
    "replace": lambda x: x.replace(**{x._first: x[x._first] * 2}),
    "dataclasses.replace": lambda x: dataclasses.replace(x, **{x._first: x[x._first] * 2}),
    "with_batch_size": lambda x: x.with_batch_size([3]), "mutate": lambda x: x.mutate().finish(),
    "to_tensordict": lambda x: x.from_tensordict(x.to_tensordict()), "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy, "tree_map": lambda x: pytree.tree_map(lambda v: v + 1, x),
    "vmap": lambda x: torch.vmap(lambda row: row * 2)(x), "tdc.vmap": lambda x: tdc.vmap(lambda row: row * 2, 1, 1)(x),
    "grad": lambda x: tdc.grad(lambda x: sum(v.sum() for v in x._leaves.values()))(x),
    "map": lambda x: tdc.map(lambda part: part * 2, x, chunksize=2),
    "map, one by one": lambda x: tdc.map(lambda r: r, x, chunksize=0),
    "copy_": lambda x: tdc.copy_(torch.clone(x), x + 1),
    "loader": lambda x: next(iter(DataLoader(x, batch_size=2, collate_fn=lambda b: b))),
    "tdc loader": lambda x: next(iter(tdc.data.loader(x, batch_size=2))), "merge": lambda x: tdc.merge(x),
    "partition": lambda x: tdc.partition(x, [x._first])[0], "ravel": lambda x: tdc.ravel(x)[1](tdc.ravel(x)[0]),
    "inner": lambda x: TensorDict({"a": {"b": x}}, [3])[1:]["a"]["b"], "no_grad": lambda x: x.with_device("cpu"),
    "bytes": lambda x: tdc.io.from_buffer(*tdc.io.to_buffer(x), classes=[type(x)]),
    "spec": lambda x: tdc.interop.zeros(tdc.interop.spec(x), [3, 2]),
    "scan": lambda x: tdc.scan(lambda c, row: (c, row * 2), torch.zeros(()), x)[1],
    "scan_map": lambda x: tdc.scan_map(lambda row: row + 1, x),
    "cond": lambda x: tdc.cond(mask.all(), torch.abs, torch.neg, (x,)),
    "while_loop": lambda x: tdc.while_loop(lambda x: x[x._first].sum() < 99, lambda x: (x + 9,), (x,))[0],
    "unpad_sequence": lambda x: tdc.data.unpad_sequence(x, batch_dims=0)[1], "batch": tdc.batch(doubled),
    "struct_array": lambda x: tdc.as_tensordict(tdc.interop.to_struct_array(x), batch_dims=2),
    "check": lambda x: (tdc.interop.check(x, tdc.interop.spec(x)), x)[1],
    "assert_close": lambda x: (tdc.testing.assert_close(x, torch.clone(x)), x)[1],
    "nbytes": lambda x: x * tdc.nbytes(x), "summary": lambda x: x * tdc.TensorDict.summary(x).leaves,
    "html": lambda x: (x._repr_html_(), x)[1], "group_by": lambda x: tdc.data.group_by(x[:, 0], x._first)[2.0],
    "clip": lambda x: tdc.optim.clip_by_global_norm(1.0).update(x, tdc.optim.clip_by_global_norm(1.0).init(x), x)[0],
    "optim": lambda x: tdc.optim.sgd(0.1).update(x, tdc.optim.sgd(0.1).init(x), x)[0],
}  # fmt: skip


def both(cls: Any, names: list[str]) -> tuple[Any, TensorDict]:
    """An instance with fields of these names, and a class with harmless names that holds the same."""
    values = [torch.arange(6.0).view(3, 2) + n for n in range(len(names))]
    cls._first = names[0]
    plain = made([f"zz{n:04}" for n in range(len(names))])
    plain._first = "zz0000"
    return cls(*values, batch_size=[3, 2]), plain(*values, batch_size=[3, 2])


def check(out: Any, want: Any) -> None:
    assert issubclass(type(want), tdc.TensorClass) == issubclass(type(out), tdc.TensorClass)
    assert out._size == want._size
    assert len(out._leaves) == len(want._leaves)
    for x, y in zip(out._leaves.values(), want._leaves.values(), strict=True):
        torch.testing.assert_close(x, y)


@cache
def with_all() -> tuple[Any, list[str]]:
    """One class with all names that a TensorDict has, and these."""
    has = [n for n in free() if n in USED or not isinstance(inspect.getattr_static(TensorDict, n, Absent("")), Absent)]
    return made(has), has


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_nothing_inside_reads_a_field_of_any_name(use: Callable[[Any], Any]):
    """One class with all names at once: whatever asks an instance for one of them gets a tensor."""
    odd, plain = both(*with_all())
    check(use(odd), use(plain))


def check_name(name: str) -> None:
    x = torch.arange(6.0).view(3, 2)
    odd = made([name])(**{name: x}, batch_size=[3])
    assert getattr(odd, name) is x
    assert odd[name] is x
    for out in (odd[1:], odd * 2, torch.cat([odd, odd]), odd.replace(**{name: x}), pickle.loads(pickle.dumps(odd))):
        assert type(out) is type(odd)
        assert getattr(out, name).shape[1:] == (2,)
    assert name in repr(odd)
    assert repr(tdc.TensorDict.summary(odd))
    static = made([name], str)(**{name: "train"}, batch_size=[3])
    assert (getattr(static, name), getattr(static[0], name)) == ("train", "train")


@pytest.mark.parametrize("name", USED)
def test_a_field_may_have_the_name(name: str):
    check_name(name)


def test_a_field_may_have_a_drawn_name():
    for name in random.Random(0).sample(sorted(set(free()) - set(USED)), 40 - len(USED)):
        check_name(name)


@pytest.mark.parametrize("name", ["type", "ndim", "split", "items"])
def test_a_graph_takes_it(name: str):
    x = torch.arange(6.0).view(3, 2)
    cls = made([name])

    def step(odd: Any) -> Any:
        return torch.stack([odd, cls(odd[name] + 1, batch_size=[3])])[:, 1:], torch.movedim(odd[None], 0, 1)

    odd = cls(x, batch_size=[3])
    for out, want in zip(torch.compile(step, backend="eager", fullgraph=True)(odd), step(odd), strict=True):
        check(out, want)
