"""What does an eager operation on a TensorDict cost, against the same thing written by hand with plain dicts?

Two batches of 24 small leaves, batch dims (6, 4): `flat`, one level of keys; `nested`, 4 x 3 inner dicts of 2 leaves
(12 innermost nodes). Leaves are float32 with one to three feature dims of 2, so fixed costs are what is measured.

The plain code is what one would write by hand: comprehensions over a flat dict, a recursive map over a nested one.
Everything is out of place: `set` and `update` give a new dict and leave the old one as it was (by hand: a copy of each
dict on the path, nothing deeper; tensordict: `clone(recurse=False)` first). By hand nothing is checked: no batch size,
no key sets.

    get           one leaf by its key                   set           one leaf replaced
    update        two leaves replaced (nested: they     index         `[2]`
                  are one inner node)                   slice         `[1:4]`
    mask          a bool mask over the first dim        stack, cat    of 3 batches along dim 0
    reshape       (6, 4) to (3, 8), features stay       permute       the two batch dims swapped
    apply         x + 1 on every leaf                   flatten_keys  one level of keys, joined by "."

Every call goes through a lambda, about 0.03 us of each figure. `get` and `set` name leaves by their full path
(`td["a1", "b2", "y"]`, `d["a1"]["b2"]["y"]`). The row `get node` reads an inner node of the nested batch: a search in
flat storage, one lookup in nested dicts. It is outside the mean, and printed because it is what flat storage
loses. `flatten_keys` by hand is one function for both: it is called where one does not know how deep the keys go.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from bench._timing import Call, Report, arguments, geometric_mean, interleaved, peer
from tdc import TensorDict, cat, stack

LIMIT = 1.4
SIZE = (6, 4)
ROWS = (
    "get", "set", "update", "index", "slice", "mask", "stack", "cat", "reshape", "permute", "apply", "flatten_keys",
)  # fmt: skip
Plain = dict[str, Any]


def flat_source(device: str) -> Plain:
    """24 leaves at one level."""
    return {f"key{i}": torch.randn(*SIZE, *[2] * (1 + i % 3), device=device) for i in range(24)}


def nested_source(device: str) -> Plain:
    """24 leaves in 4 x 3 inner dicts."""
    leaves = iter(flat_source(device).values())
    return {f"a{i}": {f"b{j}": {"x": next(leaves), "y": next(leaves)} for j in range(3)} for i in range(4)}


# -- by hand, one level


def flat_rows(d: Plain, others: list[Plain], new: Any, mask: Any) -> dict[str, Call]:
    """The twelve operations on a flat dict."""
    all_of = [d, *others]
    return {
        "get": lambda: d["key7"],
        "set": lambda: {**d, "key7": new["key7"]},
        "update": lambda: {**d, **new},
        "index": lambda: {k: v[2] for k, v in d.items()},
        "slice": lambda: {k: v[1:4] for k, v in d.items()},
        "mask": lambda: {k: v[mask] for k, v in d.items()},
        "stack": lambda: {k: torch.stack([x[k] for x in all_of]) for k in d},
        "cat": lambda: {k: torch.cat([x[k] for x in all_of]) for k in d},
        "reshape": lambda: {k: v.reshape(3, 8, *v.shape[2:]) for k, v in d.items()},
        "permute": lambda: {k: v.permute(1, 0, *range(2, v.ndim)) for k, v in d.items()},
        "apply": lambda: {k: v + 1 for k, v in d.items()},
        "flatten_keys": lambda: flatten(d),
    }


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


def nested_rows(d: Plain, others: list[Plain], new: Any, mask: Any) -> dict[str, Call]:
    """The twelve operations on nested dicts, and the reading of an inner one."""
    all_of, leaf = [d, *others], new["a1"]["b2"]["y"]
    return {
        "get": lambda: d["a1"]["b2"]["y"],
        "set": lambda: {**d, "a1": {**d["a1"], "b2": {**d["a1"]["b2"], "y": leaf}}},
        "update": lambda: merge(d, new),
        "index": lambda: tree_map(lambda v: v[2], d),
        "slice": lambda: tree_map(lambda v: v[1:4], d),
        "mask": lambda: tree_map(lambda v: v[mask], d),
        "stack": lambda: tree_join(torch.stack, all_of),
        "cat": lambda: tree_join(torch.cat, all_of),
        "reshape": lambda: tree_map(lambda v: v.reshape(3, 8, *v.shape[2:]), d),
        "permute": lambda: tree_map(lambda v: v.permute(1, 0, *range(2, v.ndim)), d),
        "apply": lambda: tree_map(lambda v: v + 1, d),
        "flatten_keys": lambda: flatten(d),
        "get node": lambda: d["a1"],
    }


# -- containers


def container_rows(
    td: Any, others: list[Any], new: Any, mask: Any, key: Any, value: Any, joins: Any
) -> dict[str, Call]:
    """The operations that tdc and tensordict spell alike."""
    stack_of, cat_of = joins
    all_of = [td, *others]
    return {
        "get": lambda: td[key],
        "index": lambda: td[2],
        "slice": lambda: td[1:4],
        "mask": lambda: td[mask],
        "stack": lambda: stack_of(all_of, 0),
        "cat": lambda: cat_of(all_of, 0),
        "reshape": lambda: td.reshape(3, 8),
        "permute": lambda: td.permute(1, 0),
        "apply": lambda: td.apply(lambda v: v + 1),
        "flatten_keys": lambda: td.flatten_keys("."),
        "get node": lambda: td["a1"],
    }


def ours(sources: list[Plain], new: Any, mask: Any, key: Any, value: Any) -> dict[str, Call]:
    """`tdc.TensorDict`: every operation is out of place."""
    td, *others = [TensorDict(d, SIZE) for d in sources]
    rows = container_rows(td, others, new, mask, key, value, (stack, cat))
    return rows | {"set": lambda: td.set(key, value), "update": lambda: td.update(new)}


def theirs(module: ModuleType, sources: list[Plain], new: Any, mask: Any, key: Any, value: Any) -> dict[str, Call]:
    """`tensordict.TensorDict`: a shallow copy first where it would write in place."""
    td, *others = [module.TensorDict(d, SIZE) for d in sources]
    rows = container_rows(td, others, new, mask, key, value, (torch.stack, torch.cat))
    return rows | {
        "set": lambda: td.clone(recurse=False).set(key, value),
        "update": lambda: td.clone(recurse=False).update(new),
    }


def leaves_of(x: Any) -> list[Any]:
    """Tensors in a result, to see that candidates agree."""
    if isinstance(x, torch.Tensor):
        return [x]
    return [leaf for k in sorted(x.keys()) for leaf in leaves_of(x[k])]


def agree(name: str, results: dict[str, Any]) -> None:
    """Every candidate gives the same tensors.

    Raises:
        AssertionError: one does not.
    """
    first, *others = [leaves_of(x) for x in results.values()]
    assert all([len(o) == len(first) for o in others]), f"{name}: different numbers of leaves"
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def main() -> None:
    args = arguments("tensordict_eager")
    question = "What does an eager operation on a TensorDict cost, as a multiple of hand-written dict code?"
    report = Report("tensordict_eager", question, args.device, args.quick)
    library = peer("tensordict", report)
    mask = torch.tensor([True, False, True, True, False, True], device=args.device)
    cases = (("flat", flat_source, flat_rows, "key7"), ("nested", nested_source, nested_rows, ("a1", "b2", "y")))
    for layout, source, by_hand, key in cases:
        sources = [source(args.device) for _ in range(3)]
        fresh = source(args.device)
        new = {"a1": {"b2": fresh["a1"]["b2"]}} if layout == "nested" else {k: fresh[k] for k in ("key7", "key8")}
        value = fresh["a1"]["b2"]["y"] if layout == "nested" else fresh["key7"]
        calls = {"dict": by_hand(sources[0], sources[1:], new, mask), "tdc": ours(sources, new, mask, key, value)}
        if library:
            calls["tensordict"] = theirs(library, sources, new, mask, key, value)
        measure(report, layout, calls)
    report.write()


def measure(report: Report, layout: str, calls: dict[str, dict[str, Call]]) -> None:
    """All rows of one layout, and the geometric means."""
    rounds, found = 7 if report.quick else 41, {}
    for row in calls["dict"]:
        candidates = {name: rows[row] for name, rows in calls.items()}
        agree(f"{layout} {row}", {name: call() for name, call in candidates.items()})
        found[row] = interleaved(candidates, rounds=rounds, device=report.device)
        report.row(f"{layout} {row}", found[row], "dict")
    mean = {n: geometric_mean([(found[r][n], found[r]["dict"]) for r in ROWS]) for n in calls if n != "dict"}
    if "tensordict" in mean:
        report.note(f"{layout}: tensordict's geometric mean is {mean['tensordict']:.2f} times hand-written dicts")
    report.limit(f"{layout}: geometric mean of {len(ROWS)} operations, tdc to dict", mean["tdc"], LIMIT)


if __name__ == "__main__":
    main()
