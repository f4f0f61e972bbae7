"""Parameters as flat vectors, of which each rank updates its part.

    parameters      w (3, 2), b (3,)      w w w w w w b b b      one vector for each dtype, or several of some bytes
    rank 0          w w w w w             its gradients, its moments, its new numbers
    rank 1          w b b b               its gradients, its moments, its new numbers
    all             w w w w w w b b b     gathered, and cut into w and b again

Parameters are gathered after the update, or stay in parts and are gathered at the start of the next step. A part has
ceil(n / ranks) numbers of n, the last ones fewer, as that of a DTensor does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tdc.core.dtensor import local_of, vector_of
from tdc.core.dtypes import is_inexact
from tdc.core.errors import StructureError, describe, message, refuse_wrong
from tdc.core.keys import parts, show
from tdc.core.typing import KeyPath
from tdc.tensordict.paths import gathered, replaced
from tdc.tensordict.tensordict import TensorDict, build_td

OP = "compile.train_step"
SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


class Form(NamedTuple):
    """Shapes of whole parameters, and those of each vector."""

    shapes: dict[KeyPath, torch.Size]
    vectors: dict[str, list[KeyPath]]
    nodes: Any

    def shapes_in(self, name: str) -> list[torch.Size]:
        """Shapes of the parameters in a vector."""
        return [self.shapes[p] for p in self.vectors[name]]


@dataclass(eq=False)
class Shards:
    """Update of an optimiser in parts: gradients are reduced to the parts, and parameters gathered from them.

    `optimizer` takes parts, and its norms are those of all ranks. `most`: bytes of a vector; one for each dtype with
    None. `keeps_params`: the state has parameters in parts, too, and `init` remembers their form.
    """

    optimizer: Any
    group: Any
    most: int | None
    keeps_params: bool = False
    form: Form | None = None

    def init(self, init: Callable[[TensorDict], TensorDict], params: TensorDict) -> TensorDict:
        """A state that a function makes of this rank's part, with a DTensor for each vector."""
        form = self.form_of(params)
        if self.keeps_params:
            self.form = form
        own = init(self.part(params, form))
        leaves = dict(own._leaves)
        for path, x in own._leaves.items():
            if x.ndim:
                leaves[path] = vector_of(x, length_of(form.shapes_in(parts(path)[-1])), self.group)
        return build_td(leaves, own._nodes, own._size, own._device)

    def form_of(self, params: TensorDict) -> Form:
        """The form of whole parameters."""
        leaves = {p: x for p, x in params._leaves.items() if is_inexact(x)}
        if self.keeps_params:
            wrong = {show(p): describe(x) for p, x in params._leaves.items() if p not in leaves}
            hint = "train_step(loss_fn, optimizer, buffers=True) for what is not trained, or shard='optimizer'"
            refuse_wrong(StructureError, OP, "floating-point parameters for shard='params'", wrong, "others", hint)
        return Form({p: x.shape for p, x in leaves.items()}, vectors_of(leaves, self.most), params._nodes)

    def part(self, td: TensorDict, form: Form) -> TensorDict:
        """The part of this rank in whole parameters, or in their gradients."""
        rank, count = dist.get_rank(self.group), dist.get_world_size(self.group)
        leaves = td._leaves
        return TensorDict({name: part_of(gathered(leaves, p), rank, count) for name, p in form.vectors.items()})

    def own(self, held: TensorDict) -> TensorDict:
        """The part of this rank in the parameters of a state."""
        return held if self.keeps_params else self.part(held, self.form_of(held))

    def whole(self, held: TensorDict) -> TensorDict:
        """The parameters of a state, gathered if it has parts."""
        form = self.form
        if form is None:
            return held
        leaves: dict[KeyPath, Tensor] = {}
        for name, paths in form.vectors.items():
            own = from_all(local_of(held._leaves[name]), form.shapes_in(name), self.group)
            leaves |= {p: x for p, x in zip(paths, own, strict=True)}
        return build_td({p: leaves[p] for p in form.shapes}, form.nodes, torch.Size([]), held._device)

    def check(self, held: TensorDict) -> None:
        """Refuse parameters in other parts than those of `init`."""
        if not self.keeps_params:
            return
        rank, count = dist.get_rank(self.group), dist.get_world_size(self.group)
        form = Form({}, {}, None) if self.form is None else self.form
        sizes = {name: (size_of(length_of(form.shapes_in(name)), rank, count),) for name in form.vectors}
        if sizes != {name: tuple(local_of(x).shape) for name, x in held._leaves.items()}:
            got = "others" if form.vectors else "a step without init"
            hint = "step.init() first, with the same bucket=; dcp_load(path, like=state) loads into its state"
            raise StructureError(message(OP, "parameters in the parts that init makes", got, hint=hint))

    def summed(self, grads: TensorDict, params: TensorDict, dtype: torch.dtype | None) -> TensorDict:
        """The part of this rank of gradients summed over all, in the dtype that travels or in that of sums.

        Vectors go in reverse order, in which a backward pass finishes them.
        """
        found: dict[str, Tensor] = {}
        for name, paths in reversed(list(self.form_of(params).vectors.items())):
            found[name] = scattered(gathered(grads._leaves, paths), dtype, self.group)
        return TensorDict({name: found[name] for name in reversed(list(found))})

    def update(self, grads: TensorDict, state: TensorDict, held: TensorDict) -> tuple[TensorDict, TensorDict]:
        """New parameters, in parts or whole as they were, and the new state."""
        if self.keeps_params:
            return self.optimizer.update(grads, state, held)  # type: ignore[no-any-return]  # of an optimizer
        form = self.form_of(held)
        new, after = self.optimizer.update(grads, state, self.part(held, form))
        leaves = held._leaves
        for name, paths in form.vectors.items():
            leaves = replaced(leaves, paths, from_all(new[name], form.shapes_in(name), self.group))
        return build_td(leaves, held._nodes, held._size, held._device), after


