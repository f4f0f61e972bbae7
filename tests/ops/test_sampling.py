"""Distributions over ragged parameters, filters of ragged logits and `F.gumbel_softmax`, against each example alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Counter
from test_distributions import MAKES as DENSE
from texts import Texts
from torch import Tensor, distributions
from torch.distributions import kl_divergence
from torch.testing import assert_close

import tdc
from tdc import DtypeError, ShapeError, UnsupportedError
from tdc.compile import counted
from tdc.ops import distribution, top_k_top_p_filtering

ROWS = [torch.randn(n, 5, generator=torch.Generator().manual_seed(n)) for n in (3, 0, 4)]
D: Any = distributions
MAKES: dict[str, Any] = {
    **DENSE,
    "probabilities": lambda x, **options: D.Categorical(probs=x.softmax(-1), **options),
    "Dirichlet": lambda x, **options: D.Dirichlet(x.exp(), **options),
    "Gamma": lambda x, **options: D.Gamma(x.exp(), 2.0, **options),
    "Independent": lambda x, **options: D.Independent(D.Normal(x, x.exp(), **options), 1, **options),
}


def batch(rows: list[Tensor], padded: bool) -> Any:
    x = tdc.pack(rows)
    return x.to_padded(float("nan")) if padded else x


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("name", MAKES)
def test_distributions_are_those_of_each_example(name: str, checks: bool, padded: bool):
    make, x = MAKES[name], batch(ROWS, padded)
    d, other = [distribution(make, y, validate_args=checks) for y in (x, x + 1)]
    one, several = d.sample(), d.sample((2,))
    assert type(one) is type(several) is type(x)
    results = [d.log_prob(one), d.entropy(), kl_divergence(d, other), d.mean, d.variance]
    assert [len(r[1]) for r in results] == [0] * 5
    for n in (0, 2):  # torch has no sum of no events
        row = ROWS[n]
        alone, beyond = make(row, validate_args=False), make(row + 1, validate_args=False)
        want = [alone.log_prob(one[n]), alone.entropy(), kl_divergence(alone, beyond), alone.mean, alone.variance]
        assert_close([r[n] for r in results], want, equal_nan=True)
        assert_close(d.log_prob(several).unbind(1)[n], alone.log_prob(several.unbind(1)[n]))


@pytest.mark.parametrize("padded", [False, True])
def test_draws_with_gradients(padded: bool):
    x = batch(ROWS, padded)
    data = (x.data if padded else x.values).requires_grad_()
    d = distribution(D.Normal, x.with_data(data) if padded else x.with_values(data), 2.0)
    d.rsample().sum().backward()
    want = batch([torch.ones_like(r) for r in ROWS], padded)
    assert_close(data.grad, want.filled(0) if padded else want.values)


@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_graph_for_all_lengths(padded: bool):
    count, some = Counter(), distribution(D.Categorical, logits=batch(ROWS, padded))
    kl_divergence(some, some)  # torch keeps which function serves two classes, of which a graph holds a guard (2.13)

    @torch.compile(fullgraph=True, backend=count)
    def step(x: Any, y: Any) -> Any:
        d, normal = distribution(D.Categorical, logits=x), distribution(D.Normal, x, 1.0)
        divergence = kl_divergence(d, distribution(D.Categorical, logits=2 * x))
        return d.sample(), normal.rsample(), d.log_prob(y), d.entropy(), divergence

    for lengths in ((3, 0, 4), (1, 7), (4, 4, 4, 4)):
        rows = [torch.randn(n, 5) for n in lengths]
        x = batch(rows, padded)
        drawn, latent, *found = step(x, x.argmax(-1))
        assert (drawn.ndim, latent.ndim) == (2, 3)
        for n, row in enumerate(rows):
            alone = D.Categorical(logits=row, validate_args=False)
            beyond = D.Categorical(logits=2 * row, validate_args=False)
            want = [alone.log_prob(row.argmax(-1)), alone.entropy(), kl_divergence(alone, beyond)]
            assert_close([f[n] for f in found], want)
    assert count.graphs == 1


def filtered(logits: Tensor, k: int, p: float, least: int) -> Tensor:
    """The filter as the field has it, for one row."""
    logits = logits.clone()
    if not logits.shape[-1]:
        return logits
    if k:
        logits[logits < logits.topk(min(max(k, least), logits.shape[-1]))[0][..., -1, None]] = -math.inf
    if p < 1:
        ordered, index = logits.sort(descending=True, stable=True)
        drop = ordered.softmax(-1).cumsum(-1) > p
        drop = torch.cat([torch.zeros_like(drop[..., :1]), drop[..., :-1]], -1)
        drop[..., :least] = False
        logits[drop.scatter(-1, index, drop)] = -math.inf
    return logits


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", [(), (5,)])
@pytest.mark.parametrize("options", [(2, 1.0, 1), (0, 0.6, 1), (3, 0.5, 2), (9, 0.9, 1)])
def test_filters_are_those_of_each_row(options: Any, shape: tuple[int, ...], padded: bool):
    rows = [torch.randn(n, *shape) for n in (3, 0, 4, 12)]
    k, p, least = options
    got = top_k_top_p_filtering(batch(rows, padded), k, p, min_tokens_to_keep=least)
    assert_close(list(got.unbind()), [filtered(r, k, p, least) for r in rows])


@pytest.mark.slow
def test_filters_in_one_graph_with_gradients():
    count = Counter("eager")

    @torch.compile(fullgraph=True, backend=count)
    def compiled(x: Any) -> Any:
        return top_k_top_p_filtering(x, 3, 0.9, filter_value=0.0)

    for lengths in ((3, 0, 4), (1, 7), (4, 4, 4, 4)):
        x = tdc.pack([torch.randn(n) for n in lengths])
        values = x.values.clone().requires_grad_()
        got = compiled(x.with_values(values))
        want = [filtered(r, 3, 0.9, 1) for r in x.unbind()]
        assert_close(list(got.unbind()), [torch.where(r.isfinite(), r, 0) for r in want])
        (grad,) = torch.autograd.grad(got.sum(), values)
        assert_close(grad, torch.cat(want).isfinite().float())
    assert count.graphs == 1


def test_filters_in_half_precision():
    rows = [torch.randn(n, 5).bfloat16() for n in (3, 2)]
    got = top_k_top_p_filtering(tdc.pack(rows), 3)
    assert_close(list(got.unbind()), [filtered(r, 3, 1.0, 1) for r in rows])


X = tdc.pack([torch.zeros(2, 3), torch.zeros(1, 3)])


class TestTexts(Texts):
    def test_parameters(self):
        self.says(lambda: distribution(D.Normal, torch.zeros(2), 1.0), """\
