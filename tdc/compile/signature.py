"""The signature of an exported function: flat tensors in order, their dtypes, and sizes by name.

    Model(batch)
      inputs
        0  batch.label           int64[B]
        1  batch.tokens.values   int64[N]
        2  batch.tokens.offsets  int64[B + 1]
        3  batch.tokens.extent   uint8[L, 0]
      outputs
        0  float32[B, 3]
      dims
        B  1 to 64    batch of batch

This is the order in which C++ passes tensors. In Python a Signature takes our types apart, refuses other arguments, and
puts the results together. It holds no tensors. Sizes that vary have names: `B`, or `B + 1` for the offsets of B rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.compile.gradients import is_batch
from tdc.core import pytree
from tdc.core.dynamo import is_on_host
from tdc.core.errors import FormatError, StructureError, TdcError, describe, dtype_name, message, show_sizes
from tdc.core.keys import show
from tdc.layout.segments import longest
from tdc.layout.structure import Structure, extent_of
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import data_of
from tdc.ragged.two_level import TwoLevelTensor, build_two_level
from tdc.ragged.validate import faults
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.nodes import Static
from tdc.tensordict.paths import ordered
from tdc.tensordict.storage import is_tensordict
from tdc.tensordict.tensordict import build_td


@dataclass(frozen=True, repr=False)
class Signature:
    """Inputs and outputs of an exported function; made by `tdc.compile.export`.

    Attributes:
        name: of the function or module.
        positional, keywords: names of the arguments, in order.
        inputs, outputs: the flat tensors and constants, in order.
        dims: bounds by name.
        read: index of offsets or shapes from which the longest row is read, with the name of the dim that bounds it.
        in_spec, out_spec: how the flat tensors become arguments and results.
    """

    name: str
    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    dims: dict[str, Bounds]
    read: tuple[tuple[int, str], ...]
    in_spec: Any
    out_spec: Any

    def flat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Take arguments apart into flat tensors and constants; refuse others than exported, with every difference."""
        arguments = self._bound(args, kwargs)
        leaves, spec = pytree.tree_flatten(arguments)
        if spec != self.in_spec:
            arguments = same_layout(self._form, arguments)
            leaves, spec = pytree.tree_flatten(arguments)
        if spec != self.in_spec or not self._accepts(leaves):
            raise self._refusal(arguments)
        return leaves

    def result(self, flat: Sequence[Any]) -> Any:
        """Put results together from flat tensors, without constants."""
        rest = iter(flat)
        return pytree.tree_unflatten([o.value if o.dtype is None else next(rest) for o in self.outputs], self.out_spec)

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Order arguments as they were exported: any of them may be given by name."""
        if not kwargs and len(args) == len(self.positional) and not self.keywords:
            return args, {}
        names = (*self.positional, *self.keywords)
        given = dict(zip(names, args, strict=False))
        wrong = [f"{n}: given twice" for n in kwargs if n in given]
        wrong += [f"{n}: no argument" for n in kwargs if n not in names]
        wrong += [f"argument {i}: no argument" for i in range(len(names), len(args))]
        given |= kwargs
        wrong += [f"{n}: missing" for n in names if n not in given]
        if wrong:
            raise self._error(wrong)
        return tuple([given[n] for n in self.positional]), {n: given[n] for n in self.keywords}

    def _accepts(self, leaves: list[Any]) -> bool:
        """True if leaves of the right structure have the right dtypes and sizes."""
        known: dict[str, Any] = {}
        for x, want in zip(leaves, self.inputs, strict=True):
            if want.dtype is None:
                if type(x) is not type(want.value) or x != want.value:
                    return False
                continue
            if not fits(want, x):
                return False
            for n, size in zip(x.shape, want.sizes, strict=True):
                if isinstance(size, Size) and known.setdefault(size.name, n - size.plus) != n - size.plus:
                    return False
        known_fit = all([self.dims[name].allow(n) for name, n in known.items()])
        return known_fit and all([self.dims[name].allow(longest_row(leaves[i])) for i, name in self.read])

    @cached_property
    def _form(self) -> Any:
        """The arguments with an Input in place of each tensor."""
        return pytree.tree_unflatten(self.inputs, self.in_spec)

    def _refusal(self, arguments: Any) -> TdcError:
        """The error for arguments that were not accepted."""
        found = Mismatch(self.dims, {self.inputs[i].at: name for i, name in self.read})
        for name, want, got in zip(self.positional, self._form[0], arguments[0], strict=True):
            found.compare(want, got, name)
        for name, want in self._form[1].items():
            found.compare(want, arguments[1][name], name)
        found.compare_names()
        return self._error(found.lines or ["the arguments: another structure"])

    def check_structures(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse ragged batches whose offsets or lengths are broken, by which code would read foreign memory. Those on
        a device are not read."""
        positional, keywords = self._bound(args, kwargs)
        named = dict(zip(self.positional, positional, strict=True)) | keywords
        wrong: list[str] = []
        for name, value in named.items():
            for path, x in pytree.tree_flatten_with_path(value, is_leaf=is_batch)[0]:
                if is_batch(x) and is_on_host(data_of(x)):
                    wrong += [f"{name}{pytree.keystr(path)}: {line}" for line in faults(x)]
        if wrong:
            hint = "tdc.validate(x) checks a batch; tdc.pack(rows) and tdc.offsets_of(lengths) make valid ones"
            raise StructureError(message("compile.Exported", "valid ragged batches", "broken ones", wrong, hint))

    def _error(self, wrong: list[str]) -> TdcError:
        expected = f"arguments as {self.name} was exported with"
        got = f"{len(wrong)} that differ{'s' * (len(wrong) == 1)}"
        hint = "print(exported.signature()) shows what it takes"
        return StructureError(message("compile.Exported", expected, got, wrong, hint))

    def __repr__(self) -> str:
        lines = [f"{self.name}({', '.join((*self.positional, *self.keywords))})"]
        wide = max([len(e.name) for e in self.inputs], default=0)
        lines += ["  inputs", *[f"    {i:<2} {e.name:{wide}}  {e}" for i, e in enumerate(self.inputs)]]
        lines += ["  outputs", *[f"    {i:<2} {o}" for i, o in enumerate(self.outputs)]]
        if self.dims:
            wide, far = max(map(len, self.dims)), max([len(f"{b}") for b in self.dims.values()])
            lines += ["  dims", *[f"    {n:{wide}}  {b!s:{far}}  {', '.join(b.where)}" for n, b in self.dims.items()]]
        return "\n".join(lines)

    def to_data(self) -> dict[str, Any]:
        """As JSON data."""
        parts = (self.name, self.positional, self.keywords, self.inputs, self.outputs, self.read)
        dims = {name: to_json(bounds) for name, bounds in self.dims.items()}
        specs = [pytree.treespec_dumps(spec) for spec in (self.in_spec, self.out_spec)]
        return {"parts": to_json(parts), "dims": dims, "specs": specs}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Signature:
        """Read `to_data`; a FormatError where this process lacks a class of the arguments or results."""
        name, positional, keywords, inputs, outputs, read = from_json(data["parts"])
        dims = {name: from_json(bounds) for name, bounds in data["dims"].items()}
        in_spec, out_spec = [spec_of(text) for text in data["specs"]]
        return Signature(name, positional, keywords, inputs, outputs, dims, read, in_spec, out_spec)


