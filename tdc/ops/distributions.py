"""Distributions of torch over ragged parameters: those of packed values, whose results are ragged batches again.

    d = tdc.ops.distribution(Categorical, logits=x)     x (B, -1, K)
    d.sample(), d.log_prob(y), d.entropy()              (B, -1)
    d.sample((5,))                                      (5, B, -1)
    kl_divergence(d, other)                             (B, -1)

torch's distributions draw by shape, which a ragged batch does not have; packed values have one. In a padded batch
every position of padding takes the parameters and values of one real position, so that they stay valid and finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, kl_divergence, register_kl

from tdc.core.dynamo import is_zero
from tdc.core.errors import CallError, DtypeError, ShapeError, StructureError, describe, first_line, message
from tdc.core.typing import OpName
from tdc.layout.structure import require_same
from tdc.ops.elementwise.pointwise import packed_operand
from tdc.ragged.masked import MaskedBatch, build_masked, fitted_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import Ragged, data_of, is_ragged


def distribution(make: Callable[..., Distribution], *args: Any, **kwargs: Any) -> RaggedDistribution:
    """A distribution of torch whose parameters are ragged batches.

    Args:
        make: a class of `torch.distributions`, or a function of the parameters that returns a distribution.
        args, kwargs: its arguments. Batches share their lengths; dense tensors broadcast against them.

    Shapes:
        Parameters `(B, -1, ...)`: the batch and one ragged dim come first, and are batch dims of the distribution.

    Raises:
        DtypeError: no ragged batch among the arguments.
        ShapeError: other dims in front, or a distribution that takes examples or positions for one event.
        StructureError: parameters of different lengths, or packed beside padded.
        CallError: torch refuses the parameters; its words are the hint.

    Compile:
        One graph for all lengths. `torch.compile` turns the checks of torch off, as it does for dense distributions.

    Example:
        >>> from torch.distributions import Normal
        >>> from tdc.ragged.pack import pack
        >>> d = distribution(Normal, pack([torch.zeros(2), torch.zeros(1)]), 1.0)
        >>> d.rsample().shape, d.log_prob(pack([torch.zeros(2), torch.zeros(1)])).values
        (torch.Size([2, -1]), tensor([-0.9189, -0.9189, -0.9189]))
    """
    batches = [a for a in (*args, *kwargs.values()) if is_ragged(a)]
    if not callable(make):
        got, hint = describe(make), "tdc.ops.distribution(torch.distributions.Normal, mean, scale)"
        raise DtypeError(message("distribution", "a class of torch.distributions first", got, hint=hint))
    if not batches:
        hint = "torch's own class takes dense parameters"
        raise DtypeError(message("distribution", "a ragged batch among the parameters", "none", hint=hint))
    like = batches[0]
    for x in batches:
        if (x._batch_dim, x.ragged_dims) != (0, (1,)):
            hint = "x.transpose(1, 2), or x.flatten(1, 2) of several ragged dims"
            raise ShapeError(message("distribution", "parameters (B, -1, ...)", describe(x), hint=hint))
        like = x if x.ndim > like.ndim else like
    own = [parameter(a, like) for a in args]
    named = {name: parameter(a, like) for name, a in kwargs.items()}
    if isinstance(make, type) and is_zero(data_of(like).numel()):  # of which the checks cannot take the dims (2.13)
        named.setdefault("validate_args", False)
    inner = called("distribution", make, *own, **named)
    lead = 1 if isinstance(like, NestedTensor) else 2
    if len(inner.batch_shape) < lead:
        got = f"batch_shape {tuple(inner.batch_shape)} of packed parameters"
        hint = "choices are a static dim; F.gumbel_softmax(x, hard=True, dim=1) chooses among positions"
        raise ShapeError(message("distribution", "events within each position", got, hint=hint))
    return RaggedDistribution(inner, like)


def called(op: OpName, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of torch, whose ValueError is one of the library."""
    try:
        return run(*args, **kwargs)
    except ValueError as error:
        text = first_line(error)
    raise CallError(message(op, "parameters and values that torch takes", "others", hint=text))


def parameter(a: Any, like: Any) -> Any:
    """A parameter as it lies beside the storage of the widest one."""
    if isinstance(like, MaskedBatch):
        return filled_from(a, like)
    if isinstance(a, NestedTensor):
        require_same(like._structure, a._structure, "distribution")
        return a._values
    if isinstance(a, MaskedBatch):
        raise other_kind(like, a)
    op: Any = "distribution"
    return packed_operand(a, like, op) if isinstance(a, Tensor) and a.ndim == like.ndim else a


def other_kind(like: Any, a: Any) -> StructureError:
    """The error for a packed batch beside a padded one."""
    got = f"{describe(like)} and {describe(a)}"
    return StructureError(message("distribution", "batches of one kind", got, hint="x.to_packed(), or x.to_padded()"))


