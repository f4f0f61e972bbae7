"""Builder: a TensorDict that a loop may change key by key.

    m = td.mutate()
    for key, value in parts:
        m[key] = value
    td = m.finish()

Each `td.set` copies the table of all leaves; the builder copies it once, and checks it once.

Invariants: the TensorDict it was made of does not change; after `finish` every use of the builder is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from tdc.core.errors import ImmutableError, message
from tdc.core.keys import as_path, parts
from tdc.core.typing import NestedKey
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.mapping import Keyed, existing_path
from tdc.tensordict.nodes import Nodes, Static
from tdc.tensordict.storage import Leaves, absorb, check_leaves, put_all, remove, retype

if TYPE_CHECKING:
    from tdc.tensordict.tensordict import TensorDict


@final
class Builder:
    """The result of `td.mutate()`: assign and delete keys, then `finish()`.

    Raises:
        KeyPathError: a key that is not there, on reading or deleting; a path that leads through a leaf.
        ShapeError: on `finish`, leaves that do not begin with the batch size; every one is named.
        ImmutableError: anything after `finish`.

    Compile:
        Traceable: it costs what a dict costs.

    Example:
        >>> import torch
        >>> from tdc.tensordict.tensordict import TensorDict
        >>> m = TensorDict({"a": torch.ones(2), "b": torch.ones(2)}, [2]).mutate()
        >>> m["c", "d"] = m["a"] + 1
        >>> del m["b"]
        >>> m.finish().to_dict()
        {'a': tensor([1., 1.]), 'c': {'d': tensor([2., 2.])}}
    """

    __slots__ = ("_leaves", "_nodes", "_td")
    _td: Keyed | None
    _leaves: Leaves
    _nodes: Nodes

    def __init__(self, td: Keyed) -> None:
        self._td = td
        self._leaves = dict(td._leaves)
        self._nodes = dict(td._nodes)

    def __repr__(self) -> str:
        if self._td is None:
            return "Builder(finished)"
        return f"Builder({', '.join(dict.fromkeys([parts(p)[0] for p in (*self._leaves, *self._nodes) if p != ()]))})"

    def _ipython_key_completions_(self) -> list[Any]:
        """The keys, for IPython to complete."""
        td = unfinished(self)
        return td._with(dict(self._leaves), dict(self._nodes))._ipython_key_completions_()

    def __setitem__(self, key: NestedKey, value: Any) -> None:
        td, path = unfinished(self), as_path(key, "mutate")
        new_leaves: Leaves = {}
        new_nodes: Nodes = {}
        absorb(new_leaves, new_nodes, (), {path: td._entry(key, value)}, td._size, td._device)
        remove(self._leaves, self._nodes, path)
        put_all(self._leaves, self._nodes, new_leaves, new_nodes)

    def __getitem__(self, key: NestedKey) -> Any:
        td, path = unfinished(self), existing_path(self, "mutate", key)
        if path in self._leaves:
            return unwrap(self._leaves[path])
        entry = self._nodes[path]
        return entry.value if type(entry) is Static else td._with(dict(self._leaves), dict(self._nodes))[path]

    def __delitem__(self, key: NestedKey) -> None:
        unfinished(self)
        remove(self._leaves, self._nodes, existing_path(self, "mutate", key))

    def __contains__(self, key: NestedKey) -> bool:
        path = as_path(key, "mutate")
        return path in self._leaves or path in self._nodes

    def update(self, other: Mapping[Any, Any]) -> None:
        """Assign every entry of a mapping."""
        for key, value in Keyed.items(other) if isinstance(other, Keyed) else other.items():
            self[key] = value

    def finish(self) -> TensorDict:
        """The TensorDict of all entries; the builder ends here."""
        td = unfinished(self)
        nodes = retype(self._leaves, self._nodes)
        check_leaves("mutate", self._leaves, nodes, td._size)
        self._td = None
        return td._with(self._leaves, nodes)


def unfinished(m: Builder) -> Keyed:
    """The TensorDict that a builder was made of."""
    if m._td is None:
        hint = "td.mutate() gives a new one"
        raise ImmutableError(message("mutate", "a builder that is not finished", "one that is", hint=hint))
    return m._td
