"""Bytes, elements and the table of a TensorDict: counted by hand, shared memory once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import TestCase
from texts import Says, says
from torch import Tensor, nn

import tdc
from tdc import ObjectArray, Static, TensorDict

X = torch.zeros(4, 8)  # 128 bytes


@tdc.tensorclass
class Point:
    xy: Tensor
    name: str = "here"


def td_of(**leaves: Any) -> TensorDict:
    return TensorDict(leaves)


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: td_of(), 0),
        (lambda: td_of(x=X), 128),
        (lambda: td_of(x=X, y={"z": X.clone()}), 256),
        (lambda: td_of(x=X, again=X), 128),
        (lambda: td_of(a=X[:2], b=X[2:]), 128),
        (lambda: td_of(a=X[:1]), 32),
        (lambda: td_of(a=X[:3], b=X[1:]), 128),  # views that overlap: never more than the storage
        (lambda: td_of(a=torch.zeros(1).expand(1000)), 4),
        (lambda: td_of(a=X, b=X.view(torch.int32)), 128),
        (lambda: td_of(a=torch.zeros(3, dtype=torch.bool)), 3),
        (lambda: td_of(a=torch.zeros(0, 4)), 0),
        (lambda: td_of(s=Static("long text"), o=ObjectArray([])), 0),
        (lambda: TensorDict({"x": torch.zeros(4, device="meta")}), 16),
        (lambda: td_of(s=torch.eye(3).to_sparse()), 36),
        (lambda: Point(torch.zeros(2, 2), batch_size=[2]), 16),
        (lambda: tdc.pack([torch.zeros(2), torch.zeros(1)]), 3 * 4 + 3 * 8),
        (lambda: tdc.pack([torch.zeros(2), torch.zeros(1)]).to_padded(), 4 * 4 + 2 * 8),
        (lambda: [X, {"y": torch.zeros(2)}], 136),
        (lambda: {}, 0),
    ],
)
def test_nbytes(make: Callable[[], Any], count: int):
    assert tdc.nbytes(make()) == count


def test_leaves_of_one_structure_share_its_bytes():
    x = tdc.pack([torch.zeros(2), torch.zeros(1)])
    assert tdc.nbytes(TensorDict({"a": x, "b": x + 1}, [2])) == 2 * 12 + 24


def test_param_count():
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    want = sum([p.numel() for p in net.parameters()])
    assert tdc.param_count(tdc.interop.from_state_dict(dict(net.named_parameters()))) == want
    assert tdc.param_count(list(net.parameters())) == want
    assert tdc.param_count(td_of(a=X, tied=X)) == 32
    x = tdc.pack([torch.zeros(2, 4), torch.zeros(1, 4)])
    assert tdc.param_count(TensorDict({"n": x, "m": x.to_padded(), "o": ObjectArray(list("ab"))}, [2])) == 12 + 16
    assert tdc.param_count(TensorDict()) == 0


def test_summary_is_data():
    td = TensorDict({"x": torch.zeros(2, 3), "p": Point(torch.zeros(2, 2), batch_size=[2]), "e": {}}, [2])
    table = td.summary()
    assert [row.path for row in table.rows] == [(), "x", "p", ("p", "xy"), ("p", "name"), "e"]
    assert [row.nbytes for row in table.rows] == [40, 24, 16, 16, None, 0]
    assert table.rows[2].kind == "Point"
    assert (table.leaves, table.elements, table.nbytes) == (2, 10, 40)
    assert repr(table) == str(table)


def test_summary_holds_no_tensors():
    table = TensorDict({"x": torch.zeros(2)}).summary()
    assert not [x for x in torch.utils._pytree.tree_leaves(table.rows) if isinstance(x, Tensor)]


def test_summary_reads_no_data():
    td = TensorDict({"x": torch.zeros(2, device="meta"), "secret": torch.tensor(1234.5)})
    assert "1234" not in str(td.summary()) + td.summary()._repr_html_()


def test_summary_html_is_escaped_and_has_headers():
    td = TensorDict({"<b>": torch.zeros(2), "s": Static("<i>")})
    html = td.summary()._repr_html_()
    assert "<b>" not in html
    assert "<i>" not in html
    assert "&lt;b&gt;" in html
    assert html.count('scope="col"') == 6
    assert html.count('scope="row"') == len(td.summary().rows)


def test_of_leaves_that_are_no_tensors():
    td = torch.utils._pytree.tree_map(lambda _: 0, TensorDict({"a": torch.zeros(2), "b": {"c": 1}}))
    assert "int" in str(td.summary())
    assert td.summary().nbytes == 0


def test_under_vmap():
    seen = []
    td = TensorDict({"x": torch.zeros(3, 4)}, [3])
    torch.func.vmap(lambda row: (seen.append(tdc.nbytes(row)), row)[1])(td)
    assert seen == [16]


class TestTable(TestCase):
    def test_every_kind(self):
        x = tdc.pack([torch.zeros(1, 4), torch.zeros(2, 4)])
        td = TensorDict(
            {
                "tokens": x,
                "padded": x.to_padded(),
                "meta": {"id": torch.arange(2), "who": ObjectArray(list("ab")), "none": {}},
                "point": Point(torch.zeros(2, 2), batch_size=[2]),
                "note": Static("a very long text that goes on and on"),
                "big": torch.zeros(1).expand(2, 1000),
            },
            [2],
        )
        self.assertExpectedInline(str(td.summary()), """\
key       kind                                      shape       dtype    device  bytes
--------------------------------------------------------------------------------------
(all)     TensorDict                                [2]                          188 B
  tokens  NestedTensor                              [2, -1, 4]  float32  cpu      72 B
  padded  MaskedBatch                               [2, 2, 4]   float32  cpu      80 B
  meta    TensorDict                                [2]                           16 B
    id    Tensor                                    [2]         int64    cpu      16 B
    who   ObjectArray                               [2]
    none  TensorDict                                [2]                            0 B
  point   Point                                     [2]                           16 B
    xy    Tensor                                    [2, 2]      float32  cpu      16 B
    name  Static('here')
  big     Tensor                                    [2, 1000]   float32  cpu       4 B
  note    Static('a very long text that goes o...)
--------------------------------------------------------------------------------------
6 leaves, 2,034 elements, 188 B""")  # fmt: skip

    def test_empty(self):
        self.assertExpectedInline(str(TensorDict().summary()), """\
key    kind        shape  dtype  device  bytes
----------------------------------------------
(all)  TensorDict  []                      0 B
----------------------------------------------
0 leaves, 0 elements, 0 B""")  # fmt: skip


SAYS: dict[str, Says] = {
    "a module is no tensordict": (lambda: TensorDict.summary(nn.Linear(1, 1)), """\
DtypeError
tdc.summary: expected a TensorDict, got Linear
hint: tdc.as_tensordict(obj), tdc.from_module(module), or repr(x) of one leaf"""),
    "a module has no leaves": (lambda: tdc.nbytes(nn.Linear(1, 1)), """\
DtypeError
tdc.nbytes: expected a TensorDict or a tree of tensors, got Linear
hint: tdc.from_module(module) for the parameters of a module"""),
    "a number has no elements": (lambda: tdc.param_count(3), """\
DtypeError
tdc.param_count: expected a TensorDict or a tree of tensors, got int
hint: tdc.from_module(module) for the parameters of a module"""),
}  # fmt: skip
test_says = says(SAYS)
