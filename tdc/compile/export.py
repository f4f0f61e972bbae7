"""Functions of our types as files: exported, compiled ahead of time, loaded anywhere.

    exported = tdc.compile.export(model, (batch,), dynamic={"batch": {"batch": ("B", 1, 64)}})
    exported(other_batch)                       any batch size and lengths within the bounds
    exported.save("model.pt2")                  the graph: portable
    exported.save("fast.pt2", format="aoti")    machine code by AOTInductor: for Python and C++
    tdc.compile.load("fast.pt2")(batch)         our types in and out

torch.export specialises on sizes 0 and 1, and on two arguments that share a tensor in the example; this does not.
Arguments are checked before anything runs.
"""

from __future__ import annotations

import inspect
import os
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection

from tdc.compile._torch.aoti import Package, save_package, save_without_weights, without_tracebacks
from tdc.compile._torch.levels import levels_in_loops
from tdc.compile._torch.symbolic import any_size
from tdc.compile.archive import read_weights, save_weights, seal, unseal
from tdc.compile.dims import Entry, Names, Vary, declared, distinct, has_bounds, outputs
from tdc.compile.signature import Signature, Size
from tdc.core import pytree
from tdc.core.annotations import python_signature
from tdc.core.arguments import expect_function
from tdc.core.errors import (
    DtypeError,
    FormatError,
    MethodError,
    UnsupportedError,
    describe,
    message,
    missing_folder,
)
from tdc.core.slow_paths import users_line
from tdc.core.torch_functions import arguments_by_name, own_name


class Function(nn.Module):
    """A function as a module with positional arguments only: torch 2.13 cannot tell which dims vary in `**kwargs`."""

    def __init__(self, fn: Callable[..., Any], keywords: Sequence[str]) -> None:
        super().__init__()
        self.fn = fn
        self.keywords = tuple(keywords)

    def forward(self, *args: Any) -> Any:
        count = len(args) - len(self.keywords)
        return self.fn(*args[:count], **dict(zip(self.keywords, args[count:], strict=True)))


def export(
    fn: Callable[..., Any],
    example_args: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Any = None,
) -> Exported:
    """Export a function or module of containers and tensors, for all the sizes that vary.

    Args:
        fn: a function or an `nn.Module`, traced without gradients; dropout in training mode warns.
        example_args: positional arguments, a tuple; anything else is the one argument. Sizes that vary are best 2 or
            more.
        example_kwargs: keyword arguments.
        dynamic: dims by argument and key: `{"batch": {"batch": ("B", 1, 64), "tokens": {"length": "L"}}}`. Dims of
            containers are called `batch`, `length` and `total`, those of tensors have numbers. A dim is a name, `(min,
            max)`, `(name, min, max)`, a `torch.export.Dim`, True, "auto" or False (as in the example). By default a dim
            varies if it can. One name given twice is one size.

    Returns:
        An `Exported`: call it with other batches, save it, read its `signature()`.

    Raises:
        KeyPathError, DtypeError: unknown names or values in `dynamic`; all are named.
        ShapeError: the function fixes a declared size, or narrows its bounds; all are named.
        UnsupportedError: arguments or results that no file can hold; branches or sizes that depend on data.

    Example:
        >>> from tdc.ragged.pack import pack
        >>> rows = [pack([torch.ones(n, 2) for n in lengths]) for lengths in ((2, 3), (4, 0, 1))]
        >>> exported = export(lambda x: x.sum(1), rows[0], dynamic={"x": {"batch": ("B", 1, 8)}})
        >>> exported(rows[1]).tolist()
        [[4.0, 4.0], [0.0, 0.0], [1.0, 1.0]]
        >>> exported
        Exported <lambda>(x)
          inputs
            0  x.values   float32[N, 2]
            1  x.offsets  int64[B + 1]
            2  x.extent   uint8[L, 0]
          outputs
            0  float32[B, 2]
          dims
            N  0 or more  total of x
            B  1 to 8     batch of x
            L  0 or more  length of x

    Source:
        `torch.export.export`.
    """
    expect_function("compile.export", fn)
    args = example_args if isinstance(example_args, tuple) else (example_args,)
    args, kwargs, names = named(fn, args, example_kwargs or {})
    args, kwargs = distinct((args, kwargs))
    entries = declared(dict(zip((*names, *kwargs), (*args, *kwargs.values()), strict=True)), dynamic)
    module = fn
    if not isinstance(module, nn.Module):
        module, args, kwargs, names = Function(fn, tuple(kwargs)), (*args, *kwargs.values()), {}, (*names, *kwargs)
    program = program_of(module, args, kwargs, entries)
    name, in_spec = getattr(fn, "__name__", type(fn).__name__), pytree.tree_flatten((args, kwargs))[1]
    return Exported(signature_of(program, entries, name, (names, tuple(kwargs)), in_spec), program)