DtypeError
tdc.distribution: expected a ragged batch among the parameters, got none
hint: torch's own class takes dense parameters"""
        )  # fmt: skip
        self.says(lambda: distribution(D.Normal, X, X.to_padded()), """\
StructureError
tdc.distribution: expected batches of one kind, got NestedTensor float32[2, -1, 3] and MaskedBatch float32[2, 2, 3]
hint: x.to_packed(), or x.to_padded()"""
        )  # fmt: skip
        self.says(lambda: distribution(D.Normal, X.transpose(1, 2), 1.0), """\
ShapeError
tdc.distribution: expected parameters (B, -1, ...), got NestedTensor float32[2, 3, -1]
hint: x.transpose(1, 2), or x.flatten(1, 2) of several ragged dims"""
        )  # fmt: skip
        self.says(lambda: distribution(D.Categorical, logits=X[..., 0]), """\
ShapeError
tdc.distribution: expected events within each position, got batch_shape () of packed parameters
hint: choices are a static dim; F.gumbel_softmax(x, hard=True, dim=1) chooses among positions"""
        )  # fmt: skip

    def test_filters(self):
        self.says(lambda: top_k_top_p_filtering(X, -1), """\
ShapeError
tdc.top_k_top_p_filtering: expected top_k of 0 or more, top_p in [0, 1], got top_k -1, top_p 1.0
hint: top_k=50, top_p=0.9; 0 and 1 keep all"""
        )  # fmt: skip

    def test_what_torch_refuses(self):
        with pytest.raises(tdc.CallError, match="hint: Expected parameter scale"):
            distribution(D.Normal, X, -1.0, validate_args=True)
        with pytest.raises(tdc.StructureError, match="one ragged structure"):
            distribution(D.Normal, X, 1.0).log_prob(tdc.pack([torch.zeros(1, 3), torch.zeros(2, 3)]))


# -- gumbel_softmax: the numbers torch draws, their distribution, gradients, and wrong inputs


EACH = (3, 0, 5, 1)


