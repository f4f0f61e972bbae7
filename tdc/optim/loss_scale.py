"""Dynamic loss scaling for float16, so that small gradients do not underflow.

    scaler = LossScale()
    state = scaler.init()
    scaled = scaler.scale(state, loss)                  differentiate this
    grads, finite = scaler.unscale(state, grads)
    state = scaler.adjust(state, finite)                after each step
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tdc.compile.train_state import Scaling, first_scale, next_scale
from tdc.core.arguments import as_own_device, expect, expect_at_least
from tdc.core.errors import StructureError, message
from tdc.optim.base import wide
from tdc.optim.checks import check_keys, check_numbers, check_td, trainable
from tdc.optim.foreach import each
from tdc.optim.wrappers import all_finite
from tdc.tensordict.storage import as_size
from tdc.tensordict.tensordict import TensorDict, build_td

OP = "optim.LossScale"
KEYS = ("scale", "growth_tracker")


@dataclass(frozen=True, slots=True)
class LossScale:
    """Dynamic loss scaling as pure functions, with the settings and numbers of `torch.amp.GradScaler`.

    Args:
        init_scale: the first scale.
        growth_factor: multiplies the scale after `growth_interval` steps in a row with finite gradients.
        backoff_factor: multiplies the scale after a step with other gradients.
        growth_interval: number of steps.

    Raises:
        StructureError: a scale of 0, a growth of at most 1, or a backoff of at least 1.

    Compile:
        fullgraph, no sync; vmap, one scale for each model.

    Example:
        >>> scaler = LossScale(init_scale=4.0)
        >>> state = scaler.init()
        >>> grads, finite = scaler.unscale(state, TensorDict({"w": torch.tensor([8.0, torch.inf])}))
        >>> grads["w"], finite, scaler.adjust(state, finite)["scale"]
        (tensor([2., inf]), tensor(False), tensor(2.))

    Source:
        `torch.amp.GradScaler`.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        check_numbers(OP, init_scale=self.init_scale, growth_factor=self.growth_factor)
        check_numbers(OP, below=1.0, backoff_factor=self.backoff_factor)
        expect_at_least(OP, 1, "growth_interval", self.growth_interval)
        if not (self.init_scale > 0 and self.growth_factor > 1):
            got = f"init_scale={self.init_scale:g}, growth_factor={self.growth_factor:g}"
            raise StructureError(message(OP, "a scale above 0 and a growth above 1", got, hint="LossScale()"))

    def init(self, batch_size: tuple[int, ...] = (), device: torch.device | str | None = None) -> TensorDict:
        """The first state: `"scale"`, and `"growth_tracker"`, the number of steps in a row with finite gradients."""
        return first_scale(as_size(batch_size), as_own_device(OP, device), self.numbers)

    def scale(self, state: TensorDict, loss: Tensor) -> Tensor:
        """A loss times the scale, in float32 at least: the scale may be larger than float16 allows."""
        check_keys(OP, state, KEYS)
        expect(OP, loss, Tensor, of=" of losses")
        dtype = torch.promote_types(loss.dtype, torch.float32)
        return loss.to(dtype) * state["scale"].to(dtype)

    def unscale(self, state: TensorDict, grads: TensorDict) -> tuple[TensorDict, Tensor]:
        """Gradients of a scaled loss divided by the scale, in their dtypes, and a flag: True if all are finite."""
        check_keys(OP, state, KEYS)
        check_td(OP, grads)
        by = 1 / state["scale"]
        leaves = {p: scaled(x, by) if trainable(x) else x for p, x in grads._leaves.items()}
        return build_td(leaves, grads._nodes, grads._size, grads._device), all_finite(grads)

    def adjust(self, state: TensorDict, finite: Tensor) -> TensorDict:
        """The next state: a smaller scale after gradients that are not finite, a larger one after many finite steps."""
        check_keys(OP, state, KEYS)
        expect(OP, finite, Tensor, of=" of bools")
        return next_scale(state, finite, self.numbers)

    @property
    def numbers(self) -> Scaling:
        """The settings, as a training step takes them."""
        return Scaling(self.init_scale, self.growth_factor, self.backoff_factor, self.growth_interval)


def scaled(x: Tensor, by: Tensor) -> Tensor:
    """A gradient times a number for each model, rounded once."""
    full = x.to(wide(x.dtype))
    return (full * each(by, [full])[0]).to(x.dtype)
