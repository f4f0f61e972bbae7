"""Differences of arguments from those a function was exported with, one line each.

The expected arguments are containers with an `Input` in place of each tensor, so both trees are walked side by side,
and a line names what a user sees: a key, a kind, a logical shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tdc.compile.flat import Bounds, Input, Size
from tdc.core.errors import describe, dtype_name, show_sizes
from tdc.core.keys import show
from tdc.layout.segments import longest
from tdc.layout.structure import Structure, extent_of
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.two_level import TwoLevelTensor, build_two_level
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.nodes import Static
from tdc.tensordict.paths import ordered
from tdc.tensordict.storage import is_tensordict
from tdc.tensordict.tensordict import build_td


class Mismatch:
    """Collect differences. `read` are names of dims, by key path, that bound the longest row where a batch does not."""

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
