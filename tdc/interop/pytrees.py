"""Trees of tensors as TensorDicts and back: torch's pytrees (lists, tuples, dicts), and flat state dicts.

    from_pytree([x, {"a": (y, "name")}])        td   {"0": x, "1": {"a": {"0": y, "1": Static("name")}}}
                                                spec where each path came from
    from_state_dict({"fc.weight": w})           td   {"fc": {"weight": w}}
    load_into(params, state_dict)               what fits, and a report of the rest

Invariants:
  - tensors pass as they are, nothing is copied; all functions but `load_into` are traceable;
  - what is no array is kept as a Static value, so that the way back gives the same Python object.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tdc.core import pytree
from tdc.core.arguments import expect
from tdc.core.container import Container
from tdc.core.errors import DtypeError, KeyPathError, StructureError, describe, message, refuse_wrong
from tdc.core.keys import show
from tdc.core.typing import KeyPath
from tdc.tensordict.leaf import PROTOCOLS, unwrap
from tdc.tensordict.mapping import Keyed
from tdc.tensordict.nodes import Static
from tdc.tensordict.paths import join, ordered, within
from tdc.tensordict.shared import like
from tdc.tensordict.tensordict import TensorDict, build_td

ROOT = "value"  # the path of a tree that is one leaf


@dataclass(frozen=True)
class PytreeSpec:
    """The structure of a pytree that a TensorDict was made of. Hashable; holds no tensors.

    Attributes:
        paths: where each leaf of the tree lies in the TensorDict, in the tree's order.
        treespec: the tree as torch describes it.
    """

    paths: tuple[KeyPath, ...]
    treespec: Any


def from_pytree(tree: Any, batch_size: Any = ()) -> tuple[TensorDict, PytreeSpec]:
    """A TensorDict of the leaves of lists, tuples, dicts and other pytrees, and how to put them back.

    Positions in lists and tuples become keys "0", "1", ...; keys of dicts become strings; fields of named tuples keep
    their names. A tree that is one leaf has the key "value". TensorDicts in the tree become inner nodes.

    Args:
        tree: leaves are tensors, ragged batches, arrays; any other Python object is kept as a Static value.
        batch_size: the leading sizes that all tensors share.

    Returns:
        The TensorDict, and the spec that `to_pytree` takes.

    Raises:
        ShapeError: tensors that do not begin with the batch size; every one is named.
        KeyPathError: two keys of a dict that are the same as strings.

    Compile:
        Traceable; the spec is a constant.

    Example:
        >>> import torch
        >>> td, spec = from_pytree([torch.zeros(2), {"a": (torch.ones(2), "name")}], [2])
        >>> td.keys(include_nested=True, leaves_only=True)
        ('0', ('1', 'a', '0'), ('1', 'a', '1'))
        >>> to_pytree(td + 1, spec)
        [tensor([1., 1.]), {'a': (tensor([2., 2.]), 'name')}]
    """
    leaves, treespec = pytree.tree_flatten(tree, is_leaf=is_entry)
    paths = tuple(paths_of(treespec, ())) if leaves else ()
    paths = (ROOT,) if paths == ((),) else paths
    twice = sorted({show(p) for i, p in enumerate(paths) if p in paths[:i]})
    expected, hint = "dict keys that differ as strings", "rename one of them: keys become strings"
    refuse_wrong(KeyPathError, "interop.from_pytree", expected, twice, "that are not", hint)
    td = TensorDict({p: as_entry(x) for p, x in zip(paths, leaves, strict=True)}, batch_size)
    return td, PytreeSpec(paths, treespec)


def to_pytree(td: TensorDict, spec: PytreeSpec) -> Any:
    """The pytree that `from_pytree` took apart, with the leaves of `td`.

    Raises:
        StructureError: paths that are missing in `td`, or that the spec does not know; all are named.
        DtypeError: something else than the spec that `from_pytree` returned.

    Example:
        >>> import torch
        >>> td, spec = from_pytree((torch.zeros(2), torch.ones(2)), [2])
        >>> to_pytree(td[0], spec)
        (tensor(0.), tensor(1.))
    """
    if not isinstance(spec, PytreeSpec):
        hint = "td, spec = tdc.interop.from_pytree(tree)"
        raise DtypeError(message("interop.to_pytree", "the spec of from_pytree", type(spec).__name__, hint=hint))
    expect("interop.to_pytree", td, TensorDict)
    known = {*td._leaves, *[p for p, n in td._nodes.items() if type(n) is Static]}
    wrong = [f"{show(p)}: missing" for p in spec.paths if p not in td]
    wrong += [f"{show(p)}: not in the spec" for p in ordered(known) if not any([within(p, q) for q in spec.paths])]
    hint = "take the TensorDict and the spec from one call of from_pytree"
    refuse_wrong(StructureError, "interop.to_pytree", "the paths of the spec", wrong, "that differ", hint)
    return pytree.tree_unflatten([td.get(p) for p in spec.paths], spec.treespec)


def from_state_dict(state_dict: Mapping[str, Any], batch_size: Any = ()) -> TensorDict:
    """A nested TensorDict of a flat dict with keys "a.b.c", such as `module.state_dict()` gives. The order is kept.

    Args:
        state_dict: values that are no arrays are kept as Static values.
        batch_size: the leading sizes that all values share, e.g. of an ensemble.

    Raises:
        KeyPathError: one key would be a leaf and an inner node.

    Example:
        >>> import torch
        >>> td = from_state_dict(torch.nn.Sequential(torch.nn.Linear(2, 3)).state_dict())
        >>> td["0", "weight"].shape, list(to_state_dict(td))
        (torch.Size([3, 2]), ['0.weight', '0.bias'])
    """
    if not isinstance(state_dict, Mapping):
        hint = "tdc.interop.from_state_dict(module.state_dict())"
        raise DtypeError(message("interop.from_state_dict", "a dict", type(state_dict).__name__, hint=hint))
    return TensorDict({k: as_entry(v) for k, v in state_dict.items()}, batch_size).unflatten_keys(".")


def to_state_dict(td: TensorDict) -> dict[str, Any]:
    """A flat dict with keys "a.b.c", for `module.load_state_dict` and `torch.save`. The order of the leaves is kept.

    Static values come last, empty inner nodes not at all.

    Raises:
        KeyPathError: two paths join to one key.

    Example:
        >>> import torch
        >>> to_state_dict(TensorDict({"fc": {"bias": torch.zeros(1)}}))
        {'fc.bias': tensor([0.])}
    """
    expect("interop.to_state_dict", td, TensorDict)
    return dict(Keyed.items(td.flatten_keys(".")))


def as_entry(value: Any) -> Any:
    """A value as an entry of a TensorDict: arrays and inner nodes as they are, other Python objects as Static."""
    if isinstance(value, (Tensor, Container, Mapping, Static)) or is_entry(value) or hasattr(value, "__array__"):
        return value
    return value if type(value).__hash__ is None else Static(value)


def is_entry(x: Any) -> bool:
    """True if a node of a pytree is one entry: a ragged batch, a TensorDict or a registered leaf."""
    return isinstance(x, Container) or type(x) in PROTOCOLS


def paths_of(treespec: Any, prefix: KeyPath) -> list[KeyPath]:
    """The path of each leaf of a tree: keys of dicts, names of fields, positions in anything else."""
    if treespec.is_leaf():
        return [prefix]
    children = treespec.children()
    names = child_names(treespec, len(children))
    return [p for name, child in zip(names, children, strict=True) for p in paths_of(child, join(prefix, f"{name}"))]


def child_names(treespec: Any, count: int) -> Sequence[Any]:
    """The names of the children of a node: keys, field names, or positions."""
    if treespec.type in (dict, OrderedDict):
        return treespec.context
    if treespec.type is defaultdict:
        return treespec.context[1]
    return getattr(treespec.context, "_fields", range(count))  # of a named tuple the context is its class


OP = "interop.load_into"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The report of `load_into`, by name.

    Attributes:
        loaded: names that the parameters now have from the state dict.
        missing: names of parameters that the state dict lacks.
        unexpected: names of the state dict that are no parameters.
        mismatched: names of both, with other shapes: `{name: "what is there, what is wanted"}`.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: dict[str, str]

    @property
    def complete(self) -> bool:
        """True if all names were loaded, and none is left."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        """One line for the count, and one for each name that was not loaded."""
        lines = [f"{len(self.loaded)} loaded"]
        lines += [f"missing: {name}" for name in self.missing]
        lines += [f"unexpected: {name}" for name in self.unexpected]
        return "\n".join(lines + [f"mismatched: {name}: {text}" for name, text in self.mismatched.items()])


def load_into(
    params: TensorDict, state_dict: Mapping[str, Any] | TensorDict, *, strict: bool = False, prefix: str = ""
) -> tuple[TensorDict, LoadReport]:
    """Parameters with the values of a state dict where names and shapes agree; the others stay as they are.

    Dtypes:
        values take the dtype and device of the parameter they replace. Those that have both already are not copied.

    Args:
        params: says which names, shapes, dtypes and devices are wanted, such as `tdc.from_module(net)`.
        state_dict: a flat dict with keys "a.b.c", as `net.state_dict()` gives, or a TensorDict.
        strict: refuse whatever is not complete.
        prefix: what the names of the state dict begin with and those of params do not, such as "module.".

    Returns:
        New parameters, and a report.

    Raises:
        DtypeError: no TensorDict, no state dict.
        StructureError: with strict, anything missing, unexpected or of another shape; all are named.

    Example:
        >>> import torch
        >>> params = TensorDict({"fc": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}})
        >>> saved = {"fc.weight": torch.ones(2, 3), "fc.bias": torch.ones(5), "old.weight": torch.ones(1)}
        >>> params, report = load_into(params, saved)
        >>> print(report)
        1 loaded
        unexpected: old.weight
        mismatched: fc.bias: Tensor float32[5], wanted Tensor float32[2]
        >>> params["fc"].to_dict()
        {'weight': tensor([[1., 1., 1.],
                [1., 1., 1.]]), 'bias': tensor([0., 0.])}

    Source:
        `torch.nn.Module.load_state_dict`, which refuses other shapes.
    """
    expect(OP, params, TensorDict, of=" of parameters")
    if not isinstance(state_dict, (Mapping, TensorDict)):
        hint = "load_into(params, net.state_dict())"
        raise DtypeError(message(OP, "a state dict", describe(state_dict), hint=hint))
    if not isinstance(prefix, str):
        raise DtypeError(message(OP, "a str as prefix", describe(prefix), hint="prefix='module.'"))
    table: Any = state_dict._leaves if isinstance(state_dict, TensorDict) else state_dict
    given = {show(p): x for p, x in table.items()}
    own = {f"{prefix}{show(p)}": p for p in params._leaves}
    report = compared(params, own, given)
    if strict:
        wrong = {**dict.fromkeys(report.missing, "missing"), **dict.fromkeys(report.unexpected, "unexpected")}
        hint = "strict=False loads the rest and reports these"
        expected = "the names and shapes of params"
        refuse_wrong(StructureError, OP, expected, {**wrong, **report.mismatched}, "that differ", hint)
    before = params._leaves
    loaded = {own[name]: given[name].detach() for name in report.loaded}
    new = {p: like(before[p], x.to(unwrap(before[p]))) for p, x in loaded.items()}
    return build_td({**params._leaves, **new}, params._nodes, params._size, params._device), report


def compared(params: TensorDict, own: dict[str, KeyPath], given: dict[str, Any]) -> LoadReport:
    """Report which names agree and which do not; `own` are the names of the parameters with the prefix."""
    both = {name: (given[name], unwrap(params._leaves[path])) for name, path in own.items() if name in given}
    fits = [name for name, (x, like) in both.items() if isinstance(x, Tensor) and x.shape == like.shape]
    mismatched = {
        name: f"{describe(x)}, wanted {describe(y)}" for name, (x, y) in both.items() if name not in set(fits)
    }
    missing, unexpected = [name for name in own if name not in given], [name for name in given if name not in own]
    return LoadReport(tuple(fits), tuple(missing), tuple(unexpected), mismatched)
