"""What `tdc` asks of the private parts of torch, one function for each thing wanted (torch 2.11-2.13).

    marks         a function whose result is a constant of the graph, another function in its stead, sizes that vary
    questions     whether operations run as they are called, under a transform of `torch.func`, on which line of a user
    features      what not every torch can do; each is asked of torch itself, not of its version
    functions     those that torch hands on to containers, and the names under which it hands them on
    kernels       operations of torch that have no public name

Dynamo knows its marks by the names of attributes. They are set here by hand, since to import Dynamo takes a second.
What torch.compile, `torch.export` and Inductor are asked besides is in `tdc/compile/_torch/`.

Invariant: no other module names what is private to torch, but for `core/levels.py` and `core/pytree.py`.
`core/probes.py` asks whether the torch that is installed still has all of it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pkgutil import resolve_name
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.typing import Op

Fn = TypeVar("Fn", bound=Callable[..., Any])
Out = TypeVar("Out")
Stamp = int | tuple[int, int]
internals: Any = torch  # parts of torch without types
functorch = internals._C._functorch


# -- marks


def constant(fn: Fn) -> Fn:
    """Mark a function of Python constants: a graph runs it once, while it is traced, and holds what it returned.

    As `torch._dynamo.assume_constant_result`. What the function does costs no time to trace. For decisions, such as
    positions and yes or no, not for keys: Dynamo cannot trace `type(x)` of a result.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what Dynamo looks for
    return fn


def trace_as(fn: Callable[..., Any], by: Callable[..., Any]) -> None:
    """Let Dynamo trace another function where the program calls `fn`, as `torch.compiler.substitute_in_graph` does for
    functions of C: in a graph the one runs, eagerly the other."""
    fn._torchdynamo_inline = by  # type: ignore[attr-defined]  # the attribute Dynamo looks for


def trace_with_grad(fn: Callable[..., Any], by: Callable[..., Any] | None = None) -> None:
    """`trace_as` for a function called in a backward: another function, or itself, with a grad mode that is on. Dynamo
    traces a backward with the grad mode off, and what is done there has no derivative (2.11-2.13)."""
    run = by or with_own_graphs(fn)

    def traced_with_grad(*args: Any) -> Any:
        with torch.enable_grad():
            return run(*args)

    trace_as(fn, traced_with_grad)


def mark_dynamic(x: Tensor, *dims: int) -> Tensor:
    """Tell torch.compile that the sizes of `dims` vary, so that the first graph serves all sizes. Returns the tensor.

    The same mark as `torch._dynamo.maybe_mark_dynamic`. A graph's results carry it on to the next graph.
    """
    marked: Any = x
    if hasattr(x, "_dynamo_weak_dynamic_indices"):
        marked._dynamo_weak_dynamic_indices.update(dims)
    else:
        marked._dynamo_weak_dynamic_indices = set(dims)
    return x


def mark_result(x: Tensor, dim: int) -> Tensor:
    """`mark_dynamic` of a tensor that was just made, in one write. Returns the tensor."""
    marked: Any = x
    marked._dynamo_weak_dynamic_indices = {dim}
    return x


def mark_only_result(x: Tensor, dim: int) -> Tensor:
    """`mark_result` of the one tensor that an operation returned: a graph marks that tensor, not a view of it."""
    marked: Any = x
    marked._dynamo_weak_dynamic_indices = {dim}
    return x


def mark_address(x: Tensor) -> None:
    """Tell torch.compile that a tensor stays where it is, so that a CUDA graph may write into it."""
    internals._dynamo.mark_static_address(x, guard=False)


def has_address(x: Tensor) -> bool:
    """Whether a tensor has that mark."""
    return hasattr(x, "_dynamo_static_input_type")


def mark_traced(x: Tensor, *dims: int) -> Tensor:
    """What Dynamo traces in place of `mark_dynamic`: it cannot mark one of several results of an operation (`chunk`,
    `unbind`), but it can mark a view of it."""
    view: Any = x.view_as(x)
    view._dynamo_weak_dynamic_indices = {*dims}  # `set` would be a guard
    return view


