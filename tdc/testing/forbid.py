"""forbid: code takes no slow path: no padding of packed batches, no loop over examples, no wait for a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from tdc.core.dynamo import watching
from tdc.core.slow_paths import BLOCKS, FORBIDDEN, announce
from tdc.testing.syncs import sync_of


@contextmanager
def forbid(*, padding: bool = True, loops: bool = True, syncs: bool = False) -> Iterator[None]:
    """A block in which packed batches are not padded, ragged batches not taken apart, and no device is waited for.

    Args:
        padding: whether to forbid that a NestedTensor becomes a rectangle, by `to_padded` or inside a rule.
        loops: whether to forbid `tdc.unbatched`, and `unbind`, `tolist` and iteration of ragged batches.
        syncs: whether to forbid that the host reads a tensor on a device, by the library or by torch: `item`,
            `tolist`, `nonzero`, a mask as an index, `repeat_interleave` without `output_size`, a copy between device
            and pageable memory. Tensors on the CPU are never waited for.

    Raises:
        AssertionError: such a path is taken; names the operation and the line that called it.

    Compile:
        A function that is traced inside the block is checked while it is traced, and is not changed by that. One that
        was compiled before is not traced again; `torch.compiler.reset()` makes torch forget it. Blocks nest; what an
        outer one forbids stays forbidden.

    Example:
        >>> import tdc, torch
        >>> x = tdc.pack([torch.ones(2), torch.ones(3)])
        >>> with forbid():
        ...     total = x.sum(1)
        >>> try:
        ...     with forbid():
        ...         rows = x.unbind()
        ... except AssertionError as error:
        ...     print(str(error).splitlines()[0])
        tdc.testing.forbid: expected no loops, got a loop over examples in 'unbind'
    """
    given = {"padding": padding, "loops": loops, "syncs": syncs}
    paths = frozenset([name for name in given if given[name]])
    token = FORBIDDEN.set(FORBIDDEN.get() | paths)
    BLOCKS.append(paths)
    try:
        with watching(refuse_sync) if syncs else nullcontext():
            yield
    finally:
        BLOCKS.remove(paths)
        FORBIDDEN.reset(token)


def refuse_sync(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An AssertionError where the host would wait for an operation of torch."""
    if name := sync_of(op, args, kwargs):
        announce("syncs", name)
