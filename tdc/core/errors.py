"""Error classes and the one message builder.

Every error of the library is a `TdcError` and also the built-in class a caller would expect to catch. A message has
three kinds of lines, in this order:

    tdc.<op>: expected <what>, got <what>
    at <key path>: <kind dtype[shape]>        one line for each offending leaf, never only the first
    hint: <one action>

Invariants: a message never shows tensor values (that would need a device sync and could leak data); the prefix
`tdc.<op>:` is stable API, because inside a compiled graph torch keeps an exception's text and loses its class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

import torch

from tdc.core.dynamo import constant, is_symbol, traced_for


class TdcError(Exception):
    """Base of every error raised by the library. Catch it to catch them all."""

    line = 0  # of a function of `tdc.batch`, where it is known

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ShapeError(TdcError, ValueError):
    """Sizes or dims do not fit. Cure: reshape the named leaf, or give the batch size it really has."""


class DtypeError(TdcError, TypeError):
    """A dtype or Python type that the operation does not take. Cure: convert the argument as the hint says."""


class KeyPathError(TdcError, KeyError):
    """A key that is not there, or not a key. Cure: use one of the nearest keys that the message lists."""


class IndexingError(TdcError, IndexError):
    """An index that reaches nothing, or has a form that the container does not take. Cure: the form in the hint."""


class StructureError(TdcError, ValueError):
    """Ragged structures (lengths, offsets) or key sets that do not fit. Cure: build both from one structure."""


class UnsupportedError(TdcError, NotImplementedError):
    """An operation without a rule for this container. Cure: convert to the container the hint names."""


class MethodError(UnsupportedError, AttributeError):
    """A Tensor method that a container does not have, or one that would change it. Cure: what the hint says."""


class FormatError(TdcError, ValueError):
    """Stored or serialised data that does not have the expected form. Cure: write it again with this version."""


class MissingFolderError(FormatError, FileNotFoundError):
    """The folder that a path is in does not exist. Cure: make it first."""


class CallError(TdcError, RuntimeError):
    """A call on batches that torch refused. Cure: the hint has torch's own words."""


class ChunkError(TdcError, RuntimeError):
    """A function that runs in parts has failed in one, or the process it ran in. Cure: that of the error behind it."""


class NonfiniteError(TdcError, FloatingPointError):
    """Numbers that are infinite or NaN, where a check for them is on. Cure: what the hint says."""


class DistError(TdcError, RuntimeError):
    """A rank that is gone or came too late, in `op`. Cure: start all ranks again, the group cannot be used any more.

    Attributes:
        rank: the other rank where one is known, else this one.
        op: name of the call.
    """

    def __init__(self, text: str = "", rank: int = -1, op: str = "") -> None:
        super().__init__(text)
        self.rank, self.op = rank, op


class ImmutableError(TdcError, TypeError):
    """An attempt to change a container in place. Cure: the functional spelling in the hint, which returns a new one."""


def show_as_imported(*errors: type[TdcError]) -> None:
    """Let tracebacks show the names that users import."""
    for error in errors:
        error.__module__ = "tdc"


show_as_imported(TdcError, *TdcError.__subclasses__(), MethodError)


def missing_folder(op: str, folder: object) -> MissingFolderError:
    """The error for a path in a folder that does not exist."""
    hint = "Path(path).parent.mkdir(parents=True) first"
    return MissingFolderError(message(op, "a path in a folder that is there", f"none at {str(folder)!r}", hint=hint))


def names_of(*modules: Any) -> dict[Callable[..., Any], str]:
    """Public functions of namespaces by identity: Dynamo can look up a name here, but cannot read `__name__`."""
    found: dict[Callable[..., Any], str] = {}
    for module in modules:
        for name, value in module.__dict__.items():
            if name[0] == "_" or not callable(value) or hasattr(value, "cache_info"):
                continue  # Dynamo (torch 2.11) takes no dict with a key that has a cache
            if value not in found or len(name) < len(found[value]):  # torch.spmm is another name of torch.mm
                found[value] = name
    return found


SPACES = (torch, torch.nn.functional, torch.Tensor, torch.Tensor.__base__, torch.linalg, torch.special, torch.fft)
NAMES = names_of(*SPACES)


def op_name(op: str | Callable[..., Any]) -> str:
    """The name an operation goes by in messages and as a method.

    Example:
        >>> op_name(torch.relu), op_name("pack")
        ('relu', 'pack')
    """
    return op if isinstance(op, str) else function_name(op)


@constant
def function_name(op: Callable[..., Any]) -> str:
    """The name of a function. Dynamo does not trace it: a guard on a key of `NAMES` would go through hundreds."""
    return NAMES.get(op, "operation")


