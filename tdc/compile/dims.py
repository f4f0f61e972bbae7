"""Dims declared on our types: which sizes of the arguments of an exported function vary, and their names.

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

Invariant: entries come in the order in which `torch.utils._pytree` flattens the arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.export import Dim

from tdc.compile.flat import range_text
from tdc.core import pytree
from tdc.core.container import Container
from tdc.core.errors import DtypeError, KeyPathError, ShapeError, TdcError, UnsupportedError, describe, refuse_wrong
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
