"""The form of a structure: everything that ranks must have in common, without its sizes.

    structure   TensorDict, tensorclass, or one tensor or ragged batch
    Form        keys, kinds, dtypes, static dims, Static values; its schema is the manifest of the same with zero rows
    sizes       ints: batch dims, packed totals, padded widths, bounds
    tensors     those that travel, grouped by dtype, wide elements first, so that each group is aligned

A batch of other lengths has the same Form and other sizes. So ranks compare digests, send the schema once, and sizes
fit a message of fixed size. Objects of an `ObjectArray` are data: a uint8 tensor of JSON.

Invariants: form, sizes and tensors make the structure again; both ends derive the places of sizes from the schema
alone; nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tdc.core.errors import DtypeError, StructureError, UnsupportedError, describe, message, refuse_wrong
from tdc.core.keys import parts, path_of, show
from tdc.core.one_storage import identity
from tdc.io.filenames import Keys, Part, dotted
from tdc.io.leaves import HINT, Faulty, as_node, taken_apart, tied_or_stored
from tdc.io.manifest import DTYPES, Entry, Node, Stored, Table, Tie, dump, parse, stored_at
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.two_level import TwoLevelTensor
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.nodes import Nodes, Static
from tdc.tensordict.shared import Shared
from tdc.tensordict.tensordict import TensorDict, build_td

MOST = 256  # forms that are kept before all are forgotten
BOUNDS = "max_length", "outer_max_length"  # optional, and no part of the form
NONE = -1  # a bound that is not there
BARE = "value"  # the key of a structure that is one leaf
X = TypeVar("X")
untyped: Any = torch


class Size(NamedTuple):
    """A dim that varies: the number of its size, and what is added to it."""

    slot: int
    plus: int = 0


Template = tuple[int | Size, ...]  # a shape
Sizes = tuple[int, ...]


class Run(NamedTuple):
    """Tensors of one dtype and template that are neighbours in the message."""

    dtype: torch.dtype
    template: Template
    times: int


@dataclass(frozen=True, eq=False)
class Form:
    """Everything that ranks must have in common; see the module.

    Attributes:
        schema: bytes that make the Form on another rank.
        ndim: number of batch dims, whose sizes come first.
        count: number of sizes.
        templates: the shape of each tensor that travels, in the order of the message.
        data: templates of what describes a ragged leaf besides its tensors.
    """

    schema: bytes
    table: Table
    templates: dict[Part, tuple[torch.dtype, Template]]
    data: dict[Keys, dict[str, Any]]
    ndim: int
    count: int
    bare: bool
    digest: bytes = field(default=b"", init=False)
    runs: tuple[Run, ...] = field(default=(), init=False)
    groups: dict[torch.dtype, int] = field(default_factory=dict, init=False)  # tensors of each dtype, in order
    paths: list[Any] = field(default_factory=list, init=False)  # of the tensors, where each is a leaf
    keys: list[Any] = field(default_factory=list, init=False)  # of the leaves, in their order
    known: dict[Sizes, Layout] = field(default_factory=dict, init=False)
    nodes: dict[Any, Nodes] = field(default_factory=dict, init=False)  # by tensorclasses

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hashlib.sha256(self.schema).digest()[:16])
        leaves = [keys for keys, entry in self.table.items() if isinstance(entry, Entry) and entry.kind != "json"]
        self.keys.extend([path_of(keys) for keys in leaves])
        if self.is_plain and len(leaves) == len(self.templates):
            self.paths.extend([path_of(keys) for keys, _ in self.templates])
        object.__setattr__(self, "runs", tuple([Run(*k, len([*x])) for k, x in groupby(self.templates.values())]))
        for run in self.runs:
            self.groups[run.dtype] = self.groups.get(run.dtype, 0) + run.times

    @property
    def is_plain(self) -> bool:
        """True if all leaves are dense tensors."""
        return not self.data

    def compared(self, sizes: Sizes) -> Sizes:
        """Sizes without bounds, which may differ."""
        own = [value for found in self.data.values() for name, value in found.items() if name in BOUNDS]
        slots = {x.slot for value in own for x in (value if type(value) is not Size else (value,))}
        return tuple([n for i, n in enumerate(sizes) if i not in slots])

    def layout(self, sizes: Sizes) -> Layout:
        """Positions of tensors of some sizes in a message."""
        return self.known.get(sizes) or remember(self.known, sizes, laid_out(self, sizes))


def remember(known: dict[Any, X], key: Any, x: X, most: int = MOST) -> X:
    """Keep what was computed, and return it; all is forgotten before there is too much."""
    if len(known) >= most:
        known.clear()
    known[key] = x
    return x


class Layout(NamedTuple):
    """Tensors of a form with sizes: shapes of its runs, and bytes in all."""

    shapes: tuple[tuple[int, ...], ...]
    nbytes: int


def laid_out(form: Form, sizes: Sizes) -> Layout:
    """The layout of a form."""
    shapes = tuple([resolved(run.template, sizes) for run in form.runs])
    runs = zip(form.runs, shapes, strict=True)
    return Layout(shapes, sum([run.times * prod(shape) * run.dtype.itemsize for run, shape in runs]))


def resolved(template: Any, sizes: Sizes) -> Any:
    """A template with its sizes."""
    if type(template) is Size:
        return sizes[template.slot] + template.plus
    return tuple([resolved(x, sizes) for x in template]) if isinstance(template, tuple) else template


# -- of a structure


class Described(NamedTuple):
    """A structure as what travels."""

    td: TensorDict  # around a single leaf, too
    form: Form
    sizes: Sizes
    tensors: list[Tensor]  # in the order of the message


class Plan(NamedTuple):
    """A form, and the order in which it takes tensors and sizes of the structures that it was made of."""

    form: Form
    order: tuple[int, ...]
    sizes: tuple[int, ...]


PLAIN = Tensor, nn.Parameter
PLANS: dict[Any, Plan] = {}
FORMS: dict[bytes, Form] = {}


def as_td(op: str, x: Any) -> tuple[TensorDict, bool]:
    """A structure as a TensorDict, and whether it was a single leaf."""
    if isinstance(x, TensorDict):
        shared = {show(p): describe(leaf) for p, leaf in x._leaves.items() if type(leaf) is Shared}
        hint = "td.exclude(key), and td.set(key, Shared(x)) again; x can be sent by itself"
        refuse_wrong(UnsupportedError, op, "leaves of rows", shared, "others", hint)
        return x, False
    if isinstance(x, Tensor):
        return build_td({BARE: x}, {}, x.shape), True
    if isinstance(x, (NestedTensor, TwoLevelTensor, MaskedBatch)):
        return build_td({BARE: x}, {}, x.batch_size), True
    hint = "tdc.as_tensordict(x) of dicts and dataclasses; TensorDict(...) around ObjectArrays"
    raise DtypeError(message(op, "a TensorDict, tensor or ragged batch", describe(x), hint=hint))


def described(op: str, x: Any, ties: bool = False) -> Described:
    """A structure as its form, sizes and tensors.

    Args:
        ties: tensors of the same memory travel once, and are one again.

    Raises:
        UnsupportedError: leaves that cannot travel; all are named.
    """
    td, bare = as_td(op, x)
    k = len(td._size)
    signature: list[Any] = [bare, k, tuple(td._leaves)]
    sizes, tensors = [*td._size], list[Tensor]()
    for path, leaf in td._leaves.items():
        if type(leaf) in PLAIN:
            signature += leaf.dtype, leaf.layout, leaf.is_nested or leaf.shape[k:]
            tensors.append(leaf)
        else:
            own, more, form = of_container(op, path, unwrap(leaf), k)
            signature += form
            tensors += own
            sizes += more
    devices = {x.device for x in tensors}
    if len(devices) > 1:
        wrong = {show(p): describe(x) for p, x in td._leaves.items() if x.device not in (None, tensors[0].device)}
        got = f"{len(wrong)} elsewhere"
        raise StructureError(message(op, f"leaves on {tensors[0].device}", got, wrong, "td.to(device)"))
    key = (*signature, tuple(td._nodes.items()), ties_of(tensors) if ties else None, torch.device("meta") in devices)
    plan = PLANS.get(key) or remember(PLANS, key, plan_of(op, td, bare, ties))
    if sizes[k:]:
        sizes = [sizes[i] for i in plan.sizes]
    return Described(td, plan.form, tuple(sizes), [tensors[i] for i in plan.order])


def of_container(op: str, path: Any, x: Any, ndim: int) -> tuple[list[Tensor], list[int], list[Any]]:
    """The tensors of a ragged leaf or ObjectArray, its own sizes, and what its form depends on besides."""
    try:
        kind, data, own = apart(x)
    except Faulty as fault:
        wrong = {show(path): f"{describe(x)}, {fault}"}
        raise UnsupportedError(message(op, EXPECTED, "1 other", wrong, HINT)) from None
    template, values = templates(kind, data, {part: tuple(t.shape) for part, t in own.items()}, ndim, count(ndim))
    found: dict[int, int] = {}
    for part, shape in template.items():
        note(found, shape, tuple(own[part].shape))
    for name, value in values.items():
        note(found, value, data.get(name, NONE if name == "outer_max_length" else (NONE,) * len(value)))
    form = [kind, tuple(template.items()), *[t.dtype for t in own.values()], tuple(values), data.get("ragged_idx")]
    return [*own.values()], [found[i] for i in sorted(found) if i >= ndim], form


def note(found: dict[int, int], template: Any, value: Any) -> None:
    """Read sizes off a shape that has a template."""
    if type(template) is Size:
        found.setdefault(template.slot, value - template.plus)
    elif isinstance(template, tuple):
        for t, v in zip(template, value, strict=True):
            note(found, t, v)


EXPECTED = "dense tensors, ragged batches, and Python values that JSON holds"


def apart(x: Any) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """`taken_apart` of a leaf; the objects of an ObjectArray as a tensor of JSON."""
    kind, data, own = taken_apart(x)
    if kind == "objects":
        text = json.dumps(data["values"], separators=(",", ":"), allow_nan=False).encode()
        return kind, {"shape": data["shape"]}, {"": untyped.frombuffer(bytearray(text), dtype=torch.uint8)}
    for name in ("max_length", "shape", "ragged_dims"):
        if name in data:
            data[name] = tuple(data[name])
    return kind, data, own


def ties_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """For each tensor the number of the first with the same memory."""
    addresses = [x.data_ptr() if x.layout == torch.strided and x.numel() else -i for i, x in enumerate(tensors)]
    if len(set(addresses)) == len(tensors):
        return ()
    known: dict[Any, int] = {}
    return tuple([known.setdefault(identity(x), i) if x.numel() else i for i, x in enumerate(tensors)])


def plan_of(op: str, td: TensorDict, bare: bool, ties: bool) -> Plan:
    """The plan of a structure, from its manifest with zero rows."""
    size, entries = tuple(td._size), {**td._leaves, **td._nodes}
    k = len(size)
    table: Table = {(): zeroed(as_node(entries.get((), 0), size, ()), k)}
    wrong: dict[str, str] = {}
    known: dict[Any, Part] = {}
    places: list[Part] = []
    numbers = count(k)
    for path, found in entries.items():
        keys = parts(path)
        node = path in td._nodes and type(found) is not Static
        for n in range(1, len(keys) + node):
            if keys[:n] not in table:
                shape = tuple(getattr(found, "shape", ()))
                table[keys[:n]] = zeroed(as_node(entries[path_of(keys[:n])], size, shape), k)
        if not node:
            try:
                table[keys], added = zero_entry(keys, unwrap(found), k, known if ties else {}, numbers)
                places += added
            except Faulty as fault:
                wrong[dotted(keys)] = f"{describe(unwrap(found))}, {fault}"
    refuse_wrong(UnsupportedError, op, EXPECTED, wrong, "others", HINT)
    form = kept(read_form(op, (b"1" if bare else b"0") + dump(op, table)))
    order = {place: i for i, place in enumerate(places)}
    own: dict[Keys, list[int]] = {}
    numbers = count(k)
    for path, found in td._leaves.items():
        if not isinstance(unwrap(found), Tensor):
            more = of_container(op, path, unwrap(found), k)[1]
            own[parts(path)] = [next(numbers) for _ in more]
    sizes = [*range(k), *[i for keys in form.table for i in own.get(keys, ())]]
    return Plan(form, tuple([order[place] for place in form.templates]), tuple(sizes))


def zeroed(node: Node, k: int) -> Node:
    """A node of zero rows."""
    return Node((*[0] * k, *node.batch_shape[k:]), node.cls)


def zero_entry(
    keys: Keys, x: Any, k: int, known: dict[Any, Part], numbers: Iterator[int]
) -> tuple[Entry, list[Part]]:
    """A leaf of zero rows as an entry of a table, and the places of all of its tensors."""
    kind, data, own = ("json", taken_apart(x)[1], {}) if type(x) is Static else apart(x)
    if any([t.is_meta for t in own.values()]):
        raise Faulty("which has no content")
    if kind == "json":
        return Entry(kind, data, {}), []
    template, values = templates(kind, data, {part: tuple(t.shape) for part, t in own.items()}, k, numbers)
    if kind == "objects":
        data = {"shape": resolved(values["shape"], NoSizes())}
    data = {name: value for name, value in data.items() if name not in BOUNDS}
    found: dict[Part, Tensor] = {}
    made_of = {part: tied_or_stored(t, (keys, part), known, found) for part, t in own.items()}
    zero = {
        part: x if isinstance(x, Tie) else Stored(x.dtype, resolved(template[part], NoSizes()))
        for part, x in made_of.items()
    }
    if kind == "objects":
        return Entry(kind, {**data, "values": [None] * prod(data["shape"])}, {}), [(keys, "")]
    return Entry(kind, data, zero), [(keys, part) for part in own]


class NoSizes(tuple[int, ...]):
    """Sizes that are all 0."""

    def __getitem__(self, at: Any) -> Any:
        return 0


# -- of a schema


def kept(form: Form) -> Form:
    """The same form as a known one, if it is known."""
    return FORMS.get(form.digest) or remember(FORMS, form.digest, form)


def read_form(op: str, schema: bytes) -> Form:
    """The form of a schema.

    Raises:
        FormatError: it is no schema.
    """
    table = parse(op, schema[1:])
    root: Any = table[()]
    k = len(root.batch_shape)
    numbers = count(k)
    found: dict[Part, tuple[torch.dtype, Template]] = {}
    data: dict[Keys, dict[str, Any]] = {}
    for keys, entry in table.items():
        if isinstance(entry, Node) or entry.kind == "json":
            continue
        shapes: dict[str, tuple[int, ...]] = {}
        for part in entry.parts:
            at = stored_at(table, keys, part)
            other: Any = table[at[0]]
            shapes[part] = other.parts[at[1]].shape
        shapes = shapes or {"": (0,)}  # of objects
        template, values = templates(entry.kind, entry.data, shapes, k, numbers)
        if entry.kind != "tensor":
            data[keys] = values
        for part, shape in template.items():
            x = entry.parts.get(part, Stored("uint8", (0,)))
            if isinstance(x, Stored):
                found[keys, part] = DTYPES[x.dtype], shape
    ranked = sorted(found.items(), key=lambda item: (-item[1][0].itemsize, str(item[1][0])))
    return Form(schema, table, dict(ranked), data, k, next(numbers), schema[:1] == b"1")


def templates(
    kind: str, data: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], k: int, numbers: Iterator[int]
) -> tuple[dict[str, Template], dict[str, Any]]:
    """Templates of the tensors of a leaf, and of what describes it.

    Args:
        shapes: of its tensors, of any sizes.
        k: batch dims of the root.
        numbers: gives the numbers of new sizes.
    """

    def new() -> Size:
        return Size(next(numbers))

    def inside(shape: Sequence[int], special: Mapping[int, Size], before: int = 0) -> Template:
        return tuple([special.get(d, Size(d + before) if d + before < k else n) for d, n in enumerate(shape)])

    if kind == "tensor":
        return {"": inside(shapes[""], {})}, {}
    if kind == "objects":
        shape = tuple(data["shape"])
        return {"": (new(),)}, {"shape": inside(shape, {0: Size(0) if k else new()} if shape else {})}
    rows = Size(0) if k else new()
    if kind == "padded":
        dims = {0: rows} | {d: new() for d in data["ragged_dims"]}
        return {"data": inside(shapes["data"], dims), "lengths": (rows, len(data["ragged_dims"]))}, {}
    inner = new() if kind == "two_level" else rows
    packed = data["ragged_idx"] - 1
    ragged = len(shapes["shapes"][1:]) and shapes["shapes"][1] if "shapes" in shapes else 1
    at = shapes["values"]
    before = inside(at[:packed], {}, 1 if kind == "jagged" else k)
    found: dict[str, Template] = {
        "values": (*before, new(), *at[packed + 1 :]),
        "offsets": (Size(inner.slot, 1),),
    }
    if "shapes" in shapes:
        found["shapes"] = inner, ragged
    values: dict[str, Any] = {"max_length": tuple([new() for _ in range(ragged)])}
    if kind == "two_level":
        found["outer"] = (Size(rows.slot, 1),)
        values["outer_max_length"] = new()
    return found, values
