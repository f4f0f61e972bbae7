"""Where `td.at[index]` writes, and what becomes of indices out of range: an error, or as in JAX dropped or clipped.

    mode=None       an error, as in torch
    mode="drop"     nothing is written for them
    mode="clip"     the first or the last place along the dim

Invariant: nothing is read on the host, so that a graph may be told to drop what it cannot know.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.errors import DtypeError, message
from tdc.core.typing import OpName
from tdc.tensordict.indexing import Numbers
from tdc.tensordict.tensordict import TensorDict, index, make, normal_index


def places_at(td: TensorDict, idx: Any, mode: str | None, op: OpName) -> Tensor:
    """The flat position of each example that an index reaches; for one that is dropped the number of examples.

    Raises:
        DtypeError: another mode.
    """
    size, total = td._size, math.prod(td._size)
    places = torch.arange(total, device=td.device).view(size)
    if mode is None:
        return index(make({"place": places}, {}, size, td.device), idx)["place"]
    if mode not in ("drop", "clip"):
        raise DtypeError(message(op, "mode 'drop', 'clip' or None", f"{mode!r}", hint="None raises, as torch does"))
    given = normal_index(td, idx)
    given = given.given if type(given) is Numbers else given
    parts, pad = [], [0] * (2 * len(size))
    d = 0
    for part in given if isinstance(given, tuple) else (given,):
        free = part is None or part is Ellipsis or isinstance(part, bool)
        if not free and not isinstance(part, slice):
            i = part if isinstance(part, (int, Tensor)) else torch.as_tensor(part, device=td.device)
            part = limited(i, size[d], mode)
            pad[2 * (len(size) - 1 - d) + 1] = int(mode == "drop")
        parts.append(part)
        d += not free
    places = F.pad(places, pad, value=total)
    return index(make({"place": places}, {}, places.shape, td.device), tuple(parts))["place"]


def limited(i: Any, n: Any, mode: str) -> Any:
    """Indices along a dim of size `n` within range: clipped to it, or those outside as `n`."""
    if isinstance(i, Tensor):
        if mode == "clip":
            return i.clamp(-n, n - 1)
        return torch.where((i >= -n) & (i < n), torch.where(i < 0, i + n, i), n)
    if mode == "clip":
        return max(-n, min(i, n - 1))
    return n if not -n <= i < n else i + n if i < 0 else i
