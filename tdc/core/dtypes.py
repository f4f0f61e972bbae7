"""The dtypes of sums, and operations that refuse integers.

    half precision    sums are carried in float32 and rounded once, as inside torch's kernels
    integers          refused by operations that divide or take a root, as torch does
    torch.autocast    knows torch's operations; ours ask it for the dtype

Invariant: results and gradients have the dtype that torch gives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.errors import DtypeError, describe, message
from tdc.core.keys import show
from tdc.core.typing import Op, OpName

X = TypeVar("X")
Out = TypeVar("Out")
HALF = (torch.float16, torch.bfloat16)


def widened(x: X) -> X:
    """A tensor or batch to be summed: half precision as float32."""
    any_x: Any = x
    return any_x.to(torch.float32) if any_x.dtype in HALF else x


def rounded_once(run: Callable[[Any], Out], x: Any, dtype: torch.dtype | None = None) -> Out:
    """`run(x)`, for half precision in float32 and rounded at the end.

    Args:
        dtype: what torch's functions mean by it: that of x before, and of the result.
    """
    x = x if dtype is None else x.to(dtype)
    found: Any = run(widened(x))
    return found if dtype is None and x.dtype not in HALF else found.to(x.dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The real dtype in which sums of a dtype are carried: float64 for double precision, float32 for all others."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def as_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Tensors or batches as `torch.autocast`, where it is on, hands them to a product; it knows none of ours."""
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple([t.to(dtype) if t.dtype in (torch.float32, *HALF) else t for t in tensors])


def under_autocast(op: Op, impl: Op) -> Op:
    """`impl` in the dtype of torch's `op` where `torch.autocast` is on."""
    policies = [(device, policy) for (device, policy), ops in AUTOCAST.items() if op in ops]
    if not policies:
        return impl

    @wraps(impl)
    def run(*args: Any, **kwargs: Any) -> Any:
        own = [*args, *kwargs.values()][0].device.type
        on = [policy for device, policy in policies if own == device and torch.is_autocast_enabled(device)]
        if on == [AS_GIVEN]:
            with torch.autocast(own, enabled=False):
                return impl(*args, **kwargs)
        if on:
            dtype = torch.float32 if on == [WIDE] else torch.get_autocast_dtype(own)
            cast = HALF if on == [WIDE] else (torch.float32, *HALF)
            args = tuple([a.to(dtype) if getattr(a, "dtype", None) in cast else a for a in args])
            kwargs = {k: a.to(dtype) if getattr(a, "dtype", None) in cast else a for k, a in kwargs.items()}
        return impl(*args, **kwargs)

    return run


def of_examples(op: Op) -> Op:
    """Ignore the memory format of an example, which packed values lack and padded ones have otherwise."""

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("memory_format") in CHANNELS_LAST:
            kwargs.pop("memory_format")
        return op(x, *args, **kwargs)  # type: ignore[no-any-return]  # of torch

    return run


def floating(op: Op, impl: Op) -> Op:
    """`impl` where torch's `op` takes integers; one that refuses them where it does not."""
    if op not in FLOATING:
        return impl
    count = FLOATING[op]

    @wraps(impl)
    def run(*args: Any, **kwargs: Any) -> Any:
        own = args[0].dtype if args else None  # None of a TensorDict whose leaves differ, too
        if own is None or not own.is_floating_point or kwargs.get("dtype") is not None:
            check([*args, *kwargs.values()])
        return impl(*args, **kwargs)

    def check(given: list[Any]) -> None:
        wanted = [a for a in given if isinstance(a, torch.dtype)]
        if not wanted:
            refuse_integers(op, *given[:count])
        elif not is_floating(wanted[0]):
            hint = "dtype=torch.float32, or x.float() before"
            raise DtypeError(message(op, "a floating point dtype", f"dtype={wanted[0]}", hint=hint))

    return run


def refuse_integers(op: OpName, *operands: Any) -> None:
    """Refuse operands that are all integers or bools, and a TensorDict with such leaves, all of which are named."""
    if hasattr(operands[0], "_leaves"):
        leaves = {p: getattr(x, "dtype", None) for p, x in operands[0]._leaves.items()}
        wrong = [p for p, dtype in leaves.items() if isinstance(dtype, torch.dtype) and not is_floating(dtype)]
        if wrong:
            at = {show(p): describe(operands[0]._leaves[p]) for p in wrong}
            raise DtypeError(message(op, "floating point leaves", f"{len(at)} of integers", at, "td.float()"))
    elif not any([is_floating(x.dtype) for x in operands]):
        raise DtypeError(message(op, "a floating point dtype", describe(operands[0]), hint="x.float()"))


def in_numpy(dtype: torch.dtype) -> bool:
    """True if numpy has a dtype: it lacks bfloat16, those of 8 bits and less, and half complex ones."""
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:
        return False
    return True


def is_floating(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def is_inexact(x: Any) -> bool:
    """True for floating-point and complex tensors."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)
untyped: Any = torch  # stubs leave types of linalg open
WIDE, NARROW, AS_GIVEN = "float32", "half precision", "without autocast"
NARROWED: tuple[Op, ...] = (torch.addmm, torch.addbmm, torch.baddbmm, untyped.linalg.vecdot, F.prelu)
AUTOCAST: dict[tuple[str, str], tuple[Op, ...]] = {  # operations whose rules do not run them on the values
    ("cpu", WIDE): (
        torch.prod, torch.quantile, torch.nanquantile, F.avg_pool3d, F.max_pool3d, F.adaptive_avg_pool3d,
        F.adaptive_max_pool3d, F.multilabel_margin_loss,
    ),
    ("cpu", NARROW): NARROWED,
    ("cpu", AS_GIVEN): (torch.mv, torch.addmv, torch.dot, torch.vdot),
    ("cuda", WIDE): (
        torch.prod, torch.sum, torch.cumsum, torch.cumprod, torch.softmax, torch.log_softmax, torch.logsumexp,
        F.multilabel_margin_loss,
    ),
    ("cuda", NARROW): (*NARROWED, torch.addmv, torch.addr),
    ("cuda", AS_GIVEN): (torch.dot, torch.vdot),
}  # fmt: skip
FLOATING: dict[Op, int] = {
    **dict.fromkeys(
        (
            torch.mean, torch.nanmean, torch.std, torch.var, torch.std_mean, torch.var_mean, untyped.norm,
            untyped.linalg.norm, untyped.linalg.vector_norm, torch.softmax, torch.log_softmax, F.softmin, F.normalize,
            torch.quantile, torch.nanquantile, torch.logcumsumexp, F.layer_norm, F.rms_norm, F.group_norm,
            F.instance_norm, F.batch_norm, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
        ),
        1,
    ),
    **dict.fromkeys((torch.dist, F.cosine_similarity, torch.cdist), 2),
}  # fmt: skip  # how many operands there are; one that is floating point makes the others so
