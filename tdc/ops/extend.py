"""Rules for operations of others: a user's custom op, or a function of torch that has no row yet.

A user's rule is a row like every other, listed in `USER_RULES`, but gives no methods.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from tdc.core.errors import NAMES, DtypeError, StructureError, message
from tdc.core.rules import CLASS_NAMES, DISPATCH, KINDS, METHOD, MODES, REFLECTED_ROW, Rule, add_rule, name_of
from tdc.core.torch_functions import overload_of
from tdc.core.typing import Op

USER_RULES: list[Rule] = []
F = TypeVar("F", bound=Callable[..., Any])
REACHES = {"handle_torch_function", "__torch_function__"}


def implements(
    op: Op,
    kinds: str | Iterable[str] = ("nested",),
    *,
    ref: Op | None = None,
    identity: float | None = None,
    modes: Iterable[str] = MODES,
    override: bool = False,
) -> Callable[[F], F]:
    """Decorator: this function is what `op` does to a container.

    Args:
        op: what users call, with containers among the arguments: a `torch.library.custom_op`, an entry of `torch.ops`,
            a function of torch, or a Python function under `torch.overrides.wrap_torch_function`.
        kinds: "nested", "masked", "tensordict", or several of them.
        ref: the same operation on one dense example; `op` itself by default.
        identity: for reductions, the value that changes nothing; for readers of the row.
        modes: what `tdc.testing.check_rule` proves: "eager", "grad", "compile", "vmap", "export".
        override: replace the row that is there. Functions compiled before keep the rule they were traced with.

    Raises:
        DtypeError: `op` is no function, or a Python function that never asks for `__torch_function__`.
        StructureError: an unknown kind or mode, or a row that is there.

    Compile:
        The rule is inlined into the graph; write it as plain traceable code.

    Example:
        >>> from tdc.ragged.pack import pack
        >>> @torch.overrides.wrap_torch_function(lambda x: (x,))
        ... def twice(x):
        ...     return torch.stack([x, x]).sum(0)
        >>> @implements(twice)
        ... def twice_nested(x):
        ...     return x.with_values(twice(x.values))
        >>> twice(pack([torch.ones(1), torch.ones(2)])).tolist()
        [[2.0], [2.0, 2.0]]
    """
    chosen, proven = (kinds,) if isinstance(kinds, str) else tuple(kinds), tuple(modes)
    check_op(op)
    check_names("kinds", chosen, KINDS)
    check_names("modes", proven, MODES)
    ops = spellings(op)
    there = [CLASS_NAMES[kind] for kind in chosen if any(o in DISPATCH[kind] for o in ops)]
    if there and not override:
        got = f"{name_of(op)!r}, which has one for {' and '.join(there)}"
        raise StructureError(message("ops.implements", "an operation without a row", got, hint="override=True"))
    for other in ops:  # so that messages can name it
        NAMES.setdefault(other, name_of(op))

    def decorate(impl: F) -> F:
        for kind in chosen:
            aliases = {*ops, *(known for o in ops if o in DISPATCH[kind] for known in dropped(o, kind))}
            rule = Rule(op, kind, "user", impl, ref or op, identity, proven)
            add_rule(rule, aliases, USER_RULES)
        return impl

    return decorate


def spellings(op: Op) -> list[Op]:
    """The functions that a call of `op` may arrive as: a custom op as its overload, a packet as the packet."""
    overload = overload_of(op)
    packet = getattr(overload, "overloadpacket", overload)
    if not isinstance(packet, type(torch.ops.aten.relu)):
        return [op]
    return list(dict.fromkeys([op, packet, *(getattr(packet, name) for name in packet.overloads())]))


def dropped(op: Op, kind: str) -> list[Op]:
    """Take a row out of dispatch; the functions that led to it."""
    table = DISPATCH[kind]
    row = table[op].removesuffix(REFLECTED_ROW).removesuffix(METHOD)
    gone = [o for o, name in table.items() if name in (row, row + REFLECTED_ROW, row + METHOD)]
    kept = [o for o in gone if table[o] == row]
    for o in gone:
        del table[o]
    return kept


def check_op(op: Any) -> None:
    """A DtypeError unless a call of `op` with a container can reach a rule."""
    if not callable(op) or isinstance(op, type):
        hint = "the function that users call, @tdc.ops.implements(op, kinds=...)"
        raise DtypeError(message("ops.implements", "an operation", type(op).__name__, hint=hint))
    foreign = isinstance(op, types.FunctionType) and not (op.__module__ or "").startswith("torch.")
    if foreign and not REACHES & set(op.__code__.co_names):
        got = f"the Python function {op.__name__!r}, which runs as it is written"
        hint = "decorate it with @torch.overrides.wrap_torch_function(lambda x, *args: (x,))"
        raise DtypeError(message("ops.implements", "a function that asks for __torch_function__", got, hint=hint))


def check_names(what: str, given: tuple[Any, ...], known: tuple[str, ...]) -> None:
    """A StructureError for unknown kinds or modes."""
    wrong = [repr(name) for name in given if name not in known]
    if wrong or not given:
        got, hint = ", ".join(wrong) or "none", f"{what}={known[1:2]}"
        raise StructureError(message("ops.implements", f"{what} among {', '.join(known)}", got, hint=hint))