trace_as(mark_dynamic, mark_traced)
trace_as(mark_result, mark_traced)


# -- questions

current_stream: Callable[[int], int] = getattr(internals._C, "_cuda_getCurrentRawStream", int)  # its number, of a GPU
under_transform: Callable[[], bool] = internals._C._are_functorch_transforms_active  # of torch.func; can be traced


def eager() -> bool:
    """Whether operations run as they are called: neither traced nor under a transform of `torch.func`."""
    return not under_transform()


def never(*args: Any) -> bool:
    """What Dynamo traces in place of questions that are about eager code."""
    return False


def readable() -> bool:
    """Whether tensors have numbers that can be read: `eager`, and under no dispatch mode, as `torch.export` traces, but
    for those that only watch and say so by an attribute `watches`."""
    return not (under_transform() or under_mode())


def under_mode() -> bool:
    """Whether a dispatch mode decides what operations do, as where a graph is traced; one that watches does not."""
    modes = internals._C._len_torch_dispatch_stack()
    return bool(modes) and not only_watched(modes)


def only_watched(modes: int) -> bool:
    """Whether so many dispatch modes let every operation run as it is called."""
    return all([hasattr(internals._C._get_dispatch_stack_at(i), "watches") for i in range(modes)])


trace_as(eager, never)
trace_as(readable, never)


def version(x: Any) -> int:
    """How often a tensor was changed in place."""
    return x._version if type(x) is Tensor else 0


PLAIN: set[type] = {Tensor}  # classes of tensors that hold their own numbers


def content(x: Tensor) -> int | None:
    """What tells apart the contents that `x` has had, where numbers read from it now may serve later calls.

    None where they may not: where `x` is not `readable`, and for a tensor of inference mode, which does not count its
    changes in place.
    """
    return None if type(x) not in PLAIN or not readable() or x.is_inference() else x._version


def stamp(x: Tensor) -> Stamp | None:
    """`content` for a tensor computed from `x`: on CUDA one for each stream, and none while a CUDA graph records."""
    now = content(x)
    if now is None or not x.is_cuda:
        return now
    return None if torch.cuda.is_current_stream_capturing() else (now, current_stream(x.device.index))


@constant
def exporting() -> bool:
    """Whether a graph is traced to be exported. Dynamo of torch 2.11 takes `torch.compiler.is_exporting` for True."""
    return torch.compiler.is_exporting()


@constant
def in_direction() -> bool:
    """Whether a `torch.func.jvp` is around the call."""
    stack = functorch.get_interpreter_stack()
    return any([level.key() == functorch.TransformType.Jvp for level in stack or ()])


def takes_functions() -> bool:
    """Whether autograd functions may be called: in a graph under one `torch.func.grad` or `vmap` at most."""
    return True


@constant
def takes_functions_traced() -> bool:
    """What Dynamo traces in place of `takes_functions`."""
    stack = functorch.get_interpreter_stack() or ()
    return len(stack) <= 1 and not in_direction()


trace_as(takes_functions, takes_functions_traced)


def known(condition: bool) -> bool:
    """Whether a condition on sizes holds; no where a graph does not know them, as those of `x @ x.transpose(1, 2)`."""
    return condition if isinstance(condition, bool) else known_symbol(condition)


def known_symbol(condition: bool) -> bool:
    """`known` of sizes in a graph. Whoever traces has loaded the module."""
    return internals.fx.experimental.symbolic_shapes.guard_or_false(condition)


trace_as(known, known_symbol)


def certain(condition: bool) -> bool:
    """Whether a condition on sizes holds for all that a graph serves, without a guard on it."""
    return condition if isinstance(condition, bool) else certain_symbol(condition)


def certain_symbol(condition: bool) -> bool:
    """`certain` of sizes in a graph. Whoever traces has loaded the module."""
    return internals.fx.experimental.symbolic_shapes.statically_known_true(condition)


trace_as(certain, certain_symbol)


def is_symbol(n: int) -> bool:
    """Whether a number is a symbol of a graph. Whoever traces has loaded the module."""
    return not internals.fx.experimental.symbolic_shapes.has_static_value(n)