def longest_row(lengths: Tensor) -> int:
    """The longest row, from offsets (B+1,) or shapes (B, R); read on the host."""
    rows = lengths.diff() if lengths.ndim == 1 else lengths[:, 0]
    return int(rows.max()) if rows.shape[0] else 0


def spec_of(text: str) -> Any:
    """A treespec from its text."""
    try:
        return pytree.treespec_loads(text)
    except NotImplementedError as error:
        hint = "import the module that defines the classes of its arguments and results first"
        named = re.match(r"Deserializing (\S+)", str(error))
        got = named[1] if named else str(error)
        raise FormatError(message("compile.load", "classes that this process knows", got, hint=hint)) from None


# -- differences of arguments


class Mismatch:
    """Collect differences of arguments from those a function was exported with, one line each.

    The expected arguments are containers with an `Input` in place of each tensor, so both trees are walked side by
    side, and a line names what a user sees: a key, a kind, a logical shape.

    Args:
        read: names of dims, by key path, that bound the longest row where a batch does not.
    """

    def __init__(self, dims: Mapping[str, Bounds], read: Mapping[str, str]) -> None:
        self.dims = dims
        self.read = read
        self.lines: list[str] = []
        self.sizes: dict[str, dict[tuple[str, str], int]] = {}

    def compare(self, want: Any, got: Any, at: str) -> None:
        """Note how `got` differs from `want`, an Input or a tree of them."""
        got = unwrap(got)
        if isinstance(want, Input):
            self.tensor(want, got, at)
        elif type(want) is not type(got):
            self.lines.append(f"{at}: {describe(got)} instead of {form_text(want)}")
        elif is_tensordict(want):
            self.tensordict(want, got, at)
        elif isinstance(want, NestedTensor):
            self.nested(want, got, at)
        elif isinstance(want, MaskedBatch):
            self.masked(want, got, at)
        elif isinstance(want, TwoLevelTensor):
            self.two_level(want, got, at)
        elif isinstance(want, (tuple, list, dict)):
            want, got = (dict(x) if isinstance(x, dict) else dict(enumerate(x)) for x in (want, got))
            self.keys([str(k) for k in want], [str(k) for k in got], at)
            for key in [k for k in want if k in got]:
                self.compare(want[key], got[key], f"{at}.{key}")

    def keys(self, want: list[str], got: list[str], at: str) -> None:
        """Note missing and unknown keys."""
        self.lines += [f"{at}.{k}: missing" for k in want if k not in got]
        self.lines += [f"{at}.{k}: unknown key" for k in got if k not in want]

    def tensor(self, want: Input, got: Any, at: str) -> None:
        """One tensor or constant."""
        if want.dtype is None:
            if type(got) is not type(want.value) or got != want.value:
                self.lines.append(f"{at}: {describe(got)} instead of the constant {want}")
        elif not fits(want, got):
            self.lines.append(f"{at}: {described(got, want)} instead of {form_text(want)}")
        else:
            self.note(want, got)

    def tensordict(self, want: Any, got: Any, at: str) -> None:
        """Keys and static values, then the leaves."""
        for path, rank in zip(want._size[0], want._size[1], strict=True) if want._leaves else ():
            dims = ndim_of(want._leaves[path]) - rank if isinstance(rank, int) else got.ndim  # a Shared has no rank
            if dims != got.ndim:
                self.lines.append(f"{at}: batch_size {show_sizes(got.batch_size)} instead of {dims} batch dims")
                return
        self.keys([show(p) for p in ordered(want._leaves)], [show(p) for p in got._leaves], at)
        for path in ordered(want._leaves):
            if path in got._leaves:
                self.compare(want._leaves[path], got._leaves[path], f"{at}.{show(path)}")
        for path in {**want._nodes, **got._nodes}:
            here, there = got._nodes.get(path), want._nodes.get(path)
            if type(here) is Static or type(there) is Static:
                if here != there:
                    texts = ["nothing" if x is None else f"{x!r}" for x in (here, there)]
                    self.lines.append(f"{at}.{show(path)}: {texts[0]} instead of {texts[1]}")
            elif here != there and path in got._nodes and path in want._nodes:
                self.lines.append(f"{at}.{show(path)}: an inner node of another class or with other batch dims")

    def nested(self, want: NestedTensor, got: NestedTensor, at: str) -> None:
        """One ragged batch, told by its logical shape."""
        s, t = want.structure, got.structure
        same = (s.packed_dim, s.batch_dim, s.ragged_ndim) == (t.packed_dim, t.batch_dim, t.ragged_ndim)
        pairs: list[Any] = [(want.values, got.values), (s.offsets, t.offsets), (s.shapes, t.shapes)]
        pairs += [(s.extent, t.extent)] if s.extent is not None and t.extent is not None else []
        self.batch(want, got, at, same, [p for p in pairs if p != (None, None)])
        if at in self.read and t.batch_size:
            self.sizes.setdefault(self.read[at], {})[at, "length"] = longest(t)[0]

    def two_level(self, want: TwoLevelTensor, got: TwoLevelTensor, at: str) -> None:
        """The inner batch, then where outer examples are in it."""
        self.nested(want.values, got.values, f"{at}.values")
        s, t = want.structure, got.structure
        for w, g in ((s.offsets, t.offsets), (s.extent, t.extent)):
            if isinstance(w, Input) and g is not None:
                self.note(w, g)

    def masked(self, want: MaskedBatch, got: MaskedBatch, at: str) -> None:
        """One padded batch."""
        same = (want.ragged_dims, want.batch_dim) == (got.ragged_dims, got.batch_dim)
        self.batch(want, got, at, same, [(want.data, got.data), (want.lengths, got.lengths)])

    def batch(self, want: Any, got: Any, at: str, same: bool, pairs: list[tuple[Any, Any]]) -> None:
        """A container whose tensors are compared in pairs, and told as one."""
        if same and all([w is not None and fits(w, g) for w, g in pairs]):
            for w, g in pairs:
                self.note(w, g)
        else:
            self.lines.append(f"{at}: {described(got, pairs[0][0])} instead of {form_text(want)}")

    def note(self, want: Input, got: Tensor) -> None:
        """Keep the sizes that have names."""
        for size, n in zip(want.sizes, got.shape, strict=True):
            if isinstance(size, Size):
                self.sizes.setdefault(size.name, {}).setdefault((want.at, size.word), n - size.plus)

    def compare_names(self) -> None:
        """Note sizes out of bounds, and names that stand for different sizes."""
        for name, found in self.sizes.items():
            (first, word), size = next(iter(found.items()))
            for (at, what), n in found.items():
                if not self.dims[name].allow(n):
                    self.lines.append(f"{at}: {what} {n}, not {self.dims[name]} ({name})")
                elif n != size:
                    self.lines.append(f"{at}: {what} {n}, but {first} has {word} {size} ({name})")


