"""Modules as functions of their parameters.

    params = from_module(net)                                     TensorDict, nested as the module tree
    y = functional_call(net, params, (x,))                        the same net with these parameters instead
    y, buffers = functional_call(net, params, (x,), return_buffers=True)      and its buffers after the call
    members = stack_modules([net, other])                         several as one TensorDict of batch size [K]

A checkpoint runs its function again in the backward pass, when modules have their own tensors back. `held` remembers
what they have when it is called; `restored` gives that to them once more, with copies of buffers.

Invariants:
  - neither the module nor the TensorDict is changed by a call, nor by one that fails: buffers are copied first;
  - a tied tensor, registered under two names, is the same tensor object under both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tdc.compile._torch.tracing import allow_writes, at_trace_time, refuse_writes
from tdc.compile.upstream import traced
from tdc.core.errors import DtypeError, KeyPathError, ShapeError, StructureError, describe, message, refuse_wrong
from tdc.core.keys import parts, show
from tdc.core.typing import KeyPath
from tdc.tensordict.nodes import Nodes
from tdc.tensordict.paths import all_ancestors, join
from tdc.tensordict.shared import Shared
from tdc.tensordict.tensordict import TensorDict, build_td

Tensors = dict[KeyPath, Any]
Values = list[dict[str, Any]]  # for each store of a module the tensors by name
Out = TypeVar("Out")
EMPTY = torch.Size(())


def from_module(
    module: nn.Module, *, params: bool = True, buffers: bool = True, remove_duplicate: bool = False
) -> TensorDict:
    """Parameters and buffers of a module as a TensorDict, nested as the module tree.

    Shapes:
        batch_size `[]`; `stack_modules` stacks several for an ensemble.

    Args:
        params, buffers: False leaves them out.
        remove_duplicate: keep only the first name of a tied tensor. Otherwise the same tensor is under each name, and
            an optimizer, which changes tensors one by one, would untie them.

    Returns:
        The tensors, detached but sharing memory with the module.

    Raises:
        DtypeError: no module.

    Compile:
        Traceable.

    Example:
        >>> td = from_module(nn.Sequential(nn.Linear(3, 4)))
        >>> td["0", "weight"].shape, td.keys(include_nested=True, leaves_only=True)
        (torch.Size([4, 3]), (('0', 'weight'), ('0', 'bias')))

    Source:
        `nn.Module.named_parameters`, RFC torch.dict.TensorDict.
    """
    if not isinstance(module, nn.Module):
        raise DtypeError(message("from_module", "a module", describe(module), hint="tdc.interop.from_state_dict(dict)"))
    leaves: Tensors = {}
    nodes: Nodes = {}
    kinds = (*["_parameters"] * params, *["_buffers"] * buffers)
    collect(module, (), kinds, remove_duplicate, {}, leaves, nodes)
    return build_td(leaves, nodes, EMPTY)


def functional_call(
    module: nn.Module,
    params: TensorDict,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
    return_buffers: bool = False,
) -> Any:
    """Call a module with the parameters and buffers of `params` instead of its own.

    Args:
        params: as from `from_module`, with the shapes of the module.
        args: positional arguments of the module, a tuple; anything else is the one argument.
        tie_weights: a tied tensor need be given under one of its names only, and must not be given two values.
        strict: missing names are an error; otherwise they are taken from the module. Unknown names are always an error.
        return_buffers: also return the buffers after the call, for the next one: `params.update(buffers)`.

    Returns:
        The output, or with `return_buffers` the pair of it and a TensorDict of all buffers, nested as the module tree.

    Raises:
        KeyPathError: unknown names, or with `strict` missing ones; all are named, with the nearest.
        ShapeError: tensors of other shapes than the module's; all are named.
        StructureError: several values for tied tensors.

    Compile:
        fullgraph, and under `grad` and `vmap`. The module holds other tensors during the call: do not call it from two
        threads at once.

    Example:
        >>> net = nn.BatchNorm1d(2, affine=False)
        >>> y, buffers = functional_call(net, from_module(net), (torch.ones(3, 2),), return_buffers=True)
        >>> buffers["running_mean"], net.running_mean
        (tensor([0.1000, 0.1000]), tensor([0., 0.]))

    Source:
        `torch.func.functional_call`, which writes into the buffers it is given.
    """
    if not isinstance(module, nn.Module) or not isinstance(params, TensorDict):
        got = f"{describe(module)} and {describe(params)}"
        hint = "functional_call(module, tdc.from_module(module), args); tdc.interop.from_state_dict(dict) for a dict"
        raise DtypeError(message("functional_call", "a module and a TensorDict", got, hint=hint))
    args = args if isinstance(args, tuple) else () if args is None else (args,)
    out, buffers = call_with(
        module, params, lambda: module(*args, **(kwargs or {})), tie_weights, strict, return_buffers
    )
    return (out, buffers) if return_buffers else out


def call_with(
    module: nn.Module, params: TensorDict, fn: Callable[[], Out], tie_weights: bool = True, strict: bool = False,
    return_buffers: bool = True,
) -> tuple[Out, Any]:  # fmt: skip
    """Call a function while the module has the tensors of `params`; return the result, and the buffers after."""
    stores: list[Store] = []
    find_stores(module, (), stores)
    given = fitted(module, stores, params, tie_weights, strict)
    return with_values(module, stores, given, lambda: (fn(), from_buffers(stores) if return_buffers else None))


def with_values(module: nn.Module, stores: list[Store], given: Values, fn: Callable[[], Out]) -> Out:
    """Call a function while the stores of the module have the given tensors."""
    before = [dict(s.tensors) for s in stores]
    nets = [s.module for s in stores if s.is_buffer and isinstance(s.module, nn.RNNBase)]
    lists = [(m._flat_weights, m._flat_weight_refs) for m in nets]  # which a call makes anew
    try:
        at_trace_time(allow_writes)  # in the body of a loop, too: they are taken back there
        for s, values in zip(stores, given, strict=True):
            s.tensors.update(values)
        at_trace_time(refuse_writes)
        with nullcontext() if traced() else holding(module):
            return fn()
    finally:
        at_trace_time(allow_writes)
        for s, own in zip(stores, before, strict=True):
            s.tensors.clear()
            s.tensors.update(own)
        for m, own in zip(nets, lists, strict=True):
            m._flat_weights, m._flat_weight_refs = own
        at_trace_time(refuse_writes)


def stack_modules(modules: Iterable[nn.Module], *, params: bool = True, buffers: bool = True) -> TensorDict:
    """Parameters and buffers of several modules of one architecture, stacked.

    Shapes:
        K modules with leaves `S` -> batch_size `[K]`, leaves `(K, *S)`.

    Args:
        modules: of one class and structure, in the same training mode; a list or `nn.ModuleList`.
        params, buffers: False leaves them out.

    Returns:
        New tensors, detached; of tied ones only the first name. `tdc.grad` takes them; `TensorDictParams` makes them
        parameters for `torch.optim`.

    Raises:
        DtypeError: no list.
        StructureError: no modules, or modules that differ; the first that does is named, with all its differences.

    Example:
        >>> members = stack_modules([nn.Linear(3, 2), nn.Linear(3, 2)])
        >>> members.batch_size, members["weight"].shape, members[1]["weight"].shape
        (torch.Size([2]), torch.Size([2, 2, 3]), torch.Size([2, 3]))

    Source:
        `torch.func.stack_module_state`.
    """
    if not isinstance(modules, Iterable):
        raise DtypeError(message("stack_modules", "modules", describe(modules), hint="stack_modules([net_a, net_b])"))
    modules = list(modules)
    wrong = {f"module {i}": describe(m) for i, m in enumerate(modules) if not isinstance(m, nn.Module)}
    if wrong or not modules:
        got, hint = f"{len(wrong)} that are not" if wrong else "no module", "stack_modules([net_a, net_b])"
        raise StructureError(message("stack_modules", "modules", got, wrong, hint))
    parts = [from_module(m, params=params, buffers=buffers, remove_duplicate=True) for m in modules]
    for i in range(1, len(modules)):
        wrong = {f"module {i}, {where}": text for where, text in differences(modules, parts, i).items()}
        which = "differences from module 0"
        hint = "build all of them with one function and arguments, and call .train() or .eval() on each"
        refuse_wrong(StructureError, "stack_modules", "modules of one structure", wrong, which, hint)
    return parts[0].apply(lambda *xs: torch.stack(xs), *parts[1:], batch_size=[len(parts)])


# -- the module tree


def collect(
    module: nn.Module, prefix: KeyPath, kinds: tuple[str, ...], remove_duplicate: bool, seen: dict[int, Tensor],
    leaves: Tensors, nodes: Nodes,
) -> None:  # fmt: skip
    """Add the detached tensors of a module and all below it, and the paths of modules that have some."""
    head = parts(prefix)  # once for a module: `join` of each name takes a third of the time of all
    for kind in kinds:
        store = getattr(module, kind)
        if store:
            for name, x in store.items():
                if x is not None:
                    leaf = seen.get(id(x))
                    if leaf is None:
                        leaf = seen[id(x)] = x.detach()
                    elif remove_duplicate:
                        continue
                    leaves[(*head, name) if head else name] = leaf
    if module._modules:
        for name, child in module._modules.items():
            if child is not None:
                path, count = (*head, name) if head else name, len(leaves)
                collect(child, path, kinds, remove_duplicate, seen, leaves, nodes)
                if len(leaves) > count:
                    nodes[path] = 0


class Store(NamedTuple):
    """Store of the parameters of a module, or of its buffers."""

    prefix: KeyPath
    tensors: dict[str, Any]
    is_buffer: bool
    module: nn.Module


def find_stores(module: nn.Module, prefix: KeyPath, found: list[Store]) -> None:
    """Add the stores of a module and all below it."""
    found.append(Store(prefix, module._parameters, False, module))
    found.append(Store(prefix, module._buffers, True, module))
    for name, child in module._modules.items():
        if child is not None:
            find_stores(child, join(prefix, name), found)


# -- what goes into the module for a call


def fitted(module: nn.Module, stores: list[Store], params: TensorDict, tie_weights: bool, strict: bool) -> Values:
    """Given tensors for each store, with copies of all buffers."""
    leaves = params._leaves
    values: Values = []
    absent: list[tuple[int, str, Tensor]] = []
    tied: dict[int, Any] = {}  # by the tensor of the module, what is given for it
    found, odd = 0, False
    for prefix, store, *_ in stores:
        here: dict[str, Any] = {}
        head = parts(prefix)
        for name, own in store.items():
            x = leaves.get((*head, name) if head else name)
            if x is not None:
                found += 1
                x = x.value if type(x) is Shared else x
                here[name] = x
                if own is not None:
                    odd = odd or x.shape != own.shape or (tied.setdefault(id(own), x) is not x and tie_weights)
            elif own is not None:
                absent.append((len(values), name, own))
        values.append(here)
    if odd or found < len(leaves) or (absent and strict):
        check(module, stores, leaves, tie_weights, strict)
    for i, name, own in absent:
        values[i][name] = tied.get(id(own), own) if tie_weights else own
    copies: dict[int, Any] = {}  # by the tensor of the module: tied buffers stay one
    for (_, store, is_buffer, _), here in zip(stores, values, strict=True):
        for name, x in here.items() if is_buffer else ():
            own = store[name]
            if own is None or not tie_weights:
                here[name] = x.clone()
            elif id(own) not in copies:
                here[name] = copies[id(own)] = x.clone()
            else:
                here[name] = copies[id(own)]
    return values


def from_buffers(stores: list[Store]) -> TensorDict:
    """Buffers of modules now."""
    leaves: Tensors = {}
    for prefix, store, is_buffer, _ in stores:
        leaves |= {join(prefix, name): x for name, x in store.items() if x is not None} if is_buffer else {}
    return build_td(leaves, dict.fromkeys(all_ancestors(leaves), 0), EMPTY)


# -- checks


def check(module: nn.Module, stores: list[Store], leaves: Tensors, tie_weights: bool, strict: bool) -> None:
    """Refuse names, shapes and ties that are not those of the module; all are named."""
    own = {join(s.prefix, name): x for s in stores for name, x in s.tensors.items()}
    op, kind = "functional_call", type(module).__name__
    strays = [path for path in leaves if path not in own]
    at = {show(path): f"not in the module; {nearest(path, own)}" for path in strays}
    flat = any(["." in key for path in strays for key in parts(path)])
    hint = "params.unflatten_keys('.')" if flat else "params nested and named as tdc.from_module(module)"
    refuse_wrong(KeyPathError, op, f"names that {kind} has", at, "others", hint)
    group: dict[int, list[KeyPath]] = {}
    for path, x in own.items():
        if x is not None:
            group.setdefault(id(x), []).append(path)
    names = {path: group[id(x)] if tie_weights else [path] for path, x in own.items() if x is not None}
    missing = [path for path, ties in names.items() if not any([tie in leaves for tie in ties])] if strict else []
    at = {show(path): f"missing; {nearest(path, leaves)}" for path in missing}
    refuse_wrong(KeyPathError, op, f"all names of {kind}", at, "missing", "strict=False takes them from the module")
    wrong = {p: x for p, x in own.items() if x is not None and p in leaves and leaves[p].shape != x.shape}
    at = {show(p): f"{describe(leaves[p])}, in the module {describe(x)}" for p, x in wrong.items()}
    hint = "call members of stacked params with tdc.ensemble(module, params), or one with params[k]"
    refuse_wrong(ShapeError, op, f"the shapes of {kind}", at, "others", hint)
    first = {path: next((tie for tie in ties if tie in leaves), path) for path, ties in names.items()}
    untied = [path for path, tie in first.items() if path in leaves and leaves[path] is not leaves[tie]]
    if untied:
        at = {show(path): f"tied to {show(first[path])!r}" for path in untied}
        hint = "from_module(module, remove_duplicate=True) has one name for each; or tie_weights=False"
        raise StructureError(message(op, "one value for tied tensors", "several", at, hint))


def nearest(path: KeyPath, known: Tensors) -> str:
    """Names most like a path."""
    names = [show(p) for p in known]
    near = get_close_matches(show(path), names, n=2, cutoff=0.5) or sorted(names)[:3]
    return f"nearest: {', '.join(near)}" if near else "there are none"


def differences(modules: list[nn.Module], parts: list[TensorDict], i: int) -> dict[str, str]:
    """Differences of module i from the first, `{where: how}`."""
    first, other = [dict(m.named_modules(remove_duplicate=False)) for m in (modules[0], modules[i])]
    found: dict[str, list[str]] = {}
    for name in [*first, *[n for n in other if n not in first]]:
        a, b = first.get(name), other.get(name)
        if a is None or b is None or type(a) is not type(b):
            found[name or "itself"] = ["nothing" if m is None else describe(m) for m in (b, a)]
        elif a.training != b.training:
            found[name or "itself"] = ["training" if m.training else "evaluating" for m in (b, a)]
    here, there = parts[0]._leaves, parts[i]._leaves
    for path in [*here, *[p for p in there if p not in here]]:
        texts = [describe(x[path]) if path in x else "nothing" for x in (there, here)]
        if texts[0] != texts[1]:
            found[show(path)] = texts
    return {where: f"{ours}, in module 0 {theirs}" for where, (ours, theirs) in found.items()}


Moment = list[tuple[Store, dict[str, Any], bool]]  # of each store its tensors, and the mode of the module


class Calls(threading.local):
    """Modules whose tensors a call of this thread replaced."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []


CALLS = Calls()


@contextmanager
def holding(module: nn.Module) -> Iterator[None]:
    """A context in which a module has other tensors."""
    CALLS.modules.append(module)
    try:
        yield
    finally:
        CALLS.modules.pop()


def held() -> Moment:
    """Tensors that modules under `with_values` have now."""
    stores: list[Store] = []
    for module in CALLS.modules:
        find_stores(module, (), stores)
    return moment_of(stores)


def moment_of(stores: list[Store]) -> Moment:
    """Tensors and modes of modules now."""
    return [(s, dict(s.tensors), s.module.training) for s in stores]


@contextmanager
def restored(moment: Moment, inner: Any) -> Iterator[None]:
    """A context in which modules have the tensors of a moment, with copies of buffers, and in it another one."""
    before = moment_of([s for s, *_ in moment])
    buffers = [x for s, tensors, _ in moment if s.is_buffer for x in tensors.values() if x is not None]
    copies = {id(x): x.clone() for x in buffers}
    try:
        put([(s, {k: copies.get(id(x), x) for k, x in tensors.items()}, mode) for s, tensors, mode in moment])
        with inner:
            yield
    finally:
        put(before)


def put(moment: Moment) -> None:
    """Give modules the tensors of a moment."""
    for s, tensors, mode in moment:
        s.tensors.clear()
        s.tensors.update(tensors)
        s.module.training = mode
