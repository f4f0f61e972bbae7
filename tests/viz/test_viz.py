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


def test_tree_shows_bytes_and_sharing():
    x = torch.zeros(3, 4)
    td = tdc.TensorDict({"x": x, "in": {"row": x[:, 0], "ragged": X}, "note": tdc.Static("a"), "o": x.clone()}, [3])
    axes = tdc.viz.tree(td).axes[0]
    assert axes.get_title("left") == "4 leaves, 176 B"
    assert [t.get_text() for t in axes.get_yticklabels()] == ["x", "in", "  row", "  ragged", "o", "note"]
    notes = [t.get_text() for t in axes.texts]
    assert notes[:4] == ["48 B", "Tensor [3, 4] float32", "TensorDict [3]", "12 B, in x"]
    assert [bar.get_width() for bar in axes.patches] == [48, 12, 80, 48]
    tdc.viz.tree(tdc.TensorDict({}, []))


def test_report_shows_compiles_and_causes():
    r = tdc.compile.report(lambda x, k: x * k, (torch.ones(3), 2), (torch.ones(3), 7), backend="eager", repeats=1)
    left, right = tdc.viz.report(r).axes
    assert left.get_title("left") == "1 graph, 0 breaks, 2 compiles"
    assert [t.get_text().partition(": ")[2] for t in left.texts] == ["first", "not k == 2 any more"]
    assert right.get_title("left").startswith("warm call: ")


def test_html_has_a_text_instead_of_the_picture():
    html = tdc.viz.to_html(tdc.viz.batch(X), 'six of "twelve"')
    assert html.startswith('<figure><svg role="img" aria-label="six of &quot;twelve&quot;" ')
    assert html.endswith("</svg></figure>")
    assert "<script" not in html


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tdc.viz.lengths([1, 2]), "expected a batch of one ragged dim, or a tensor of lengths"),
        (lambda: tdc.viz.lengths(torch.tensor([], dtype=torch.long)), "expected at least one example"),
        (lambda: tdc.viz.batch(torch.ones(2, 3)), "expected a batch of one ragged dim"),
        (lambda: tdc.viz.batch(tdc.pack([torch.ones(2, 3)], ragged_dim=(1, 2))), "expected a batch of one ragged dim"),
        (lambda: tdc.viz.attention(X.values), "expected a batch of matrices"),
        (lambda: tdc.viz.attention([]), "expected at least one example"),
        (lambda: tdc.viz.tree({"x": X}), "expected a TensorDict"),
        (lambda: tdc.viz.report(print), "expected a compile report"),
        (lambda: tdc.viz.to_html(tdc.viz.batch(X), ""), "expected a figure, and a text"),
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
