"""Sizes that batches are filled up to, and the choice between those that have a graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tdc.compile.filling.values import Expr
from tdc.core.errors import DtypeError, ShapeError, UnsupportedError, describe, message

Sizes = Sequence[int]
OP = "compile.Buckets"
FIELDS = {"rows": "rows", "ends": "rows", "totals": "totals", "lengths": "lengths"}  # sizes of each kind, by name
ANY = 1 << 62  # of a number that is no size: every graph takes it
MORE = 1.02  # of a size that depends on data, beyond its proportion to totals
WORTH = 0.9  # a new graph has at most so much of the sizes of one that is there


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes of buckets that batches are filled up to, for `buckets=` of `counted` and `train_step`.

    Args:
        rows: sizes for the number of rows. By default each number of rows has a graph of its own.
        totals: sizes for the packed elements of a NestedTensor. By default each is some 15 % larger than the one
            before.
        lengths: sizes for `max_length`, which padding follows. By default powers of two.
        most: number of graphs. The last one has room for other numbers of rows and for larger batches; after it a batch
            takes a larger graph that is there, and only one that no graph holds records another.

    Raises:
        DtypeError: sizes that are no ints.
        ShapeError: fewer than one graph; in a call, a batch larger than the largest size.

    Compile:
        Each graph has fixed sizes, so that `mode="reduce-overhead"` records it as a CUDA graph. Results, losses and
        gradients are those of the batch without filling. An operation whose filling cannot be taken out raises an
        UnsupportedError that names it. Sizes that depend on data are read before a graph runs, and filled in proportion
        to totals; elements by a mask that a layer tells are counted in the graph, which has room for all of them.

    Example:
        >>> from tdc.compile import buckets, counted
        >>> Buckets(totals=buckets(1024, 4096))
        Buckets(rows=None, totals=(1024, 2048, 4096), lengths=None, most=8)
    """

    rows: Sizes | None = None
    totals: Sizes | None = None
    lengths: Sizes | None = None
    most: int = 8

    def __post_init__(self) -> None:
        for name in ("rows", "totals", "lengths"):
            sizes = getattr(self, name)
            whole = isinstance(sizes, (tuple, list)) and all([type(n) is int for n in sizes])
            if sizes is not None and not whole:
                hint = f"{name}=tdc.compile.buckets(low, high)"
                raise DtypeError(message(OP, f"a tuple of ints as {name}", describe(sizes), hint=hint))
        if type(self.most) is not int or self.most < 1:
            raise ShapeError(message(OP, "at least one graph", f"most={self.most!r}", hint="most=8"))

    def choice(self, real: Mapping[Expr, int], kinds: Mapping[Expr, str], known: Sequence[Fixed]) -> Fixed:
        """Sizes for a batch: of the known ones that hold it those with the least filling, or smaller new ones."""
        holding = [fixed for fixed in known if fixed.holds(real)]
        best = min(holding, key=Fixed.total, default=None)
        last = len(known) >= self.most - 1
        if best is not None and last:
            return best
        new = self.rounded(real, kinds, last)
        return new if best is None or new.total() < WORTH * best.total() else best

    def rounded(self, real: Mapping[Expr, int], kinds: Mapping[Expr, str], every: bool) -> Fixed:
        """New sizes for a batch; with `every` there is room for others of all kinds."""
        sizes: dict[Expr, int] = {}
        filled: list[Expr] = []
        for symbol, n in real.items():
            kind = kinds[symbol]
            more = kind == "ends"  # offsets, one more than rows
            given: Sizes | None = getattr(self, FIELDS[kind]) if kind in FIELDS else None
            if kind == "numbers":
                sizes[symbol] = ANY
            elif given is not None:
                sizes[symbol] = next_of(given, n - more, kind) + more
            elif every or kind == "lengths":
                sizes[symbol] = (1 << max(n - more - 1, 0).bit_length()) + more
            else:
                sizes[symbol] = next_fifth(n) if kind == "totals" else n
            if given is not None or every or kind in ("totals", "lengths", "data", "numbers"):
                filled.append(symbol)
        room = max([sizes[s] / max(n, 1) for s, n in real.items() if kinds[s] == "totals"], default=1.15)
        sizes |= {s: max(2, math.ceil(n * room * MORE)) for s, n in real.items() if kinds[s] == "data"}
        return Fixed(sizes, tuple(filled))


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """Sizes of one graph.

    Attributes:
        sizes: of each symbol.
        filled: symbols whose real size may be smaller.
    """

    sizes: dict[Expr, int]
    filled: tuple[Expr, ...]

    def holds(self, real: Mapping[Expr, int]) -> bool:
        """True if a batch of these sizes runs on the graph."""
        return all([n <= self.sizes[s] if s in self.filled else n == self.sizes[s] for s, n in real.items()])

    def total(self) -> int:
        """A measure of filling, to compare graphs by."""
        return sum([n for n in self.sizes.values() if n < ANY])


def next_of(sizes: Sizes, n: int, kind: str) -> int:
    """The smallest of some sizes that holds a number; refuse a larger number."""
    found = min([size for size in sizes if size >= n], default=None)
    if found is None:
        hint = "add a larger size, or split the batch"
        raise ShapeError(message(OP, f"{kind} of at most {max(sizes, default=0)}", str(n), hint=hint))
    return found


def next_fifth(n: int) -> int:
    """The next of five sizes between a power of two and its double, at most 15 % larger."""
    exponent = math.ceil(5 * math.log2(max(n, 1)) - 1e-9) / 5
    return max(n, math.ceil(2**exponent))


def buckets_of(given: Any, op: str) -> Buckets | None:
    """The setting `buckets=` of a compiled function; "auto" is the default sizes."""
    if given is None or isinstance(given, Buckets):
        return given
    if given != "auto":
        raise UnsupportedError(message(op, "buckets='auto' or a tdc.compile.Buckets", describe(given), hint="'auto'"))
    return Buckets()
