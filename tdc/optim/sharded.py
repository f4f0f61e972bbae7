"""Optimiser state sharded over processes, each of which updates its own part of the parameters.

    parameters      w (3, 2), b (3,)      w w w w w w b b b      one vector for each dtype
    process 0       w w w w w             its state, its new numbers
    process 1       w b b b               its state, its new numbers
    all             w w w w w w b b b     gathered, and cut into w and b again

All processes have all parameters and the same gradients. One `torch.distributed.all_gather` for each dtype exchanges
the new parameters. Vectors of the state are DTensors of the length of the whole, so that checkpoints shard them anew.

Invariant: a step equals that of the optimiser alone, number for number, since it is elementwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tdc.compile.shards import Form, Shards
from tdc.core.dtensor import group_from, is_dtensor, local_of, with_local
from tdc.core.dynamo import under_transform
from tdc.core.errors import ShapeError, StructureError, UnsupportedError, message, refuse_wrong
from tdc.core.keys import show
from tdc.optim.checks import check_grads, check_keys, check_td, check_transform
from tdc.optim.transform import Optimizer, around
from tdc.tensordict.tensordict import TensorDict

OP = "optim.sharded"


def sharded(optimizer: Optimizer, process_group: Any) -> Optimizer:
    """Shard the state of an optimiser: each process of a group has that of its own part of the parameters.

    Gradients and parameters are the same in all processes, as `train_step(process_group=)` makes them.

    Shapes:
        in place of the moments of one dtype, n numbers in all, the state has a DTensor `(n,)`, of which each process
        has `ceil(n / processes)` numbers, the last ones fewer.

    Args:
        optimizer: elementwise, as `adamw`, `sgd`, `lion`. Put what reads norms or keys outside:
            `chain(clip_by_global_norm(1.0), sharded(adamw(1e-3), group))`, or `partition` of sharded parts.
        process_group: such as `torch.distributed.group.WORLD`, or a `DeviceMesh` with one dim.

    Returns:
        An `Optimizer`; its state is `{"inner": …}`. `tdc.io.dcp_save` saves it, and `dcp_load` shards it over as many
        processes as there are then. The average of `schedule_free_adamw` is sharded, too: evaluate with
        `train_step(average=ema())`.

    Raises:
        DtypeError: not an optimiser, or not a process group.
        StructureError: an optimiser that is not elementwise; in `update`, parameters without a gradient.
        ShapeError: parameters with batch dims, of an ensemble.

    Compile:
        fullgraph; the exchange is part of the graph. Refused under `vmap`.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from tdc.optim import adamw
        >>> store = dist.HashStore()  # with torchrun, init_process_group() alone
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> opt = sharded(adamw(0.1), dist.group.WORLD)
        >>> params = TensorDict({"w": torch.ones(3, 2), "b": torch.ones(3)})
        >>> params, state = opt.update(params, opt.init(params), params)
        >>> state["inner", "mean", "float32"].full_tensor(), params["b"].shape
        (tensor([0.1000, 0.1000, 0.1000, 0.1000, 0.1000, 0.1000, 0.1000, 0.1000, 0.1000]), torch.Size([3]))
        >>> dist.destroy_process_group()

    Source:
        Rajbhandari et al., ZeRO, 2020, stage 1; `torch.distributed.optim.ZeroRedundancyOptimizer`.
    """
    check_transform(OP, optimizer, optimizer=True)
    if not optimizer.elementwise:
        hint = "put it outside: chain(clip_by_global_norm(1.0), sharded(adamw(1e-3), group))"
        got = "one that looks at norms, shapes or keys, or is sharded already"
        raise StructureError(message(OP, "an optimizer that treats each number by itself", got, hint=hint))
    group = group_from(OP, process_group)
    parts = InParts(Shards(optimizer, group, None))
    return around(optimizer, parts.init, parts.update, process_group=group)


@dataclass(frozen=True)
class InParts:
    """`init` and `update` of a sharded optimiser."""

    shards: Shards

    def init(self, params: TensorDict) -> TensorDict:
        check_td("optim.init", params)
        self.form_of(params)
        return TensorDict({"inner": self.shards.init(self.shards.optimizer.init, params)})

    def update(self, grads: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        check_td(OP, grads, params)
        check_keys(OP, state, ("inner",))
        check_grads(OP, grads, params)
        form = self.form_of(params)
        lacking = [show(p) for p in form.shapes if p not in grads._leaves]
        hint = "gradients of all of them, or partition({'frozen.*': None, '*': sharded(...)})"
        refuse_wrong(StructureError, OP, "a gradient for each parameter", lacking, "without one", hint)
        if under_transform():
            raise UnsupportedError(message(OP, "no vmap around processes", "one", hint="train the models one by one"))
        before = state["inner"]
        new, inner = self.shards.update(self.shards.part(grads, form), before.apply(local_of), params)
        inner = inner.apply(lambda x, old: with_local(x, old) if is_dtensor(old) else x, before)
        return new, TensorDict({"inner": inner})

    def form_of(self, params: TensorDict) -> Form:
        """The form of the parameters of one model on one device."""
        if params.ndim:
            hint = "one model in each process, or the optimizer without sharded"
            raise ShapeError(message(OP, "parameters without batch dims", f"{params.ndim} of them", hint=hint))
        form = self.shards.form_of(params)
        devices = [params._leaves[p].device for p in form.shapes]
        elsewhere = [f"{show(p)}: {d}" for p, d in zip(form.shapes, devices, strict=True) if d != devices[0]]
        hint = "partition of sharded parts, one for each device"
        refuse_wrong(StructureError, OP, "parameters on one device", elsewhere, "on others", hint)
        return form
