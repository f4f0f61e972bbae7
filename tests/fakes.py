"""Operators of the library beside their fakes, which say what a graph knows of the results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

DATA = "sizes that are data"


class Compared(TorchDispatchMode):
    """Each operator of the library also runs on tensors without numbers; notes how the results differ."""

    watches = True  # operations run as they are called

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.wrong: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "tdc":
            given = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            with FakeTensorMode(shape_env=ShapeEnv()) as mode:
                given = pytree.tree_map_only(Tensor, mode.from_tensor, given)
                fake = func(*given[0], **given[1])
            self.seen.add(str(func))
            found, said = [[*map(facts, pytree.tree_leaves(t))] for t in (out, fake)]
            if len(found) != len(said) or any([b not in (a, DATA) for a, b in zip(found, said, strict=True)]):
                self.wrong.append(f"{func}: {found}, but in a graph {said}")
        return out


def facts(x: Any) -> Any:
    """What a graph knows of a result; strides of dims that have several elements."""
    if not isinstance(x, Tensor):
        return x
    if free_unbacked_symbols(tuple(x.shape)):
        return DATA
    strides = [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1] if x.numel() else []
    return tuple(x.shape), strides, x.dtype, x.device


@contextmanager
def fakes_agree() -> Iterator[None]:
    """A block in which each operator of the library gives what its fake says: as many results, of the same shapes,
    strides, dtypes and devices."""
    with Compared() as mode:
        yield
    assert not mode.wrong, "\n".join(mode.wrong)