def ndim_of(want: Any) -> int:
    """Number of logical dims of a leaf."""
    if isinstance(want, TwoLevelTensor):
        return ndim_of(want.values) + 1
    if isinstance(want, NestedTensor):
        return ndim_of(want.values) + want.structure.ragged_ndim
    return len(want.sizes) if isinstance(want, Input) else ndim_of(want.data)


def fits(want: Input, got: Any) -> bool:
    """True if a tensor is as expected, but for sizes that vary."""
    if not isinstance(got, Tensor) or got.dtype != want.dtype or got.device.type != want.device:
        return False
    sizes = want.sizes
    return got.ndim == len(sizes) and all([w == n for w, n in zip(sizes, got.shape, strict=True) if isinstance(w, int)])


def described(got: Any, want: Any) -> str:
    """A value as messages show it, with its device where that is what differs."""
    device = getattr(got, "device", None)
    other = device is not None and isinstance(want, Input) and device.type != want.device
    return describe(got) + (f" on {device}" if other else "")


def form_text(want: Any) -> str:
    """Describe the expected form: kind, dtype, logical sizes by name."""
    if isinstance(want, Input):
        return f"{want}" if want.dtype is None else f"Tensor {want}"
    if isinstance(want, NestedTensor):
        s: Any = want.structure
        sizes: list[Any] = list(want.values.sizes)  # type: ignore[attr-defined]  # an Input stands for the tensor
        sizes[s.packed_dim : s.packed_dim + 1] = [-1] * s.ragged_ndim
        rows = s.offsets.sizes[0]
        sizes.insert(s.batch_dim, Size(rows.name, rows.plus - 1) if isinstance(rows, Size) else rows - 1)
        return f"NestedTensor {dtype_name(want.values.dtype)}{show_sizes(sizes)}"
    if isinstance(want, TwoLevelTensor):
        return f"TwoLevelTensor of {form_text(want.values)}"
    if isinstance(want, MaskedBatch):
        return f"MaskedBatch {want.data}"
    if isinstance(want, (tuple, list, dict)):
        return f"{type(want).__name__} of {len(want)}"
    return type(want).__name__