def vectors_of(leaves: Mapping[KeyPath, Tensor], most: int | None = None) -> dict[str, list[KeyPath]]:
    """Paths of leaves by the vector they are in: "float32", "float32_1", ..., of at most so many bytes or one leaf."""
    kinds: dict[str, list[KeyPath]] = {}
    for path, x in leaves.items():
        kinds.setdefault(str(x.dtype).removeprefix("torch."), []).append(path)
    if most is None:
        return kinds
    found: dict[str, list[KeyPath]] = {}
    for name, paths in kinds.items():
        sizes = [leaves[p].numel() * leaves[p].element_size() for p in paths]
        for i, positions in enumerate(packs(sizes, most)):
            found[f"{name}_{i}" if i else name] = [paths[k] for k in positions]
    return found


def packs(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Positions in order, put together up to so many bytes."""
    found: list[list[int]] = []
    size = 0
    for i, own in enumerate(sizes):
        if not found or size + own > most:
            found.append([])
            size = 0
        found[-1].append(i)
        size += own
    return found


def length_of(shapes: Sequence[torch.Size]) -> int:
    """Numbers in tensors of these shapes."""
    return sum([shape.numel() for shape in shapes])


def size_of(length: int, rank: int, count: int) -> int:
    """Numbers in the part of a rank."""
    size = -(-length // count)
    return max(0, min(size, length - rank * size))


def joined(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Tensors of one dtype in a vector, `out` if given."""
    flats = [x if x.ndim == 1 else x.reshape(-1) for x in tensors]
    return torch.cat(flats) if out is None else torch.cat(flats, out=out)


def cut(whole: Tensor, like: Sequence[Tensor | torch.Size]) -> list[Tensor]:
    """The inverse of `joined`, for tensors or shapes: views of a vector."""
    shapes = [x.shape if isinstance(x, Tensor) else x for x in like]
    pieces = whole.split([shape.numel() for shape in shapes])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def part_of(tensors: list[Tensor], rank: int, count: int) -> Tensor:
    """The part of a rank in concatenated tensors."""
    size = -(-sum([x.numel() for x in tensors]) // count)
    first, begin, found = rank * size, 0, []
    for x in tensors:
        low, high = max(first - begin, 0), min(first + size - begin, x.numel())
        if low < high:
            found.append(x.reshape(-1)[low:high])
        begin += x.numel()
    return torch.cat(found) if found else tensors[0].new_empty(0)


def scattered(tensors: list[Tensor], dtype: torch.dtype | None, group: Any) -> Tensor:
    """The part of this rank in the sum over ranks of concatenated tensors."""
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    length = sum([x.numel() for x in tensors])
    size = -(-length // count)
    flat = joined([*tensors, tensors[0].new_zeros(size * count - length)])
    whole = torch.view_as_real(flat) if flat.is_complex() else flat
    whole = whole if dtype is None else whole.to(dtype)
    out = whole.new_empty((size, *whole.shape[1:]))
    SCATTER(out, whole.contiguous(), group=group)
    own = out[: size_of(length, rank, count)]
    if dtype is not None:
        own = own.to(tensors[0].real.dtype)
    return torch.view_as_complex(own) if flat.is_complex() else own


def from_all(part: Tensor, shapes: Sequence[torch.Size], group: Any) -> list[Tensor]:
    """Tensors of these shapes, each with memory of its own, from the parts of all ranks."""
    count, length = dist.get_world_size(group), length_of(shapes)
    full = torch.cat([part, part.new_zeros(-(-length // count) - part.shape[0])])  # all exchange as much
    mine = (torch.view_as_real(full) if full.is_complex() else full).contiguous()
    found = [torch.empty_like(mine) for _ in range(count)]
    dist.all_gather(found, mine, group=group)
    whole = torch.cat(found)[:length]
    return [x.clone() for x in cut(torch.view_as_complex(whole) if part.is_complex() else whole, shapes)]
