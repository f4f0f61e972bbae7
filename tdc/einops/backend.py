"""The backend by which einops works on batches: `rearrange`, `reduce`, `repeat`, `pack`, `unpack` and `einsum`.

einops asks a backend for the shape of its operand, computes the sizes of the result from it and calls reshape,
permute, reductions, expand and cat. Those of torch are operations of batches, too, so all but the shape and the reshape
of a ragged batch is einops' own backend for torch.
"""

from __future__ import annotations

from typing import Any

import torch

from tdc.core.container import Container
from tdc.core.extras import extra
from tdc.einops.axes import axes_of, reshaped
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import is_ragged
from tdc.tensordict.tensordict import TensorDict

NAME = "tdc"  # by which einops looks for a loaded module


class Batches:
    """What of a backend is not as for tensors."""

    framework_name = NAME

    def is_appropriate_type(self, tensor: Any) -> bool:
        """Whether it is a batch of this library."""
        return isinstance(tensor, Container)

    def shape(self, x: Any) -> tuple[Any, ...]:
        """Sizes to compute with: of a TensorDict its batch size, of a ragged batch with an `Axis` for what varies."""
        return axes_of(x) if is_ragged(x) else tuple(x.shape)

    def reshape(self, x: Any, shape: Any) -> Any:
        """A batch in another shape, whose sizes are products of those of `shape`."""
        return reshaped(x, list(shape)) if is_ragged(x) else x.reshape(tuple(shape))

    def is_float_type(self, x: Any) -> bool:
        """Whether there are means: of a TensorDict its leaves say so."""
        return isinstance(x, TensorDict) or x.dtype.is_floating_point


def register() -> None:
    """Make einops take TensorDict, NestedTensor and MaskedBatch, in this process; a second call does nothing.

    Raises:
        UnsupportedError: einops is not installed.

    Compile:
        `rearrange`, `reduce`, `repeat`, `pack` and `einsum` are traced in one piece, one graph for all lengths.

    Example:
        >>> import einops, tdc, tdc.einops
        >>> tdc.einops.register()
        >>> x = tdc.pack([torch.ones(2, 6), torch.ones(3, 6)])
        >>> einops.rearrange(x, "b t (h d) -> b h t d", h=2).shape, einops.reduce(x, "b t d -> b d", "mean").shape
        (torch.Size([2, 2, -1, 3]), torch.Size([2, 6]))

    Source:
        The functions of einops, https://einops.rocks.
    """
    backends: Any = extra("einops.register", "einops._backends", "torch-tdc[einops]")
    if NAME in [backend.framework_name for backend in backends.TorchBackend.__subclasses__()]:
        return

    class Backend(Batches, backends.TorchBackend):
        """Found by einops among the subclasses of its own."""

    for x in (
        NestedTensor(torch.empty(0), torch.zeros(1, dtype=torch.int64)),
        MaskedBatch(torch.empty(0, 0), torch.zeros(0, dtype=torch.int64)),
        TensorDict(),
    ):
        backends.get_backend(x)  # einops remembers the backend of a type, so that a graph need not look for it
