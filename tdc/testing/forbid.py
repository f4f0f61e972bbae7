"""How code runs: `forbid` slow paths, such as padding of packed batches, loops over examples, device syncs; and
`assert_one_graph`, compiled once.

torch syncs with a device when

    a number is read          item, tolist, bool(x), equal, allclose, checks of torch.linalg
    a size depends on data    nonzero, masks as indices, unique, masked_select, repeat_interleave without output_size
    memory is pageable        copies between host and device, unless they are non-blocking and the host's side is pinned
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tdc.compile.inductor import backend as inductor
from tdc.compile.report.build import report
from tdc.compile.report.record import Report
from tdc.core import pytree
from tdc.core.dynamo import watching
from tdc.core.errors import message
from tdc.core.slow_paths import BLOCKS, FORBIDDEN, announce
from tdc.tensordict.display import shortened

READS = frozenset([
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "_linalg_check_errors", "nonzero", "argwhere",
    "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount",
])  # fmt: skip
INDEXES = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
COPIES = ("_to_copy", "copy_", "copy")


@contextmanager
def forbid(*, padding: bool = True, loops: bool = True, syncs: bool = False) -> Iterator[None]:
    """A block in which padding of packed batches, loops over examples, or device syncs are errors. Blocks nest.

    Args:
        padding: forbid that a NestedTensor becomes a rectangle, by `to_padded` or inside a rule.
        loops: forbid `tdc.unbatched`, and `unbind`, `tolist` and iteration of ragged batches.
        syncs: forbid that the host waits for a device: `item`, `tolist`, `nonzero`, a mask as an index,
            `repeat_interleave` without `output_size`, a copy between device and pageable memory.

    Raises:
        AssertionError: such a path is taken; names the operation and the line that called it.

    Compile:
        A function is checked while it is traced. One that was compiled before is not traced again;
        `torch.compiler.reset()` makes torch forget it.

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
    """Raise an AssertionError for an operation of torch that syncs."""
    if name := sync_of(op, args, kwargs):
        announce("syncs", name)


def sync_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Name of an operation, as a dispatch mode gets it, that syncs; empty for any other."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if all([on_host(x) for x in tensors]) and not kwargs.get("device"):
        return ""
    _, name, overload = f"{op}.".split(".")[:3]
    if name in INDEXES:
        chosen = [i for i in args[1] if i is not None]
        if any([i.dtype in (torch.bool, torch.uint8) for i in chosen]):
            return f"{name} of a mask"
        return f"{name} of an index on the host" if any([i.device != args[0].device for i in chosen]) else ""
    if name == "repeat_interleave":
        given = len(args) > 1 if overload == "Tensor" else overload == "self_int"
        return "" if given or kwargs.get("output_size") is not None else name
    waits = crosses(args, kwargs) if name in COPIES else name in READS
    return name if waits else ""


def on_host(x: Tensor) -> bool:
    """True if a tensor is on no device that can be waited for."""
    return x.device.type in ("cpu", "meta")


def crosses(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a copy between host and device makes the host wait."""
    first, second = args[0], args[1] if len(args) > 1 else None
    there = second.device if isinstance(second, Tensor) else torch.device(kwargs.get("device") or first.device)
    if (first.device.type == "cpu") == (there.type == "cpu"):
        return False
    hosts = [x for x in (first, second) if isinstance(x, Tensor) and x.device.type == "cpu"]
    asynchronous = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
    return not (asynchronous and hosts and hosts[0].is_pinned())


def assert_one_graph(
    fn: Callable[..., Any], *examples: Any, compiles: int = 1, backend: Any = inductor, dynamic: bool | None = None
) -> Report:
    """Assert that a function compiles to one graph without breaks, and does not recompile for other examples.

    Args:
        fn: the function. It is called once for each example.
        examples: a tuple of arguments each, or a single argument; give some of different sizes.
        compiles: the number of compiles allowed; 2 if torch learns from the second example which sizes vary.
        backend, dynamic: as of `torch.compile`. `backend="eager"` is fast and finds all but the guards of Inductor.

    Returns:
        The report, for further assertions. Time and memory are not measured.

    Raises:
        AssertionError: another number of graphs, or more compiles; names the user's line of each break and the cause of
            each recompile.
        StructureError, DtypeError, UnsupportedError: as `tdc.compile.report`.

    Compile:
        torch remembers the sizes that a function has seen; call `torch._dynamo.reset()` before a test.

    Example:
        >>> import torch
        >>> assert_one_graph(lambda x: x * 2, torch.ones(3), torch.zeros(3), backend="eager").graphs
        1
    """
    r = report(fn, *examples, backend=backend, dynamic=dynamic, repeats=0)
    if r.graphs == 1 and not r.breaks and len(r.compiles) <= compiles:
        return r
    lines = [f"{b.where or 'calls'}: graph break: {shortened(b.reason, 120)}" for b in r.breaks]
    for c in r.recompiles:
        lines.append(f"graph {c.graph}: compiled again: {c.causes[0] if c.causes else 'unknown'}")
    expected = f"1 graph, 0 breaks, at most {compiles} compile{'s' * (compiles != 1)} of {r.name}"
    got = f"{r.graphs} graphs, {len(r.breaks)} breaks, {len(r.compiles)} compiles"
    hint = "tdc.compile.report(fn, *examples) shows all of it"
    raise AssertionError(message("testing.assert_one_graph", expected, got, lines, hint))
