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
puts the results together. It holds no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from tdc.compile.flat import Bounds, Input, Output, Size, from_json, to_json
from tdc.compile.gradients import is_batch
from tdc.compile.mismatch import Mismatch, fits, same_layout
from tdc.core import pytree
from tdc.core.dynamo import is_on_host
from tdc.core.errors import FormatError, StructureError, TdcError, message
from tdc.ragged.storage import data_of
from tdc.ragged.validate import faults


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
        return known_fit and all([self.dims[name].allow(longest(leaves[i])) for i, name in self.read])

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


def longest(lengths: Tensor) -> int:
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
