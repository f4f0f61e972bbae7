"""The operations on a TensorDict that `bench_tensordict` measures, each in five spellings.

A row has a name and one line for each candidate:

    flat      by hand, on a dict with one level of keys: what one would write, comprehensions mostly
    nested    by hand, on nested dicts: a recursive map
    tdc, tensordict    the same line where both spell it alike
    optree    on the nested dict, where optree has something for it

By hand nothing is checked but in `construct`, `set checked` and `update checked`: no batch size, no key sets.
Everything is out of place, `set` and `update` give a new dict and leave the old one as it was (tensordict:
`clone(recurse=False)` first). Leaves have batch dims (6, 4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import optree
import torch
from torch.utils import _pytree as pytree

import tdc
from bench._timing import Call

Plain = dict[str, Any]
SIZE = (6, 4)


@dataclass(frozen=True)
class Inputs:
    """Inputs of a row, for one layout: batches `x` (three of them) in a candidate's form, and the rest."""

    xs: list[Any]
    key: Any
    leaf: torch.Tensor
    new: Any
    mask: torch.Tensor
    rows: torch.Tensor
    names: list[Any]
    source: Plain


# -- by hand, nested


def tree_map(fn: Callable[[Any], Any], d: Plain) -> Plain:
    """`fn` on every leaf."""
    return {k: tree_map(fn, v) if isinstance(v, dict) else fn(v) for k, v in d.items()}


def tree_join(fn: Callable[[list[Any]], Any], ds: list[Plain]) -> Plain:
    """`fn` on the list of leaves at each place."""
    return {
        k: tree_join(fn, [d[k] for d in ds]) if isinstance(v, dict) else fn([d[k] for d in ds])
        for k, v in ds[0].items()
    }


def merge(d: Plain, new: Plain) -> Plain:
    """`d` with the entries of `new`, dicts merged."""
    out = dict(d)
    for k, v in new.items():
        out[k] = merge(out[k], v) if isinstance(v, dict) and k in out else v
    return out


def flatten(d: Plain, prefix: str = "") -> Plain:
    """One level of keys, joined by dots."""
    out: Plain = {}
    for k, v in d.items():
        if isinstance(v, dict):
            out.update(flatten(v, f"{prefix}{k}."))
        else:
            out[prefix + k] = v
    return out


def unflatten(d: Plain) -> Plain:
    """Nested dicts of dotted keys."""
    out: Plain = {}
    for k, v in d.items():
        *path, last = k.split(".")
        inner = out
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = v
    return out


def picked(d: Plain, paths: list[tuple[str, ...]]) -> Plain:
    """Only what is at `paths`."""
    out: Plain = {}
    for path in paths:
        value, inner = d, out
        for key in path[:-1]:
            value, inner = value[key], inner.setdefault(key, {})
        inner[path[-1]] = value[path[-1]]
    return out


def without(d: Plain, path: tuple[str, ...]) -> Plain:
    """A copy of the dicts on the way, with nothing at `path`."""
    out = dict(d)
    if len(path) == 1:
        del out[path[0]]
    else:
        out[path[0]] = without(d[path[0]], path[1:])
    return out


def checked(d: Plain) -> Plain:
    """The dicts again, with every leaf seen to begin with the batch size."""
    for k, v in d.items():
        if not isinstance(v, dict) and v.shape[:2] != SIZE:
            raise ValueError(k)
    return {k: checked(v) if isinstance(v, dict) else v for k, v in d.items()}


def fitting(x: torch.Tensor) -> torch.Tensor:
    """A tensor that begins with the batch size."""
    if x.shape[:2] != SIZE:
        raise ValueError(x.shape)
    return x


def all_fitting(d: Plain) -> Plain:
    """Nested dicts of such tensors."""
    return {k: all_fitting(v) if isinstance(v, dict) else fitting(v) for k, v in d.items()}


def parts(d: Plain, n: int, cut: Callable[[torch.Tensor], Any]) -> list[Plain]:
    """`n` dicts of the parts that `cut` makes of every leaf."""
    whole = tree_map(cut, d)
    return [tree_map(lambda v, i=i: v[i], whole) for i in range(n)]


def by_hand(i: Inputs, nested: bool) -> dict[str, Call]:
    """Every row on plain dicts."""
    return (nested_rows if nested else flat_rows)(i)


