"""Sizes of an exported function that vary: dims declared on our types, and names for torch's symbols of them.

    dynamic={"batch": {"batch": "B", "tokens": {"length": ("L", 1, 512)}, "image": {1: "H"}}}
             argument  TensorDict     key                              tensor: dims by number

Words of a container: `batch` (a list for several batch dims), `length` (a list for several ragged dims), `total` (the
packed axis, which follows from the lengths), and `values`, the words of the inner of two levels. A dim may be:

    "B"                     a name; one name given twice is one size
    (1, 64), ("B", 1, 64)   bounds, either of them None; with a name
    torch.export.Dim        its name and bounds
    True, "auto"            varies; "auto" only where the function lets it
    False, None             as in the example

A dim in place of a mapping is that of the batch; False fixes all dims. The default is "auto" for batch dims, ragged
dims and dim 0 of plain tensors, and False for other dims of tensors.

torch.export gives each size that varies a symbol, and replaces symbols by others where the function relates them: after
`label * tokens.sum(1)` the offsets of `tokens` have size `s0 + 1`. `Names` makes a name and a number of every size
`a * s + b` of an input.

Invariants: entries come in the order in which `torch.utils._pytree` flattens the arguments; a size that was declared to
vary does, within all of its declared bounds, or export fails; two declared names stand for independent sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.export import Dim

from tdc.compile._torch.symbolic import Line, fixed, limits, line_of, size_text
from tdc.compile.signature import Bounds, Input, Output, Size, range_text
from tdc.core import pytree
from tdc.core.container import Container
from tdc.core.errors import (
    DtypeError,
    KeyPathError,
    ShapeError,
    TdcError,
    UnsupportedError,
    describe,
    message,
    refuse_wrong,
)
from tdc.core.keys import parts, show
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.two_level import TwoLevelTensor
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.shared import Shared
from tdc.tensordict.storage import is_tensordict
from tdc.tensordict.tensordict import TensorDict

OP = "compile.export"
SHOWN = "'B', (1, 64), ('B', 1, 64), torch.export.Dim('B'), True, 'auto' or False"
WRONG = (  # what may be wrong with declarations, in the order in which it is told
    (KeyPathError, "names of arguments, keys and dims in dynamic=", "others", "what is not said varies if it can"),
    (DtypeError, "dims", "others", f"one of {SHOWN}"),
    (UnsupportedError, "tensors, containers of them, numbers or strings", "others",
     "exclude the key, or pass its tensors"),
    (ShapeError, "an example within the bounds", "sizes beyond", "widen the bounds, or take another example"),
)  # fmt: skip
T = TypeVar("T")
Keys = tuple[str, ...]
CONSTANTS = (bool, int, float, str, type(None))
LETTERS = {"batch": "B", "length": "L", "total": "N"}


class Vary(NamedTuple):
    """A size that varies."""

    key: str  # what makes two of them the same: the name, or where it is
    word: str  # what it is: "batch", "length", "total", "dim 1"
    at: str  # the argument and key it belongs to
    named: bool = False
    asked: bool = False  # declared, so that it is an error when the function fixes it
    low: int = 0
    high: int | None = None
    plus: int = 0  # how much larger the size of this tensor is: 1 for offsets


class Entry(NamedTuple):
    """One tensor among the flattened arguments, or a constant."""

    name: str  # as in `batch.tokens.values`
    at: str  # the argument and key it belongs to, `batch.tokens`
    value: Any
    sizes: tuple[int | Vary, ...] = ()  # for each dim the size in the example, or how it varies
    longest: Vary | None = None  # for the offsets of a batch that does not carry its longest length: how that varies


def declared(arguments: Mapping[str, Any], dynamic: Any) -> list[Entry]:
    """Entries of all arguments, in order; `arguments` by name, `dynamic` as `tdc.compile.export` takes it.

    Refuses names in `dynamic` that are no argument, key or word, what stands for a dim and is none, and arguments that
    are neither tensors, containers nor constants; all are named.

    Example:
        >>> import torch
        >>> [e] = declared({"x": torch.zeros(3, 2)}, {"x": ("B", 1, 8)})
        >>> e.name, e.sizes[0].key, e.sizes[0].high, e.sizes[1]
        ('x', 'B', 8, 2)
    """
    reader = Reader()
    if not isinstance(dynamic, Mapping):
        dynamic = dict.fromkeys(arguments, "auto" if dynamic is None else dynamic)
    reader.unknown(dynamic, arguments, "arguments", ())
    entries = [e for name, x in arguments.items() for e in reader.argument(x, dynamic.get(name, "auto"), (name,))]
    reader.report()
    return entries


class Reader:
    """Read declarations; collect errors until all are read."""

    def __init__(self) -> None:
        self.wrong: dict[type[TdcError], dict[str, str]] = {error: {} for error, *_ in WRONG}

    def report(self) -> None:
        """Raise the first kind of error, if there is any."""
        for error, expected, which, hint in WRONG:
            refuse_wrong(error, OP, expected, self.wrong[error], which, hint)

    def unknown(self, given: Iterable[Any], known: Any, kind: str, path: Keys) -> None:
        """Note names that are none of the known ones."""
        for name in [name for name in given if name not in known]:
            text = f"{kind} are {', '.join([repr(k) for k in known]) or 'none'}"
            self.wrong[KeyPathError][show((*path, str(name)))] = text

    def argument(self, x: Any, spec: Any, path: Keys) -> list[Entry]:
        """Entries of one argument: a container, a tensor, a constant, or a dict, list or tuple of these."""
        if isinstance(x, (Container, Tensor)):
            return self.container(x, spec, path)
        children = dict(x) if isinstance(x, dict) else dict(enumerate(x)) if isinstance(x, (list, tuple)) else None
        if children is None:
            if not isinstance(x, CONSTANTS):
                self.wrong[UnsupportedError][show(path)] = describe(x)
            return [Entry(show(path), show(path), x)]
        if isinstance(spec, list):
            spec = dict(enumerate(spec))
        if isinstance(spec, Mapping):
            self.unknown(spec, children, "keys", path)
        each = spec if isinstance(spec, Mapping) else dict.fromkeys(children, spec)
        return [e for k, v in children.items() for e in self.argument(v, each.get(k, "auto"), (*path, str(k)))]

    def container(self, x: Any, spec: Any, path: Keys, batch: Any = None) -> list[Entry]:
        """Entries of one tensor or container. `batch` are the batch dims of the TensorDict around it."""
        x = unwrap(x)
        if isinstance(spec, (bool, type(None))) or spec == "auto" or is_hint(spec):
            spec, rest = {}, spec
        else:
            spec, rest = spec if isinstance(spec, Mapping) else {"batch": spec}, "auto"
        if is_tensordict(x):
            return self.tensordict(x, spec, rest, path, batch)
        if isinstance(x, NestedTensor):
            return self.nested(x, spec, rest, path, batch)
        if isinstance(x, TwoLevelTensor):
            return self.two_level(x, spec, rest, path, batch)
        if isinstance(x, MaskedBatch):
            return self.masked(x, spec, rest, path, batch)
        if isinstance(x, Tensor):
            return self.tensor(x, spec, rest, path, batch)
        self.wrong[UnsupportedError][show(path)] = describe(x)
        return []

    def tensordict(self, td: TensorDict, spec: Any, rest: Any, path: Keys, outer: Any) -> list[Entry]:
        leaves = {parts(p): x for p, x in td._leaves.items()}
        keys = {p[: n + 1] for p in leaves for n in range(len(p))}
        is_dim = "batch" in spec and not isinstance(spec["batch"], Mapping)
        specs: dict[Keys, Any] = {}
        for key, value in spec.items():
            if not (is_dim and key == "batch"):
                self.below(value, (key,) if isinstance(key, str) else key, keys, path, specs)
        batch = self.batch(spec["batch"] if is_dim else rest, td.batch_size, path, outer)
        found = [
            self.container(x, specs.get(p, rest), (*path, *p), [] if type(x) is Shared else batch)
            for p, x in sorted(leaves.items())
        ]
        return [entry for entries in found for entry in entries]

    def below(self, spec: Any, key: Any, keys: set[Keys], path: Keys, specs: dict[Keys, Any]) -> None:
        """Spread a declaration over the leaves at and below a key; a mapping at an inner node goes one key down."""
        if not isinstance(key, tuple) or key not in keys:
            known = sorted({k[len(key) - 1] for k in keys if len(k) == len(key)}) if isinstance(key, tuple) else []
            at = [str(k) for k in key] if isinstance(key, tuple) else [str(key)]
            self.wrong[KeyPathError][show((*path, *at))] = f"keys are {', '.join([repr(k) for k in known])}"
        elif isinstance(spec, Mapping) and any([k[: len(key)] == key and len(k) > len(key) for k in keys]):
            for k, v in spec.items():
                self.below(v, (*key, k) if isinstance(k, str) else (*key, *k), keys, path, specs)
        else:
            specs |= {p: spec for p in keys if p[: len(key)] == key}

    def batch(self, spec: Any, sizes: Any, path: Keys, outer: Any) -> list[Any]:
        """Batch dims; those of the TensorDict around come first."""
        words = ["batch", *[f"batch dim {i}" for i in range(1, len(sizes))]]
        found = self.several(spec, sizes, words, path, f"batch_size {list(sizes)}")
        return [*outer, *found[len(outer) :]] if outer and is_rest(spec) else found

    def several(self, spec: Any, sizes: Any, words: list[str], path: Keys, of: str) -> list[Any]:
        """Several dims: each as in a list, or the first as declared and the rest "auto"."""
        each = spec if isinstance(spec, list) else [spec, *[spec if is_rest(spec) else "auto"] * (len(sizes) - 1)]
        if len(each) != len(sizes) and (len(sizes) or isinstance(spec, list)):
            self.wrong[DtypeError][show((*path, words[0]))] = f"{len(each)} dims for {of}"
            each = ["auto"] * len(sizes)
        return [self.dim(s, n, w, path) for s, n, w in zip(each, sizes, words, strict=False)]

    def nested(self, x: NestedTensor, spec: Any, rest: Any, path: Keys, outer: Any) -> list[Entry]:
        s, name = x.structure, show(path)
        self.unknown(spec, ("batch", "length", "total"), "words", path)
        (rows,) = self.batch(spec.get("batch", rest), [s.batch_size], path, outer and outer[:1])
        total = self.dim(spec.get("total", rest), x.values.shape[s.packed_dim], "total", path)
        sizes: list[Any] = [*x.values.shape]
        sizes[s.packed_dim] = total
        extent: Any = s.extent
        longest = [None] * s.ragged_ndim if extent is None else list(extent.shape[:-1])
        wishes = self.lengths(spec.get("length", rest), longest, path)
        bound: Any = wishes[0]
        if extent is not None or not isinstance(bound, Vary) or not has_bounds(bound):
            bound = None
        ends = rows._replace(plus=1) if isinstance(rows, Vary) else rows + 1
        entries = [
            Entry(f"{name}.values", name, x.values, tuple(sizes)),
            Entry(f"{name}.offsets", name, s.offsets, (ends,), bound if s.shapes is None else None),
        ]
        if s.shapes is not None:
            entries.append(Entry(f"{name}.shapes", name, s.shapes, (rows, s.ragged_ndim), bound))
        if extent is not None:
            entries.append(Entry(f"{name}.extent", name, extent, (*wishes, 0)))
        return entries

    def two_level(self, x: TwoLevelTensor, spec: Any, rest: Any, path: Keys, outer: Any) -> list[Entry]:
        s, name = x.structure, show(path)
        self.unknown(spec, ("batch", "length", "values"), "words", path)
        (rows,) = self.batch(spec.get("batch", rest), [s.batch_size], path, outer and outer[:1])
        ends = rows._replace(plus=1) if isinstance(rows, Vary) else rows + 1
        entries = self.container(x.values, spec.get("values", rest), (*path, "values"))
        entries.append(Entry(f"{name}.offsets", name, s.offsets, (ends,)))
        if s.extent is not None:
            (wish,) = self.lengths(spec.get("length", rest), [s.extent.shape[0]], path)
            entries.append(Entry(f"{name}.extent", name, s.extent, (wish, 0)))
        return entries

    def masked(self, x: MaskedBatch, spec: Any, rest: Any, path: Keys, outer: Any) -> list[Entry]:
        name = show(path)
        self.unknown(spec, ("batch", "length"), "words", path)
        (rows,) = self.batch(spec.get("batch", rest), [len(x)], path, outer and outer[:1])
        wishes = self.lengths(spec.get("length", rest), [x.data.shape[d] for d in x.ragged_dims], path)
        sizes: list[Any] = [*x.data.shape]
        for dim, wish in zip((x.batch_dim, *x.ragged_dims), (rows, *wishes), strict=True):
            sizes[dim] = wish
        lengths = Entry(f"{name}.lengths", name, x.lengths, (rows, len(x.ragged_dims)))
        return [Entry(f"{name}.data", name, x.data, tuple(sizes)), lengths]

    def lengths(self, spec: Any, sizes: list[Any], path: Keys) -> list[Any]:
        """Ragged dims."""
        words = ["length", *[f"length {i}" for i in range(1, len(sizes))]]
        return self.several(spec, sizes, words, path, f"{len(sizes)} ragged ones")

    def tensor(self, x: Tensor, spec: Any, rest: Any, path: Keys, outer: Any) -> list[Entry]:
        known = ("batch", *range(x.ndim)) if x.ndim else ()
        self.unknown(spec, known, "dims", path)
        given = {0 if d == "batch" else d: v for d, v in spec.items() if d in known}
        shared = [] if outer is None else outer
        sizes: list[Any] = [*shared, *x.shape[len(shared) :]]
        for dim in sorted(given.keys() | ({0} if outer is None and x.ndim else set())):
            word = "batch" if dim == 0 else f"dim {dim}"
            sizes[dim] = self.dim(given.get(dim, rest), x.shape[dim], word, path)
        return [Entry(show(path), show(path), x, tuple(sizes))]

    def dim(self, spec: Any, size: int | None, word: str, path: Keys) -> int | Vary:
        """One dim: how it varies, or its size where it does not."""
        at, where = show(path), show((*path, word))
        here = Vary(where, word, at)
        if spec is False or spec is None or spec is Dim.STATIC:
            return 0 if size is None else size
        if spec == "auto" or spec is Dim.AUTO:
            return here
        if spec is True or spec is Dim.DYNAMIC:
            return here._replace(asked=True)
        if is_hint(spec):
            spec = (spec.min, spec.max)
        elif isinstance(spec, Dim):
            spec = (spec.__name__, spec.min, spec.max if isinstance(spec.max, int) else None)  # infinity is a symbol
        parts: Any = (spec,) if isinstance(spec, str) else spec
        if not is_declaration(parts):
            self.wrong[DtypeError][where] = f"{spec!r}"
            return here
        name = parts[0] if isinstance(parts[0], str) else None
        low, high = parts[-2:] if len(parts) > 1 else (0, None)
        low = low or 0
        if size is not None and (size < low or (high is not None and size > high)):
            self.wrong[ShapeError][where] = f"{size}, not in {range_text(low, high)}"
        return Vary(name or where, word, at, name is not None, True, low, high)


def is_hint(spec: Any) -> bool:
    """True for torch's hints, such as `Dim.AUTO(max=64)`."""
    return type(spec).__name__ == "_DimHint"


