"""Names for torch's symbols: the sizes of an exported program's inputs and outputs, as its caller calls them.

torch.export gives each size that varies a symbol, and replaces symbols by others where the function relates them: after
`label * tokens.sum(1)` the offsets of `tokens` have size `s0 + 1`. Here every size `a * s + b` of an input becomes a
name and a number.

Invariants: a size that was declared to vary does, within all of its declared bounds, or export fails; two declared
names stand for independent sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tdc.compile._torch.symbolic import Line, fixed, limits, line_of, size_text
from tdc.compile.dims import Entry, Vary, has_bounds
from tdc.compile.flat import Bounds, Input, Output, Size, range_text
from tdc.core.errors import ShapeError, UnsupportedError, message, refuse_wrong

LETTERS = {"batch": "B", "length": "L", "total": "N"}


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