def flat_rows(i: Inputs) -> dict[str, Call]:
    d, all_of, leaf, new, mask, rows = i.xs[0], i.xs, i.leaf, i.new, i.mask, i.rows
    other, names = i.xs[1], set(i.names)
    stack, cat = torch.stack, torch.cat
    return {
        "construct": lambda: checked(i.source),
        "get": lambda: d["key7"],
        "set": lambda: {**d, "key7": leaf},
        "set checked": lambda: {**d, "key7": fitting(leaf)},
        "update": lambda: {**d, **new},
        "update checked": lambda: {**d, **all_fitting(new)},
        "delete": lambda: {k: v for k, v in d.items() if k != "key7"},
        "select": lambda: {k: d[k] for k in i.names},
        "exclude": lambda: {k: v for k, v in d.items() if k not in names},
        "keys": lambda: list(d.keys()),
        "items": lambda: list(d.items()),
        "flatten_keys": lambda: flatten(d),
        "unflatten_keys": lambda: unflatten(d),
        "index": lambda: {k: v[2] for k, v in d.items()},
        "slice": lambda: {k: v[1:4] for k, v in d.items()},
        "mask": lambda: {k: v[mask] for k, v in d.items()},
        "index tensor": lambda: {k: v[rows] for k, v in d.items()},
        "stack": lambda: {k: stack([x[k] for x in all_of]) for k in d},
        "cat": lambda: {k: cat([x[k] for x in all_of]) for k in d},
        "split": lambda: parts(d, 3, lambda v: v.split(2)),
        "unbind": lambda: parts(d, 6, lambda v: v.unbind(0)),
        "reshape": lambda: {k: v.reshape(3, 8, *v.shape[2:]) for k, v in d.items()},
        "permute": lambda: {k: v.permute(1, 0, *range(2, v.ndim)) for k, v in d.items()},
        "transpose": lambda: {k: v.transpose(0, 1) for k, v in d.items()},
        "unsqueeze": lambda: {k: v.unsqueeze(1) for k, v in d.items()},
        "squeeze": lambda: {k: v.squeeze(0) for k, v in d.items()},
        "expand": lambda: {k: v.expand(2, 6, 4, *v.shape[2:]) for k, v in d.items()},
        "flatten": lambda: {k: v.flatten(0, 1) for k, v in d.items()},
        "gather": lambda: {k: v.index_select(0, rows) for k, v in d.items()},
        "where": lambda: {
            k: torch.where(mask.view(6, *[1] * (v.ndim - 1)), v, w)
            for (k, v), w in zip(d.items(), other.values(), strict=True)
        },
        "apply": lambda: {k: v + 1 for k, v in d.items()},
        "apply two": lambda: {k: v + w for (k, v), w in zip(d.items(), other.values(), strict=True)},
        "add number": lambda: {k: v + 1 for k, v in d.items()},
        "add": lambda: {k: v + other[k] for k, v in d.items()},
        "exp": lambda: {k: v.exp() for k, v in d.items()},
        "sum": lambda: {k: v.sum(0) for k, v in d.items()},
        "zeros_like": lambda: {k: torch.zeros_like(v) for k, v in d.items()},
        "clone": lambda: {k: v.clone() for k, v in d.items()},
        "to": lambda: {k: v.to(torch.float64) for k, v in d.items()},
        "tree_map": lambda: {k: v + 1 for k, v in d.items()},
    }


def nested_rows(i: Inputs) -> dict[str, Call]:
    d, all_of, leaf, new, mask, rows = i.xs[0], i.xs, i.leaf, i.new, i.mask, i.rows
    other, flat = i.xs[1], flatten(d)
    paths = [p if isinstance(p, tuple) else (p,) for p in i.names]
    return {
        "construct": lambda: checked(i.source),
        "get": lambda: d["a1"]["b2"]["y"],
        "get node": lambda: d["a1"],
        "set": lambda: {**d, "a1": {**d["a1"], "b2": {**d["a1"]["b2"], "y": leaf}}},
        "set checked": lambda: {**d, "a1": {**d["a1"], "b2": {**d["a1"]["b2"], "y": fitting(leaf)}}},
        "update": lambda: merge(d, new),
        "update checked": lambda: merge(d, all_fitting(new)),
        "delete": lambda: without(d, i.key),
        "select": lambda: picked(d, paths),
        "exclude": lambda: without(without(d, paths[0]), paths[1]),
        "keys": lambda: list(flatten(d)),
        "items": lambda: list(flatten(d).items()),
        "flatten_keys": lambda: flatten(d),
        "unflatten_keys": lambda: unflatten(flat),
        "index": lambda: tree_map(lambda v: v[2], d),
        "slice": lambda: tree_map(lambda v: v[1:4], d),
        "mask": lambda: tree_map(lambda v: v[mask], d),
        "index tensor": lambda: tree_map(lambda v: v[rows], d),
        "stack": lambda: tree_join(torch.stack, all_of),
        "cat": lambda: tree_join(torch.cat, all_of),
        "split": lambda: parts(d, 3, lambda v: v.split(2)),
        "unbind": lambda: parts(d, 6, lambda v: v.unbind(0)),
        "reshape": lambda: tree_map(lambda v: v.reshape(3, 8, *v.shape[2:]), d),
        "permute": lambda: tree_map(lambda v: v.permute(1, 0, *range(2, v.ndim)), d),
        "transpose": lambda: tree_map(lambda v: v.transpose(0, 1), d),
        "unsqueeze": lambda: tree_map(lambda v: v.unsqueeze(1), d),
        "squeeze": lambda: tree_map(lambda v: v.squeeze(0), d),
        "expand": lambda: tree_map(lambda v: v.expand(2, 6, 4, *v.shape[2:]), d),
        "flatten": lambda: tree_map(lambda v: v.flatten(0, 1), d),
        "gather": lambda: tree_map(lambda v: v.index_select(0, rows), d),
        "where": lambda: tree_join(lambda v: torch.where(mask.view(6, *[1] * (v[0].ndim - 1)), *v), [d, other]),
        "apply": lambda: tree_map(lambda v: v + 1, d),
        "apply two": lambda: tree_join(lambda v: v[0] + v[1], [d, other]),
        "add number": lambda: tree_map(lambda v: v + 1, d),
        "add": lambda: tree_join(lambda v: v[0] + v[1], [d, other]),
        "exp": lambda: tree_map(torch.exp, d),
        "sum": lambda: tree_map(lambda v: v.sum(0), d),
        "zeros_like": lambda: tree_map(torch.zeros_like, d),
        "clone": lambda: tree_map(torch.clone, d),
        "to": lambda: tree_map(lambda v: v.to(torch.float64), d),
        "tree_map": lambda: tree_map(lambda v: v + 1, d),
    }


