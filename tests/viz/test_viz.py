"""Pictures: what they say in titles and bars, and what they refuse."""

from __future__ import annotations

import sys

import pytest
import torch

import tdc
import tdc.viz

pytest.importorskip("matplotlib")
ROWS = [torch.ones(n, 2) for n in (4, 0, 2)]
X = tdc.pack(ROWS)


@pytest.mark.parametrize("x", [X, X.to_padded(), X.lengths], ids=["packed", "padded", "lengths"])
def test_lengths(x, tmp_path):
    figure = tdc.viz.lengths(x, batch_size=3)
    assert [a.get_title('left') for a in figure.axes] == ["3 examples, 6 positions", "real positions of batches of 3"]
    assert {t.get_text() for t in figure.axes[1].texts} == {"50%", "100%"}
    figure.savefig(tmp_path / "x.png")


@pytest.mark.parametrize("x", [X, X.to_padded()], ids=["packed", "padded"])
def test_batch(x):
    figure = tdc.viz.batch(x)
    assert [a.get_title('left') for a in figure.axes] == ["packed: 6 positions", "padded: 12 positions, 50% real"]
    assert [bar.get_width() for bar in figure.axes[0].patches] == [4, 0, 2]


def test_attention_of_a_module():
    x = tdc.pack([torch.randn(n, 8) for n in (3, 1, 2)])
    weights = torch.nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x)[1]
    figure = tdc.viz.attention(weights, labels=[list("abc"), list("d"), list("ef")])
    assert [a.get_title('left') for a in figure.axes] == ["example 0: 3 by 3", "example 1: 1 by 1", "example 2: 2 by 2"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tdc.viz.lengths([1, 2]), "expected a batch of one ragged dim, or a tensor of lengths"),
        (lambda: tdc.viz.lengths(torch.tensor([], dtype=torch.long)), "expected at least one example"),
        (lambda: tdc.viz.batch(torch.ones(2, 3)), "expected a batch of one ragged dim"),
        (lambda: tdc.viz.batch(tdc.pack([torch.ones(2, 3)], ragged_dim=(1, 2))), "expected a batch of one ragged dim"),
        (lambda: tdc.viz.attention(X.values), "expected a batch of matrices"),
        (lambda: tdc.viz.attention([]), "expected at least one example"),
    ],
)
def test_what_is_refused(call, words):
    with pytest.raises(tdc.TdcError, match=words):
        call()


def test_without_matplotlib(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(tdc.UnsupportedError, match=r"torch-tdc\[viz\]"):
        tdc.viz.batch(X)
