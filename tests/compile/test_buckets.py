"""tdc.compile.buckets, and to_bucket and unbucket, which are deprecated: exact results, one compile for each bucket."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from texts import said
from torch import Tensor, nn

import tdc
from tdc.compile import buckets, counted, to_bucket, unbucket

pytestmark = pytest.mark.filterwarnings(r"ignore:tdc.compile.(to_bucket|unbucket) is deprecated:DeprecationWarning")
SMALL = {"rows": (4, 8), "totals": (16, 32)}


def ragged(*lengths: int, features: int = 2) -> tdc.NestedTensor:
    total = sum(lengths)
    values = torch.arange(1.0, 1 + total * features).view(total, features)
    return tdc.NestedTensor(values, tdc.offsets_of(torch.tensor(lengths)))


def batch(*lengths: int) -> tdc.TensorDict:
    n, x = len(lengths), ragged(*lengths)
    rows = {"x": x, "m": x.to_padded(), "y": torch.arange(n), "deep": {"z": torch.ones(n, 3)}}
    return tdc.TensorDict(rows, [n])


def rows_of(x) -> list[list[float]]:
    return [row.tolist() for row in x.unbind()]


@pytest.mark.parametrize("call", [lambda x: to_bucket(x, **SMALL), lambda x: unbucket(x, torch.ones(2).bool())])
def test_deprecated(call):
    text = r"is deprecated, and goes with version 0.4\nhint: counted\(fn, buckets=.auto.\)"
    with pytest.warns(DeprecationWarning, match=text) as found:
        call(ragged(3, 2))
    assert [each.filename for each in found] == [__file__]


@pytest.mark.parametrize("growth", [1.01, 1.3, 2.0, 3.5])
def test_sizes_grow_from_low_to_high(growth: float):
    sizes = buckets(3, 1000, growth=growth)
    assert (sizes[0], sizes[-1]) == (3, 1000)
    assert all(a < b <= max(a + 1, a * growth) for a, b in pairwise(sizes))
    assert buckets(5, 5) == (5,)


@pytest.mark.parametrize("lengths", [(3, 2), (1, 1, 1), (0, 4), (7,), (4, 4, 4), (0, 0)])
def test_packed(lengths: tuple[int, ...]):
    x = ragged(*lengths)
    out, valid = to_bucket(x, **SMALL)
    tdc.validate(out)
    assert (len(out), out.values.shape[0]) == (4, 16)
    assert valid.tolist() == [True] * len(lengths) + [False] * (4 - len(lengths))
    assert rows_of(out)[: len(lengths)] == rows_of(x)
    assert int(out.lengths[len(lengths) :].min()) >= 1
    assert rows_of(unbucket(out, valid)) == rows_of(x)


def test_a_full_batch_goes_to_the_next_bucket():
    out, valid = to_bucket(ragged(4, 4, 4, 4), **SMALL)
    assert (len(out), out.values.shape[0], int(valid.sum())) == (8, 32, 4)


def test_without_rows_one_is_added():
    out, valid = to_bucket(ragged(3, 2), totals=(8,))
    assert out.offsets.tolist() == [0, 3, 5, 8]
    assert valid.tolist() == [True, True, False]


def test_filling_repeats_what_is_there():
    out, _ = to_bucket(ragged(2, 1, features=1), **SMALL)
    assert out.values[:, 0].tolist() == [1.0, 2.0, 3.0] * 5 + [1.0]


def test_several_ragged_dims():
    x = tdc.pack([torch.ones(2, 3), torch.ones(1, 4)], ragged_dim=(1, 2))
    out, valid = to_bucket(x, **SMALL)
    tdc.validate(out)
    assert out.sizes.tolist() == [[2, 3], [1, 4], [3, 1], [3, 1]]
    assert out.max_length == 4
    assert [tuple(row.shape) for row in unbucket(out, valid).unbind()] == [(2, 3), (1, 4)]


def test_longest_rows():
    x = tdc.pack([torch.ones(3), torch.ones(2)])
    assert to_bucket(x, **SMALL)[0].max_length == 8  # filling rows of 6 and 5
    assert to_bucket(x, **SMALL, lengths=(10, 20))[0].max_length == 10


def test_padded():
    x = ragged(3, 1, 2).to_padded()
    out, valid = to_bucket(x, rows=(4, 8), lengths=(5, 10))
    assert (tuple(out.shape), out.lengths[:, 0].tolist()) == ((4, 5, 2), [3, 1, 2, 3])
    assert rows_of(unbucket(out, valid)) == rows_of(x)
    assert torch.equal(out.sum(1)[valid], x.sum(1))


def test_tensordicts():
    td = batch(3, 1, 2)
    out, valid = to_bucket(td, **SMALL, lengths=(16,))
    assert out.batch_size == (4,)
    assert out["deep"].batch_size == (4,)
    assert out["y"].tolist() == [0, 1, 2, 0]
    back = unbucket(out, valid)
    assert back.batch_size == (3,)
    assert rows_of(back["x"]) == rows_of(td["x"])
    assert rows_of(back["m"]) == rows_of(td["m"])
    assert torch.equal(back["y"], td["y"])


def test_tensordicts_of_tensors_need_no_filling_row():
    td = tdc.TensorDict({"y": torch.arange(4)}, [4])
    out, valid = to_bucket(td, rows=(4, 8))
    assert out["y"].tolist() == [0, 1, 2, 3]
    assert bool(valid.all())


def test_no_rows_at_all():
    out, valid = to_bucket(tdc.NestedTensor(torch.zeros(0, 2), torch.zeros(1, dtype=torch.int64)), **SMALL)
    tdc.validate(out)
    assert not valid.any()
    assert len(unbucket(out, valid)) == 0


def test_trees_of_results():
    td, valid = to_bucket(batch(3, 1), **SMALL)
    params = tdc.TensorDict({"w": torch.ones(3)}, [])
    out = unbucket((td["x"].sum(1), {"td": td, "params": params, "loss": torch.tensor(1.0), "n": 3}), valid)
    assert (out[0].shape[0], out[1]["td"].batch_size, out[1]["params"]["w"].shape[0]) == (2, (2,), 3)


def model(td, net):
    x = torch.softmax(net(td["x"]), 1)
    return x, x.amax(1), td["m"].sum(1) + td["y"][:, None]


def test_results_are_those_of_the_batch_itself():
    net = nn.Linear(2, 3).double()
    for lengths in ((3, 2), (1, 5, 1), (4,), (6, 0, 2)):
        td = batch(*lengths).to(torch.float64)
        filled, valid = to_bucket(td, **SMALL)
        x, top, total = unbucket(model(filled, net), valid)
        want = model(td, net)
        torch.testing.assert_close(x.values, want[0].values, rtol=1e-14, atol=0)
        torch.testing.assert_close(top, want[1], rtol=1e-14, atol=0, equal_nan=True)
        torch.testing.assert_close(total, want[2], rtol=1e-14, atol=0)


def test_gradients_are_those_of_the_batch_itself():
    """Filling rows are finite, so that zero times them is zero: a mean of an empty row would make every weight NaN."""
    weight = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)

    def gradient(x, valid: Tensor) -> Tensor:
        loss = (x.mean(1) @ weight).square().sum(1)
        return torch.autograd.grad(torch.where(valid, loss, 0).sum() / valid.sum(), weight)[0]

    x = ragged(3, 1, 2).to(torch.float64)
    filled, valid = to_bucket(x, **SMALL)
    want = gradient(x, torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close(gradient(filled, valid), want, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dynamic", [False, None])
def test_one_compile_for_each_bucket(dynamic: bool | None):
    f = counted(lambda td: td["x"].sum(1) + td["y"][:, None], backend="eager", dynamic=dynamic)
    used = set()
    for lengths in ((3, 2), (1, 5, 1), (4,), (6, 6), (9, 9), (1,) * 5, (2, 2), (20, 1)):
        td = batch(*lengths)
        filled, valid = to_bucket(td, **SMALL, lengths=(32,))
        used.add((len(filled), filled["x"].values.shape[0]))
        torch.testing.assert_close(unbucket(f(filled), valid), td["x"].sum(1) + td["y"][:, None])
    assert used == {(4, 16), (4, 32), (8, 16)}
    assert f.counts.compiles == len(used)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch records one to make its pool of memory
def test_cuda_graphs():
    f = counted(lambda x: torch.relu(x).sum(1), mode="reduce-overhead", dynamic=False)
    for lengths in ((3, 2), (1, 5, 1), (9, 9), (3, 2), (1, 5, 1), (9, 9)):
        x = ragged(*lengths).to("cuda")
        filled, valid = to_bucket(x, **SMALL)
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(unbucket(f(filled), valid), torch.relu(x).sum(1))
    assert f.counts.compiles == 2


# Wrong inputs


def test_sizes_that_do_not_grow():
    assert said(tdc.ShapeError, lambda: buckets(8, 4)) == (
        "tdc.compile.buckets: expected 1 <= low <= high and growth > 1, got low=8, high=4, growth=2.0\n"
        "hint: buckets(8, 64)"
    )
    assert "growth=1" in said(tdc.ShapeError, lambda: buckets(1, 4, growth=1))


def test_too_many_rows():
    assert said(tdc.ShapeError, lambda: to_bucket(ragged(*[1] * 8), **SMALL)) == (
        "tdc.compile.to_bucket: expected a size of at least 9, got 8 rows and a filling one for rows=(4, 8)\n"
        "hint: add a larger size, or split the batch"
    )


def test_too_many_elements():
    assert said(tdc.ShapeError, lambda: to_bucket(ragged(31), **SMALL)) == (
        "tdc.compile.to_bucket: expected a size of at least 34, got 31 packed elements and 3 for filling rows for "
        "totals=(16, 32)\nhint: add a larger size, or split the batch"
    )


def test_too_long_rows():
    text = said(tdc.ShapeError, lambda: to_bucket(ragged(3, 1).to_padded(), lengths=(2,)))
    assert text.startswith("tdc.compile.to_bucket: expected a size of at least 3, got rows of up to 3 elements for")


def test_no_totals():
    assert said(tdc.StructureError, lambda: to_bucket(batch(2, 1), rows=(4,))) == (
        "tdc.compile.to_bucket: expected totals for packed elements, got none\n"
        "hint: totals=tdc.compile.buckets(low, high)"
    )


def test_a_plain_tensor():
    assert said(tdc.UnsupportedError, lambda: to_bucket(torch.ones(3), rows=(4,))) == (
        "tdc.compile.to_bucket: expected a NestedTensor, a MaskedBatch or a TensorDict of them, with the batch as its "
        "one first dim, got Tensor float32[3]\nhint: tdc.TensorDict({'x': x}, [B]) for a plain tensor"
    )


def test_results_without_rows():
    valid = torch.tensor([True, False])
    assert said(tdc.ShapeError, lambda: unbucket((torch.ones(2), torch.ones(3)), valid)) == (
        "tdc.compile.unbucket: expected 2 rows, got 1 others\nat Tensor float32[3]\n"
        "hint: results over all rows are not split by rows; mask them with valid instead"
    )
