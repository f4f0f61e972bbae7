"""forbid: code takes no slow path, neither padding of packed batches nor a loop over examples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tdc.core.slow_paths import BLOCKS, FORBIDDEN


@contextmanager
def forbid(*, padding: bool = True, loops: bool = True) -> Iterator[None]:
    """A block in which packed batches are not padded, and ragged batches not taken apart.

    Args:
        padding: whether to forbid that a NestedTensor becomes a rectangle, by `to_padded` or inside a rule.
        loops: whether to forbid `tdc.unbatched`, and `unbind`, `tolist` and iteration of ragged batches.

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
    paths = frozenset([name for name, given in (("padding", padding), ("loops", loops)) if given])
    token = FORBIDDEN.set(FORBIDDEN.get() | paths)
    BLOCKS.append(paths)
    try:
        yield
    finally:
        BLOCKS.remove(paths)
        FORBIDDEN.reset(token)
