"""Messages between the ranks of a group, and what ranks tell each other before they send data.

    header      256 bytes: operation, digest of the form, digest of contents, flags, weight, number of sizes, sizes
    handshake   one all_gather of headers at the start of every collective; all ranks compare all headers

So ranks that call different operations, or with structures of different forms, all get the same error, and the group
goes on. Sizes that do not fit the header follow in a second all_gather.

Invariants: a message is only sent when its receiver knows its size (gloo aborts a process that gets a longer one);
an error of torch's transport becomes a `DistError`, after which the group is dead.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tdc.core.dtensor import group_from
from tdc.core.errors import DistError, DtypeError, StructureError, TdcError, describe, first_line, message
from tdc.dist.form import Described, Form, Sizes, kept, read_form, remember
from tdc.io.filenames import Keys, dotted, first
from tdc.io.files import bytes_of, host
from tdc.io.manifest import Entry, stored_at

HEADER = struct.Struct("<72s16s16sqqqd")
BYTES = 256
INLINE = (BYTES - HEADER.size) // 8
MOST_FORMS = 1024
NEW, RECORDS = 1, 2  # flags: the schema follows; gradients are recorded
TAG = 0x7DC0DE  # of messages inside of collectives, apart from those of users
untyped: Any = torch
comm: Any = dist  # parts of it without types


@dataclass(eq=False)
class Ranks:
    """A process group, this rank in it, and the forms that went through its channels, which need no schema again."""

    group: Any
    rank: int
    world: int
    device: torch.device
    forms: dict[Any, Form] = field(default_factory=dict)
    pending: dict[Any, Any] = field(default_factory=dict)  # the last receive that was begun, by rank and tag

    def is_new(self, channel: Any, form: Form) -> bool:
        """True if a form did not go through a channel yet. Both ends know alike."""
        return (channel, form.digest) not in self.forms

    def remember(self, channel: Any, form: Form) -> Form:
        """Remember that a form went through a channel. Returns the form."""
        return remember(self.forms, (channel, form.digest), form, MOST_FORMS)


RANKS: Any = WeakKeyDictionary()


def as_group(op: str, group: Any) -> Any:
    """The process group that is meant, by default that of all; errors are those of `group_from`."""
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group_from(op, group)


def ranks_of(op: str, group: Any) -> Ranks:
    """This rank in a group, and what the group has exchanged."""
    pg = as_group(op, group)
    found = RANKS.get(pg)
    if found is None:
        on_host = "cpu:" in str(comm.get_backend_config(pg)) or not torch.cuda.is_available()
        device = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
        found = RANKS[pg] = Ranks(pg, dist.get_rank(pg), dist.get_world_size(pg), device)
    return found


def check_rank(op: str, name: str, rank: Any, ranks: Ranks) -> None:
    """Refuse a number that is not a rank of the group."""
    if type(rank) is not int or not 0 <= rank < ranks.world:
        got = f"{name}={rank}" if isinstance(rank, int) else describe(rank)
        hint = "ranks are those within the group, also of a subgroup"
        error = StructureError if isinstance(rank, int) else DtypeError
        raise error(message(op, f"{name} in [0, {ranks.world - 1}]", got, hint=hint))


# -- messages


@contextmanager
def sending(op: str, ranks: Ranks, peer: int | None = None) -> Generator[None]:
    """Raise a DistError in place of torch's errors."""
    try:
        yield
    except TdcError:
        raise
    except RuntimeError as error:
        raise lost(op, ranks, peer, first_line(error)) from error


def lost(op: str, ranks: Ranks, peer: int | None, why: str) -> DistError:
    """The error for a rank that is gone, or that did not come in time."""
    expected = f"an answer of {'every rank' if peer is None else f'rank {peer}'}"
    words = re.sub(r"^\[[^]]*\] ", "", why).partition(". This is")[0]  # of gloo, without its place in C++
    got = f"none on rank {ranks.rank} of {ranks.world}: {words[:200]}"
    hint = "a rank is gone or came too late; the group is dead: start again, as torchrun --max-restarts=3 does"
    return DistError(message(op, expected, got, hint=hint), ranks.rank if peer is None else peer, op)


def exchange(op: str, ranks: Ranks, send: Sequence[Tensor | None], receive: Sequence[Tensor | None]) -> None:
    """Send a tensor to each rank and receive one from each, where there is one with elements; not to itself."""
    works: list[Any] = []
    for how, tensors in ((comm.irecv, receive), (comm.isend, send)):
        there = [(i, x) for i, x in enumerate(tensors) if x is not None and x.numel() and i != ranks.rank]
        works += [comm.P2POp(how, x, group=ranks.group, tag=TAG, group_peer=i) for i, x in there]
    with sending(op, ranks):
        for work in comm.batch_isend_irecv(works) if works else ():
            work.wait()


