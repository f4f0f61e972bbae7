"""Memory is free when the last name of a batch is gone: nothing here makes a reference cycle that holds tensors.

The garbage collector is off, so only reference counts free anything. After each operation the names of operands and
results go, and with them every tensor must be gone.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import tdc
from tdc import ObjectArray, Static, TensorDict


class Inner(tdc.TensorClass):
    c: Tensor
    name: str = "inner"

    def doubled(self) -> Tensor:
        return self.c * 2


class Batch(tdc.TensorClass):
    a: Tensor
    b: Inner
    extra: Any = None


def plain() -> Any:
    return TensorDict({"a": torch.ones(3, 4), "b": {"c": torch.ones(3, 4, 2), "s": Static("x")}}, [3, 4])


def typed() -> Any:
    return Batch(torch.ones(3, 4), Inner(torch.ones(3, 4, 2), batch_size=[3, 4]), batch_size=[3, 4])


def with_objects() -> Any:
    names = ObjectArray([str(i) for i in range(12)], (3, 4))
    return TensorDict({"a": torch.ones(3, 4), "b": {"c": torch.ones(3, 4, 2)}, "n": names}, [3, 4])


def ragged() -> Any:
    return TensorDict({"a": torch.ones(3), "b": {"c": tdc.pack([torch.ones(n, 2) for n in (1, 0, 4)])}}, [3])


ANY: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda td: td, "get": lambda td: (td["a"], td.get("b"), td["b", "c"], td["b"]["c"]),
    "get default": lambda td: td.get("zz", td),
    "keys": lambda td: (td.keys(True), td.values(True, True), td.items(True)), "to_dict": lambda td: td.to_dict(),
    "repr": lambda td: (repr(td), td._repr_html_()),
    "set": lambda td: td.set("new", td["a"]).set(("b", "d"), td["a"]).set("b", td["b"]),
    "update": lambda td: td.update({"a": td["a"], "b": {"c": td["b", "c"]}}).update(td),
    "delete": lambda td: (td.delete("a"), td.pop("b"), td.select("a"), td.exclude("a"), td.split_keys(["a"])),
    "rename": lambda td: td.rename_keys({"a": ("x", "y")}),
    "flatten_keys": lambda td: td.flatten_keys().unflatten_keys(),
    "filter": lambda td: td.filter(lambda key, x: key == "a"), "index": lambda td: (td[0], td[1:], td[[2, 0]]),
    "mask": lambda td: td[torch.tensor([True, False, True])], "cat": lambda td: torch.cat([td, td]),
    "split": lambda td: (td.split(2), td.chunk(2), td.unbind()),
    "to": lambda td: (td.to(torch.float64), td.to("cpu"), td.clone(), td.detach()),
    "tree_map": lambda td: (pytree.tree_map(lambda x: x, td), optree.tree_map(lambda x: x, td)),
    "treedef": lambda td: pytree.tree_flatten(td),
    "copies": lambda td: (copy.copy(td), copy.deepcopy(td), pickle.loads(pickle.dumps(td))),
    "mutate": lambda td: td.mutate().finish(), "iterate": lambda td: list(td),
    "a missing key": lambda td: error(lambda: td["zz"]), "an index out of range": lambda td: error(lambda: td[99]),
    "an assignment": lambda td: error(lambda: td.__setitem__("a", 1)),
    "a wrong size": lambda td: error(lambda: td.set("w", torch.ones(7))),
    "different keys": lambda td: error(lambda: torch.cat([td, td.delete("a")])),
    "an op without a rule": lambda td: error(lambda: torch.fft.fft(td)),
}  # fmt: skip
NUMERIC: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda td: (td + 1, td * td, -td, 2 / td, td == td, td > 0),
    "where": lambda td: torch.where(td > 0, td, td + 1),
    "apply": lambda td: (td.apply(torch.neg), td.apply(lambda x, y: x + y, td)),
    "full_like": lambda td: (torch.zeros_like(td), torch.full_like(td, 2)),
    "grad": lambda td: tdc.grad(lambda td: td["a"].sum())(td),
}
DENSE: dict[str, Callable[[Any], Any]] = {
    "shape": lambda td: (td.reshape(12), td.permute(1, 0), td.flatten(), td.unsqueeze(0).squeeze(0)),
    "more shape": lambda td: (td.expand(2, 3, 4), td.transpose(0, 1), td.unflatten(1, (2, 2)), td.flip(0)),
    "stack": lambda td: (torch.stack([td, td]), torch.stack([td, td], -1)),
    "reductions": lambda td: (td.sum(0), td.mean(), td.amax(1), td.all(0)),
    "at": lambda td: (td.at[0].set(1), td.at[[0, 0]].add(1), td.at[0].get(), td.at[0].apply(torch.neg)),
    "gather": lambda td: td.gather(0, torch.tensor([[0, 1, 2, 0]])),
    "sort": lambda td: (td.sort(0), td.cumsum(0)),
    "vmap": lambda td: (torch.vmap(lambda row: row * 2)(td), tdc.vmap(lambda row: row * 2, out_dims=1)(td)),
    "broadcasting": lambda td: td + torch.ones(4),
    "a tensor that does not fit": lambda td: error(lambda: td + torch.ones(5)),
    "backward": lambda td: td.apply(lambda x: x.clone().requires_grad_()).apply(lambda x: x * x).sum(),
}
RAGGED: dict[str, Callable[[Any], Any]] = {
    "shape": lambda td: (td.reshape(3, 1), td.unsqueeze(0), td.flip(0), td.expand(2, 3)),
    "stack": lambda td: (torch.stack([td, td]), torch.stack([td, td], 1)),
    "padding": lambda td: td.set(("b", "c"), td["b", "c"].to_padded()),
    "pad_sequence": lambda td: tdc.data.pad_sequence([row.select("b") for row in td], keys=[("b", "c")]),
}
OF_CLASS: dict[str, Callable[[Any], Any]] = {
    "attributes": lambda x: (x.a, x.b, x.b.c, x.extra),
    "methods": lambda x: x.b.doubled(),
    "replace": lambda x: (x.replace(a=x.a), x.replace(b=x.b), x.replace(extra="z"), x.replace(extra=x.a)),
    "demotion": lambda x: (x.delete("extra"), x.set("new", x.a), x.to_tensordict()),
    "from_tensordict": lambda x: Batch.from_tensordict(x.to_tensordict()),
    "a wrong field": lambda x: error(lambda: x.replace(zz=1)),
    "a wrong value": lambda x: error(lambda: Batch(x.a, x.b[0], batch_size=[3, 4])),
}


def error(fn: Callable[[], Any]) -> None:
    """Run what must fail; a traceback holds frames, and these hold batches."""
    with pytest.raises(Exception):  # noqa: B017, PT011  # which one it is, is for other tests
        fn()


def tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def survivors(make: Callable[[], Any], op: Callable[[Any], Any]) -> int:
    """How many tensors of the operands and results of an operation outlive them."""
    op(make())  # what is cached on first use is no cycle
    with uncollected():
        x = make()
        out = op(x)
        alive = [weakref.ref(t) for t in (*tensors(x), *tensors(out))]
        assert alive
        del x, out
        return sum(ref() is not None for ref in alive)


CASES = [
    *[(plain, name, op) for name, op in (ANY | NUMERIC | DENSE).items()],
    *[(typed, name, op) for name, op in (ANY | NUMERIC | DENSE | OF_CLASS).items()],
    *[(ragged, name, op) for name, op in (ANY | NUMERIC).items()],
    *[(ragged, name, op) for name, op in RAGGED.items()],
    *[(with_objects, name, op) for name, op in ANY.items()],
]


@pytest.mark.parametrize(
    ("make", "op"), [pytest.param(make, op, id=f"{make.__name__}-{name}") for make, name, op in CASES]
)
def test_no_tensor_outlives_its_names(make: Callable[[], Any], op: Callable[[Any], Any]):
    assert survivors(make, op) == 0


def test_a_cycle_is_found():
    def cyclic(td: TensorDict) -> TensorDict:
        ring: list[Any] = [td]
        ring.append(ring)
        return td

    assert survivors(plain, cyclic) == 4  # two leaves, of the operand and of the result
    gc.collect()
