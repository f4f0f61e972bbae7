"""From one rank to another: a header, the schema where it is new, and one buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from threading import Thread
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from tdc.core.arguments import expect_number
from tdc.core.errors import StructureError, message
from tdc.dist.form import described
from tdc.dist.transport import (
    BYTES,
    NEW,
    Header,
    Ranks,
    as_bytes,
    check_rank,
    from_bytes,
    header_of,
    known_form,
    lost,
    ranks_of,
    sending,
    unpacked,
)
from tdc.dist.wire import built, empty_buffer, packed, views
from tdc.io.load import names_of

comm: Any = dist  # parts of it without types


@final
class Pending:
    """A message that is on its way, the result of `isend` and `irecv`.

    It holds the memory of the message: one of `isend` that is dropped before `wait` may not arrive.
    """

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[float | None], Any]) -> None:
        self._finish = finish

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the message is through, and return the structure of `irecv`; None of `isend`.

        Args:
            timeout: seconds; that of the group by default.

        Raises:
            DistError: the other rank is gone, or the time is up.
        """
        if timeout is not None:
            expect_number("dist.Pending.wait", timeout)
        return self._finish(timeout)


def send(td: Any, dst: int, *, group: Any = None, tag: int = 0) -> None:
    """Send a structure to a rank, which calls `recv`.

    Two messages, whatever it holds; one more the first time that a structure of this form goes there. Tensors that are
    one come back as one.

    Args:
        td: a TensorDict or tensorclass, or one tensor or ragged batch.
        dst: a rank within the group.
        group: a process group or a DeviceMesh of one dim; the default group without it.
        tag: of messages that are received apart from others.

    Raises:
        UnsupportedError: leaves that cannot travel (DTensors, sparse tensors, objects that JSON does not hold).
        DistError: the other rank is gone or did not receive in time.

    Compile:
        Eager only, without gradients.

    Example:
        >>> def program(rank):  # of two
        ...     if rank == 0:
        ...         send(torch.ones(2), 1)
        ...     else:
        ...         print(recv(0))

    Source:
        `torch.distributed.send`.
    """
    begin_send("dist.send", td, dst, group, tag).wait()


def isend(td: Any, dst: int, *, group: Any = None, tag: int = 0) -> Pending:
    """Begin a `send`, and return a `Pending`.

    Arguments and errors are those of `send`. The tensors are copied before it returns, so they may be changed.

    Compile:
        Eager only, without gradients.

    Example:
        >>> def program(rank):  # of two, which send to each other
        ...     sent, got = isend(torch.ones(2), 1 - rank), irecv(1 - rank)
        ...     sent.wait()
        ...     print(got.wait())

    Source:
        `torch.distributed.isend`.
    """
    return begin_send("dist.isend", td, dst, group, tag)


def recv(src: int, *, group: Any = None, tag: int = 0, classes: Iterable[type] = ()) -> Any:
    """Receive the structure that a rank sends.

    Args:
        src: a rank within the group.
        group, tag: as of `send`.
        classes: tensorclasses that nodes become again, as of `tdc.io.load`; others are plain TensorDicts.

    Returns:
        What was sent, its leaves in one new buffer.

    Raises:
        DistError: the other rank is gone or did not send in time.
        FormatError: offsets or lengths that do not make ragged batches; classes with other fields.

    Compile:
        Eager only.

    Example:
        >>> def program(rank):  # of two
        ...     if rank == 0:
        ...         send(torch.ones(2), 1)
        ...     else:
        ...         print(recv(0, classes=()))

    Source:
        `torch.distributed.recv`.
    """
    return opened("dist.recv", src, group, tag, classes)[1]()