@final
class Exported:
    """An exported function: call it, save it, read its signature. Made by `tdc.compile.export` and `tdc.compile.load`.

    Calls take and return the types of the example, on other sizes, without gradients.

    Raises:
        StructureError: arguments other than exported: containers, keys, dtypes, dims, feature sizes, sizes out of
            bounds or different for one name, lengths or offsets on the host that no rows have; all are named, and
            nothing has run.
    """

    __slots__ = ("_module", "_package", "_program", "_separate", "_signature")

    def __init__(self, signature: Signature, program: Any = None, package: Any = None, separate: Any = None) -> None:
        self._signature = signature
        self._program = program
        self._package = package
        self._separate = separate  # what the file says of weights that are not in it
        self._module: nn.Module | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._signature.check_structures(args, kwargs)
        leaves = self._signature.flat(args, kwargs)
        if self._package is not None:
            return self._signature.result(self._package.run([x for x in leaves if isinstance(x, Tensor)]))
        args, kwargs = pytree.tree_unflatten(leaves, self._signature.in_spec)
        with torch.no_grad():
            return self.module(*args, **kwargs)

    @property
    def program(self) -> torch.export.ExportedProgram:
        """torch's program.

        Raises:
            UnsupportedError: an AOTInductor package holds none.
        """
        if self._program is None:
            got, hint = "a compiled package, which has none", "keep the file of exported.save(path), format 'export'"
            raise UnsupportedError(message("compile.Exported", "a program", got, hint=hint))
        return self._program

    @property
    def module(self) -> nn.Module:
        """The program as a module of torch, without our checks."""
        self._module = self._module or self.program.module()
        return self._module

    def signature(self) -> Signature:
        """Return flat inputs and outputs in order, with dtypes, sizes by name, and bounds, as C++ passes them."""
        return self._signature

    def __repr__(self) -> str:
        return f"Exported {self._signature!r}"

    def __reduce__(self) -> NoReturn:
        hint = "exported.save('model.pt2'), then tdc.compile.load('model.pt2')"
        raise UnsupportedError(message("compile.Exported", "a file of its own", "a pickle or a copy", hint=hint))

    if not TYPE_CHECKING:  # which names it has is known

        def __getattr__(self, name: str) -> Any:
            """Refuse names of torch's classes with the attribute that has them."""
            theirs = [("program", torch.export.ExportedProgram), ("module", nn.Module)]
            found = [f"exported.{own}" for own, cls in theirs if name[0] != "_" and hasattr(cls, name)]
            if not found:
                raise AttributeError(f"'Exported' object has no attribute {name!r}")
            hint = f"{' or '.join(found)}, which torch's functions take"
            raise MethodError(message("compile.Exported", "a method of Exported", f".{name}", hint=hint))

    def save(self, path: str | os.PathLike[str], *, format: str = "export", weights: str = "inside") -> Path:
        """Write a `.pt2` file.

        Args:
            format: "export", a graph for any machine; or "aoti", compiled by AOTInductor for this kind of machine and
                this version of torch, also for C++.
            weights: "inside", or "separate": parameters, buffers and constants in `<name>.weights.pt` beside the file,
                replaceable by `load(path, weights=...)` and `load_weights`.

        Returns:
            The path.

        Raises:
            FormatError: a path that does not end in `.pt2` or is not in a folder, another format, or another word for
                weights.
            UnsupportedError: a compiled package is saved again.
        """
        path = check_saving(path, format, weights)
        program, separate = self.program, weights == "separate"
        if format == "aoti":
            save_package(program, path, separate)
        elif separate:
            save_without_weights(program, path)
        else:
            torch.export.save(program, str(path))
        forms = save_weights(path, program) if separate else None
        seal(path, {"kind": format, "signature": self._signature.to_data(), "weights": forms})
        return path

    def load_weights(self, weights: Any) -> Exported:
        """Run with other weights from now on.

        Args:
            weights: a TensorDict as from `tdc.from_module`, a state of `train_step`, a mapping of names to tensors, or
                the path of a `.pt` or `.safetensors` file. Of tied weights one name is enough.

        Returns:
            This object.

        Raises:
            StructureError: other names, dtypes or shapes; every difference is named.
            UnsupportedError: a package that was not saved with `weights="separate"`.
        """
        if self._separate is None:
            op, hint = "compile.Exported.load_weights", "exported.save(path, weights='separate')"
            raise UnsupportedError(message(op, "a file without weights", "one with its own", hint=hint))
        found = read_weights(weights, self._separate)
        if self._package is not None:
            self._package.load_weights(found)
        else:
            self.module.load_state_dict({n: x for n, x in found.items() if n in self.program.state_dict}, assign=True)
        return self


