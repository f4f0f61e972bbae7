"""Tensors of a CUDA device on a machine without one: they have shapes, but no elements, and take the ways of CUDA.

torch's own fake tensors do, but a few methods of `Tensor` that its C++ begins by a visit to the device, which a torch
without CUDA has not. In a block of `fake_cuda` these go to the operation that they stand for. There are no gradients:
autograd visits the device, too.

    with fake_cuda():
        x = on_fake_cuda(packed)          offsets, values and what else is a tensor are fake
        torch.relu(x)

Tensors of the CPU stay real, so that what is computed on the host has numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tdc.core import dynamo, pytree
from tdc.layout.segments import sizes_on_host
from tdc.layout.structure import Structure, remember
from tdc.ragged.nested import NestedTensor, build_nested

aten = torch.ops.aten


@contextmanager
def fake_methods() -> Iterator[None]:
    """A block in which methods of fake tensors are operations, as a graph that is traced needs them, too."""
    with ExitStack() as stack:
        for name, method in METHODS.items():
            stack.enter_context(mock.patch.object(FakeTensor, name, method, create=True))
        yield


@contextmanager
def fake_cuda() -> Iterator[None]:
    """A block in which `device="cuda"` makes fake tensors."""
    with ExitStack() as stack:
        stack.enter_context(fake_methods())
        stack.enter_context(mock.patch.object(dynamo, "PLAIN", {Tensor, FakeTensor}))
        stack.enter_context(mock.patch.object(dynamo, "current_stream", return_value=0))
        stack.enter_context(mock.patch("torch.cuda.is_current_stream_capturing", return_value=False))
        stack.enter_context(mock.patch("torch.cuda.get_device_capability", return_value=(8, 0)))  # torch 2.15 asks
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # whose grid_sampler has no fake kernel
        stack.enter_context(torch.no_grad())
        stack.enter_context(Fakes(allow_non_fake_inputs=True))
        stack.enter_context(RealOnHost())
        yield


class Fakes(FakeTensorMode):
    """A mode of fake tensors that changes nothing for what asks whether its tensors can be read."""

    watches = True


class RealOnHost(TorchDispatchMode):
    """Runs what meets tensors of the CPU alone as it is; a fake tensor of the CPU has no numbers."""

    watches = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        fake = any(isinstance(x, FakeTensor) for x in pytree.tree_leaves((args, given)))
        if fake or torch.device(given.get("device") or "cpu").type != "cpu":
            return func(*args, **given)
        with _disable_current_modes():
            return func(*args, **given)


def on_fake_cuda(tree: Any, told: bool = True) -> Any:
    """The same containers and tensors on the fake device; what shares a structure or a tensor still does.

    Args:
        told: whether structures know the sizes of their examples on the host, as those that `pack` makes do.
    """
    made: dict[int, Any] = {}

    def tensor(x: Tensor | None) -> Any:
        if x is None:
            return None
        return made.setdefault(id(x), torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda"))

    def structure(s: Structure, sizes: Tensor) -> Structure:
        offsets, shapes, extent = [tensor(t) for t in (s.offsets, s.shapes, s.extent)]
        there = Structure(offsets, shapes, extent, s.packed_dim, s.batch_dim, s.ragged_ndim)
        return remember(sizes_on_host, there, sizes if told else None)

    def one(x: Any) -> Any:
        if isinstance(x, NestedTensor):
            s = x.structure
            if id(s) not in made:
                made[id(s)] = structure(s, x.sizes)
            return build_nested(made[id(s)], tensor(x.values))
        return tensor(x) if isinstance(x, Tensor) else x

    return pytree.tree_map(one, tree, is_leaf=lambda x: isinstance(x, NestedTensor))


def get_item(x: Tensor, index: Any) -> Tensor:
    """`x[index]` by operations alone."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(i is ... for i in entries):
        at = next(k for k, i in enumerate(entries) if i is ...)
        rest = [i for i in entries if i is not None and i is not ...]
        taken = sum(i.ndim if isinstance(i, Tensor) and i.dtype == torch.bool else 1 for i in rest)
        entries[at : at + 1] = [slice(None)] * (x.ndim - taken)
    vectors: list[Tensor | None] = []
    for i in entries:
        d = sum(v.ndim if v is not None and v.dtype == torch.bool else 1 for v in vectors)
        if i is None or isinstance(i, slice):
            x = x.unsqueeze(d) if i is None else aten.slice(x, d, i.start, i.stop, 1 if i.step is None else i.step)
            vectors.append(None)
        elif isinstance(i, (Tensor, list)):
            vectors.append(i if isinstance(i, Tensor) else torch.tensor(i, device=x.device))
        else:
            x = x.select(d, i)
    return x if all(v is None for v in vectors) else aten.index(x, vectors)


def set_item(x: Tensor, index: Any, value: Any) -> None:
    part = get_item(x, index)
    part.copy_(value) if isinstance(value, Tensor) else part.fill_(value)


def new_tensor(x: Tensor, data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    return torch.tensor(data, dtype=dtype or x.dtype, device=device or x.device)


METHODS: dict[str, Any] = {
    "__getitem__": get_item, "__setitem__": set_item, "__invert__": lambda x: aten.bitwise_not(x),
    "new_tensor": new_tensor,
    "contiguous": lambda x, memory_format=torch.contiguous_format: aten.contiguous(x, memory_format=memory_format),
    "nonzero": lambda x, as_tuple=False: aten.nonzero(x), "__bool__": lambda x: bool(x.item()),
    "__int__": lambda x: int(x.item()), "__index__": lambda x: int(x.item()), "__float__": lambda x: float(x.item()),
}  # fmt: skip
