"""Averages of parameters over the steps: another set of parameters, to evaluate and serve with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tdc.core.errors import StructureError, refuse_wrong
from tdc.optim.base import check_numbers, differing, trainable, wide
from tdc.tensordict.tensordict import TensorDict, build_td


@dataclass(frozen=True, slots=True)
class Average:
    """Two functions: `init(params) -> mean` and `update(mean, params) -> mean`. The mean is all the state there is."""

    init: Callable[[TensorDict], TensorDict]
    update: Callable[[TensorDict, TensorDict], TensorDict]


def ema(decay: float) -> Average:
    """An exponential moving average of parameters: `decay * mean + (1 - decay) * params`, from the first parameters on.

    Shapes:
        mean as the parameters.

    Dtypes:
        those of the parameters; float32 for bfloat16 and float16, whose digits would swallow the small changes.

    Args:
        decay: in [0, 1), how much of the mean stays; it looks back some `1 / (1 - decay)` steps.

    Returns:
        An `Average`. Integer buffers and other leaves are the latest.

    Raises:
        StructureError: a decay out of its range; in `update`, a mean of other parameters.

    Compile:
        fullgraph and vmap.

    Example:
        >>> average = ema(0.9)
        >>> mean = average.init(TensorDict({"w": torch.tensor(1.0)}))
        >>> average.update(mean, TensorDict({"w": torch.tensor(2.0)}))["w"]
        tensor(1.1000)

    Source:
        `torch.optim.swa_utils.get_ema_avg_fn`; AveragedModel begins with the parameters of its first update.
    """
    op = "optim.ema"
    check_numbers(op, below=1.0, decay=decay)

    def init(params: TensorDict) -> TensorDict:
        return params.apply(lambda p: p.to(wide(p.dtype), copy=True) if trainable(p) else p)

    def update(mean: TensorDict, params: TensorDict) -> TensorDict:
        old = {p: x for p, x in mean._leaves.items() if trainable(x)}
        wrong = differing(build_td(old, {}, mean._size), params)
        hint = "make the mean with init(params) of these parameters"
        refuse_wrong(StructureError, op, "a mean of these params", wrong, "leaves that differ", hint)
        leaves: dict[Any, Any] = {
            path: torch.lerp(old[path], x.to(old[path].dtype), 1 - decay) if path in old else x
            for path, x in params._leaves.items()
        }
        return build_td(leaves, params._nodes, params._size, params._device)

    return Average(init, update)
