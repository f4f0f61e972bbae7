"""Structures from some ranks to others, as they are: broadcast, scatter, gather, all_gather, all_to_all.

Each begins with a handshake, so that structures of other forms, or another operation on some rank, are an error on
every rank. Rows differ between ranks as they like, also in their lengths: buffers have their real size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tdc.core.dynamo import skipped_in_graphs
from tdc.core.errors import ShapeError, StructureError, describe, message
from tdc.dist.form import Described, Form, Sizes, described
from tdc.dist.in_graphs import all_to_all_rows, broadcast_whole, gather_rows, in_transform, records
from tdc.dist.transport import (
    NEW,
    RECORDS,
    Handshake,
    Header,
    Ranks,
    agreed,
    as_bytes,
    as_group,
    check_rank,
    contents,
    exchange,
    from_bytes,
    header_of,
    known_form,
    ranks_of,
    sending,
    taking_part,
)
from tdc.dist.wire import built, empty_buffer, over_ranks, packed, stacked_views, views
from tdc.io.load import names_of
from tdc.tensordict.tensordict import TensorDict

comm: Any = dist  # parts of it without types


def broadcast(td: Any = None, src: int = 0, *, group: Any = None, classes: Iterable[type] = ()) -> Any:
    """Send the structure of one rank to all.

    A handshake and one message of N bytes; one more the first time that a structure of this form is sent.

    Args:
        td: a TensorDict or tensorclass, or one tensor or ragged batch, on rank `src`. Others may leave it out; where
            they give one, it has the same form. For gradients, and in a graph, all give one of the same sizes.
        src: a rank within the group.
        group: a process group or a DeviceMesh of one dim; the default group without it.
        classes: tensorclasses that nodes become again where td was left out, as of `tdc.io.load`.

    Returns:
        `td` itself on rank `src`; elsewhere the same in new memory, on the device of a given td.

    Raises:
        StructureError: on every rank: another operation on some rank, another form than that of `src`.
        UnsupportedError: leaves that cannot travel; all are named.
        DistError: a rank is gone or did not come in time.

    Compile:
        fullgraph, without the handshake. Where all ranks give a td that requires grad, the gradient at `src` is that of
        the sum of all ranks' losses, and zero elsewhere.

    Example:
        >>> store = dist.HashStore()  # with torchrun, init_process_group() alone
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> broadcast(TensorDict({"x": torch.ones(2)}))["x"]
        tensor([1., 1.])
        >>> dist.destroy_process_group()

    Source:
        `torch.distributed.broadcast`.
    """
    op = "dist.broadcast"
    pg = as_group(op, group)
    agreement = agree_on_source(op, td, src, group, classes)
    if agreement is not None:
        return agreement[0]
    return broadcast_whole(op, td, src, pg)


@skipped_in_graphs
def agree_on_source(op: str, td: Any, src: int, group: Any, classes: Iterable[type]) -> tuple[Any] | None:
    """The handshake of `broadcast`, and its result; None where gradients are to be recorded."""
    if in_transform():
        return None
    ranks = ranks_of(op, group)
    text, mine = f"{op} src={src}", type(src) is int and ranks.rank == src
    x, head = None, Header(text)
    with taking_part(text, ranks):
        check_rank(op, "src", src, ranks)
        known = names_of(classes, op)
        if mine or td is not None:
            x, recorded = described(op, td, ties=True), records(td)
            flags = RECORDS * recorded | NEW * (mine and ranks.is_new("all", x.form))
            head = header_of(text, x, flags=flags, content=contents(x) if recorded else b"")
    shake = Handshake(op, ranks, head)
    own = packed(x, ranks.device) if mine and x is not None else None  # while the handshake is under way
    heads = shake.headers()
    there = [h for h in heads if h.digest]
    if len({h.digest for h in there}) > 1:  # all tell, a rank without a td the form of an empty one
        agreed(op, ranks, heads, described(op, TensorDict()).form if x is None else x.form)
    if x is not None and all([h.flags & RECORDS for h in heads]):
        agreed(op, ranks, heads, x.form, sizes=True)
        return None
    form = receive_form(op, ranks, heads[src], src, None if x is None else x.form)
    sizes = heads[src].sizes
    buffer = empty_buffer(form, sizes, ranks.device) if own is None else own
    with sending(op, ranks):
        comm.broadcast(buffer, group=ranks.group, group_src=src)
    like = None if x is None else x.td
    return (td if mine else rebuilt(op, form, sizes, buffer, known, like, device_of(x)),)


def receive_form(op: str, ranks: Ranks, head: Header, src: int, own: Form | None) -> Form:
    """The form of rank `src`, which sends its schema where that is new."""

    def schema() -> bytes:
        data = own.schema if ranks.rank == src and own is not None else bytes(head.length)
        x = from_bytes(data, ranks)
        with sending(op, ranks):
            comm.broadcast(x, group=ranks.group, group_src=src)
        return as_bytes(x)

    if ranks.rank == src and own is not None and not head.flags & NEW:
        return own
    return known_form(op, ranks, "all", head, schema)


def rebuilt(
    op: str, form: Form, sizes: Sizes, buffer: Tensor, classes: Mapping[str, type], like: Any, device: Any
) -> Any:
    """The structure in a buffer."""
    buffer = buffer if device is None else buffer.to(device)
    return built(op, form, sizes, views(buffer, form.runs, form.layout(sizes).shapes), classes, like)


def device_of(x: Described | None) -> torch.device | None:
    """The device of the tensors of a structure."""
    return x.tensors[0].device if x is not None and x.tensors else None


def scatter(
    parts: Sequence[Any] | None = None, src: int = 0, *, group: Any = None, classes: Iterable[type] = ()
) -> Any:
    """Give each rank its part of what one rank has.

    A handshake and one message for each rank, of the bytes of its part.

    Args:
        parts: on rank `src` a structure for each rank, all of one form; other ranks leave it out.
        src: a rank within the group.
        group: a process group or a DeviceMesh of one dim; the default group without it.
        classes: as of `broadcast`.

    Returns:
        The part of this rank.

    Raises:
        StructureError: on every rank: another operation on some rank; parts of different forms or another number of
            them than of ranks.
        UnsupportedError: leaves that cannot travel; all are named.
        DistError: a rank is gone or did not come in time.

    Compile:
        Eager only, without gradients.

    Example:
        >>> store = dist.HashStore()  # with torchrun, init_process_group() alone
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> scatter([torch.ones(2)])
        tensor([1., 1.])
        >>> dist.destroy_process_group()

    Source:
        `torch.distributed.scatter`.
    """
    op = "dist.scatter"
    ranks = ranks_of(op, group)
    text, mine = f"{op} src={src}", type(src) is int and ranks.rank == src
    xs, head = list[Described](), Header(text)
    with taking_part(text, ranks):
        check_rank(op, "src", src, ranks)
        known = names_of(classes, op)
        if mine:
            xs = described_parts(op, parts, ranks)
            sizes = tuple([n for x in xs for n in x.sizes])
            head = header_of(text, xs[0], sizes=sizes, flags=NEW * ranks.is_new("all", xs[0].form))
    heads = Handshake(op, ranks, head).headers()
    form = receive_form(op, ranks, heads[src], src, xs[0].form if mine else None)
    if mine:
        exchange(op, ranks, [packed(x, ranks.device) for x in xs], [])
        return [*(parts or ())][src]
    sizes = heads[src].sizes[ranks.rank * form.count : (ranks.rank + 1) * form.count]
    buffer = empty_buffer(form, sizes, ranks.device)
    exchange(op, ranks, [], [buffer if i == src else None for i in range(ranks.world)])
    return rebuilt(op, form, sizes, buffer, known, None, None)


def described_parts(op: str, parts: Any, ranks: Ranks) -> list[Described]:
    """The structures for all ranks, of one form."""
    given: list[Any] = [*parts] if isinstance(parts, (list, tuple)) else []
    if len(given) != ranks.world:
        got = f"{len(given)}" if given else describe(parts)
        raise StructureError(message(op, f"a list of {ranks.world} parts, one for each rank", got, hint="td.chunk(n)"))
    found = [described(op, part) for part in given]
    wrong = [f"part {i}" for i, x in enumerate(found) if x.form.digest != found[0].form.digest]
    if wrong:
        hint = "the same keys, kinds, dtypes and feature sizes in all parts"
        raise StructureError(message(op, "parts of one form", f"{len(wrong)} unlike part 0", wrong, hint))
    return found


def gather(td: Any, dst: int = 0, *, dim: int | None = 0, group: Any = None) -> Any:
    """Join the structures of all ranks on one rank.

    Args:
        td, dim: as of `all_gather`.
        dst: a rank within the group.
        group: a process group or a DeviceMesh of one dim; the default group without it.

    Returns:
        As of `all_gather` on rank `dst`; None elsewhere.

    Raises:
        StructureError, UnsupportedError, ShapeError, DistError: as `all_gather`.

    Compile:
        Eager only, without gradients.

    Example:
        >>> store = dist.HashStore()  # with torchrun, init_process_group() alone
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> gather(TensorDict({"x": torch.arange(2)}, [2]))["x"]
        tensor([0, 1])
        >>> dist.destroy_process_group()

    Source:
        `torch.distributed.gather`.
    """
    op = "dist.gather"
    ranks = ranks_of(op, group)
    text = f"{op} dst={dst} dim={dim}"
    with taking_part(text, ranks):
        check_rank(op, "dst", dst, ranks)
    x, own, heads = agree_to_join(op, text, ranks, td, dim)
    if ranks.rank != dst:
        exchange(op, ranks, [own if i == dst else None for i in range(ranks.world)], [])
        return None
    buffers = buffers_of(x, own, heads, ranks)
    exchange(op, ranks, [], buffers)
    return joined_structures(op, x, heads, buffers, dim)


def all_gather(td: Any, *, dim: int | None = 0, counts: bool = False, even: bool = False, group: Any = None) -> Any:
    """Join the structures of all ranks, in their order, on every rank.

    A handshake and one message from each rank to each, of its real bytes: ranks may have different numbers of rows,
    none too, and other lengths.

    Shapes:
        `(n_r, *F)` on rank r `-> (n_0 + n_1 + ..., *F)`; with `dim=None` `(*S) -> (world, *S)`.

    Args:
        td: a TensorDict or tensorclass, or one tensor or ragged batch.
        dim: the batch dim along which rows are joined, as by `torch.cat`; None stacks, as `torch.stack`.
        counts: return the number of rows of each rank, too.
        even: all ranks have equally many rows; a graph then keeps its sizes, and saves the exchange of them.
        group: a process group or a DeviceMesh of one dim; the default group without it.

    Returns:
        A new structure; with `counts` a pair, the second an int64 tensor `(world,)`.

    Raises:
        StructureError: on every rank: another operation on some rank; other forms, or other sizes of further batch
            dims. Keys and ranks are named.
        UnsupportedError: leaves that cannot travel; all are named.
        ShapeError: no such batch dim.
        DistError: a rank is gone or did not come in time.

    Compile:
        fullgraph, without the handshake; the number of rows is then data-dependent. The gradient is that of the sum of
        all ranks' losses.

    Example:
        >>> store = dist.HashStore()  # with torchrun, init_process_group() alone
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> td = TensorDict({"x": torch.arange(3)}, [3])
        >>> all_gather(td, counts=True)[1], all_gather(td, dim=None).batch_size
        (tensor([3]), torch.Size([1, 3]))
        >>> dist.destroy_process_group()

    Source:
        `torch.distributed.all_gather`, `torch.cat`.
    """
    op = "dist.all_gather"
    pg = as_group(op, group)
    agreement = agree_on_all(op, td, dim, group, even)
    if agreement is not None:
        out, numbers = agreement
    else:
        out, numbers = gather_rows(op, td, dim, even, pg)
    return (out, numbers) if counts else out


@skipped_in_graphs
def agree_on_all(op: str, td: Any, dim: int | None, group: Any, even: bool) -> tuple[Any, Any] | None:
    """The handshake of `all_gather`, and its result; None where gradients are to be recorded."""
    if in_transform():
        return None
    ranks = ranks_of(op, group)
    recorded = records(td)
    x, own, heads = agree_to_join(op, f"{op} dim={dim}{' recorded' * recorded}", ranks, td, dim, even)
    if recorded:
        return None
    rows = [1 if dim is None else h.sizes[: x.form.ndim][dim] for h in heads]
    buffers = buffers_of(x, own, heads, ranks)
    exchange(op, ranks, [own] * ranks.world, buffers)
    return joined_structures(op, x, heads, buffers, dim), torch.tensor(rows)


def agree_to_join(
    op: str, text: str, ranks: Ranks, td: Any, dim: int | None, even: bool = False
) -> tuple[Described, Tensor, list[Header]]:
    """The handshake of what joins structures along a batch dim, and the own buffer, packed while it is under way."""
    with taking_part(text, ranks):
        x = described(op, td)
        k = x.form.ndim
        if dim is not None and (type(dim) is not int or not -k <= dim < k):
            got, hint = f"dim={dim}" if type(dim) is int else describe(dim), "dim=None stacks"
            raise ShapeError(message(op, f"one of {k} batch dims", got, hint=hint))
    shake = Handshake(op, ranks, header_of(text, x))
    own = packed(x, ranks.device)
    heads = shake.headers()
    agreed(op, ranks, heads, x.form)
    at = None if dim is None or even else dim % k
    others = {tuple([n for i, n in enumerate(h.sizes[:k]) if i != at]) for h in heads}
    if len(others) > 1:
        said = {f"rank {i}": f"batch size {list(h.sizes[:k])}" for i, h in enumerate(heads)}
        raise StructureError(message(op, f"batch sizes that differ in dim {dim} alone", "others", said))
    return x, own, heads


def buffers_of(x: Described, own: Tensor, heads: Sequence[Header], ranks: Ranks) -> list[Tensor]:
    """The own buffer at the place of this rank, and empty ones for those of others."""
    return [own if i == ranks.rank else empty_buffer(x.form, h.sizes, ranks.device) for i, h in enumerate(heads)]


def joined_structures(op: str, x: Described, heads: Sequence[Header], buffers: list[Tensor], dim: int | None) -> Any:
    """The structure that those of all ranks make, joined along a batch dim."""
    form, device = x.form, device_of(x)
    buffers = buffers if device is None else [b.to(device) for b in buffers]
    shapes = [form.layout(h.sizes).shapes for h in heads]
    if not form.is_plain:
        parts = [
            built(op, form, h.sizes, views(b, form.runs, own), {}, x.td)
            for h, b, own in zip(heads, buffers, shapes, strict=True)
        ]
        return torch.stack(parts) if dim is None else torch.cat(parts, dim)
    at = None if dim is None else dim % form.ndim
    runs = zip(*[stacked_views(b, form.runs, own) for b, own in zip(buffers, shapes, strict=True)], strict=True)
    tensors = [t for run in runs for t in over_ranks(run, at)]
    sizes = [*heads[0].sizes]
    if at is None:
        sizes.insert(0, len(heads))
    else:
        sizes[at] = sum([h.sizes[at] for h in heads])
    return built(op, form, tuple(sizes), tensors, {}, x.td, torch.Size(sizes))


def all_to_all(parts: Sequence[Any], *, group: Any = None) -> list[Any]:
    """Give each rank its part of what every rank has.

    A handshake and one message from each rank to each, of the real bytes of its part.

    Args:
        parts: a structure for each rank, all of one form, of as many rows each as they like.
        group: a process group or a DeviceMesh of one dim; the default group without it.

    Returns:
        What each rank had for this one, in their order; the part of this rank itself is the same object.

    Raises:
        StructureError: on every rank: another operation on some rank; parts of different forms or another number of
            them than of ranks.
        UnsupportedError: leaves that cannot travel; all are named.
        DistError: a rank is gone or did not come in time.

    Compile:
        fullgraph, without the handshake; one graph for all numbers of rows. The gradient is that of the sum of all
        ranks' losses.

    Example:
        >>> store = dist.HashStore()  # with torchrun, init_process_group() alone
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> all_to_all([torch.ones(2)])
        [tensor([1., 1.])]
        >>> dist.destroy_process_group()

    Source:
        `torch.distributed.all_to_all`.
    """
    op = "dist.all_to_all"
    pg = as_group(op, group)
    agreement = exchange_parts(op, parts, group)
    return all_to_all_rows(op, parts, pg) if agreement is None else agreement


@skipped_in_graphs
def exchange_parts(op: str, parts: Any, group: Any) -> list[Any] | None:
    """The handshake of `all_to_all`, and its result; None where gradients are to be recorded."""
    if in_transform():
        return None
    ranks = ranks_of(op, group)
    recorded = any([records(part) for part in parts]) if isinstance(parts, (list, tuple)) else False
    text = op + " recorded" * recorded
    with taking_part(text, ranks):
        xs = described_parts(op, parts, ranks)
    form, own = xs[0].form, xs[ranks.rank]
    heads = Handshake(op, ranks, header_of(text, own, sizes=tuple([n for x in xs for n in x.sizes]))).headers()
    agreed(op, ranks, heads, form)
    if recorded:
        return None
    sizes = [h.sizes[ranks.rank * form.count :][: form.count] for h in heads]
    buffers = [empty_buffer(form, n, ranks.device) for n in sizes]
    exchange(op, ranks, [None if i == ranks.rank else packed(x, ranks.device) for i, x in enumerate(xs)], buffers)
    return [
        parts[i] if i == ranks.rank else rebuilt(op, form, n, b, {}, own.td, device_of(own))
        for i, (n, b) in enumerate(zip(sizes, buffers, strict=True))
    ]
