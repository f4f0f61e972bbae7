"""Modules that have other tensors for the time of a call, and what they had at one moment of it.

A checkpoint runs its function again in the backward pass, when the call is over and the modules have their own tensors
and modes back. `held` remembers what they have when the checkpoint is called; `restored` gives it to them once more.

Invariant: a module that writes into buffers when it runs again writes into copies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn


class Moment(NamedTuple):
    """What modules have: each store of tensors with its contents, and each module with its mode."""

    params: list[tuple[dict[str, Any], dict[str, Any]]]
    buffers: list[tuple[dict[str, Any], dict[str, Any]]]
    modes: list[tuple[nn.Module, bool]]


class Calls(threading.local):
    """The modules that a call of this thread gave other tensors."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []


CALLS = Calls()


@contextmanager
def holding(module: nn.Module) -> Iterator[None]:
    """Tell that a module has other tensors."""
    CALLS.modules.append(module)
    try:
        yield
    finally:
        CALLS.modules.pop()


def held() -> Moment | None:
    """What the modules that have other tensors have now; None where there are none."""
    found = [m for module in CALLS.modules for m in module.modules()]
    return moment_of(found) if found else None


def moment_of(modules: list[nn.Module]) -> Moment:
    """What modules have now."""
    params, buffers = [[(x, dict(x)) for x in stores] for stores in zip(*[stores_of(m) for m in modules], strict=True)]
    return Moment(params, buffers, [(m, m.training) for m in modules])


def stores_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where a module keeps its parameters, and its buffers."""
    return module._parameters, module._buffers


@contextmanager
def restored(moment: Moment) -> Iterator[None]:
    """Modules with what they had, with copies of buffers, and afterwards with what they have now."""
    before = moment_of([m for m, _ in moment.modes])
    copies = {id(x): x.clone() for _, here in moment.buffers for x in here.values() if x is not None}
    buffers = [(store, {k: copies.get(id(x)) for k, x in here.items()}) for store, here in moment.buffers]
    try:
        put(moment._replace(buffers=buffers))
        yield
    finally:
        put(before)


def put(moment: Moment) -> None:
    """Give modules what they had."""
    for store, here in (*moment.params, *moment.buffers):
        store.clear()
        store.update(here)
    for module, mode in moment.modes:
        module.training = mode