def load(path: str | os.PathLike[str], *, weights: Any = None) -> Exported:
    """Load a file of `Exported.save`. An AOTInductor package is machine code: load only files you trust.

    Args:
        weights: for a file without weights, as in `Exported.load_weights`; by default the file saved beside it.

    Raises:
        FormatError: no such file, damaged, of a newer format, compiled for another version of torch, or with arguments
            of classes that are not defined here.
        StructureError: weights of other names, dtypes or shapes.
        UnsupportedError: weights for a file that has its own.

    Warns:
        UserWarning: a graph exported by another version of torch.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise DtypeError(message("compile.load", "a path", describe(path), hint='tdc.compile.load("model.pt2")'))
    path = Path(path)
    data = unseal(path)
    signature = Signature.from_data(data["signature"])
    separate = data["weights"] and {**data["weights"], "folder": str(path.parent)}
    if data["kind"] == "aoti":
        exported = Exported(signature, package=Package(path), separate=separate)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # torch 2.11 reads weights from bytes
            exported = Exported(signature, torch.export.load(str(path)), separate=separate)
    return exported if separate is None and weights is None else exported.load_weights(weights)


# -- helpers


def check_saving(given: str | os.PathLike[str], format: str, weights: str) -> Path:
    """Return the path; refuse one without .pt2 or in no folder, another format, and another word for weights."""
    try:
        path = Path(given)
    except TypeError:
        got, hint = describe(given), "exported.save('model.pt2')"
        raise DtypeError(message("compile.Exported.save", "a path", got, hint=hint)) from None
    for name, given, known in (("format", format, ("export", "aoti")), ("weights", weights, ("inside", "separate"))):
        if given not in known:
            expected, hint = " or ".join([f"{name}={word!r}" for word in known]), f"{name}={known[0]!r}, the default"
            raise FormatError(message("compile.Exported.save", expected, f"{given!r}", hint=hint))
    if path.suffix != ".pt2":
        hint = f"exported.save({path.with_suffix('.pt2').name!r})"
        raise FormatError(message("compile.Exported.save", "a path that ends in .pt2", f"{path.name!r}", hint=hint))
    if not path.parent.is_dir():
        raise missing_folder("compile.Exported.save", path.parent)
    if path.is_dir():
        hint = "exported.save(path / 'model.pt2')"
        raise FormatError(message("compile.Exported.save", "a path of a file", f"{path.name!r}, a folder", hint=hint))
    return path


def named(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...]]:
    """Order arguments as the function declares them, positional where possible, and name the positional ones.

    Refuse arguments that the function does not take, and a module that takes some as `**kwargs`.
    """
    try:
        declared_as = python_signature(fn.forward if isinstance(fn, nn.Module) else fn)
    except (ValueError, TypeError):  # a builtin, such as torch.relu
        return args, dict(kwargs), tuple([f"arg{i}" for i in range(len(args))])
    try:
        bound = declared_as.bind(*args, **kwargs)
    except TypeError as error:
        expected, hint = f"example arguments for {declared_as}", "export(fn, (first, second), {'name': value})"
        raise DtypeError(message("compile.export", expected, f"{error}", hint=hint)) from None
    names: list[str] = []
    loose = [n for n in bound.kwargs if n not in declared_as.parameters]
    if loose and isinstance(fn, nn.Module):
        got, hint = f"{', '.join(loose)} as **kwargs", "export a function that calls it, or name them in forward"
        raise UnsupportedError(message("compile.export", "arguments that forward() names", got, hint=hint))
    for name, parameter in declared_as.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}[{i}]" for i in range(len(bound.args) - len(names))]
        elif len(names) < len(bound.args):
            names.append(name)
    return bound.args, bound.kwargs, tuple(names)


def program_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], entries: Sequence[Entry]
) -> torch.export.ExportedProgram:
    """torch's program of a module, for all sizes that vary."""
    shapes: Any = ShapesCollection()
    for entry in entries:
        varying = {d: dim_hint(v) for d, v in enumerate(entry.sizes) if isinstance(v, Vary)}
        if varying:
            shapes[entry.value] = varying
    try:
        with torch.no_grad(), any_size(), levels_in_loops(), without_tracebacks():
            program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
    except Exception as error:
        if type(error).__name__ != "GuardOnDataDependentSymNode":
            raise
        line = users_line(traceback.extract_tb(error.__traceback__))
        expected, got = "a function whose ways and sizes no data decides", "one that reads a number from a tensor"
        hint = "tdc.cond for an if, tdc.while_loop for a loop, tdc.batch for a function of one example"
        raise UnsupportedError(message("compile.export", expected, got, [line] if line else (), hint)) from None
    warn_of_training(program)
    return program


