"""`buckets=`: a graph of fixed sizes for each of a few sizes of batches, exact against the batch without filling."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from catalogue import is_representative, samples, title
from filled_batches import compared, poison, ragged
from harness import called, case_of, compared_gradients
from torch import Tensor, nn

import tdc
from tdc.compile import Buckets, buckets, counted, train_step
from tdc.core.errors import TdcError, UnsupportedError
from tdc.core.rules import Rule
from tdc.ops import RULES
from tdc.optim import sgd
from tdc.testing import assert_close
from tdc.testing.conformance import LENGTHS

BATCHES = ((3, 17, 2), (9, 4, 19), (1, 1, 33), (2, 2, 2), (5, 6, 11))
WRONG: Any = 8.0
FILLED = Buckets(rows=(8, 16), totals=(64, 256, 1024))


class Net(nn.Module):
    """Mixes positions, rows and whole batches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, ids: Any) -> Any:
        x = self.encoder(self.embed(ids))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x.softmax(1).mean(1)) + self.head(x).mean()


def text(*lengths: int) -> tdc.TensorDict:
    ids = tdc.pack([torch.randint(0, 50, (n,)) for n in lengths])
    return tdc.TensorDict({"ids": ids, "label": torch.arange(len(lengths)) % 3}, [len(lengths)])


def by_row(net: Any, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch["ids"]), batch["label"])


def by_token(net: Any, batch: Any) -> Any:
    x = net.embed(batch["ids"]).sum(2).square()
    return x.sum(), x.numel()


FUNCTIONS: tuple[Any, ...] = (
    lambda x: x.sum(), lambda x: x.mean(), lambda x: x.sum(1), lambda x: x.softmax(1), lambda x: x.amax((0, 1)),
    lambda x: x.var((0, 1)), lambda x: x.cumsum(1) * x.values.shape[0], lambda x: x.values.std(0),
    lambda x: x.argmax(1), lambda x: x.to_padded().data.mean(1), lambda x: x.flip(1),
    lambda x: x.to_padded().data.flatten(),
    lambda x: torch.cat([x, x * 2], 1), lambda x: x.values.T @ x.values, lambda x: torch.cat([x, x]).sum(),
    lambda x: x.sort(1).values, lambda x: x.values.sort(0).values, lambda x: x.values[-1], lambda x: x.values[2:],
    lambda x: x.values.view(-1), lambda x: x - x.mean(1, keepdim=True), lambda x: x.values.T.reshape(-1),
    lambda x: torch.zeros(99, 4).index_put((-1 - torch.arange(len(x.values)),), x.values),
    lambda x: torch.zeros(9, dtype=torch.bool).index_put((classes(x) - 9,), x.values[:, 0] > 0, accumulate=True),
    lambda x: torch.zeros(50, 5).scatter(1, classes(x)[:, None] % 5, 1.0),
    lambda x: torch.zeros(50, 5).scatter(1, classes(x)[:, None] % 5, x.values),
    lambda x: torch.zeros(38, 5).scatter_add(1, classes(x)[:, None] % 5, x.values),
    lambda x: torch.complex(x.values, 2 * x.values).var(0), lambda x: torch.var_mean(x.values, -1),
    lambda x: x.values.chunk(2, -1), lambda x: x.values.chunk(2), lambda x: (x.values @ x.values.T).trace(),
    lambda x: (x.values @ x.values.T).diagonal_scatter(x.values[:, 0]),
    lambda x: x.values.repeat_interleave(2, 0)[:, 0].clone().view(-1, 2),
    lambda x: x.values.unfold(0, 3, 2), lambda x: torch.arange(len(x.values) - 1, -1, -1),
    lambda x: torch.arange(100).clamp(0, len(x.values) - 1), lambda x: x.values[: math.ceil(len(x.values) / 2)],
    lambda x: x.values[: int(len(x.values) / 3)], lambda x: torch.arange(0, len(x.values), 0.5),
    lambda x: F.pad(x.values.T[None], (2, 2), mode="replicate"), lambda x: F.instance_norm(x.values.T[None]),
    lambda x: F.batch_norm(x.values, None, None, training=True), lambda x: torch.fft.fft(x.values, dim=1),
    lambda x: torch.cdist(x.values, x.values, 1.0), lambda x: x.values.tile(2, 1).cumsum(0),
    lambda x: x.values.sum(0) * len(x.values) ** -0.5, lambda x: F.pad(x.values, (0, 0, -2, 3), value=2.0),
    lambda x: F.pad(x.values, (0, 0, 1, 60 - len(x.values))),
    lambda x: F.pad(x.values.T[None], (2, 2), mode="circular"),
    lambda x: x.values.median(0), lambda x: x.values.median(), lambda x: x.values.log().median(0).values.isnan(),
    lambda x: x.values.kthvalue(3, 0), lambda x: classes(x).median(), lambda x: classes(x)[:, None].median(0).values,
    lambda x: x.values.histc(9, -1, 1), lambda x: classes(x).bincount(minlength=9) / torch.ones(9),
    lambda x: classes(x).bincount(x.values[:, 0], 9) / torch.ones(9), lambda x: x.values.log().median().isnan(),
    lambda x: torch.complex(x.values, 2 * x.values).conj().imag, lambda x: assigned(x.values.clone()),
)  # fmt: skip


