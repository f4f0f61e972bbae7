"""Private parts of torch that `tdc` needs, a function for each (torch 2.11-2.15).

    marks         constants of a graph, functions that a graph replaces or skips, sizes that vary
    questions     is code traced, under a transform of `torch.func`, under a dispatch mode; is a size known
    features      what not every torch has; asked of torch itself, not of its version
    storage       memory that tensors share, and modules that load late

Dynamo knows its marks by the names of attributes, set here by hand since an import of Dynamo takes a second. What
torch.compile, `torch.export` and Inductor are asked besides is in `tdc/compile/_torch/`.

Invariants: beside `core/levels.py` and `core/pytree.py` no other module of the room names private parts of torch. Each
name is found by `core/private.py`; one that is gone costs a feature. `core/probes.py` tests that they still work.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tdc.core.private import find, find_or, nothing, optional

Fn = TypeVar("Fn", bound=Callable[..., Any])
Out = TypeVar("Out")
Stamp = int | tuple[int, int]
internals: Any = torch  # parts of torch without types


def always(*args: Any) -> bool:
    """True: the careful answer where a question cannot be asked, so that plain rules run."""
    return True


def never(*args: Any) -> bool:
    """False: the answer where a question cannot be asked."""
    return False


# -- marks


def constant(fn: Fn) -> Fn:
    """Mark a function of Python constants: a graph runs it once, while it is traced, and holds its result.

    As `torch._dynamo.assume_constant_result`. Not for functions that return keys: Dynamo cannot trace `type(x)` of a
    result.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what Dynamo looks for
    return fn


def trace_as(fn: Callable[..., Any], by: Callable[..., Any]) -> None:
    """Let Dynamo trace another function where the program calls `fn`, as `torch.compiler.substitute_in_graph` does for
    functions of C."""
    fn._torchdynamo_inline = by  # type: ignore[attr-defined]  # the attribute Dynamo looks for


def traced_for(fn: Callable[..., Any]) -> Callable[[Fn], Fn]:
    """Decorate the function that Dynamo traces where the program calls `fn`."""

    def put(by: Fn) -> Fn:
        trace_as(fn, by)
        return by

    return put


def skipped_in_graphs(fn: Fn) -> Fn:
    """Decorate a check or question of eager calls: a graph skips it, and takes None, which is false, for the answer."""
    trace_as(fn, nothing)
    return fn


def unchanged_in_graphs(fn: Fn) -> Fn:
    """Decorate a function that eagerly replaces its first argument: a graph goes on with that argument."""
    trace_as(fn, first_of)
    return fn


def first_of(x: Any, *others: Any) -> Any:
    return x


def trace_with_grad(fn: Callable[..., Any], by: Callable[..., Any] | None = None) -> None:
    """`trace_as` for a function called in a backward, which Dynamo traces with grad mode off: the traced function, or
    itself, turns it on, so that the gradient has a derivative (2.11-2.13)."""
    run = by or with_own_graphs(fn)

    def traced_with_grad(*args: Any) -> Any:
        with torch.enable_grad():
            return run(*args)

    trace_as(fn, traced_with_grad)