def is_rest(spec: Any) -> bool:
    """True if a dim only says if it varies."""
    return spec is None or isinstance(spec, bool) or spec == "auto"


def is_declaration(parts: Any) -> bool:
    """True for `(name,)`, `(low, high)` and `(name, low, high)`."""
    if not isinstance(parts, tuple) or not parts:
        return False
    ends = parts[1:] if isinstance(parts[0], str) else parts
    known = [n for n in ends if n is not None]
    are_sizes = all([isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in known])
    return are_sizes and len(ends) in ((0, 2) if len(ends) < len(parts) else (2,)) and known == sorted(known)


def has_bounds(v: Vary) -> bool:
    return v.low > 0 or v.high is not None


def distinct(tree: T) -> T:
    """Copy tensors that are given twice: torch.export would take the two for always one and the same."""
    seen: set[int] = set()

    def own(x: Any) -> Any:
        if isinstance(x, Tensor) and id(x) in seen:
            return x.detach().clone().requires_grad_(x.requires_grad)
        seen.add(id(x))
        return x

    return pytree.tree_map(own, tree)


# -- names for symbols


class Names:
    """Names of the dims of one program, and their bounds."""

    def __init__(self, program: Any, entries: Sequence[Entry]) -> None:
        values = {n.name: n.meta.get("val") for n in program.graph.nodes}
        specs = program.graph_signature.input_specs
        self.values: list[Any] = [values.get(s.arg.name) for s in specs if s.kind.name == "USER_INPUT"]
        self.ranges = program.range_constraints
        self.names: dict[str, str] = {}  # of a key of Vary
        self.known: dict[tuple[int, Any], tuple[str, int]] = {}  # (factor, symbol) -> its name and plus
        self.factors: dict[Any, int] = {}
        self.bounds: dict[str, Bounds] = {}
        self.wrong: dict[str, str] = {}
        self.taken = {v.key for e in entries for v in e.sizes if isinstance(v, Vary) and v.named}
        self.sizes: dict[tuple[int, int], int | Size] = {}
        slots = [(i, d, v) for i, e in enumerate(entries) for d, v in enumerate(e.sizes) if isinstance(v, Vary)]
        for i, d, v in sorted(slots, key=lambda slot: not slot[2].named):  # declared names before invented ones
            self.sizes[i, d] = self.size(v, self.values[i].shape[d])
        for e in entries:
            if e.longest is not None:
                self.name(e.longest)
        expected, hint = "sizes that vary as declared", "declare what the function does, or 'auto' to let it decide"
        refuse_wrong(ShapeError, "compile.export", expected, self.wrong, "that do not", hint)

    def inputs(self, entries: Sequence[Entry]) -> list[Input]:
        """The entries with names in place of sizes."""
        found = []
        for i, e in enumerate(entries):
            if not isinstance(e.value, Tensor):
                found.append(Input(e.name, e.at, None, "", (), e.value))
                continue
            sizes = tuple([self.sizes.get((i, d), n) for d, n in enumerate(e.value.shape)])
            found.append(Input(e.name, e.at, e.value.dtype, e.value.device.type, sizes))
        return found

    def size(self, v: Vary, size: Any) -> int | Size:
        """One size of an input."""
        number = fixed(size)
        if number is not None:
            if v.asked:
                self.wrong[f"{v.at}.{v.word}"] = f"the function fixes it to {number - v.plus}"
            return number
        line = line_of(size)
        if line is None or self.factors.setdefault(line.symbol, line.factor) != line.factor:
            got, hint = f"{size} at {v.at}.{v.word}", "fix one of the dims with False"
            raise UnsupportedError(message("compile.export", "sizes that depend on one other size", got, hint=hint))
        line = line._replace(plus=line.plus - v.plus)
        name, plus = self.known.get((line.factor, line.symbol), ("", 0))
        if name and v.named and (v.key, line.plus) != (name, plus):
            self.wrong[f"{v.at}.{v.word}"] = f"the function needs {v.key} = {Size(name, line.plus - plus)}"
        elif not name:
            name, plus = self.name(v), line.plus
            self.known[line.factor, line.symbol] = name, plus
        self.limit(name, v, line)
        return Size(name, line.plus - plus + v.plus, v.word)

    def name(self, v: Vary) -> str:
        """Name of a dim: declared, or a letter for its word."""
        if v.key not in self.names:
            letter, count = LETTERS.get(v.word, "D"), 2
            name = v.key if v.named else letter
            while not v.named and name in self.taken:
                name, count = f"{letter}{count}", count + 1
            self.taken.add(name)
            self.names[v.key] = name
        name = self.names[v.key]
        self.merge(name, v.low, v.high, 1, f"{v.word} of {v.at}")
        return name

    def limit(self, name: str, v: Vary, line: Line) -> None:
        """Narrow the bounds of a name by the range of a symbol; a declared range may not be wider."""
        low, high, where = 0, None, f"{v.word} of {v.at}"
        found = self.ranges.get(line.symbol)
        if found is not None:
            lower, upper = limits(found)
            low = max(0, line.factor * (lower or 0) + line.plus)
            high = None if upper is None else line.factor * upper + line.plus
        if has_bounds(v) and ((v.low and low > v.low) or (high is not None and v.high is not None and high < v.high)):
            self.wrong[f"{v.at}.{v.word}"] = f"the function takes {range_text(low, high)} only"
        shift = line.plus - self.known[line.factor, line.symbol][1]
        tops = [h - shift for h in (v.high, high) if h is not None]
        self.merge(name, max(0, v.low - shift, low - shift), min(tops, default=None), line.factor, where)

    def merge(self, name: str, low: int, high: int | None, step: int, where: str) -> None:
        """Narrow the bounds of a name."""
        old = self.bounds.get(name, Bounds())
        top = min([h for h in (old.high, high) if h is not None], default=None)
        where_all = old.where if where in old.where else (*old.where, where)
        self.bounds[name] = Bounds(max(old.low, low), top, max(old.step, step), where_all)


def outputs(program: Any, names: Names) -> list[Output]:
    """The flat results. Raises UnsupportedError where one is neither a tensor nor a constant."""
    values = {n.name: n.meta.get("val") for n in program.graph.nodes}
    found = []
    for spec in [s for s in program.graph_signature.output_specs if s.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT")]:
        if hasattr(spec.arg, "value"):
            found.append(Output(None, (), spec.arg.value))
            continue
        value = values[spec.arg.name]
        if not isinstance(value, Tensor):
            got, hint = type(value).__name__, "return a tensor: torch.tensor(x.shape[0])"
            raise UnsupportedError(message("compile.export", "results that are tensors or constants", got, hint=hint))
        found.append(Output(value.dtype, tuple([size_text(n, names.known) for n in value.shape])))
    return found
