"""Hierarchical attention over documents of sentences: trained, differentiated and exported, with one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from two_levels import LENGTHS, OTHERS, batch, documents

import tdc
from tdc.compile import counted, export, train_step
from tdc.ragged import TwoLevelTensor
from tdc.testing import assert_close


class Documents(nn.Module):
    """Sentence vectors of token vectors, document vectors of sentence vectors, classes."""

    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.words = nn.TransformerEncoderLayer(width, 2, 8, 0.0, batch_first=True)
        self.score = nn.Linear(width, 1)
        self.sentences = nn.TransformerEncoderLayer(width, 2, 8, 0.0, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: TwoLevelTensor) -> Tensor:
        tokens = x.with_values(self.words(x.values))
        sentences = (self.score(tokens).softmax(2) * tokens).sum(2)
        return self.head(self.sentences(sentences).sum(1))


@pytest.fixture
def net() -> Documents:
    torch.manual_seed(0)
    return Documents()


def texts(lengths: list[list[int]]) -> TwoLevelTensor:
    return batch(documents(lengths, dtype=torch.float32))


@pytest.mark.slow
def test_equals_each_document_alone(net: Documents):
    run = counted(net, backend="aot_eager")
    for lengths in (LENGTHS, *OTHERS):
        x = texts([d for d in lengths if d])
        alone = torch.cat([net(x[i : i + 1]) for i in range(len(x))])
        want = torch.autograd.grad(alone.square().sum(), list(net.parameters()))
        for out in (net(x), run(x)):
            assert_close(out, alone)
            assert_close(torch.autograd.grad(out.square().sum(), list(net.parameters())), want, atol=1e-4, rtol=1e-4)
    assert (run.counts.graphs, run.counts.compiles) == (1, 1)


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_trains_in_one_graph(net: Documents, accumulate: int):
    def loss(model: Any, td: tdc.TensorDict) -> Tensor:
        return F.cross_entropy(model(td["text"]), td["label"])

    step = train_step(net, loss, tdc.optim.sgd(0.1), accumulate=accumulate, backend="aot_eager")
    state, losses = step.init(), []
    for lengths in (LENGTHS, *OTHERS):
        x = texts([*lengths, [1, 2], [3]])  # parts of two documents and more: one alone compiles once more
        state, metrics = step(state, tdc.TensorDict({"text": x, "label": torch.arange(len(x)) % 3}, [len(x)]))
        losses.append(metrics["loss"])
    assert all(value.isfinite() for value in losses)
    assert step.counts.compiles == 1


def test_gradient_of_documents(net: Documents):
    x = texts(LENGTHS)
    grads = tdc.grad(lambda x: net(x).square().sum())(x)
    assert isinstance(grads, TwoLevelTensor)
    leaf = texts(LENGTHS).with_values(x.values.detach()).requires_grad_()
    net(leaf).square().sum().backward()
    assert_close(grads, leaf.grad)
    td = tdc.TensorDict({"b": torch.ones(4, 3), "text": x, "n": torch.arange(4)}, [4])
    found = tdc.grad(lambda td: (net(td["text"]) * td["b"]).square().sum())(td)
    assert set(found.keys()) == {"b", "text"}
    assert_close(found["text"], leaf.grad)
    assert_close(found["b"], 2 * net(x).square().detach())


def test_exports(net: Documents, tmp_path: Any):
    x = texts(LENGTHS)
    program = export(net, (x,), dynamic={"x": {"batch": ("B", 1, 64)}})
    for lengths in (LENGTHS, *OTHERS):
        y = texts(lengths)
        assert_close(program(y), net(y))
    without = TwoLevelTensor(x.values, x.offsets)
    assert_close(program(without), net(x))
    with pytest.raises(tdc.StructureError, match="NestedTensor"):
        program(x.values)
    with pytest.raises(tdc.TdcError, match=r"x.values: NestedTensor float64"):
        program(x.double())


@pytest.mark.sweep
@pytest.mark.slow
def test_torch_export(net: Documents):
    x = texts(LENGTHS)
    assert_close(torch.export.export(net, (x,)).module()(x), net(x))


DOCUMENTS: dict[str, Any] = {
    "x[i]": lambda x, i: x[i], "x[-i]": lambda x, i: x[-i], "x[i, 0]": lambda x, i: x[i, 0],
    "x[i, :1]": lambda x, i: x[i, :1], "x[i, :, 0]": lambda x, i: x[i, :, 0], "x[i][:, 1:]": lambda x, i: x[i][:, 1:],
    "x[i, 0, 0]": lambda x, i: x[i, 0, 0], "x[i][0]": lambda x, i: x[i][0],
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_one_document_in_a_graph(name: str):
    docs = [[torch.randn(n, 2) for n in lengths] for lengths in ((2, 3), (4,), (1, 2, 5), (3, 3))]
    x, fn = tdc.pack([tdc.pack(rows) for rows in docs]), DOCUMENTS[name]
    run = counted(fn, backend="eager")
    for i in (2, 3, 1, 2):
        assert_close(run(x, i), fn(x, i))
    assert run.counts.compiles <= 3  # 1 is apart
    with pytest.raises(tdc.IndexingError, match=r"expected a row in \[-4, 3\], got -?9"):
        run(x, 9)
