"""The compiler backend: Inductor, told that a size may be anything.

Inductor's CPU code generator asks of a sum whether it has more than 4096 terms, and guards on the answer: a batch whose
packed total crosses that number then compiles a second time (torch 2.11-2.13, `CppKernel.need_use_acc_helper`).
Questions of this kind have an answer that is right for every size; `backed_size_oblivious` makes Inductor take that
one without a guard. The flag is set only while Inductor runs: tracing, and with it torch's treatment of sizes 0 and 1,
is as always. torch 2.11 cannot lower a slice under the flag and guards in spite of it, so there it stays unset.

    torch.compile(fn, backend=tdc.compile.backend, fullgraph=True)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch

from tdc.core.errors import UnsupportedError, message

OBLIVIOUS = not torch.__version__.startswith("2.11.")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def backend(
    graph: torch.fx.GraphModule,
    inputs: list[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """Compile a graph with Inductor, for every length and not only those on this side of a threshold.

    Args:
        graph, inputs: what Dynamo hands to a backend.
        mode, options: as of `torch.compile`, which hands them on.

    Raises:
        UnsupportedError: no such mode.

    Compile:
        Pass it to `torch.compile(fn, backend=tdc.compile.backend)`.

    Example:
        >>> f = torch.compile(lambda x: x.sum(0), backend=backend)  # one kernel for 4096 rows and for 4097

    Source:
        `torch._inductor.compile_fx`.
    """
    inductor = resolve_name("torch._inductor.compile_fx")  # heavy: loaded by the first compile, not by `import tdc`

    def inner_compile(module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        keep_alpha(module.graph)
        with torch.fx.experimental._config.patch(backed_size_oblivious=OBLIVIOUS):  # type: ignore[attr-defined]  # torch's own
            return inductor.compile_fx_inner(module, *args, **kwargs)

    # Graphs compiled without the flag carry the guard with them in the cache on disk, so ours are kept apart.
    with torch.compiler.config.patch(cache_key_tag="tdc-2"):  # type: ignore[attr-defined]  # made by install_config_module
        patches = patches_of(mode, options, "compile.backend")
        return inductor.compile_fx(graph, inputs, inner_compile=inner_compile, config_patches=patches)


def keep_alpha(graph: torch.fx.Graph) -> None:
    """Make `x + alpha * y` the difference `x - (-alpha) * y`.

    Inductor makes `addmm` of a sum with a matrix product, and loses the alpha (torch 2.11-2.13, `post_grad.addmm`).
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        if "alpha" in node.kwargs and node.meta["val"].dtype is not torch.bool:
            node.target = torch.ops.aten.sub.Tensor
            node.kwargs = {"alpha": -node.kwargs["alpha"]}


def patches_of(mode: str | None, options: dict[str, Any] | None, op: str) -> dict[str, Any]:
    """Inductor's settings for a mode and options of `torch.compile`.

    Raises:
        UnsupportedError: no such mode.
    """
    if mode is not None and mode not in MODES:
        raise UnsupportedError(message(op, f"a mode of {', '.join(MODES)}", repr(mode), hint="mode='max-autotune'"))
    return torch._TorchCompileInductorWrapper(mode, options, None).config if mode or options else {}


def backend_of(name: Any, mode: str | None, options: dict[str, Any] | None, op: str) -> Callable[..., Any]:
    """A backend by its name or as it is, as a function of a graph and its inputs.

    Raises:
        UnsupportedError: no such backend, no such mode, or a mode for a backend that has none.
    """
    if not callable(name) and name not in torch._dynamo.list_backends(exclude_tags=()):
        expected = "a function or the name of a backend of torch.compile, such as 'inductor', 'aot_eager' or 'eager'"
        raise UnsupportedError(message(op, expected, repr(name), hint="backend=tdc.compile.backend"))
    patches = patches_of(mode, options, op)
    if name is backend:
        return partial(backend, mode=mode, options=options)
    found = name if callable(name) else torch._dynamo.lookup_backend(name)
    if not patches:
        return found
    if name != "inductor":
        got = f"mode={mode!r}, options={options!r} for backend {name!r}"
        raise UnsupportedError(message(op, "modes and options of Inductor only", got, hint="leave backend out"))
    return partial(found, config_patches=patches)