def mark_dynamic(x: Tensor, *dims: int) -> Tensor:
    """Tell torch.compile that the sizes of `dims` vary, as `torch._dynamo.maybe_mark_dynamic`. Returns the tensor.

    A graph's results carry the mark on to the next graph.
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


@optional("addresses of states marked", lost="a copy of each state in CUDA graphs", instead=nothing)
def mark_address(x: Tensor) -> None:
    """Tell torch.compile that a tensor stays where it is, so that a CUDA graph may write into it."""
    find("torch._dynamo:mark_static_address", takes=("guard",))(x, guard=False)


def has_address(x: Tensor) -> bool:
    """True if a tensor has that mark."""
    return hasattr(x, "_dynamo_static_input_type")


@traced_for(mark_dynamic)
@traced_for(mark_result)
def mark_traced(x: Tensor, *dims: int) -> Tensor:
    """Replace `mark_dynamic` in graphs: Dynamo marks a view, but not one of several results (`chunk`, `unbind`)."""
    view: Any = x.view_as(x)
    view._dynamo_weak_dynamic_indices = {*dims}  # `set` would be a guard
    return view


# -- questions

current_stream: Callable[[int], int] = getattr(internals._C, "_cuda_getCurrentRawStream", int)  # its number, of a GPU
under_transform: Callable[[], bool] = find_or(  # of torch.func; can be traced
    always, "torch:_C._are_functorch_transforms_active", feature="eager calls told", lost="speed of eager calls"
)
interpreter_stack: Callable[[], list[Any] | None] = find_or(
    list, "torch:_C._functorch.get_interpreter_stack", feature="transforms listed",
    lost="forward-mode derivatives of some operators",
)  # fmt: skip
is_wrapped: Callable[[Tensor], bool] = find_or(
    never, "torch:_C._functorch.is_functorch_wrapped_tensor", feature="assertions under vmap", lost="a check"
)
is_batched: Callable[[Any], bool] = find_or(  # True of a vmapped tensor; can be traced
    never, "torch:_C._functorch.is_batchedtensor", feature="vmapped tensors told", lost="lanes of tdc.batch"
)
count_modes: Callable[[], int] = find_or(
    always, "torch:_C._len_torch_dispatch_stack", feature="dispatch modes told", lost="speed of eager calls"
)


@skipped_in_graphs
def eager() -> bool:
    """True if operations run as they are called: neither traced nor under a transform of `torch.func`."""
    return not under_transform()


@skipped_in_graphs
def readable() -> bool:
    """True if tensors have numbers: `eager`, and under no dispatch mode, such as that of `torch.export`, except modes
    that only watch and say so by an attribute `watches`."""
    return not (under_transform() or under_mode())


@skipped_in_graphs
def has_numbers(*tensors: Any) -> bool:
    """True if the numbers of all tensors can be read."""
    return readable() and all([type(x) in (*PLAIN, torch.nn.Parameter) and not x.is_meta for x in tensors])


@skipped_in_graphs
def is_on_host(x: Tensor) -> bool:
    """True if reading the numbers of a tensor takes no sync: on CPU, where there are numbers to read."""
    return type(x) is Tensor and x.is_cpu and readable()


@skipped_in_graphs
def ints_of(*tensors: Tensor) -> list[int] | None:
    """Tensors of one whole number as ints, a device sync; None where there are no numbers to read."""
    return [int(x.item()) for x in tensors] if readable() else None


def under_mode() -> bool:
    """True if a dispatch mode decides what operations do, as where a graph is traced; one that watches does not."""
    modes = count_modes()
    return modes is True or (bool(modes) and not only_watched(modes))  # True where torch does not count them


@optional("watching modes told", lost="speed under TorchDispatchMode", instead=never)
def only_watched(modes: int) -> bool:
    """True if so many dispatch modes let every operation run as it is called."""
    mode_at = find("torch:_C._get_dispatch_stack_at")
    return all([hasattr(mode_at(i), "watches") for i in range(modes)])


def version(x: Any) -> int:
    """Number of changes of a tensor in place."""
    return x._version if type(x) is Tensor else 0


PLAIN: set[type] = {Tensor}  # classes of tensors that hold their own numbers


@skipped_in_graphs
def content(x: Tensor) -> int | None:
    """Version of the content of `x`, by which numbers read now may serve later calls; None where they may not: where
    `x` is not `readable`, and in inference mode, which counts no changes."""
    return None if type(x) not in PLAIN or not readable() or x.is_inference() else x._version


@skipped_in_graphs
def stamp(x: Tensor) -> Stamp | None:
    """`content` for a tensor computed from `x`: on CUDA one for each stream, and none while a CUDA graph records."""
    now = content(x)
    if now is None or not x.is_cuda:
        return now
    return None if torch.cuda.is_current_stream_capturing() else (now, current_stream(x.device.index))


@constant
def exporting() -> bool:
    """True if a graph is traced to be exported. Dynamo of torch 2.11 takes `torch.compiler.is_exporting` for True."""
    return torch.compiler.is_exporting()


@constant
def in_direction() -> bool:
    """True if a `torch.func.jvp` is around the call."""
    return any([level.key().name == "Jvp" for level in interpreter_stack() or ()])


READS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by traced program: sizes that it reads from data


def number_of_read() -> int:
    """A number that no other read of a size has in a graph; 0 elsewhere.

    torch merges equal operations of a graph, but not the symbols of sizes that these made, so that Inductor meets a
    symbol without a definition (`fx_graph_cse`, 2.11-2.15). Reads with different numbers stay apart.
    """
    return 0


@constant
@optional("reads of sizes numbered", lost="Inductor graphs that read one size twice", instead=number_of_read)
def next_read() -> int:
    """The next number in the program that Dynamo traces."""
    program = find("torch._dynamo.symbolic_convert:InstructionTranslator.current_tx")().output.root_tracer
    READS[program] = READS.get(program, 0) + 1
    return READS[program]


@traced_for(number_of_read)
def number_of_read_traced() -> int:
    return next_read()


@constant
def takes_functions() -> bool:
    """True if Dynamo takes autograd functions here: under one `torch.func.grad` or `vmap` at most."""
    return len(interpreter_stack() or ()) <= 1 and not in_direction()


def known(condition: bool) -> bool:
    """True if a condition on sizes holds; False where a graph does not know them, as of `x @ x.transpose(1, 2)`."""
    return condition if isinstance(condition, bool) else known_symbol(condition)


@traced_for(known)
def known_symbol(condition: bool) -> bool:
    """`known` of sizes in a graph, whose tracer has loaded the module."""
    if not asks("guard_or_false"):
        return bool(condition)
    return internals.fx.experimental.symbolic_shapes.guard_or_false(condition)


@constant
@optional("sizes asked without a guard", lost="a recompile where a size crosses a threshold", instead=never)
def asks(name: str) -> bool:
    """True if torch has a function that answers questions about sizes in a graph."""
    return callable(find(f"torch.fx.experimental.symbolic_shapes:{name}"))


def certain(condition: bool) -> bool:
    """True if a condition on sizes holds for all that a graph serves, without a guard on it."""
    return condition if isinstance(condition, bool) else certain_symbol(condition)


@traced_for(certain)
def certain_symbol(condition: bool) -> bool:
    """`certain` of sizes in a graph, whose tracer has loaded the module."""
    return asks("statically_known_true") and internals.fx.experimental.symbolic_shapes.statically_known_true(condition)


def is_symbol(n: float) -> bool:
    """True if a number is a symbol of a graph, whose tracer has loaded the module."""
    return asks("has_static_value") and not internals.fx.experimental.symbolic_shapes.has_static_value(n)


def is_zero(n: int) -> bool:
    """True if a size is `known` to be 0."""
    return known(n == 0)


def hold(condition: bool) -> None:
    """Tell a graph that a condition on sizes holds; it is checked when the graph runs."""
    internals._check(condition)


def larger(a: int, b: int) -> int:
    """The larger of two sizes, without a guard on which it is."""
    return internals.sym_max(a, b)


def smaller(a: int, b: int) -> int:
    """The smaller of two sizes, without a guard on which it is."""
    return internals.sym_min(a, b)


@traced_for(larger)
def larger_traced(a: int, b: int) -> int:
    """Replace `larger` in graphs, which `torch.sym_max` of two known sizes breaks (torch 2.11)."""
    return max(a, b)


@traced_for(smaller)
def smaller_traced(a: int, b: int) -> int:
    return min(a, b)


@unchanged_in_graphs
def without_vmap(condition: Tensor) -> Tensor:
    """A vmapped condition as one for all examples, below the levels of `grad`: vmap has no rule for assertions."""
    while is_wrapped(condition):
        mapped, condition = is_batched(condition), unwrapped(condition)
        condition = condition.all() if mapped else condition
    return condition


def unwrapped(x: Tensor) -> Tensor:
    """A tensor one level of a transform below."""
    found: Tensor = find("torch:_C._functorch.get_unwrapped")(x)
    return found


def program_stack() -> traceback.StackSummary:
    """Calls that led here, outermost first: of the program that Dynamo traces, else of Python."""
    return traced_stack() or traceback.extract_stack()


@optional("lines of traced programs", lost="the line in errors of compiled code", instead=nothing)
def traced_stack() -> traceback.StackSummary | None:
    """Calls of the program that Dynamo traces; None where nothing is traced."""
    context = find("torch._guards:TracingContext")
    return context.extract_stack() if context.try_get() is not None else None


# -- features


@optional("rules of vmap told", lost="hash_tensor and recurrent nets under vmap", instead=never)
def has_kernel(name: str, key: str) -> bool:
    """True if torch has a kernel of an operation for a dispatch key."""
    return find("torch:_C._dispatch_has_kernel_for_dispatch_key")(f"aten::{name}", key)


def maps_views_of_bits() -> bool:
    """True if `torch.vmap` has a rule for `x.view(dtype)` (from torch 2.12)."""
    return has_kernel("view.dtype", "FuncTorchBatched")


@constant
def has_gradients_in_graphs() -> bool:
    """True if `torch.func` in a graph differentiates operators, and `index_select` where sizes vary (torch 2.12)."""
    return torch.__version__ >= "2.12"


def recorded_operations(fn: Callable[[], Any]) -> list[Any]:
    """Operations that a call runs, as a dispatch mode sees them. The first call takes seconds."""
    seen: list[Any] = []
    with watching(lambda op, args, kwargs: seen.append(op), reads=False):
        fn()
    return seen


def watching(see: Callable[[Any, tuple[Any, ...], dict[str, Any]], None], reads: bool = True) -> Any:
    """A block in which `see(op, args, kwargs)` is called before each operation of torch runs.

    Args:
        reads: True if tensors stay `readable` there, so that the same operations run as elsewhere.
    """

    class Watching(find("torch.utils._python_dispatch:TorchDispatchMode")):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            see(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    mode = Watching()
    if reads:
        mode.watches = True
    return mode


def unconfigured(fn: Callable[[], Out], **settings: bool) -> Out:
    """A call under the settings of Dynamo as they are."""
    return fn()


@optional("settings of Dynamo", lost="counts of the doctor", instead=unconfigured)
def configured(fn: Callable[[], Out], **settings: bool) -> Out:
    """A call under other settings of Dynamo."""
    with find("torch._dynamo.config:patch")(**settings):
        return fn()


def with_own_graphs(fn: Any) -> Any:
    """The same function with graphs of its own, which torch.compile keeps, with their limit, on the code object.

    A module is returned as it is, and so is what has no code in Python.
    """
    if isinstance(fn, MethodType):
        return MethodType(with_own_graphs(fn.__func__), fn.__self__)
    methods: dict[str, Any] = {} if isinstance(fn, torch.nn.Module) else fn.__class__.__dict__
    called = methods.get("__call__")
    if isinstance(called, FunctionType):  # of a function of `tdc.batch`, all of which share the code of a wrapper
        return MethodType(with_own_graphs(called), fn)
    if not isinstance(fn, FunctionType) or hasattr(fn, "__wrapped__"):
        return fn
    own = FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    own.__kwdefaults__ = fn.__kwdefaults__
    return own


# -- storage


def storage_id(x: Tensor) -> int:
    """Identity of the memory that tensors share, also below transforms of `torch.func`."""
    while is_wrapped(x):
        x = unwrapped(x)
    storage: Any = x.untyped_storage()
    return getattr(storage, "_cdata", None) or storage.data_ptr()


@contextmanager
def scripting() -> Generator[None]:
    """A context in which torch may script functions without its warning that this is deprecated (2.13-2.15)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script")
        yield


@constant
def has_loaded(name: str) -> bool:
    """Load a module of torch: in a graph, while it is traced. The first call may take seconds."""
    with scripting():
        return bool(find(name))


@constant
@optional("forward mode loaded", lost="silence: torch warns at its first forward-mode derivative", instead=never)
def has_forward_mode() -> bool:
    """Load what torch needs for its first forward-mode derivative."""
    return has_loaded("torch._decomp.decompositions_for_jvp")


def flex_module() -> ModuleType:
    """torch's module of flex_attention, which `import torch` leaves out, and so does `import tdc`."""
    has_loaded("torch.nn.attention.flex_attention")
    return internals.nn.attention.flex_attention


def jagged_layout(x: Any) -> tuple[int, int | None]:
    """Ragged dim of one of torch's jagged tensors, and the longest length where it is known."""
    return x._ragged_idx, x._maybe_max_seqlen