def warn_of_training(program: torch.export.ExportedProgram) -> None:
    """Warn of operations that do something else in training, and were traced so."""
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    found = {own_name(node.target).partition(".")[0] for graph in graphs for node in graph.nodes if trains(node)}
    if found:
        got, hint = f"{', '.join(sorted(found))} as in training", "net.eval() before the export"
        text = message("compile.export", "a module in evaluation mode", got, hint=hint)
        warnings.warn(text, stacklevel=4)


def trains(node: torch.fx.Node) -> bool:
    """True if a node is an operation as in training with an effect: dropout above 0, or with statistics."""
    given = arguments_by_name(node.target, node.args, node.kwargs)
    idle = given.get("p", given.get("dropout", 1)) == 0 or given.get("running_mean", 0) is None
    return not idle and (given.get("train") is True or given.get("training") is True)


def dim_hint(v: Vary) -> Any:
    """Hint of a dim for torch.export, which finds relations between dims; they are checked here."""
    if not has_bounds(v):
        return Dim.AUTO
    return Dim.AUTO(min=v.low + v.plus, max=None if v.high is None else v.high + v.plus)  # type: ignore[operator]  # a hint


def signature_of(
    program: Any, entries: Sequence[Entry], name: str, arguments: tuple[Sequence[str], Sequence[str]], in_spec: Any
) -> Signature:
    """Signature of a program, with sizes named as declared."""
    names = Names(program, entries)
    inputs = names.inputs(entries)
    order = [s.name for e in inputs for s in e.sizes if isinstance(s, Size)]
    dims = {n: names.bounds[n] for n in dict.fromkeys([*order, *names.bounds])}
    read = [(i, names.names[e.longest.key]) for i, e in enumerate(entries) if e.longest is not None]
    parts = tuple(inputs), tuple(outputs(program, names)), dims, tuple(read)
    return Signature(name, tuple(arguments[0]), tuple(arguments[1]), *parts, in_spec, program.call_spec.out_spec)
