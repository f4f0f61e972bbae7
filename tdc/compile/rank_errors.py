"""An error of one rank ends the others, in words, before the timeout of the group.

    a rank raises     writes its error where others find it, and waits a moment for theirs
      all raise       the error stands, and the group can be used
      else            this rank leaves the group, so that the exchange in which the others wait fails at once
    those raise       a DistError with the text of the rank that failed
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from tdc.compile._torch.collectives import store_of_processes
from tdc.core.errors import DistError, TdcError, first_line, message

GRACE = 2.0  # seconds in which ranks that raise the same error do so
HINT = "the group is dead: mend the error of that rank and start again, as torchrun --max-restarts=3 does"
ERRORS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by group: steps that failed on this rank


@contextmanager
def all_together(op: str, group: Any) -> Generator[None]:
    """Let an error within end the other ranks of a group, and raise a DistError where it is that of another rank."""
    try:
        yield
    except Exception as error:
        if group is None or dist.get_world_size(group) == 1:
            raise
        others = settled(group, first_line(error), is_lost(error))
        if is_lost(error):
            raise lost(op, group, error, others) from error
        raise


def is_lost(error: Exception) -> bool:
    """True for an error of torch's exchange between processes."""
    text = str(error)
    return isinstance(error, RuntimeError) and not isinstance(error, TdcError) and ("gloo" in text or "NCCL" in text)


def settled(group: Any, text: str, is_lost: bool) -> dict[int, str]:
    """Tell the others of an error, and leave the group unless all of them have one. Returns their errors by rank."""
    store, rank, world = store_of_processes(), dist.get_rank(group), dist.get_world_size(group)
    count = ERRORS[group] = ERRORS.get(group, 0) + 1
    names = {i: f"tdc.error/{group.group_name}/{count}/{i}" for i in range(world)}
    if store is not None:
        store.set(names[rank], f"lost: {text}" if is_lost else f"error: {text}")
        if not is_lost and waited(store, list(names.values()), GRACE):
            return {}
    group.abort()
    if store is None:
        return {}
    waited(store, list(names.values()), GRACE)  # the store may be in this process, which is about to end
    told = {i: store.get(name).decode() for i, name in names.items() if i != rank and store.check([name])}
    return {i: text.removeprefix("error: ") for i, text in told.items() if text.startswith("error: ")}


def waited(store: Any, names: list[str], seconds: float) -> bool:
    """Wait until all of these are in a store, or so many seconds. Returns True if they are."""
    end = time.monotonic() + seconds
    while not store.check(names):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def lost(op: str, group: Any, error: Exception, others: dict[int, str]) -> DistError:
    """The error of a rank whose exchange failed, with those of ranks that told theirs."""
    rank = dist.get_rank(group)
    said = {f"rank {i}": text for i, text in others.items()} or {f"rank {rank}": first_line(error)[:200]}
    got = "an error of another" if others else "an exchange that failed"
    return DistError(message(op, "all ranks to take part", got, said, HINT), next(iter(others), rank), op)