def draw_rows(*features: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return tdc.pack([torch.randn(n, *features) for n in EACH])


def noise(values: Tensor, seed: int = 1) -> Tensor:
    """The numbers that torch adds to logits."""
    torch.manual_seed(seed)
    return -torch.empty_like(values).exponential_().log()


def seeded(x: Any, *args: Any, seed: int = 1, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return F.gumbel_softmax(x, *args, **kwargs)


@pytest.mark.parametrize("hard", [False, True])
def test_static_dim_is_torch_of_packed_values(hard: bool):
    x = draw_rows(4).requires_grad_()
    got = seeded(x, 0.5, hard, dim=-1)
    values = x.values.detach().requires_grad_()
    want = seeded(values, 0.5, hard, dim=-1)
    assert torch.equal(got.values, want)
    weight = torch.randn(want.shape)
    (got.values * weight).sum().backward()
    (want * weight).sum().backward()
    assert torch.equal(x.values.grad, values.grad)


@pytest.mark.parametrize("hard", [False, True])
def test_ragged_dim_is_a_softmax_of_each_row(hard: bool):
    x = draw_rows(2).requires_grad_()
    got = seeded(x, 0.7, hard, dim=1)
    noisy = x.with_values((x.values + noise(x.values)) / 0.7)
    soft = [row.softmax(0) for row in noisy.unbind()]
    weight = torch.randn(x.values.shape)
    grads = torch.autograd.grad((torch.cat(soft) * weight).sum(), x.values)
    assert torch.equal(torch.autograd.grad((got.values * weight).sum(), x.values)[0].isfinite(), grads[0].isfinite())
    torch.testing.assert_close(
        torch.autograd.grad((seeded(x, 0.7, hard, dim=1).values * weight).sum(), x.values), grads
    )
    for row, part in zip(got.unbind(), soft, strict=True):
        place = F.one_hot(part.argmax(0), len(part)).t().float() if hard and len(part) else part
        torch.testing.assert_close(row, place)


@pytest.mark.parametrize("dim", [1, 2])
def test_padding_gets_no_share_and_spoils_no_gradient(dim: int):
    x = draw_rows(3).to_padded(fill=float("nan")).requires_grad_()
    for hard in (False, True):
        out = seeded(x, hard=hard, dim=dim)
        rows = [row for row in out.unbind() if len(row)]
        torch.testing.assert_close(rows[0].sum(dim - 1), torch.ones(rows[0].sum(dim - 1).shape))
        (grad,) = torch.autograd.grad(torch.stack([row.square().sum() for row in rows]).sum(), x.data)
        assert grad.masked_select(x.mask).isfinite().all()
        assert dim == 2 or (grad.masked_select(~x.mask) == 0).all()


@pytest.mark.cases(1)
@pytest.mark.parametrize("padded", [False, True])
def test_each_row_is_drawn_from_its_own_softmax(padded: bool):
    rows = [torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5, -0.5])]
    x = tdc.pack(rows * 4000)
    x = x.to_padded() if padded else x
    hits = seeded(x, hard=True, dim=1).unbind()
    for i, row in enumerate(rows):
        share = torch.stack(hits[i::2]).mean(0)
        torch.testing.assert_close(share, row.softmax(0), atol=0.03, rtol=0)


def test_one_graph_draws_anew_in_each_call():
    fn = counted(lambda x: F.gumbel_softmax(x, 0.5, True, dim=1), backend="aot_eager")
    x = draw_rows()
    assert any([not torch.equal(fn(x).values, fn(x).values) for _ in range(20)])
    for other in (tdc.pack([torch.randn(n) for n in (4, 2)]), tdc.pack([torch.randn(n) for n in (7, 1, 6)])):
        torch.testing.assert_close(fn(other).sum(1), torch.ones(len(other)))
    assert (fn.counts.graphs, fn.counts.compiles) == (1, 1)


def test_tensordict_along_batch_dims():
    td = tdc.TensorDict({"a": torch.randn(2, 3, 4)}, [2, 3])
    want = seeded(td["a"], 0.5, True, dim=1)
    assert torch.equal(seeded(td, 0.5, True)["a"], want)


@pytest.mark.parametrize("padded", [False, True])
def test_the_batch_and_integers_are_refused(padded: bool):
    x = draw_rows(2)
    x = x.to_padded() if padded else x
    with pytest.raises(UnsupportedError, match=r"tdc.gumbel_softmax: expected a static or ragged dim, got the batch"):
        F.gumbel_softmax(x, dim=0)
    with pytest.raises(ShapeError, match=r"tdc.gumbel_softmax: expected a dim in \[-3, 2\], got 3"):
        F.gumbel_softmax(x, dim=3)
    with pytest.raises(DtypeError, match=r"tdc.gumbel_softmax: expected floating point logits"):
        F.gumbel_softmax(x.long())
