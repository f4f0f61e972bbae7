"""The norm of all gradients together, and gradients scaled so that it stays below a bound."""

from __future__ import annotations

import torch
from torch import Tensor

from tdc.core.arguments import expect
from tdc.optim.base import DOUBLE, Transform, check_numbers, grouped, trainable, wide
from tdc.optim.foreach import times
from tdc.tensordict.tensordict import TensorDict, build_td


def global_norm(td: TensorDict) -> Tensor:
    """The Euclidean norm of all leaves together, one for each member of the batch.

    Shapes:
        leaves `(*batch_size, *features)` -> `batch_size`.

    Dtypes:
        float32, float64 where a leaf is; integer leaves do not count.

    Args:
        td: gradients or parameters.

    Compile:
        fullgraph; under `vmap` one norm for each member.

    Example:
        >>> global_norm(TensorDict({"w": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)}))
        tensor(5.)

    Source:
        `torch.nn.utils.get_total_norm`.
    """
    expect("optim.global_norm", td, TensorDict)
    leaves = [x for x in td._leaves.values() if trainable(x)]
    if not leaves:
        return torch.zeros(td.batch_size, device=td.device)
    dtype = torch.float64 if any([x.dtype in DOUBLE for x in leaves]) else torch.float32
    k = td.ndim  # where the features are; not -1, for which torch 2.11 traces a norm over one element to a wrong shape
    rows = [x.flatten(k) if x.ndim > k else x.unsqueeze(k) for x in leaves]
    norms = [torch.linalg.vector_norm(x.to(wide(x.dtype)), dim=k) for x in rows]
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, dtype) for n in norms], k), dim=k)


def clip_by_global_norm(max_norm: float) -> Transform:
    """Gradients scaled so that their global norm is at most `max_norm`; smaller ones stay as they are.

    Shapes:
        gradients `(*batch_size, *features)`; each member of the batch is scaled by its own norm.

    Args:
        max_norm: the largest norm, a float or a tensor `batch_size`.

    Returns:
        A `Transform` for `chain`; its state is empty.

    Raises:
        StructureError: `max_norm` less than 0.

    Compile:
        fullgraph, without reading the norm on the host; under `vmap` each member by its own norm.

    Example:
        >>> grads = TensorDict({"w": torch.tensor([3.0, 4.0])})
        >>> clip = clip_by_global_norm(1.0)
        >>> clip.update(grads, clip.init(grads), grads)[0]["w"]
        tensor([0.6000, 0.8000])

    Source:
        `torch.nn.utils.clip_grad_norm_`, with its 1e-6 in the denominator.
    """
    check_numbers("optim.clip_by_global_norm", max_norm=max_norm)

    def update(grads: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        scale = (max_norm / (global_norm(grads) + 1e-6)).clamp(max=1.0)
        leaves = dict(grads._leaves)
        paths = [p for p, g in leaves.items() if trainable(g)]
        for dtype, positions in grouped([leaves[p].dtype for p in paths]):
            wider = [leaves[paths[i]].to(wide(dtype)) for i in positions]
            leaves |= {paths[i]: x.to(dtype) for i, x in zip(positions, times(wider, scale), strict=True)}
        return build_td(leaves, grads._nodes, grads._size, grads._device), state

    return Transform(lambda params: TensorDict({}, params.batch_size), update)