def assigned(x: Tensor) -> Tensor:
    x[-3:], x[2:-4:2], x[-1], x[0] = 7.0, x[1], 8.0, x[-5]
    return x


def classes(x: Any) -> Tensor:
    """Numbers below 9 by element."""
    return (x.values[:, 0] * 1000).long() % 9


@pytest.mark.parametrize("functions", [FUNCTIONS[k::6] for k in range(6)])
def test_functions(functions: Any, monkeypatch: pytest.MonkeyPatch):
    """No result reads what stands in the filling."""
    poison(monkeypatch)
    batches = [ragged(*lengths) for lengths in ((3, 17, 2), (9, 4, 1, 19), (3, 1, 31))]
    given = Buckets(rows=(8,), totals=(31, 63), lengths=(40,))
    run = compared(lambda x: tuple([fn(x) for fn in functions]), *batches, buckets=given)
    assert (run.counts.compiles, run.counts.buckets) == (1, 2)


def test_numbers_of_full_precision():
    def scaled(x: Any) -> Tensor:
        return x.values.double() * (1 / len(x.values)) + 0.1 * len(x.values) + 1.1 ** len(x.values)

    run = counted(scaled, backend="eager", buckets=FILLED)
    for lengths in BATCHES[:2]:
        x = ragged(*lengths)
        assert_close(run(x), scaled(x), rtol=1e-14, atol=1e-14)


def test_sizes_that_a_bucket_does_not_divide():
    """A row of two elements is split in a bucket of 67, whose halves differ in length."""
    given, batches = Buckets(rows=(4,), totals=(67,)), [ragged(*lengths) for lengths in ((4, 18), (10, 4), (2, 2))]
    compared(lambda x: x.values[:, 0].clone().view(-1, 2), *batches, buckets=given)
    with pytest.raises(UnsupportedError, match="add"):
        compared(lambda x: x.values[::2] + x.values[1::2], *batches, buckets=given)


def test_strides_of_a_bucket():
    """A batch that has the size of its bucket comes with the strides of one that is filled."""

    def strict(graph: Any, inputs: Any) -> Any:
        expected = [x.stride() for x in inputs]

        def run(*given: Any) -> Any:
            assert [x.stride() for x in given] == expected
            return graph(*given)

        return run

    run = counted(lambda x: x.sum(2), backend=strict, buckets=Buckets(totals=(16,)))
    for lengths in ((3, 8, 2), (9, 4, 3)):
        x = ragged(*lengths)
        x = x.with_values(x.values.T.contiguous().T)
        assert_close(run(x), x.sum(2), rtol=1e-5, atol=1e-6)
    assert run.counts.buckets == 1


def test_gradients_outside_of_the_graph():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    run = counted(lambda x: net(x).mean(1).square().sum(), backend="aot_eager", buckets="auto")
    for lengths in BATCHES[:2]:
        x = ragged(*lengths)
        x.values.requires_grad_()
        want = torch.autograd.grad(net(x).mean(1).square().sum(), [x.values, *net.parameters()])
        assert_close(torch.autograd.grad(run(x), [x.values, *net.parameters()]), want, rtol=1e-5, atol=1e-6)
    assert run.counts.compiles == 1


def test_offsets_of_a_jagged_tensor():
    """torch knows them by identity."""
    x = ragged(3, 17, 2)
    torch.nested.nested_tensor_from_jagged(x.values, x.offsets, max_seqlen=17, min_seqlen=2)
    run = counted(lambda x: torch.relu(x).sum(1), backend="aot_eager", buckets="auto")
    assert_close(run(x), torch.relu(x).sum(1))


@pytest.mark.parametrize("loss", [pytest.param(by_row, marks=pytest.mark.slow), by_token])
def test_steps_are_those_without_filling(loss: Any):
    torch.manual_seed(0)
    net = Net()
    plain = train_step(net, loss, sgd(0.1), compile=False)
    step = train_step(net, loss, sgd(0.1), backend="eager", buckets="auto", metrics=("loss", "grad_norm", "tokens"))
    a, b = plain.init(), step.init()
    judge, expected = step.eval(), plain.eval()
    for lengths in BATCHES:
        batch = text(*lengths)
        (a, _), (b, metrics) = plain(a, batch), step(b, batch)
        assert int(metrics["tokens"]) == sum(lengths)
        assert_close(b, a, rtol=1e-5, atol=1e-5)
        assert_close(judge(b, batch), expected(a, batch), rtol=1e-5, atol=1e-5)
    assert (step.counts.compiles, judge.counts.compiles) == (1, 1)
    assert step.counts.buckets in (4, 5)  # torch 2.11 has one more size