def as_bytes(x: Tensor) -> bytes:
    """The bytes of a tensor of bytes."""
    return bytes(bytes_of(host(x)))


def from_bytes(data: bytes, ranks: Ranks) -> Tensor:
    """A tensor of bytes where the group can send it."""
    return untyped.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)].to(ranks.device)


# -- headers


class Header(NamedTuple):
    """The announcement of a rank before it sends data."""

    op: str
    digest: bytes = b""  # of its form; empty of a rank that gave nothing
    content: bytes = b""  # digest of what has to be equal on all ranks
    flags: int = 0
    length: int = 0  # of the schema, or of the text of an error
    weight: float = 1.0
    sizes: Sizes = ()

    @property
    def inline(self) -> Sizes:
        """The sizes that fit in."""
        return self.sizes[:INLINE]

    def packed(self) -> bytes:
        head = (self.op.encode()[:72], self.digest, self.content, self.flags, self.length, len(self.sizes), self.weight)
        return (HEADER.pack(*head) + struct.pack(f"<{len(self.inline)}q", *self.inline)).ljust(BYTES, b"\0")


def unpacked(data: bytes) -> tuple[Header, int]:
    """A header, with those of its sizes that fit in, and how many there are."""
    op, digest, content, flags, length, count, weight = HEADER.unpack_from(data)
    sizes = struct.unpack_from(f"<{min(count, INLINE)}q", data, HEADER.size)
    head = Header(text_of(op), digest if digest.strip(b"\0") else b"", content, flags, length, weight, sizes)
    return head, count