def same_extent(want: Structure, s: Structure) -> Structure:
    """Add or drop the longest length of a structure, as expected."""
    if (want.extent is None) == (s.extent is None):
        return s
    extent = extent_of(longest(s), s.offsets.device) if s.extent is None else None
    return Structure(s.offsets, s.shapes, extent, s.packed_dim, s.batch_dim, s.ragged_ndim)


def same_layout(want: Any, got: Any) -> Any:
    """Give arguments the layout of the expected ones: longest length of a ragged batch, device of a TensorDict."""
    if type(want) is not type(got) or isinstance(want, Input):
        return got
    if isinstance(want, NestedTensor):
        return build_nested(same_extent(want.structure, got.structure), got.values)
    if isinstance(want, TwoLevelTensor):
        outer = same_extent(want.structure, got.structure)
        return build_two_level(outer, same_layout(want.values, got.values))
    if is_tensordict(want):
        leaves = {p: same_layout(want._leaves.get(p), x) for p, x in got._leaves.items()}
        return build_td(leaves, got._nodes, got._size, want._device)
    if isinstance(want, dict) and want.keys() == got.keys():
        return {k: same_layout(want[k], got[k]) for k in want}
    if type(want) in (tuple, list) and len(want) == len(got):
        return type(want)([same_layout(w, g) for w, g in zip(want, got, strict=True)])
    return got