def is_zero(n: int) -> bool:
    """Whether a size is `known` to be 0."""
    return known(n == 0)


def hold(condition: bool) -> None:
    """Say that a condition on sizes holds, to a graph that does not know them; it is checked when the graph runs."""
    internals._check(condition)


def larger(a: int, b: int) -> int:
    """The larger of two sizes, without a guard on which it is."""
    return internals.sym_max(a, b)


def smaller(a: int, b: int) -> int:
    """The smaller of two sizes, without a guard on which it is."""
    return internals.sym_min(a, b)


def larger_traced(a: int, b: int) -> int:
    """What Dynamo traces in place of `larger`: `torch.sym_max` of two that a graph knows breaks it (torch 2.11)."""
    return max(a, b)


def smaller_traced(a: int, b: int) -> int:
    """What Dynamo traces in place of `smaller`."""
    return min(a, b)


trace_as(larger, larger_traced)
trace_as(smaller, smaller_traced)


def without_vmap(condition: Tensor) -> Tensor:
    """A condition for all members of a `torch.vmap`, which has no rule for assertions, below the levels of `grad`."""
    while functorch.is_functorch_wrapped_tensor(condition):
        mapped, condition = functorch.is_batchedtensor(condition), functorch.get_unwrapped(condition)
        condition = condition.all() if mapped else condition
    return condition


trace_as(without_vmap, lambda *args: args[0])


def program_stack() -> traceback.StackSummary:
    """The calls that led here, outermost first: those of the program that Dynamo traces, else those of Python."""
    context = internals._guards.TracingContext
    traced = context.extract_stack() if context.try_get() is not None else None
    return traced or traceback.extract_stack()


# -- features


def maps_views_of_bits() -> bool:
    """Whether `torch.vmap` has a rule for `x.view(dtype)` (from torch 2.12)."""
    return internals._C._dispatch_has_kernel_for_dispatch_key("aten::view.dtype", "FuncTorchBatched")


@constant
def has_gradients_in_graphs() -> bool:
    """Whether `torch.func` in a graph has those of operators, and of `index_select` where sizes vary (torch 2.12)."""
    return torch.__version__ >= "2.12"


def recorded_operations(fn: Callable[[], Any]) -> list[Any]:
    """The operations that a call runs, as a dispatch mode sees them. The first call takes seconds."""
    seen: list[Any] = []
    with watching(lambda op, args, kwargs: seen.append(op), reads=False):
        fn()
    return seen


