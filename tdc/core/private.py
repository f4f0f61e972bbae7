"""Private names of torch: how they are found, and what is lost where one is gone.

A *feature* is one thing that this library does by names that a release of torch may rename or change. Where a name is
gone the feature is off: the first use warns once, and everything else goes on.

Invariants: a feature that is off never makes an operation fail which plain torch runs; it may cost speed, memory or a
check. Where it would cost right numbers, its `instead` raises an `UnsupportedError`.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any, TypeVar

import torch

Fn = TypeVar("Fn", bound=Callable[..., Any])
LOST: dict[str, str] = {}  # by feature that can be switched off: what users lose
OFF: dict[str, str] = {}  # by feature that is off: what is gone, and what is lost


class Gone(Exception):
    """A private name of torch that this torch does not have, or has in another form."""


class FeatureWarning(UserWarning):
    """A feature of this library is off, since torch lacks a private name that it needs."""


def find(*paths: str, takes: tuple[str, ...] = ()) -> Any:
    """Return an object of torch by its path.

    Args:
        paths: such as "torch._inductor.ir:WhileLoop"; the first that is there, where a name differs between versions.
        takes: parameters that a function must have.

    Raises:
        Gone: none is there, or it lacks a parameter.
    """
    for path in paths:
        try:
            found = resolve_name(path)
        except (AttributeError, ImportError):
            continue
        lacking: set[str] = set(takes) - set(inspect.signature(found).parameters) if takes else set()
        if lacking:
            raise Gone(f"{path} takes no {', '.join(sorted(lacking))}")
        return found
    raise Gone(f"{paths[0]} is gone")


def find_or(instead: Any, *paths: str, feature: str, lost: str) -> Any:
    """Return an object of torch by its path, or `instead` where it is gone; for what is found once, at import."""
    try:
        return find(*paths)
    except Gone as gone:
        LOST[feature] = lost
        switch_off(feature, gone)
        return instead


def optional(feature: str, *, lost: str, instead: Callable[..., Any]) -> Callable[[Fn], Fn]:
    """Decorate a function that finds private names: where one is gone, `instead` is called with the same arguments.

    Args:
        feature: what the function is for, in some words.
        lost: what users lose without it: speed, memory, or a check.

    Compile:
        Not for functions that Dynamo traces.
    """

    LOST[feature] = lost

    def decorate(fn: Fn) -> Fn:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            if feature not in OFF:
                try:
                    return fn(*args, **kwargs)
                except Gone as gone:
                    switch_off(feature, gone)
            return instead(*args, **kwargs)

        return run  # type: ignore[return-value]  # of the same signature

    return decorate


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: the `instead` of what only saves time or memory."""


def switch_off(feature: str, why: object) -> None:
    """Switch a feature off, and warn once."""
    if feature not in OFF:
        OFF[feature] = f"{why}; lost: {LOST[feature]}"
        text = f"tdc: {feature} is off on torch {torch.__version__}: {OFF[feature]}"
        warnings.warn(text, FeatureWarning, stacklevel=3)


@contextmanager
def suspended(features: Sequence[str]) -> Generator[None]:
    """A context in which features are off, without a warning."""
    new = [name for name in features if name not in OFF]
    OFF.update(dict.fromkeys(new, "suspended"))
    try:
        yield
    finally:
        for name in new:
            del OFF[name]