# -- flat inputs and outputs as data, without tensors: dtypes, and sizes by name


class Size(NamedTuple):
    """A size that varies: the name of a dim, how much larger it is, and its word in a container."""

    name: str
    plus: int = 0
    word: str = ""

    def __str__(self) -> str:
        return self.name if not self.plus else f"{self.name} {'+' if self.plus > 0 else '-'} {abs(self.plus)}"


class Bounds(NamedTuple):
    """Values of a dim: a multiple of `step` in a range; `where` lists the dims of this name."""

    low: int = 0
    high: int | None = None
    step: int = 1
    where: tuple[str, ...] = ()

    def __str__(self) -> str:
        return range_text(self.low, self.high) + (f", a multiple of {self.step}" if self.step > 1 else "")

    def allow(self, size: int) -> bool:
        """True for a size within."""
        return size >= self.low and (self.high is None or size <= self.high) and size % self.step == 0


class Input(NamedTuple):
    """One flat argument: a tensor, or a constant, which has no dtype."""

    name: str  # as in `batch.tokens.offsets`
    at: str  # the container it belongs to, `batch.tokens`
    dtype: torch.dtype | None
    device: str = ""
    sizes: tuple[int | Size, ...] = ()
    value: Any = None

    def __str__(self) -> str:
        return f"{self.value!r}" if self.dtype is None else f"{dtype_name(self.dtype)}{show_sizes(self.sizes)}"


class Output(NamedTuple):
    """One flat result: a tensor with sizes as texts, or a constant, which has no dtype."""

    dtype: torch.dtype | None
    sizes: tuple[str, ...] = ()
    value: Any = None

    def __str__(self) -> str:
        return f"{self.value!r}" if self.dtype is None else f"{dtype_name(self.dtype)}{show_sizes(self.sizes)}"


def range_text(low: int, high: int | None) -> str:
    """A range as messages show it: "0 or more", "1 to 8"."""
    return f"{low} or more" if high is None else f"{low} to {high}"


def to_json(x: Any) -> Any:
    """As JSON data: tuples as lists, dtypes by name, the classes above as one-key dicts."""
    if isinstance(x, torch.dtype):
        return {"dtype": dtype_name(x)}
    if type(x) in KINDS.values():
        return {type(x).__name__: [to_json(v) for v in x]}
    return [to_json(v) for v in x] if isinstance(x, (list, tuple)) else x


def from_json(data: Any) -> Any:
    """The inverse of `to_json`; lists become tuples.

    Example:
        >>> e = Input("x", "x", torch.float32, "cpu", (Size("B", 0, "batch"), 3))
        >>> from_json(to_json(e)) == e
        True
    """
    if isinstance(data, dict):
        [(kind, value)] = data.items()
        return getattr(torch, value) if kind == "dtype" else KINDS[kind](*[from_json(v) for v in value])
    return tuple([from_json(v) for v in data]) if isinstance(data, list) else data


KINDS: dict[str, Any] = {c.__name__: c for c in (Size, Bounds, Input, Output)}