def watching(see: Callable[[Any, tuple[Any, ...], dict[str, Any]], None], reads: bool = True) -> Any:
    """A block in which `see(op, args, kwargs)` is called before each operation of torch runs.

    Args:
        reads: whether tensors stay `readable` there, so that the same operations run as elsewhere.
    """

    class Watching(internals.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            see(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    mode = Watching()
    if reads:
        mode.watches = True
    return mode


def configured(fn: Callable[[], Out], **settings: bool) -> Out:
    """A call under other settings of Dynamo."""
    with internals._dynamo.config.patch(**settings):
        return fn()


def with_own_graphs(fn: Any) -> Any:
    """The same function, compiled anew: torch.compile keeps graphs, and their limit, on the code object. What is no
    Python function or method, such as a module, or wraps one, is returned as it is."""
    if isinstance(fn, MethodType):
        return MethodType(with_own_graphs(fn.__func__), fn.__self__)
    if not isinstance(fn, FunctionType) or hasattr(fn, "__wrapped__"):
        return fn
    own = FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    own.__kwdefaults__ = fn.__kwdefaults__
    return own


# -- functions that torch hands on

LEFT_OUT: dict[Any, tuple[Op, ...]] = {
    torch: (torch.fill, torch.rand_like, torch.randn_like, torch.randint_like, torch.vander),
    F: (F.hardsigmoid, F.hardswish),
}


def hand_on(module: Any, ops: tuple[Op, ...]) -> None:
    """Put functions of a module into torch's list of those that it hands on to classes with `__torch_function__`.

    Eagerly it hands on all of them. In a graph Dynamo goes by `torch.overrides.get_overridable_functions`, which leaves
    some out, and refuses containers as their arguments. A list that Dynamo made before `tdc` was imported lacks them.
    """
    known: list[Op] = internals.overrides.get_overridable_functions()[module]
    known += [op for op in ops if op not in known]


for _module, _ops in LEFT_OUT.items():
    hand_on(_module, _ops)

scaled_grouped_mm: Op = internals.nn.functional.scaled_grouped_mm  # which the stubs lack
CALLED_BY: dict[Op, Op] = {  # the function that one of `torch.nn.functional` calls, and torch hands on
    F.grouped_mm: internals._grouped_mm,
    F.scaled_mm: internals._scaled_mm_v2,
    scaled_grouped_mm: internals._scaled_grouped_mm_v2,
}
checkpoint_operator: Op = torch.ops.higher_order.tag_activation_checkpoint  # what checkpoint is in a graph


def overload_of(op: Op) -> Op:
    """The operation that a call of a `torch.library.custom_op` arrives as; others as they are."""
    return getattr(op, "_opoverload", op)


def own_name(op: Any) -> str:
    """The name that a function or an operation gives itself; empty where it gives none."""
    return str(getattr(op, "__name__", None) or getattr(op, "_name", None) or "")


def argument_names(op: Any) -> list[str]:
    """The names of the arguments of an operation of `torch.ops`."""
    return [a.name for a in op._schema.arguments]


def schemas(name: str) -> list[tuple[tuple[str, bool, str], ...]]:
    """The parameters of an operation of torch, in each of its forms: names, whether by position, too, and types.

    A type is `int`, or `int = ...` where there is a default. The forms of named tensors, which torch 2.11 still has,
    are left out.
    """
    forms = internals._C._jit_get_schemas_for_operator(f"aten::{name}")
    return [
        tuple([("input" if a.name == "self" else a.name, not a.kwarg_only, declared(a)) for a in form.arguments])
        for form in forms
        if any(["Tensor" in str(a.type) for a in form.arguments]) and not any([a.is_out for a in form.arguments])
        if "name" not in form.overload_name.lower()
    ]


def declared(argument: Any) -> str:
    """The type of an argument of a schema, and whether it has a default."""
    return f"{argument.real_type} = ..." if argument.has_default_value() else str(argument.real_type)


# -- kernels and storage

aten: Any = internals.ops.aten
assert_async: Op = aten._assert_async.msg
flash_forward, flash_backward = aten._flash_attention_forward, aten._flash_attention_backward
efficient_forward, efficient_backward = aten._efficient_attention_forward, aten._efficient_attention_backward
fused_cpu_forward: Op = aten._scaled_dot_product_flash_attention_for_cpu.default
fused_cpu_backward: Op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
adaptive_avg_backwards: dict[int, Op] = {n: getattr(aten, f"_adaptive_avg_pool{n}d_backward") for n in (2, 3)}
pack_lstm_weights: Any = getattr(internals.ops.mkldnn, "_reorder_mkldnn_rnn_layer_weight", None)  # as oneDNN wants them


def list_kernel(name: str) -> Op:
    """The kernel on lists of tensors that torch has under a name, such as "foreach_add" or "fused_adamw_"."""
    return getattr(torch, f"_{name}")


def storage_id(x: Tensor) -> int:
    """What tensors that share memory have in common."""
    storage: Any = x.untyped_storage()
    return storage._cdata


@constant
def has_loaded(name: str) -> bool:
    """Load a module of torch: in a graph, while it is traced. The first call may take seconds."""
    return bool(resolve_name(name))


def flex_module() -> ModuleType:
    """torch's module of flex_attention, which `import torch` leaves out, and so does `import tdc`."""
    has_loaded("torch.nn.attention.flex_attention")
    return internals.nn.attention.flex_attention


def jagged_layout(x: Any) -> tuple[int, int | None]:
    """The ragged dim of one of torch's jagged tensors, and the longest length where it is known."""
    return x._ragged_idx, x._maybe_max_seqlen
