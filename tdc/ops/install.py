"""Methods and other names of all rows, and functions that call a function; imported once all rows are there.

Other names that torch has for an operation, such as `torch.concat` for `torch.cat`, run the rows of what they stand
for. torch gives both names the same arguments and results, but for the names of arguments.

`torch.utils.checkpoint.checkpoint` and `torch.compiler.nested_compile_region` hand containers on as they are. In a
graph containers are flattened outside of the operator and built again inside (torch 2.11-2.13; torch 2.11 lets only
tensors come out). A region of containers is traced in place: one of tensors alone is compiled once, but torch takes no
closure over a container for it (torch 2.13-2.15).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from tdc.core import pytree
from tdc.core.container import as_method, install_methods
from tdc.core.errors import op_name
from tdc.core.rules import DISPATCH, IMPLS, RULES
from tdc.core.torch_functions import checkpoint_operator, region_operator
from tdc.core.typing import Op
from tdc.ops.two_level import TWO_LEVEL_RULES
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.two_level import TwoLevelTensor
from tdc.tensordict import at as _at  # noqa: F401  # which `td.at` calls
from tdc.tensordict.tensordict import TensorDict


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint` with containers among the arguments, as Dynamo traces it."""
    flat, spec = pytree.tree_flatten(args)

    def inner(*leaves: Any, **named: Any) -> Any:
        return function(*pytree.tree_unflatten(list(leaves), spec), **named)

    return torch.utils.checkpoint.checkpoint(inner, *flat, **kwargs)


def region(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function marked by `torch.compiler.nested_compile_region` with containers, as Dynamo traces it."""
    return function(*args, **kwargs)


CLASSES: dict[str, type] = {
    "tensordict": TensorDict, "nested": NestedTensor, "masked": MaskedBatch, "two_level": TwoLevelTensor,
}  # fmt: skip
ARC = "acos acosh asin asinh atan atanh"
COPIES = "narrow permute select split split_with_sizes squeeze t transpose unbind unsqueeze"
SPECIAL = "digamma erf erfc erfinv exp2 expm1 i0 log1p log_softmax logit logsumexp polygamma round sinc softmax xlogy"
ALIASES: dict[Op, Op] = {
    torch.absolute: torch.abs, torch.negative: torch.neg, torch.fix: torch.trunc, torch.clip: torch.clamp,
    torch.subtract: torch.sub, torch.multiply: torch.mul, torch.divide: torch.div, torch.true_divide: torch.div,
    torch.greater: torch.gt, torch.greater_equal: torch.ge, torch.less: torch.lt, torch.less_equal: torch.le,
    torch.not_equal: torch.ne, torch.arctan2: torch.atan2, torch.swapaxes: torch.transpose,
    torch.swapdims: torch.transpose, torch.moveaxis: torch.movedim, torch.concat: torch.cat,
    torch.concatenate: torch.cat, torch.row_stack: torch.vstack, torch.special.expit: torch.sigmoid,
    torch.special.gammaln: torch.lgamma, torch.special.gammainc: torch.igamma, torch.special.gammaincc: torch.igammac,
    torch.special.psi: torch.digamma, torch.special.multigammaln: torch.mvlgamma,
    torch.celu: F.celu, torch.selu: F.selu, torch.threshold: F.threshold, torch.rrelu: F.rrelu,
    torch.dropout: F.dropout, torch.alpha_dropout: F.alpha_dropout,
    torch.unsafe_chunk: torch.chunk, torch.unsafe_split: torch.split,
    torch.unsafe_split_with_sizes: torch.split_with_sizes,
    **{getattr(torch, f"{name}_copy"): getattr(torch, name, getattr(torch.Tensor, name)) for name in COPIES.split()},
    torch.linalg.matmul: torch.matmul, torch.ger: torch.outer, torch.det: torch.linalg.det,
    torch.slogdet: torch.linalg.slogdet, torch.inverse: torch.linalg.inv, torch.pinverse: torch.linalg.pinv,
    torch.matrix_power: torch.linalg.matrix_power, torch.matrix_exp: torch.linalg.matrix_exp,
    torch.orgqr: torch.linalg.householder_product,
    **{getattr(torch, f"arc{name[1:]}"): getattr(torch, name) for name in ARC.split()},
    **{getattr(torch.special, name): getattr(torch, name) for name in SPECIAL.split()},
}  # fmt: skip

for _alias, _op in ALIASES.items():
    _name = op_name(_alias)
    _method = getattr(torch.Tensor, _name, None)
    for _kind, _table in DISPATCH.items():
        if _op in _table:
            _table.setdefault(_alias, _table[_op])
            if _method is not None and _method not in _table:
                _table[_method] = _table[_op]
                setattr(CLASSES[_kind], _name, as_method(_alias, _name))
for _kind in DISPATCH:
    DISPATCH[_kind][region_operator] = f"{_kind}_region"
    IMPLS[f"{_kind}_region"] = region
    DISPATCH[_kind][checkpoint_operator] = f"{_kind}_checkpoint"
    IMPLS[f"{_kind}_checkpoint"] = checkpoint
install_methods(CLASSES, (*RULES, *TWO_LEVEL_RULES))
