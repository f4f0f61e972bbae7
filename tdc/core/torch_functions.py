"""Functions and operations of torch without a public name, or whose names classes with `__torch_function__` need.

    handed on     functions that torch hands on to containers, and the names under which it hands them on
    schemas       parameters of operations
    kernels       fused attention, assertions, operations on lists of tensors; None, or a loop, where torch has none
    changes       to Dynamo, made once, when it reads the functions that torch hands on

Invariant: the module is imported before the first graph is traced, since it adds to torch's list of functions.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.dynamo import skipped_in_graphs
from tdc.core.errors import refusing
from tdc.core.private import find, find_or, nothing, optional
from tdc.core.typing import Op

internals: Any = torch  # parts of torch without types
aten: Any = internals.ops.aten

# -- handed on

LEFT_OUT: dict[Any, tuple[Op, ...]] = {
    torch: (torch.fill, torch.rand_like, torch.randn_like, torch.randint_like, torch.vander),
    F: (F.hardsigmoid, F.hardswish),
}


def hand_on(module: Any, ops: tuple[Op, ...]) -> None:
    """Add functions of a module to `torch.overrides.get_overridable_functions`.

    In a graph Dynamo refuses containers as arguments of functions that are not there. A list that Dynamo made before
    `tdc` was imported lacks them.
    """
    known: list[Op] = internals.overrides.get_overridable_functions()[module]
    known += [op for op in ops if op not in known]


for _module, _ops in LEFT_OUT.items():
    hand_on(_module, _ops)


def is_handed_on(op: Op) -> bool:
    """True if torch hands on a function of its own namespace: `torch.cholesky` and `torch.qr` are gone since 2.14."""
    return op in internals.overrides.get_overridable_functions()[torch]


CALLED_BY: dict[Op, Op] = {  # the function that one of `torch.nn.functional` calls, and torch hands on
    getattr(F, name): find_or(
        getattr(F, name), path, feature=f"F.{name} of batches", lost="the function itself on batches"
    )
    for name, path in (
        ("grouped_mm", "torch:_grouped_mm"),
        ("scaled_mm", "torch:_scaled_mm_v2"),
        ("scaled_grouped_mm", "torch:_scaled_grouped_mm_v2"),
    )
    if hasattr(F, name)
}
checkpoint_operator: Op = torch.ops.higher_order.tag_activation_checkpoint  # what checkpoint is in a graph
region_operator: Op = torch.ops.higher_order.invoke_subgraph  # what `nested_compile_region` is
flex_operator: Op = find_or(  # what flex_attention calls
    nothing, "torch:ops.higher_order.flex_attention", feature="flex_attention of batches", lost="torch's own function"
)


def overload_of(op: Op) -> Op:
    """The operation that a call of a `torch.library.custom_op` arrives as; others as they are."""
    return getattr(op, "_opoverload", op)


def own_name(op: Any) -> str:
    """The name that a function or an operation gives itself; empty where it gives none."""
    return str(getattr(op, "__name__", None) or getattr(op, "_name", None) or "")


def arguments_by_name(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an operation of `torch.ops`; none of anything else."""
    names = argument_names(op) if hasattr(op, "_schema") else []
    return {**dict(zip(names, args, strict=False)), **kwargs} if names else {}


def argument_names(op: Any) -> list[str]:
    """The names of the arguments of an operation of `torch.ops`."""
    return [a.name for a in op._schema.arguments]


def schemas(name: str) -> list[tuple[tuple[str, bool, str], ...]]:
    """The parameters of an operation of torch, in each of its forms: names, True if by position, too, and types.

    A type is `int`, or `int = ...` where there is a default. Forms of named tensors (torch 2.11) are left out.
    """
    return [
        tuple([("input" if a.name == "self" else a.name, not a.kwarg_only, declared(a)) for a in form.arguments])
        for form in forms_of(f"aten::{name}") or ()
        if any(["Tensor" in str(a.type) for a in form.arguments]) and not any([a.is_out for a in form.arguments])
        if "name" not in form.overload_name.lower()
    ]


@optional("signatures of torch", lost="stubs and errors for arguments by name", instead=nothing)
def forms_of(name: str) -> list[Any] | None:
    """The schemas of an operation."""
    found: list[Any] = find("torch:_C._jit_get_schemas_for_operator")(name)
    return found


def declared(argument: Any) -> str:
    """The type of an argument of a schema, and whether it has a default."""
    return f"{argument.real_type} = ..." if argument.has_default_value() else str(argument.real_type)


# -- kernels


def kernel(name: str, lost: str) -> Any:
    """An operation of torch without a public name; None where this torch has none."""
    return find_or(None, f"torch:ops.aten.{name}", feature=f"aten::{name}", lost=lost)


@skipped_in_graphs
def assert_now(condition: Tensor, text: str) -> None:
    """Assert a condition that is read on the host."""
    if not condition:
        raise RuntimeError(text)


