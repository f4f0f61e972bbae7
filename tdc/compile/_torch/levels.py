"""A level of vmap seen from inside: the tensors of all examples behind those of one (torch 2.11-2.15).

current_level()      the level that is innermost, a number
physical(x, level)   the tensor of all examples that stands behind one example's
outside()            where the level is not in effect: what runs there runs once, for the whole batch
mapped(x, level)     one example's tensor of that of all examples
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tdc.core.errors import refusing
from tdc.core.private import find_or


def level_part(path: str) -> Any:
    """Return a function of torch's vmap; where it is gone, code that needs it is refused."""
    return find_or(refusing("tdc.batch and lanes"), path, feature="one level of vmap by hand", lost="tdc.batch")


add_batch_dim: Any = level_part("torch._functorch.vmap:_add_batch_dim")
remove_batch_dim: Any = level_part("torch._functorch.vmap:_remove_batch_dim")
interpreter: Any = level_part("torch._functorch.pyfunctorch:retrieve_current_functorch_interpreter")
maybe_level: Any = level_part("torch:_C._functorch.maybe_get_level")
level_of_vmap: Any = level_part("torch._functorch.vmap:vmap_increment_nesting")


def level_of(x: Tensor) -> int:
    """The level at which a tensor stands for one example; -1 at none."""
    found: int = maybe_level(x)
    return found


def current_level() -> int:
    """The number of the innermost level, of `vmap` or of another transform. Can be traced."""
    found: int = interpreter().level()
    return found


def outside() -> Any:
    """A context in which the innermost level is not in effect: random numbers are drawn once for the whole batch, and
    sizes may be read. Can be traced."""
    return interpreter().lower()


def physical(x: Tensor, level: int) -> Tensor:
    """The tensor of all examples, which are its first dim, of one that `is_batched` at a level."""
    found: Tensor = remove_batch_dim(x, level, 0, 0)
    return found


def mapped(x: Tensor, level: int) -> Tensor:
    """The tensor of one example, of a tensor of all, which are its first dim."""
    found: Tensor = add_batch_dim(x, 0, level)
    return found
