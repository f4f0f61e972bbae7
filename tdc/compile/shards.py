"""Parameters as flat vectors, of which each rank updates its part.

    parameters      w (3, 2), b (3,)      w w w w w w b b b      one vector for each dtype, or several of some bytes
    rank 0          w w w w w             its gradients, its moments, its new numbers
    rank 1          w b b b               its gradients, its moments, its new numbers
    all             w w w w w w b b b     gathered, and cut into w and b again

A part has ceil(n / ranks) numbers of n, the last ones fewer, as that of a DTensor does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tdc.core.dtensor import vector_of
from tdc.core.keys import parts
from tdc.core.typing import KeyPath
from tdc.tensordict.paths import gathered, replaced
from tdc.tensordict.tensordict import TensorDict, build_td

SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


@dataclass(frozen=True, eq=False)
class Shards:
    """Update of an optimiser in parts: gradients are reduced to the parts, and new parameters gathered from them.

    `optimizer` takes parts, and its norms are those of all ranks. `most`: bytes of a vector.
    """

    optimizer: Any
    group: Any
    most: int

    def init(self, optimizer: Any, params: TensorDict) -> TensorDict:
        """The state of an optimiser of this rank's part, with a DTensor for each vector."""
        return spread(optimizer.init(self.own(params)), self.lengths(params), self.group)

    def own(self, params: TensorDict) -> TensorDict:
        """The part of this rank."""
        rank, count = dist.get_rank(self.group), dist.get_world_size(self.group)
        leaves = params._leaves
        return TensorDict({name: part_of(gathered(leaves, p), rank, count) for name, p in self.vectors(params).items()})

    def vectors(self, params: TensorDict) -> dict[str, list[KeyPath]]:
        """Paths of the parameters in each vector."""
        return vectors_of({p: x for p, x in params._leaves.items() if is_inexact(x)}, self.most)

    def lengths(self, params: TensorDict) -> dict[str, int]:
        """Numbers in each vector."""
        return {
            name: sum([params._leaves[p].numel() for p in paths]) for name, paths in self.vectors(params).items()
        }

    def summed(self, grads: TensorDict, params: TensorDict, dtype: torch.dtype | None) -> TensorDict:
        """The part of this rank of gradients summed over all, in the dtype that travels or in that of sums.

        Vectors go in reverse order, in which a backward pass finishes them.
        """
        found: dict[str, Tensor] = {}
        for name, paths in reversed(list(self.vectors(params).items())):
            found[name] = scattered(gathered(grads._leaves, paths), dtype, self.group)
        return TensorDict({name: found[name] for name in reversed(list(found))})

    def update(self, grads: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        """New parameters, whole, and the new state."""
        new, after = self.optimizer.update(grads, state, self.own(params))
        leaves = params._leaves
        for name, paths in self.vectors(params).items():
            like = gathered(params._leaves, paths)
            leaves = replaced(leaves, paths, cut(from_all(new[name], like, self.group), like))
        return build_td(leaves, params._nodes, params._size, params._device), after


def is_inexact(x: Any) -> bool:
    """True for floating-point and complex tensors."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


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


def spread(state: TensorDict, lengths: Mapping[str, int], group: Any) -> TensorDict:
    """A state of parts with a DTensor in place of each, by the name of its vector; numbers stay as they are."""
    leaves = {p: vector_of(x, lengths[parts(p)[-1]], group) if x.ndim else x for p, x in state._leaves.items()}
    return build_td(leaves, state._nodes, state._size, state._device)


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
    flat = torch.cat([*[x.reshape(-1) for x in tensors], tensors[0].new_zeros(size * count - length)])
    whole = torch.view_as_real(flat) if flat.is_complex() else flat
    whole = whole if dtype is None else whole.to(dtype)
    out = whole.new_empty((size, *whole.shape[1:]))
    SCATTER(out, whole.contiguous(), group=group)
    own = out[: max(0, min(size, length - rank * size))]
    if dtype is not None:
        own = own.to(tensors[0].real.dtype)
    return torch.view_as_complex(own) if flat.is_complex() else own


def from_all(part: Tensor, like: list[Tensor], group: Any) -> Tensor:
    """The parts of all ranks, concatenated: a vector of all numbers of some tensors."""
    count, length = dist.get_world_size(group), sum([x.numel() for x in like])
    full = torch.cat([part, part.new_zeros(-(-length // count) - part.shape[0])])  # all exchange as much
    mine = (torch.view_as_real(full) if full.is_complex() else full).contiguous()
    found = [torch.empty_like(mine) for _ in range(count)]
    dist.all_gather(found, mine, group=group)
    whole = torch.cat(found)[:length]
    return torch.view_as_complex(whole) if part.is_complex() else whole


def cut(whole: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Split concatenated tensors into the shapes of others, each with memory of its own."""
    sizes = [x.numel() for x in like]
    return [part.reshape(x.shape).clone() for part, x in zip(whole.split(sizes), like, strict=True)]