def irecv(src: int, *, group: Any = None, tag: int = 0, classes: Iterable[type] = ()) -> Pending:
    """Begin a `recv`, and return a `Pending`, whose `wait` gives the structure.

    A thread receives, so messages come in while this program goes on; those of one rank and tag in their order.

    Args:
        src, group, tag, classes: as of `recv`.

    Compile:
        Eager only.

    Example:
        >>> def program(rank):  # of two
        ...     if rank == 0:
        ...         send(torch.ones(2), 1)
        ...     else:
        ...         print(irecv(0).wait(timeout=5.0))

    Source:
        `torch.distributed.irecv`.
    """
    op = "dist.irecv"
    ranks, receive_next = opened(op, src, group, tag, classes)
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(receive_next())
        except BaseException as error:
            found.append(error)

    thread = ranks.pending[src, tag] = Thread(target=run, daemon=True, name=f"tdc {op} {src}")
    thread.start()

    def finish(timeout: float | None) -> Any:
        thread.join(timeout)
        if not found:
            raise lost(op, ranks, src, f"nothing came in {timeout} seconds")
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    return Pending(finish)


def begin_send(op: str, td: Any, dst: int, group: Any, tag: int) -> Pending:
    """Begin to send; the header, the schema where it is new, and the buffer."""
    ranks = ranks_of(op, group)
    check_peer(op, "dst", dst, ranks)
    x = described(op, td, ties=True)
    new = ranks.is_new(("to", dst, tag), x.form)
    header = header_of("send", x, flags=NEW if new else 0)
    tensors: list[Tensor] = []
    works: list[Any] = []

    def begin(t: Tensor) -> None:
        if t.numel():
            tensors.append(t)
            with sending(op, ranks, dst):
                works.append(comm.isend(t, group=ranks.group, group_dst=dst, tag=tag))

    begin(from_bytes(header.packed(), ranks))
    if new:
        begin(from_bytes(x.form.schema, ranks))
        ranks.remember(("to", dst, tag), x.form)
    if len(x.sizes) > len(header.inline):
        begin(torch.tensor(x.sizes, device=ranks.device))
    begin(packed(x, ranks.device))  # while the header is under way

    def finish(timeout: float | None) -> None:
        with sending(op, ranks, dst):
            for work in works:
                work.wait() if timeout is None else work.wait(timedelta(seconds=timeout))
        works.clear()
        tensors.clear()

    return Pending(finish)


def opened(op: str, src: int, group: Any, tag: int, classes: Any) -> tuple[Ranks, Callable[[], Any]]:
    """The group, and a function that receives from a rank, behind receives that were begun before."""
    ranks, known = ranks_of(op, group), names_of(classes, op)
    check_peer(op, "src", src, ranks)
    before = ranks.pending.get((src, tag))

    def run() -> Any:
        if before is not None:
            before.join()
        return receive(op, ranks, src, tag, known)

    return ranks, run


def receive(op: str, ranks: Ranks, src: int, tag: int, classes: Any) -> Any:
    """Receive a structure."""

    def get(x: Tensor) -> Tensor:
        if x.numel():
            with sending(op, ranks, src):
                comm.recv(x, group=ranks.group, group_src=src, tag=tag)
        return x

    def get_bytes(n: int) -> bytes:
        return as_bytes(get(torch.empty(n, dtype=torch.uint8, device=ranks.device)))

    head: Header
    head, count = unpacked(get_bytes(BYTES))
    form = known_form(op, ranks, ("from", src, tag), head, lambda: get_bytes(head.length))
    sizes = head.sizes
    if count > len(sizes):
        sizes = tuple(get(torch.empty(count, dtype=torch.int64, device=ranks.device)).tolist())
    buffer = empty_buffer(form, sizes, ranks.device)
    tensors = views(buffer, form.runs, form.layout(sizes).shapes)  # before the data is there
    get(buffer)
    return built(op, form, sizes, tensors, classes)


def check_peer(op: str, name: str, rank: int, ranks: Ranks) -> None:
    """Refuse a number that is not another rank of the group."""
    check_rank(op, name, rank, ranks)
    if rank == ranks.rank:
        got, hint = f"{name}={rank}, this rank", "td.clone() makes a copy"
        raise StructureError(message(op, f"another rank as {name}", got, hint=hint))