@pytest.mark.slow  # Inductor
def test_steps_in_kernels():
    torch.manual_seed(0)
    net = Net()
    plain = train_step(net, by_row, sgd(0.1), compile=False)
    step = train_step(net, by_row, sgd(0.1), buckets=Buckets(totals=(32, 64)))
    a, b = plain.init(), step.init()
    for lengths in BATCHES:
        batch = text(*lengths)
        (a, _), (b, _) = plain(a, batch), step(b, batch)
        assert_close(b, a, rtol=1e-5, atol=1e-5)
    assert (step.counts.compiles, step.counts.buckets) == (1, 2)
    assert step.counts.kernels > 0


def test_few_graphs_and_little_filling():
    draw, net = random.Random(0), nn.Linear(4, 2)
    run = counted(lambda x: net(x).amax(1), backend="eager", buckets="auto")
    for _ in range(40):
        x = ragged(*[min(1 + int(draw.lognormvariate(3, 0.6)), 128) for _ in range(32)])
        assert_close(run(x), net(x).amax(1), rtol=1e-5, atol=1e-6)
    assert run.counts.compiles == 1
    assert run.counts.buckets <= 8
    assert 0 < run.counts.filling <= 0.08


def test_a_limit_of_graphs():
    run = compared(lambda x: x.mean(1), *[ragged(*[3] * n) for n in (2, 3, 8, 4, 5, 6, 7)], buckets=Buckets(most=3))
    assert run.counts.buckets == 3  # the last one has room for other numbers of rows


def test_sizes_by_name():
    given = Buckets(rows=(4, 8), totals=buckets(16, 64), lengths=(32,))
    run = compared(
        lambda x: x.to_padded().data.sum(0), *[ragged(*n) for n in ((3, 2), (9, 1, 2), (4,) * 4)], buckets=given
    )
    assert run.counts.buckets == 1


@pytest.mark.parametrize(("fn", "words"), [
    (lambda x: x.values.as_strided((2,), (1,)), "aten."), (lambda x: x.values.add(1, alpha=len(x.values)), "aten.add"),
    (lambda x: x.values.mode(0), "aten.mode"), (lambda x: x.values.histc(), "name min"),
])  # fmt: skip
def test_what_is_refused(fn: Any, words: str):
    run = counted(fn, backend="eager", buckets="auto")
    with pytest.raises(TdcError, match=r"compile\.buckets") as error:
        run(ragged(3, 5))
    assert words in str(error.value)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: counted(torch.relu, buckets=WRONG), "buckets='auto' or a tdc.compile.Buckets"),
    (lambda: train_step(by_row, sgd(0.1), buckets=WRONG), "buckets='auto' or a tdc.compile.Buckets"),
    (lambda: Buckets(rows=WRONG), "a tuple of ints as rows"),
    (lambda: Buckets(totals=(8, WRONG)), "a tuple of ints as totals"),
    (lambda: Buckets(most=0), "at least one graph"),
    (lambda: compared(lambda x: x.sum(1), ragged(3, 5), buckets=Buckets(totals=(4,))), "totals of at most 4"),
])  # fmt: skip
def test_wrong_settings(make: Any, words: str):
    with pytest.raises(TdcError) as error:
        make()
    assert words in str(error.value)


def operations() -> Iterator[Any]:
    """Operations on NestedTensors; a graph for each is for the sweep, but for those that stand for a family."""
    for rule in RULES:
        if not rule.reason and rule.kind == "nested" and "compile" in rule.modes:
            late = pytest.mark.slow if is_representative(rule) else pytest.mark.sweep
            yield pytest.param(rule, id=title(rule), marks=late)


@pytest.mark.parametrize("rule", list(operations()))
def test_operations(rule: Rule):
    """Results and gradients of an operation, or an error that names what cannot be taken out."""
    torch.compiler.reset()
    sample = next(sample for sample in samples(rule) if "compile" in sample.modes)
    case = case_of(rule, sample, LENGTHS[0], 0, True)
    run = counted(partial(called, [case]), backend="eager", buckets=FILLED)
    try:
        (result,) = run(case.inputs)
    except UnsupportedError as error:
        if not str(error).startswith("tdc.compile.buckets"):
            raise
        return
    lines, pairs = case.compare_values(result)
    assert not lines, lines
    assert not (wrong := compared_gradients([case], [pairs])), wrong