# -- containers


def shared(i: Inputs, module: Any, stack: Any, cat: Any) -> dict[str, Call]:
    """Operations that tdc and tensordict spell alike."""
    td, other, key = i.xs[0], i.xs[1], i.key
    column = i.mask[:, None].expand(SIZE)
    flat = td.flatten_keys(".")
    node = {"get node": lambda: td["a1"]} if isinstance(key, tuple) else {}
    return node | {
        "construct": lambda: module.TensorDict(i.source, SIZE),
        "get": lambda: td[key],
        "select": lambda: td.select(*i.names),
        "exclude": lambda: td.exclude(*i.names),
        "keys": lambda: list(td.keys(True, True)),
        "items": lambda: list(td.items(True, True)),
        "flatten_keys": lambda: td.flatten_keys("."),
        "unflatten_keys": lambda: flat.unflatten_keys("."),
        "index": lambda: td[2],
        "slice": lambda: td[1:4],
        "mask": lambda: td[i.mask],
        "index tensor": lambda: td[i.rows],
        "stack": lambda: stack(i.xs, 0),
        "cat": lambda: cat(i.xs, 0),
        "split": lambda: td.split(2),
        "unbind": lambda: td.unbind(0),
        "reshape": lambda: td.reshape(3, 8),
        "permute": lambda: td.permute(1, 0),
        "transpose": lambda: td.transpose(0, 1),
        "unsqueeze": lambda: td.unsqueeze(1),
        "squeeze": lambda: td.squeeze(0),
        "expand": lambda: td.expand(2, 6, 4),
        "flatten": lambda: td.flatten(0, 1),
        "where": lambda: torch.where(column, td, other),
        "apply": lambda: td.apply(lambda v: v + 1),
        "apply two": lambda: td.apply(lambda v, w: v + w, other),
        "add number": lambda: td + 1,
        "add": lambda: td + other,
        "exp": lambda: td.exp(),
        "sum": lambda: td.sum(dim=0),
        "zeros_like": lambda: torch.zeros_like(td),
        "clone": lambda: td.clone(),
        "to": lambda: td.to(torch.float64),
        "tree_map": lambda: pytree.tree_map(lambda v: v + 1, td),
    }


def ours(i: Inputs) -> dict[str, Call]:
    """`tdc.TensorDict`: every operation is out of place."""
    td = i.xs[0]
    return shared(i, tdc, torch.stack, torch.cat) | {
        "set": lambda: td.set(i.key, i.leaf),
        "set checked": lambda: td.set(i.key, i.leaf),
        "update": lambda: td.update(i.new),
        "update checked": lambda: td.update(i.new),
        "delete": lambda: td.delete(i.key),
        "gather": lambda: td.index_select(0, i.rows),
    }


def theirs(i: Inputs, module: ModuleType) -> dict[str, Call]:
    """`tensordict.TensorDict`: a shallow copy first where it would write in place."""
    td = i.xs[0]
    return shared(i, module, torch.stack, torch.cat) | {
        "set": lambda: td.clone(recurse=False).set(i.key, i.leaf),
        "update": lambda: td.clone(recurse=False).update(i.new),
        "delete": lambda: td.exclude(i.key),
        "gather": lambda: td[i.rows],
    }


def by_optree(i: Inputs) -> dict[str, Call]:
    """Operations of optree on nested dicts: maps over one tree and several."""
    d, other = i.xs[0], i.xs[1]
    return {
        "index": lambda: optree.tree_map(lambda v: v[2], d),
        "apply": lambda: optree.tree_map(lambda v: v + 1, d),
        "apply two": lambda: optree.tree_map(torch.add, d, other),
        "stack": lambda: optree.tree_map(lambda *v: torch.stack(v), *i.xs),
        "clone": lambda: optree.tree_map(torch.clone, d),
        "tree_map": lambda: optree.tree_map(lambda v: v + 1, d),
    }
