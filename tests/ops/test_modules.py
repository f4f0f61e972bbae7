"""Stock modules on ragged batches: results and gradients of a loop over examples, one graph for all lengths."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Counter
from test_nn import KINDS, LENGTHS, OTHERS, SIZE, assert_same, compiled, plain, rows
from torch import Tensor, nn

import tdc
from tdc import StructureError
from tdc.testing.batches import build

ACTIVATIONS = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid,
    nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.RReLU, nn.SELU, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Softshrink,
    nn.Softsign, nn.Tanh, nn.Tanhshrink,
)  # fmt: skip
MODULES: dict[str, nn.Module] = {
    **{cls.__name__.lower(): cls() for cls in ACTIVATIONS},
    "identity": nn.Identity(),
    "threshold": nn.Threshold(0.1, 20.0),
    "softmax": nn.Softmax(-1),
    "log_softmax": nn.LogSoftmax(2),
    "softmin": nn.Softmin(-1),
    "unflatten": nn.Unflatten(-1, (2, 4)),
    "flatten": nn.Sequential(nn.Unflatten(-1, (2, 4)), nn.Flatten(2)),
    "rms_norm": nn.RMSNorm(SIZE),
    "alpha_dropout": nn.AlphaDropout(0.2),
    "sequential": nn.Sequential(nn.Linear(SIZE, 6), nn.Sequential(nn.PReLU(), nn.RMSNorm(6)), nn.Softplus()),
}
ALL = nn.Sequential(*[m for name, m in MODULES.items() if name not in ("unflatten", "sequential")], nn.Linear(SIZE, 3))
PAIRS: dict[str, nn.Module] = {
    "bilinear": nn.Bilinear(SIZE, SIZE, 3),
    "cosine_similarity": nn.CosineSimilarity(-1),
    "pairwise_distance": nn.PairwiseDistance(),
}


def inputs(name: str, lengths: tuple[int, ...] = LENGTHS) -> list[Any]:
    return [rows(lengths, seed=i) for i in range(2 if name in PAIRS else 1)]


def row(module: nn.Module, *xs: Tensor) -> Tensor:
    """A row as a batch of one, since dims of these modules count the batch."""
    return module(*[x[None] for x in xs])[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*MODULES, *PAIRS])
def test_module(name: str, kind: str):
    module = copy.deepcopy({**MODULES, **PAIRS}[name]).eval()
    assert_same(module, kind, inputs(name), plain, row)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", ["all", *[pytest.param(name, marks=pytest.mark.slow) for name in PAIRS]])
@pytest.mark.parametrize("kind", ["nested", pytest.param("masked", marks=pytest.mark.slow)])
def test_module_compiled(name: str, kind: str):
    module, counter = copy.deepcopy({"all": ALL, **PAIRS}[name]).eval(), Counter()
    run = compiled(plain, counter)
    for lengths in (LENGTHS, *OTHERS):
        assert_same(module, kind, inputs(name, lengths), run, row)
    assert counter.graphs == 1


def test_softmax_over_the_ragged_dim():
    """Each row sums to 1 over its own steps."""

    def one(module: nn.Module, x: Tensor) -> Tensor:
        return x.softmax(0)

    for kind in KINDS:
        assert_same(nn.Softmax(1), kind, [rows()], plain, one)


@pytest.mark.parametrize("run", [plain, pytest.param(None, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_training_step(run: Callable[..., Any] | None):
    """Embedding, recurrence, attention and a head in one Sequential: the loss of all real positions falls."""

    class First(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Any) -> Any:
            return self.module(x)[0]

    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module = nn.Sequential(nn.Embedding(5, SIZE), First(nn.GRU(SIZE, 8, batch_first=True)), encoder, nn.Linear(8, 5))
    optimizer, losses = torch.optim.Adam(module.parameters(), 0.05), []
    x = build([rows(size=None)], "nested", Tensor.detach)[0]
    with torch._dynamo.config.patch(allow_rnn=True):
        call = run or torch.compile(plain, fullgraph=True, backend="aot_eager")
        for _ in range(6):
            loss = nn.CrossEntropyLoss()(call(module, x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_attention_asks_a_batch_where_its_rows_are(padded: bool, first: bool):
    packed = tdc.pack([torch.randn(n, 8) for n in (2, 1, 4)])
    x: Any = packed.to_padded() if padded else packed
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=first)
    want = [layer.eval()(row.unsqueeze(int(not first))).squeeze(int(not first)) for row in packed.unbind()]
    for got in (layer(x), layer(x.transpose(0, 1)).transpose(0, 1)):
        torch.testing.assert_close(got.unbind(), want)


def test_recurrent_modules_find_the_rows_themselves():
    x = tdc.pack([torch.randn(n, 8) for n in (2, 1, 4)])
    second = nn.GRU(8, 3)
    for got, row in zip(second(x.transpose(0, 1))[0].transpose(0, 1).unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(got, second(row)[0])
    with pytest.raises(tdc.ShapeError, match=r"hint: .* recurrent layers are built with batch_first=True"):
        second(x)
    with pytest.raises(RuntimeError, match=r"Expected hidden size \(1, -1, 3\)"):  # torch's, and in the docs
        second(x, torch.zeros(1, 3, 3))
    with pytest.raises(StructureError, match="build the module with batch_first=True"):
        second(x.to_padded())