def text_of(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


class Handshake:
    """The exchange of headers of all ranks, begun where it is made, and finished by `headers`."""

    def __init__(self, op: str, ranks: Ranks, header: Header) -> None:
        self.op, self.ranks, self.own = op, ranks, header
        self.out = torch.empty(BYTES * ranks.world, dtype=torch.uint8, device=ranks.device)
        self.work: Any = None
        if ranks.world > 1:
            with sending(op, ranks):
                mine = from_bytes(header.packed(), ranks)
                self.work = gather_equal(self.out, mine, ranks)

    def headers(self) -> list[Header]:
        """The headers of all ranks.

        Raises:
            DistError: a rank did not answer.
            StructureError: another rank called another operation, or failed before it could take part.
        """
        if self.work is None:
            return [self.own]
        with sending(self.op, self.ranks):
            self.work.wait()
        data = as_bytes(self.out)
        found = [unpacked(data[i : i + BYTES]) for i in range(0, len(data), BYTES)]
        most = max([count for _, count in found])
        heads = [head for head, _ in found]
        refuse_other_operations(self.op, heads)
        if most > INLINE:
            heads = [h._replace(sizes=s[:n]) for h, s, (_, n) in zip(heads, self.all_sizes(most), found, strict=True)]
        return heads

    def all_sizes(self, most: int) -> list[Sizes]:
        """The sizes of all ranks, filled up to one length."""
        with sending(self.op, self.ranks):
            own = torch.tensor([*self.own.sizes, *[0] * (most - len(self.own.sizes))], device=self.ranks.device)
            out = own.new_empty(most * self.ranks.world)
            gather_equal(out, own, self.ranks).wait()
        return [tuple(row) for row in untyped.Tensor.tolist(out.view(-1, most))]


def gather_equal(out: Tensor, x: Tensor, ranks: Ranks) -> Any:
    """Begin an all_gather of equally large tensors."""
    return comm.all_gather([*out.split(x.numel())], x, group=ranks.group, async_op=True)


def refuse_other_operations(op: str, heads: Sequence[Header]) -> None:
    """Refuse headers of different operations, on every rank with the same text."""
    failed = {f"rank {i}": h.op.removeprefix("!") for i, h in enumerate(heads) if h.op.startswith("!")}
    if failed:
        hint = "the error of that rank says why"
        raise StructureError(message(op, "all ranks to take part", f"{len(failed)} that failed", failed, hint))
    if len({h.op for h in heads}) > 1:
        said = {f"rank {i}": h.op for i, h in enumerate(heads)}
        hint = "all ranks call the same operations in the same order"
        raise StructureError(message(op, "one operation on all ranks", "others", said, hint))


@contextmanager
def taking_part(op: str, ranks: Ranks) -> Generator[None]:
    """Tell the others where this rank fails before its handshake, so that they do not wait for it."""
    try:
        yield
    except TdcError as error:
        if ranks.world > 1:
            with sending(op, ranks):
                Handshake(op, ranks, Header(f"!{type(error).__name__} in {op}")).work.wait()
        raise


def agreed(op: str, ranks: Ranks, heads: Sequence[Header], form: Form, sizes: bool = False) -> None:
    """Refuse structures of different forms, and of different sizes or contents where these have to be equal.

    Raises:
        StructureError: on every rank with the same text; names the keys that differ.
    """
    if len({h.digest for h in heads}) > 1:
        forms = all_forms(op, ranks, heads, form)
        got, hint = f"{len(set(forms.values()))} forms", "the same keys, kinds, dtypes and feature sizes on every rank"
        raise StructureError(message(op, "structures of one form on all ranks", got, differences(forms), hint))
    own = [form.compared(h.sizes) for h in heads] if sizes else []
    if sizes and len({(n, h.content) for n, h in zip(own, heads, strict=True)}) > 1:
        said = {f"rank {i}": f"sizes {list(n)}" for i, n in enumerate(own)}
        got = "others" if len({*own}) > 1 else "other lengths of examples"
        hint = "all_gather takes other numbers of rows; pad, or balance, what is to be reduced"
        raise StructureError(message(op, "structures of one size on all ranks", got, said, hint))


def all_forms(op: str, ranks: Ranks, heads: Sequence[Header], form: Form) -> dict[str, Form]:
    """The forms of all ranks, by their names."""
    lengths = [h.length for h in heads]
    with sending(op, ranks):
        own = from_bytes(form.schema.ljust(max(lengths), b"\0"), ranks)
        out = own.new_empty(own.numel() * ranks.world)
        gather_equal(out, own, ranks).wait()
    schemas = [as_bytes(x)[:n] for x, n in zip(out.split(own.numel()), lengths, strict=True)]
    return {str(i): kept(read_form(op, schema)) for i, schema in enumerate(schemas)}


def header_of(op: str, x: Described, **more: Any) -> Header:
    """The header for a structure."""
    return Header(op, x.form.digest, length=len(x.form.schema), **{"sizes": x.sizes, **more})


def known_form(op: str, ranks: Ranks, channel: Any, head: Header, schema: Callable[[], bytes]) -> Form:
    """The form that a header speaks of; `schema` receives it where it is new."""
    if head.flags & NEW:
        return ranks.remember(channel, kept(read_form(op, schema())))
    found = ranks.forms.get((channel, head.digest))
    if found is None:
        hint = "an error on one rank has left the ranks apart; start again"
        raise StructureError(message(op, "the form of an earlier message", "an unknown one", hint=hint))
    return found


def is_structural(part: str) -> bool:
    """True for offsets and lengths, which are equal on all ranks and not reduced."""
    return part in ("offsets", "shapes", "outer", "lengths")


def contents(x: Described) -> bytes:
    """A digest of offsets and lengths."""
    if x.form.is_plain:
        return b""
    digest = hashlib.sha256()
    for (_, part), tensor in zip(x.form.templates, x.tensors, strict=True):
        if is_structural(part):
            digest.update(as_bytes(tensor.detach().contiguous().view(-1).view(torch.uint8)))
    return digest.digest()[:16]


# -- forms that differ


def lines(form: Form) -> dict[str, str]:
    """A line for each key of a form."""
    found: dict[str, str] = {}
    for keys, entry in form.table.items():
        if isinstance(entry, Entry):
            kind = {"json": "Static", "objects": "ObjectArray"}.get(entry.kind, entry.kind)
            shown = [repr(entry.data["value"])] if entry.kind == "json" else []
            shown += [shown_tensor(form, keys, part) for part in entry.parts]
            found[dotted(keys)] = " ".join([kind, *shown])
        elif keys and entry.cls:
            found[dotted(keys)] = entry.cls
    root: Any = form.table[()]
    return {"the root": f"{form.ndim} batch dims {root.cls}".strip(), **found}


def shown_tensor(form: Form, keys: Keys, part: str) -> str:
    """A tensor in one word, as in `float32[B0, 3]`."""
    dtype, template = form.templates[stored_at(form.table, keys, part)]
    dims = ", ".join([str(d) if type(d) is int else shown_size(form, d) for d in template])
    return f"{part}{' ' * bool(part)}{str(dtype).removeprefix('torch.')}[{dims}]"


def shown_size(form: Form, size: Any) -> str:
    return ("B" if size.slot < form.ndim else "n") + f" + {size.plus}" * (size.plus > 0)


def differences(forms: Mapping[str, Form]) -> list[str]:
    """Lines for the keys that differ between the forms of some ranks."""
    by_rank = {rank: lines(form) for rank, form in forms.items()}
    keys = dict.fromkeys([key for found in by_rank.values() for key in found])
    wrong: list[str] = []
    for key in keys:
        said: dict[str, list[str]] = {}
        for rank, found in by_rank.items():
            said.setdefault(found.get(key, "not there"), []).append(rank)
        if len(said) > 1:
            wrong.append(f"{key}: " + "; ".join([f"{text} on rank {', '.join(ranks)}" for text, ranks in said.items()]))
    return first(wrong)
