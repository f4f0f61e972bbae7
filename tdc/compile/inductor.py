"""The compiler backend: Inductor, told that a size may be anything.

    torch.compile(fn, backend=tdc.compile.backend, fullgraph=True)

Inductor's CPU code generator asks if a sum has more than 4096 terms, and guards on the answer: a batch whose packed
total crosses that number compiles a second time (torch 2.11-2.13, `CppKernel.need_use_acc_helper`); so does its
decomposition of small products (`decomposition.mm`). A flag of torch, `backed_size_oblivious`, makes it take the answer
that is right for every size, without a guard. It is set only while Inductor runs, or decomposes a product; tracing is
as always. Where Inductor cannot work under the flag (torch 2.11) it stays unset for all but products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch

from tdc.compile._torch.dynamo import named_backend
from tdc.compile._torch.inductor import BUDGET, apart_in_caches, compile_graph, memory_budget, merge_equal, settings_of
from tdc.compile._torch.remat import drawn_once, drop_detours
from tdc.compile._torch.scans import without_copies
from tdc.core.arguments import expect
from tdc.core.errors import DtypeError, ShapeError, UnsupportedError, describe, first_line, message

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def backend(
    graph: torch.fx.GraphModule, inputs: list[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph with Inductor, for every length and not only those on this side of a threshold.

    Args:
        graph, inputs: as Dynamo passes them to a backend.
        mode, options: as of `torch.compile`. `options={"activation_memory_budget": 0.5}` keeps about half of the
            activations for a backward pass outside of the graph, and computes the others again.

    Raises:
        UnsupportedError: an unknown mode.
        ShapeError: a budget that is no number from 0 to 1.

    Compile:
        Pass it to `torch.compile(fn, backend=tdc.compile.backend)`.

    Example:
        >>> f = torch.compile(lambda x: x.sum(0), backend=backend)  # one kernel for 4096 rows and for 4097

    Source:
        `torch._inductor.compile_fx`.
    """
    settings = checked_settings(mode, options, "compile.backend")
    again = has_checkpoints(graph)
    if again:  # what is computed again stays where it is used, and is not what was computed before
        settings.setdefault("reorder_for_locality", False)
    # Graphs compiled without the flag carry the guard with them in the cache on disk, so ours are kept apart.
    drawn = drawn_once(seeds=True) if again else nullcontext()
    with drawn, apart_in_caches("tdc-18"), memory_budget(settings.pop(BUDGET, None)):
        return compile_graph(graph, inputs, partial(prepare, merge=not again), settings)


def has_checkpoints(graph: torch.fx.GraphModule) -> bool:
    """True if parts of a graph are computed again for gradients."""
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    return any([len(part.graph.find_nodes(op="call_function", target=checkpoint)) > 0 for part in parts])


def prepare(module: torch.fx.GraphModule, *, merge: bool) -> None:
    """Change a graph before it is lowered, and the bodies of its loops; `merge` makes one of equal operations."""
    if merge:
        merge_equal(module)
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            without_copies(part)
            keep_alpha(part.graph)
            select_rows(part.graph)
    drop_detours(module.graph)


def keep_alpha(graph: torch.fx.Graph) -> None:
    """Turn `x + alpha * y` into `x - (-alpha) * y`: Inductor's `addmm` loses the alpha (torch 2.11-2.13)."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        if "alpha" in node.kwargs and node.meta["val"].dtype is not torch.bool:
            node.target = torch.ops.aten.sub.Tensor
            node.kwargs = {"alpha": -node.kwargs["alpha"]}


def select_rows(graph: torch.fx.Graph) -> None:
    """Gather the row `x[i]` for a computed number i.

    Where x has one column less than there are offsets, Inductor writes `Max(1, n - 1)` into its code (torch 2.13). The
    backward pass of a loop over examples has such rows.
    """
    ops = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=ops.select.int):
        x, dim, i = node.args
        val = x.meta["val"]
        if not isinstance(i, torch.fx.Node) or "Max" not in str(val.stride(dim)):
            continue
        row = node.meta["val"].clone(memory_format=torch.contiguous_format)
        with graph.inserting_before(node):
            at = graph.call_function(ops.full.default, ([1], i), {"dtype": torch.int64, "device": val.device})
            rows = graph.call_function(ops.index.Tensor, (x, [*[None] * dim, at]))
            found = graph.call_function(ops.squeeze.dim, (rows, dim))
        one = val.new_empty(1, dtype=torch.int64)
        at.meta["val"], rows.meta["val"], found.meta["val"] = one, row.unsqueeze(dim), row
        node.replace_all_uses_with(found)
        graph.erase_node(node)


def checked_settings(mode: str | None, options: dict[str, Any] | None, op: str) -> dict[str, Any]:
    """Inductor's settings for a known mode and options of `torch.compile`."""
    if mode is not None and mode not in MODES:
        hint = f"mode={[*nearest(mode, MODES), 'max-autotune'][0]!r}"
        raise UnsupportedError(message(op, f"a mode of {', '.join(MODES)}", repr(mode), hint=hint))
    expect(op, options or {}, dict, of=" of options")
    try:
        settings = settings_of(mode, options)
    except RuntimeError as error:  # torch lists all of its options
        got = ", ".join([repr(name) for name in options or {}])
        hint = f"torch: {first_line(error)[:110]}"
        raise UnsupportedError(message(op, "options of Inductor with values that fit", got, hint=hint)) from None
    budget = settings.get(BUDGET, 1.0)
    if not isinstance(budget, (int, float)) or not 0 <= budget <= 1:
        hint = f"options={{'{BUDGET}': 0.5}} keeps half of what would be kept"
        raise ShapeError(message(op, f"{BUDGET} from 0 to 1", repr(budget), hint=hint))
    return settings


def nearest(name: Any, known: Iterable[str]) -> list[str]:
    """Return a list with the known name that is spelled most like this one; an empty one without any."""
    return get_close_matches(name, [*known], 1) if isinstance(name, str) else []


def backend_of(
    name: Any, mode: str | None, options: dict[str, Any] | None, op: str, dynamic: Any = None
) -> Callable[..., Any]:
    """A backend by its name or as it is, as a function of a graph and its inputs; refuses a `dynamic` of no bool."""
    if dynamic is not None and not isinstance(dynamic, bool):
        hint = "tdc.compile.dynamic(x, 'length') marks sizes of an argument"
        raise DtypeError(message(op, "True, False or None as dynamic", describe(dynamic), hint=hint))
    found = name if callable(name) else named_backend(name)
    if found is None:
        expected = "a function or the name of a backend of torch.compile, such as 'inductor', 'aot_eager' or 'eager'"
        near = [repr(x) for x in nearest(name, torch.compiler.list_backends(exclude_tags=()))]
        raise UnsupportedError(message(op, expected, repr(name), hint=f"backend={[*near, 'tdc.compile.backend'][0]}"))
    settings = checked_settings(mode, options, op)
    if name is backend:
        return partial(backend, mode=mode, options=options)
    if not settings:
        return found
    if name != "inductor":
        got = f"mode={mode!r}, options={options!r} for backend {name!r}"
        raise UnsupportedError(message(op, "modes and options of Inductor only", got, hint="leave backend out"))
    return partial(with_budget, found, settings.pop(BUDGET, None), settings)


def with_budget(
    found: Callable[..., Any], budget: float | None, settings: dict[str, Any], graph: Any, inputs: Any
) -> Any:
    """Compile a graph with torch's own Inductor."""
    with memory_budget(budget):
        return found(graph, inputs, config_patches=settings)