def message(
    op: str | Callable[..., Any], expected: str, got: str, at: Mapping[str, str] | Iterable[str] = (), hint: str = ""
) -> str:
    """Text of an error: one line for what was expected, one for each wrong leaf, one for what to do.

    Args:
        op: name behind `tdc.`, as the user calls it, or the torch function itself.
        expected, got: what the operation needs and what it was given, without tensor values.
        at: wrong leaves or operands, `{key path: description}` or ready lines.
        hint: one action that mends the call.

    Example:
        >>> print(message("stack", "equal batch sizes", "[2] and [3]", {"a": "float32[3]"}, "slice the second"))
        tdc.stack: expected equal batch sizes, got [2] and [3]
        at a: float32[3]
        hint: slice the second
    """
    given: Any = at
    wrong: list[str] = [f"{path}: {text}" for path, text in given.items()] if isinstance(at, Mapping) else list(at)
    said = f"tdc.{op_name(op)}: expected {expected}, got {got}"
    for line in wrong:  # Dynamo joins no strings that hold a size of the graph
        said = f"{said}\nat {line}"
    return f"{said}\nhint: {hint}" if hint else said


def refuse_wrong(
    error: type[TdcError], op: str | Callable[..., Any], expected: str, wrong: Mapping[str, str] | Sequence[str],
    which: str, hint: str,
) -> None:  # fmt: skip
    """Raise an error that names all that is wrong, if anything is; its number goes before `which`, as in "3 others"."""
    if wrong:
        raise error(message(op, expected, f"{len(wrong)} {which}", wrong, hint))


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def describe(x: Any) -> str:
    """Kind, dtype and shape of a value, without its content; of a TensorDict the batch size.

    Example:
        >>> import torch
        >>> describe(torch.zeros(2, 3)), describe(3)
        ('Tensor float32[2, 3]', 'int')
    """
    if isinstance(x, type):
        return f"the class {x.__name__}"
    if isinstance(x, ModuleType):  # which may have a function of the name `shape`
        return f"the module {x.__name__}"
    if isinstance(x, (int, float)):  # one that varies in a graph has no attributes
        return "bool" if isinstance(x, bool) else "int" if isinstance(x, int) else "float"
    name = getattr(x, "_label", type(x).__name__)
    x = getattr(x, "_shown", x)
    shape = sizes_of(x)
    dtype = None if is_dict(x) else getattr(x, "dtype", None)
    if shape is None:
        return name
    sizes = show_sizes(shape)
    return f"{name} {dtype_name(dtype)}{sizes}" if dtype is not None else f"{name} {sizes}"


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype without its module."""
    return str(dtype).removeprefix("torch.")


def is_dict(x: Any) -> bool:
    """True of a TensorDict. A tensorclass may have fields of any name, so that its attributes tell nothing."""
    return getattr(x, "_kind", "") == "tensordict"


def sizes_of(x: Any) -> Any:
    """The shape of a value, None where it has none; a strided tensor of `torch.nested` does not tell its own."""
    try:
        return x._size if is_dict(x) else getattr(x, "shape", None)
    except RuntimeError:
        return torch.Size([x.size(0), *[-1] * (x.dim() - 1)])


def show_sizes(sizes: Iterable[Any]) -> str:
    """Sizes as a list.

    Example:
        >>> show_sizes(torch.Size([2, 3]))
        '[2, 3]'
    """
    return f"[{', '.join([show_size(s) for s in sizes])}]"


def show_size(n: Any) -> str:
    """A number or a size in an error, -1 of a ragged dim."""
    return f"{-1 if n == -1 else n}"


@traced_for(show_size)
def show_size_traced(n: Any) -> str:
    """Replace `show_size` in graphs: Dynamo (torch 2.11-2.15) knows no text of a number that varies, but a length."""
    if isinstance(n, str) or n == -1 or not is_symbol(n):
        return f"{-1 if n == -1 else n}"
    return f"{len(range(n))}" if n >= 0 else f"-{len(range(-n))}"


def describe_index(index: Any) -> str:
    """An index as it is written between brackets; tensors and lists by their kind.

    Example:
        >>> describe_index((0, slice(None, -2), ..., None, torch.zeros(2)))
        '0, :-2, ..., None, Tensor float32[2]'
    """
    given: Any = index
    if isinstance(index, tuple):
        return ", ".join([describe_index(i) for i in given]) or "()"
    if isinstance(index, slice):
        parts = (given.start, given.stop) if given.step is None else (given.start, given.stop, given.step)
        return ":".join(["" if n is None else f"{n}" if isinstance(n, (int, float)) else describe(n) for n in parts])
    if index is Ellipsis:
        return "..."
    return f"{index}" if index is None or isinstance(index, (int, float)) else describe(index)


def in_words(ours: Callable[[Exception], TdcError | None], run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch; an error of torch becomes that of `ours`, which may have none for it."""
    try:
        return run(*args, **kwargs)
    except Exception as error:
        told = None if isinstance(error, TdcError) else ours(error)
        if told is None:
            raise
        raise told from error


@traced_for(in_words)
def in_words_traced(ours: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace `in_words` in graphs, where Dynamo has words of its own."""
    return run(*args, **kwargs)


def no_second(op: str) -> str:
    """The text for a derivative of a derivative in a graph, where an operation of the library has none."""
    got = "a second one in a graph"
    return message(op, "one derivative", got, hint="call it eagerly, or compile the parts between derivatives")


def refusing(feature: str) -> Callable[..., NoReturn]:
    """Return a function that refuses what this torch cannot do right, for want of a private name."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        text = f"a torch that has it; {torch.__version__} has none"
        raise UnsupportedError(message("private", text, feature, hint="python -m tdc doctor says what is off"))

    return refuse
