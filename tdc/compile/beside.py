"""Results of which tensors alone go through a transform of torch; anything else is kept beside it.

    form: list[Any] = []
    tensors = transform(lambda *args: tensors_in(fn(*args), form))(*args)
    out = put_back(tensors, form)               with None, numbers and strings where fn returned them

Invariant: a transform sees a list of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tdc.core import pytree
from tdc.core.typing import MISSING


def tensors_in(out: Any, form: list[Any]) -> list[Tensor]:
    """The tensors of a result, in the order of its pytree; `form` becomes all the rest."""
    leaves, spec = pytree.tree_flatten(out)
    form[:] = [MISSING if isinstance(x, Tensor) else x for x in leaves], spec
    return [x for x in leaves if isinstance(x, Tensor)]


def put_back(tensors: Sequence[Tensor], form: list[Any]) -> Any:
    """The result of these tensors and what `tensors_in` kept."""
    others, spec = form
    found = iter(tensors)
    return pytree.tree_unflatten([next(found) if x is MISSING else x for x in others], spec)
