"""A cache of keys and values for decoding, with preallocated memory and one length for each row.

    cache = KVCache.allocate(32, 640, heads=8, head_dim=64)     once for each layer
    cache = cache.append_(k, v)                                 of a prompt, or of one new token of each row
    y = cache.attend(q)                                         each query attends to itself and earlier positions

    key (B, C, G, D), value (B, C, G, E)      B rows, capacity C, G heads
    length (B,)                               number of positions of each row

A cache is a tensorclass: `cache[index]`, `tdc.copy_`, `torch.compile` and stores work as for any. `append_` writes into
its memory and returns a cache with the new lengths. An older cache, with its shorter rows, stays valid until the next
append: keep it to undo speculative tokens.
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor

from tdc.core.arguments import as_own_device, expect, expect_at_least
from tdc.core.asserts import require
from tdc.core.dynamo import mark_address
from tdc.core.errors import DtypeError, ShapeError, describe, message, show_sizes
from tdc.kernels.attention.cached import cached_rows
from tdc.layout.segments import lengths_of, local_positions, row_ids
from tdc.layout.structure import require_same
from tdc.ragged.nested import NestedTensor
from tdc.tensordict.tensorclass import TensorClass

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
HINT = "a NestedTensor of tdc.pack(rows), or a tensor with as many positions of each row"


class KVCache(TensorClass):
    """Keys and values of the positions so far.

    Shapes:
        key `(B, C, G, D)`, value `(B, C, G, E)`, length `(B,)`: int64, at most C. Arguments and results are ragged,
        `(B, -1, heads, size)`, or rectangular, `(B, n, heads, size)`.

    Raises:
        ShapeError: more positions than the capacity; other heads or sizes.

    Compile:
        fullgraph: one graph for prompts of all lengths, one for single tokens. `append_` mutates its input in place.
        On a GPU `allocate` marks the memory as one that stays, so that `mode="reduce-overhead"` may write into it
        (not yet measured); the next step writes over results, so carry `cache.replace(length=cache.length.clone())`.

    Example:
        >>> from tdc.ragged.pack import pack
        >>> cache = KVCache.allocate(2, 8, heads=1, head_dim=4)
        >>> prompt = pack([torch.ones(3, 1, 4), torch.ones(5, 1, 4)])
        >>> cache = cache.append_(prompt, prompt)
        >>> cache.attend(prompt).lengths.flatten(), cache.append_(torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 4)).length
        (tensor([3, 5]), tensor([4, 6]))
    """

    key: Tensor
    value: Tensor
    length: Tensor

    @classmethod
    def allocate(
        cls, batch_size: int, capacity: int, *, heads: int, head_dim: int, value_dim: int | None = None,
        dtype: torch.dtype | None = None, device: Any = None,
    ) -> Self:  # fmt: skip
        """An empty cache.

        Args:
            batch_size: number of rows.
            capacity: most positions of a row.
            heads: of keys; the heads of queries are a multiple.
            head_dim, value_dim: size of a head of keys, and of values if it differs.
            dtype, device: torch's defaults if None.
        """
        op, sizes = "KVCache.allocate", [head_dim, head_dim if value_dim is None else value_dim]
        for name, n in {"batch_size": batch_size, "capacity": capacity, "heads": heads, "head_dim": min(sizes)}.items():
            expect_at_least(op, 1, name, n)
        if dtype is not None:
            expect(op, dtype, torch.dtype, of=" for dtype")
        device = as_own_device(op, device)
        made = [torch.zeros(batch_size, heads, capacity, size, dtype=dtype, device=device) for size in sizes]
        length = torch.zeros(batch_size, dtype=torch.int64, device=made[0].device)
        key, value = (x.transpose(1, 2) if x.is_cpu else x.transpose(1, 2).contiguous() for x in made)
        for x in (key, value):
            if not x.is_cpu:
                mark_address(x)
        return cls(key, value, length, batch_size=[batch_size])

    @property
    def capacity(self) -> int:
        """Most positions of a row."""
        return self.key.shape[1]

    def append_(self, key: Any, value: Any) -> Self:
        """Append new positions to the rows, in place.

        Args:
            key, value: ragged or `(B, n, G, size)`; ragged rows may be empty.

        Returns:
            A cache of the same memory with the new lengths.

        Raises:
            ShapeError: above the capacity, or another number of rows, heads or features.
            StructureError: values of other lengths than keys.
            DtypeError: only one of both is ragged; not floating-point.
        """
        op = "KVCache.append_"
        k, v = self._flat(op, key), self._flat(op, value)
        if k.shape[1:] != self.key.shape[2:] or v.shape[1:] != self.value.shape[2:] or k.shape[0] != v.shape[0]:
            got = f"{show_sizes(k.shape[1:])} and {show_sizes(v.shape[1:])}, of {k.shape[0]} and {v.shape[0]} positions"
            expected = f"keys and values of {show_sizes(self.key.shape[2:])} and {show_sizes(self.value.shape[2:])}"
            raise ShapeError(message(op, expected, got, hint="(B, n, heads, size) or ragged (B, -1, heads, size)"))
        if isinstance(key, NestedTensor) is not isinstance(value, NestedTensor):
            got = f"{describe(key)} and {describe(value)}"
            raise DtypeError(message(op, "keys and values that are both ragged, or neither", got, hint=HINT))
        if isinstance(key, NestedTensor):
            require_same(key.structure, value.structure, op)
        rows, at, count = self._targets(key)
        length = self.length + count
        text = message(op, f"at most {self.capacity} positions in a row", "more", hint="allocate with more capacity")
        require((length <= self.capacity).all(), text, ShapeError)
        self.key.index_put_((rows, at), k.to(self.key.dtype))
        self.value.index_put_((rows, at), v.to(self.value.dtype))
        return self.replace(length=length)

    def attend(
        self, query: Any, *, is_causal: bool = True, window: int | None = None, scale: float | None = None
    ) -> Any:
        """Attention of queries to the positions of their rows.

        Args:
            query: ragged or `(B, n, H, D)`, H a multiple of G: of the last positions of each row.
            is_causal: attend to the own and earlier positions; else to the whole row.
            window: if causal, the number of positions attended to, the own included.
            scale: of scores, `1 / sqrt(D)` by default.

        Returns:
            As `query`, with the size of values. A query without keys gives 0.

        Raises:
            ShapeError: more queries in a row than positions; heads that are not a multiple of the cache's.
        """
        op = "KVCache.attend"
        expect(op, is_causal, bool, of=" for is_causal")
        if window is not None:
            expect_at_least(op, 1, "window", window)
            if not is_causal:
                raise ShapeError(message(op, "a window of causal attention", "is_causal=False", hint="window=None"))
        q = self._flat(op, query)
        heads, size = self.key.shape[2:]
        if q.shape[-1] != size or q.shape[1] % heads:
            expected = f"queries of {size} features in a multiple of {heads} heads"
            raise ShapeError(message(op, expected, f"{show_sizes(q.shape[1:])}", hint="(B, -1, heads, size)"))
        ragged = isinstance(query, NestedTensor)
        count = self.length.shape[0] + 1
        offsets = query.structure.offsets if ragged else torch.arange(count, device=q.device) * query.shape[1]
        options = is_causal, window or 0, 1 / math.sqrt(size) if scale is None else scale
        (out,) = cached_rows(q.to(self.key.dtype), self.key, self.value, offsets, self.length, *options)
        out = out.to(q.dtype)
        return query.with_values(out) if ragged else out.unflatten(0, query.shape[:2])

    def positions(self, new: Any) -> Any:
        """Positions of new elements before they are appended, for position embeddings, int64.

        Returns:
            A NestedTensor `(B, -1)` for a ragged batch, `(B, n)` for a tensor.
        """
        self._check("KVCache.positions", new)
        _, at, _ = self._targets(new)
        return new.with_values(at) if isinstance(new, NestedTensor) else at.unflatten(0, new.shape[:2])

    def truncate_to(self, length: Tensor) -> Self:
        """A cache of the same memory with shorter rows: to undo speculative tokens, or 0 to begin a row anew.

        Args:
            length: `(B,)`, integers; rows that are shorter stay as they are.
        """
        op = "KVCache.truncate_to"
        expect(op, length, Tensor, of=" for length")
        if length.shape != self.length.shape or length.dtype not in WHOLE:
            expected = f"one whole number for each of {self.length.shape[0]} rows"
            raise ShapeError(message(op, expected, describe(length), hint="cache.length.masked_fill(done, 0)"))
        return self.replace(length=torch.minimum(self.length, length.clamp(min=0)))

    def _targets(self, new: Any) -> tuple[Tensor, Tensor, Any]:
        """Row and position of each new element, (N,) each, and the number of new elements of each row."""
        if isinstance(new, NestedTensor):
            s, total = new.structure, new.values.shape[0]
            rows = row_ids(s, total)
            return rows, local_positions(s, total) + self.length[rows], lengths_of(s)
        at = self.length[:, None] + torch.arange(new.shape[1], device=self.length.device)
        rows = torch.arange(new.shape[0], device=self.length.device)[:, None].expand(new.shape[:2])
        return rows.flatten(), at.flatten(), new.shape[1]

    def _flat(self, op: str, x: Any) -> Tensor:
        """New elements as (N, heads, size)."""
        self._check(op, x)
        flat: Tensor = x.values if isinstance(x, NestedTensor) else x.flatten(0, 1)
        if flat.ndim != 3:
            raise ShapeError(message(op, "numbers of each head, (B, n, heads, size)", describe(x), hint=HINT))
        if not flat.is_floating_point():
            raise DtypeError(message(op, "real numbers", describe(x), hint="x.float()"))
        return flat

    def _check(self, op: str, x: Any) -> None:
        """Refuse anything but a batch of this cache's rows."""
        if self.length.ndim != 1:
            got = f"batch_size {list(self.length.shape)}"
            raise ShapeError(message(op, "a cache of rows, batch_size [B]", got, hint="cache[i : i + 1] is one row"))
        count = self.length.shape[0]
        if isinstance(x, NestedTensor):
            if x._batch_dim or x.ragged_dims != (1,) or x.structure.batch_size != count:
                raise ShapeError(message(op, f"{count} ragged rows, (B, -1, heads, size)", describe(x), hint=HINT))
        elif not isinstance(x, Tensor):
            raise DtypeError(message(op, "a NestedTensor or a tensor", describe(x), hint=HINT))
        elif x.ndim < 2 or x.shape[0] != count:
            raise ShapeError(message(op, f"the positions of {count} rows, (B, n, ...)", describe(x), hint=HINT))