def filled_from(a: Any, like: MaskedBatch) -> Any:
    """Data of a padded batch, or a tensor, whose padding takes the elements at the first real position; 1 of none."""
    if isinstance(a, NestedTensor):
        raise other_kind(like, a)
    if not isinstance(a, MaskedBatch):
        return a
    k, a = a._batch_dim, a if a._batch_dim else fitted_masked("distribution", like, a)
    data, real = a.data.movedim((k, k + 1), (0, 1)), like.lengths[:, 0]
    row = (real > 0).to(torch.uint8).argmax(0)
    first = data[:, 0].index_select(0, row[None])[:, None] if data.shape[1] else data
    inside = torch.arange(data.shape[1], device=data.device) < real[:, None]
    inside = inside.view(*inside.shape, *[1] * (data.ndim - 2))
    ones = torch.ones_like(first)
    filler = torch.where((real > 0).any(), first.detach(), ones)
    return torch.where(inside, data, filler).movedim((0, 1), (k, k + 1))


class RaggedDistribution(Distribution):
    """A distribution over ragged parameters, see `tdc.ops.distribution`.

    Attributes:
        inner: torch's distribution, over packed values or the data of a rectangle.
        like: a batch with the lengths of all results.
    """

    arg_constraints: Any = {}  # noqa: RUF012

    def __init__(self, inner: Distribution, like: Ragged) -> None:
        self.inner, self.like = inner, like
        self.has_rsample = inner.has_rsample
        super().__init__(inner.batch_shape, inner.event_shape, validate_args=False)

    def __repr__(self) -> str:
        return f"{type(self.inner).__name__} over {describe(self.like)}"

    @property
    def support(self) -> Any:
        """The constraint that values satisfy."""
        return self.inner.support

    def around(self, out: Tensor, more: int = 0) -> Any:
        """A result of torch as a batch, behind so many dims of samples."""
        x = self.like
        if isinstance(x, NestedTensor):
            return build_nested(x._structure.moved(more, more), out)
        batch = build_masked(out, x.lengths, (more + 1,), more)
        return batch.with_data(batch.filled(0))

    def storage(self, value: Any) -> Any:
        """Values beside the parameters: of a batch of the same lengths, or for all positions."""
        x = self.like
        if isinstance(x, MaskedBatch) or not isinstance(value, NestedTensor):
            if is_ragged(value) and type(value) is not type(x):
                raise other_kind(x, value)
            return filled_from(value, x) if isinstance(x, MaskedBatch) else value
        k = value._batch_dim
        require_same(x._structure, value._structure.moved(0, 0), "distribution")
        if value._structure.packed_dim != k:
            hint = "d.sample() has them"
            raise ShapeError(message("log_prob", "values (..., B, -1, ...)", describe(value), hint=hint))
        return value._values

    def of_value(self, name: str, value: Any) -> Any:
        """A density or the like of a value."""
        more = value._batch_dim if is_ragged(value) else 0
        return self.around(called(name, getattr(self.inner, name), self.storage(value)), more)

    def sample(self, sample_shape: Any = ()) -> Any:
        """Draw `(*sample_shape, B, -1, *event)`, without gradients."""
        return self.around(self.inner.sample(torch.Size(sample_shape)), len(sample_shape))

    def rsample(self, sample_shape: Any = ()) -> Any:
        """Draw with gradients for the parameters."""
        return self.around(self.inner.rsample(torch.Size(sample_shape)), len(sample_shape))

    def log_prob(self, value: Any) -> Any:
        """The logarithm of the density at a value, `(B, -1, *batch)`."""
        return self.of_value("log_prob", value)

    def cdf(self, value: Any) -> Any:
        """The probability of no more than a value."""
        return self.of_value("cdf", value)

    def icdf(self, value: Any) -> Any:
        """The value below which a probability lies."""
        return self.of_value("icdf", value)

    def entropy(self) -> Any:
        """The entropy at each position, `(B, -1, *batch)`."""
        return self.around(self.inner.entropy())

    @property
    def mean(self) -> Any:
        """The mean at each position."""
        return self.around(self.inner.mean)

    @property
    def mode(self) -> Any:
        """The most probable value at each position."""
        return self.around(self.inner.mode)

    @property
    def variance(self) -> Any:
        """The variance at each position."""
        return self.around(self.inner.variance)


@register_kl(RaggedDistribution, RaggedDistribution)
def kl_ragged(p: RaggedDistribution, q: RaggedDistribution) -> Any:
    """The divergence of two distributions of the same lengths, at each position."""
    x: Any = p.like
    y: Any = q.like
    if type(x) is not type(y):
        raise other_kind(x, y)
    if isinstance(x, NestedTensor):
        require_same(x._structure, y._structure, "kl_divergence")
    else:
        fitted_masked("kl_divergence", x, y)
    return p.around(kl_divergence(p.inner, q.inner))
