"""The compiler backend: Inductor, told that a size may be anything.

Inductor's CPU code generator asks of a sum whether it has more than 4096 terms, and guards on the answer: a batch whose
packed total crosses that number then compiles a second time (torch 2.11-2.13, `CppKernel.need_use_acc_helper`).
Questions of this kind have an answer that is right for every size; `backed_size_oblivious` makes Inductor take that
one without a guard. The flag is set only while Inductor runs: tracing, and with it torch's treatment of sizes 0 and 1,
is as always.

    torch.compile(fn, backend=tdc.compile.backend, fullgraph=True)
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import torch


def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Compile a graph with Inductor, for every length and not only those on this side of a threshold.

    Args:
        graph, inputs: what Dynamo hands to a backend.

    Compile:
        Pass it to `torch.compile(fn, backend=tdc.compile.backend)`.

    Example:
        >>> f = torch.compile(lambda x: x.sum(0), backend=backend)  # one kernel for 4096 rows and for 4097

    Source:
        `torch._inductor.compile_fx`.
    """
    inductor = resolve_name("torch._inductor.compile_fx")  # heavy: loaded by the first compile, not by `import tdc`

    def inner_compile(*args: Any, **kwargs: Any) -> Any:
        with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]  # torch's own
            return inductor.compile_fx_inner(*args, **kwargs)

    # Graphs compiled without the flag carry the guard with them in the cache on disk, so ours are kept apart.
    with torch.compiler.config.patch(cache_key_tag="tdc"):  # type: ignore[attr-defined]  # made by install_config_module
        return inductor.compile_fx(graph, inputs, inner_compile=inner_compile)