assert_async: Op = find_or(
    assert_now, "torch:ops.aten._assert_async.msg", feature="assertions that do not wait", lost="checks in graphs"
)
ctc_forward, ctc_backward = [
    find_or(refusing("ctc_loss"), f"torch:ops.aten.{name}", feature="kernels of ctc_loss", lost="ctc_loss of batches")
    for name in ("_ctc_loss", "_ctc_loss_backward")
]
flash_forward, flash_backward = [kernel(f"_flash_attention_{way}", "speed on CUDA") for way in ("forward", "backward")]
efficient_forward, efficient_backward = [
    kernel(f"_efficient_attention_{way}", "speed on CUDA") for way in ("forward", "backward")
]
fused_cpu_forward, fused_cpu_backward = [
    kernel(f"_scaled_dot_product_flash_attention_for_cpu{way}.default", "speed on CPU") for way in ("", "_backward")
]


def list_kernel(name: str) -> Op:
    """The kernel on lists of tensors that torch has under a name, such as "foreach_add"."""
    found: Op = find_or(one_by_one(name), f"torch:_{name}", feature=f"_{name}", lost="speed on many tensors")
    return found


def fused_kernel(name: str) -> Any:
    """torch's kernel for the update of an optimiser, such as "adamw"; None where this torch has none."""
    return find_or(None, f"torch:_fused_{name}_", feature=f"_fused_{name}_", lost="speed of eager updates")


def one_by_one(name: str) -> Op:
    """A loop in place of a kernel on lists: the operation on each tensor, and on those of other lists beside it."""
    name = name.removeprefix("foreach_")
    op: Any = getattr(torch, name, None) or getattr(Tensor, name, None)

    def run(*columns: Any, **kwargs: Any) -> list[Any]:
        rows: list[Any] = [x if isinstance(x, (list, tuple)) else [x] * len(columns[0]) for x in columns]
        return [op(*row, **kwargs) for row in zip(*rows, strict=True)]

    return run


# -- changes to Dynamo


class WhenRead(list[Op]):
    """No functions that torch hands on. Dynamo reads the list with the others, before it looks at the arguments of the
    first function that it traces, and is changed then: an import of Dynamo takes a second."""

    def __init__(self, change: Callable[[], None]) -> None:
        super().__init__()
        self.change = change

    def __iter__(self) -> Iterator[Op]:
        if "torch._dynamo" in sys.modules:
            self.change()
        return iter(())


def when_read(change: Callable[[], None]) -> None:
    """Call `change` before Dynamo traces a function: now, if it has read the list of functions already."""
    found = WhenRead(change)
    internals.overrides.get_overridable_functions()[sys.modules[__name__]] = found
    iter(found)


@optional("batches found in tuples", lost="torch.cat of a tuple in graphs; a list works", instead=nothing)
@cache
def find_in_tuples() -> None:
    """Let Dynamo look for `__torch_function__` among the items of a tuple, as it does for a list (2.11-2.15): a change
    to Dynamo itself, made once, when it reads which functions torch hands on, or traces the first row."""
    module = find("torch._dynamo.variables.torch_function")
    flatten = find("torch._dynamo.variables.torch_function:_flatten_vts", takes=("vts",))
    tuples = find("torch._dynamo.variables.lists:TupleVariable")

    def flattened(vts: Any) -> list[Any]:
        found = flatten(vts)
        return [x for vt in found for x in (flattened(vt.items) if type(vt) is tuples else [vt])]  # a Size is none

    module._flatten_vts = flattened


@optional("operators of containers", lost="x == n and x @ y in graphs; torch.eq and torch.matmul work", instead=nothing)
@cache
def operate_on(base: type) -> None:
    """Let Dynamo call the operator of a container for `x < n`, `x @ y`, `x **= y` and `~x` (2.11-2.15): to Dynamo no
    object is equal to a number that varies, so that `x == n` is False and `x < n` fails; the others it knows of tensors
    alone (2.11-2.13)."""
    handlers = find("torch._dynamo.variables.builtin:BuiltinVariable._binop_handlers")()
    number = find("torch._dynamo.variables:SymNodeVariable")
    user_defined = find("torch._dynamo.variables:UserDefinedObjectVariable")
    for name, reflected in (("eq", "eq"), ("ne", "ne"), ("lt", "gt"), ("le", "ge"), ("gt", "lt"), ("ge", "le")):

        def compare(tx: Any, a: Any, b: Any, *, names: tuple[str, str] = (name, reflected)) -> Any:
            mine, other, used = (a, b, names[0]) if isinstance(b, number) else (b, a, names[1])
            return mine.call_method(tx, f"__{used}__", [other], {}) if issubclass(mine.python_type(), base) else None

        of_op = handlers[getattr(operator, name)]
        of_op[:0] = [((user_defined, number), compare), ((number, user_defined), compare)]
    for name, method in (("matmul", "matmul"), ("imatmul", "matmul"), ("ipow", "pow")):

        def operate(tx: Any, a: Any, b: Any, *, method: str = method) -> Any:
            return a.call_method(tx, f"__{method}__", [b], {}) if issubclass(a.python_type(), base) else None

        of_op = handlers.setdefault(getattr(operator, name), [])
        of_op[:0] = [((user_defined, find("torch._dynamo.variables:VariableTracker")), operate)]
    builtins = find("torch._dynamo.variables.builtin:BuiltinVariable")
    if not hasattr(builtins, "call_invert"):

        def call_invert(self: Any, tx: Any, x: Any) -> Any:
            mine = isinstance(x, user_defined) and issubclass(x.python_type(), base)
            return x.call_method(tx, "__invert__", [], {}) if mine else None

        builtins.call_invert = call_invert
    builtins.call_function_handler_cache.clear()
