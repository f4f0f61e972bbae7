"""AOTInductor: exported programs as packages of machine code; programs saved without weights (torch 2.11-2.15)."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tdc.compile._torch.bodies import refuse_reuse
from tdc.compile._torch.inductor import CHANGES, lowering
from tdc.compile._torch.patches import with_changes_that_fit
from tdc.core import pytree
from tdc.core.errors import refusing
from tdc.core.private import Gone, find, optional

ASSERTIONS = "assertions between loops"


class Package:
    """A package that was loaded: flat tensors in, flat tensors out."""

    def __init__(self, path: Path) -> None:
        self.compiled: Any = find("torch._inductor:aoti_load_package")(str(path))

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """Call it.

        Code assumes sizes of at least 2 where they vary. Where a smaller bound of lengths fails, as in `x[:, 1:]`, a
        larger one works.
        """
        try:
            return self.called(tensors)
        except RuntimeError:
            raised = [at_least_two(x) for x in tensors]
            if all([x is y for x, y in zip(raised, tensors, strict=True)]):
                raise
            return self.called(raised)

    def called(self, tensors: list[Tensor]) -> list[Tensor]:
        """Results for these tensors; an error is without the calls of C++."""
        try:
            found: list[Tensor] = self.compiled.loader.boxed_run([*tensors])
        except RuntimeError as error:
            text, frames, _ = str(error).partition("\nException raised from ")
            if not frames:
                raise
            raise RuntimeError(text) from None
        return found

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Run with these weights from now on; the code may lack some of them."""
        used = set(self.compiled.get_constant_fqns())
        self.compiled.load_constants({n: x for n, x in weights.items() if n in used}, check_full_update=True)


def at_least_two(x: Tensor) -> Tensor:
    """Raise a bound of lengths, the shape of an empty tensor, to at least 2; return any other tensor as it is."""
    sizes = [max(n, 2) for n in x.shape[:-1]]
    bound = x.dtype == torch.uint8 and x.ndim > 1 and x.shape[-1] == 0 and sizes != [*x.shape[:-1]]
    return x.new_empty((*sizes, 0)) if bound else x


def save_package(program: Any, path: Path, separate: bool) -> None:
    """Compile a program with AOTInductor, and write the package; `separate` leaves the weights out."""
    options = {"aot_inductor.package": True}
    if separate:  # small ones would be written into the code
        options |= {"aot_inductor.package_constants_in_so": False, "always_keep_tensor_constants": True}
    args, kwargs = program.example_inputs
    module = tensors_only(program.module())
    compile, package = packaging()

    def lowered() -> Any:
        with torch.no_grad(), lowering(guards=False), assertions_between_loops(), without_notes():
            return compile(module, args, kwargs, options=options)

    files = with_changes_that_fit(lowered, (*CHANGES, ASSERTIONS))
    refuse_reuse(module)
    package(str(path), aoti_files=files)


@optional(ASSERTIONS, lost="processes that outlive a failed check of a package", instead=nullcontext)
def assertions_between_loops() -> AbstractContextManager[Any]:
    """A context in which assertions become calls: an error raised in a parallel loop ends the process."""
    if torch.__version__ < "2.12":
        raise Gone("a package goes on where a call in it fails")
    table = find("torch._inductor.lowering:lowerings")
    call = find("torch._inductor.lowering:fallback_handler", takes=("add_to_fallback_set",))
    op = find("torch:ops.aten._assert_async.msg")
    return patch.dict(table, {op: call(op, add_to_fallback_set=False)})


@contextmanager
def without_notes() -> Iterator[None]:
    """A context without what torch says of its own: a deprecated class, and operators called by way of its executor."""
    with without_lines("torch._inductor.ir", "is missing a c-shim implementation"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        yield


def without_tracebacks() -> AbstractContextManager[None]:
    """A context in which an operation that sizes do not fit raises its error, and writes no traceback beside it."""
    return without_lines("torch._subclasses.fake_tensor", "failed while attempting to run meta for")


@contextmanager
def without_lines(logger: str, told: str) -> Iterator[None]:
    """A context in which a logger leaves out the lines with a text."""

    def others(record: logging.LogRecord) -> bool:
        return told not in record.getMessage()

    log = logging.getLogger(logger)
    log.addFilter(others)
    try:
        yield
    finally:
        log.removeFilter(others)


@optional("AOTInductor packages", lost="save(format='aoti')", instead=refusing("save(format='aoti')"))
def packaging() -> tuple[Any, Any]:
    """torch's functions that compile a program ahead of time, and that write a package."""
    return find("torch._inductor:aot_compile"), find("torch.export.pt2_archive._package:package_pt2")


def tensors_only(module: Any) -> Any:
    """Drop the constants among the results of a module, which AOTInductor cannot return."""
    graph = module.graph
    node = graph.output_node()
    kept = [x for x in node.args[0] if isinstance(x, torch.fx.Node)]
    if len(kept) < len(node.args[0]):
        node.args = (kept,)
        info = graph._codegen.pytree_info
        graph._codegen.pytree_info = info._replace(out_spec=pytree.tree_flatten(kept)[1])
        module.recompile()
    return module


def save_without_weights(program: Any, path: Path) -> None:
    """Write the graph of a program; each of its weights is one number."""
    program = copy.copy(program)
    program._state_dict = {n: hollow(x) for n, x in program.state_dict.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No complete tensor found")
        torch.export.save(program, str(path))


def hollow(x: Tensor) -> Tensor:
    """A tensor of the same form without memory."""
    empty = torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)
    return nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
