"""Operators of TensorDicts and ragged batches: how operands pair, dtypes, and what autograd sees."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tdc
from tdc import TensorDict, UnsupportedError
from tdc.core.errors import op_name
from tdc.core.rules import RULES, SELF_SECOND
from tdc.ops.elementwise.pointwise import STEEP

REFLECTED = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow]
NO_SLOPE = [torch.floor_divide, torch.igamma, torch.igammac]  # for torch, in one operand or in both
DTYPES = [torch.float64, torch.float32, torch.float16, torch.int32, torch.int64]


def test_batch_dims_meet_batch_dims():
    a, b = TensorDict({"x": torch.arange(3.0)}, [3]), TensorDict({"x": torch.ones(3, 3)}, [3])
    want = torch.stack([a["x"][i] * b["x"][i] for i in range(3)])
    for out in (a * b, b * a, torch.where(a > 5, b, a * b)):
        assert torch.equal(out["x"], want)


def test_features_broadcast_behind_batch_dims():
    a, b = TensorDict({"x": torch.rand(2, 3)}, [2]), TensorDict({"x": torch.rand(2, 4, 3)}, [2])
    assert torch.equal((a + b)["x"], a["x"][:, None] + b["x"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", REFLECTED, ids=lambda op: op.__name__)
def test_a_number_is_a_number_on_either_side(op: Callable[..., Any], dtype: torch.dtype):
    x = torch.tensor([1, 2, 3]).to(dtype)
    td, nt = TensorDict({"x": x}, [3]), tdc.pack([x, x[:1]])
    for number in (2, 0.1):
        for want, got in ((op(number, x), op(number, td)["x"]), (op(x, number), op(td, number)["x"])):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert op(number, nt).dtype == op(number, x).dtype
        torch.testing.assert_close(op(number, nt).values[:3], op(number, x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", [operator.and_, operator.or_, operator.xor, operator.lshift], ids=lambda op: op.__name__)
def test_integers_meet_integers(op: Callable[..., Any]):
    x = torch.tensor([1, 2, 3])
    assert torch.equal(op(TensorDict({"x": x}, [3]), 1)["x"], op(x, 1))
    assert torch.equal(op(1, TensorDict({"x": x}, [3]))["x"], op(1, x))


@pytest.mark.parametrize("op", [operator.lshift, operator.rshift], ids=lambda op: op.__name__)
def test_a_number_is_shifted_by_a_batch(op: Callable[..., Any]):
    x = torch.tensor([1, 2, 3])
    td, nt = TensorDict({"x": x}, [3]), tdc.pack([x, x[:1]])

    def shift(td: TensorDict, nt: tdc.NestedTensor, mb: tdc.MaskedBatch) -> Any:
        return op(20, td)["x"], op(20, nt).values, op(20, mb).filled(0)

    for run in (shift, torch.compile(shift, backend="eager", fullgraph=True)):
        plain, packed, padded = run(td, nt, nt.to_padded())
        assert torch.equal(plain, op(20, x))
        assert torch.equal(packed, torch.cat([op(20, x), op(20, x[:1])]))
        assert torch.equal(padded, torch.stack([op(20, x), op(20, x) * torch.tensor([1, 0, 0])]))
    with pytest.raises(tdc.DtypeError, match=r"tdc.bitwise_(left|right)_shift: expected a number, .*, got str"):
        op("a", nt)


def test_other_types_are_refused():
    td = TensorDict({"x": torch.ones(2)}, [2])
    assert (td == None) is False  # noqa: E711  # the operator under test
    assert (td != None) is True  # noqa: E711  # the same
    for other in (None, [1, 2], "x"):
        with pytest.raises(tdc.DtypeError, match=r"tdc.add: expected a number, a tensor or a batch, got"):
            td + other
    with pytest.raises(TypeError, match="unsupported operand"):  # which may have an operator of its own
        td + object()


@pytest.mark.parametrize("fn", [
    lambda td: td * 2, lambda td: td + 1, lambda td: td - td, lambda td: td * td, lambda td: td.abs(), lambda td: -td,
    lambda td: td.sign(), lambda td: td / 2, lambda td: td.exp(),
])  # fmt: skip
def test_leaves_that_require_grad_beside_others(fn: Callable[[Any], Any]):
    leaves = {"w": torch.rand(3, 2, requires_grad=True), "x": torch.rand(3), "i": torch.arange(3)}
    out = fn(TensorDict(leaves, [3]))
    for key, leaf in leaves.items():
        want = fn(TensorDict({key: leaf}, [3]))[key]
        assert out[key].dtype == want.dtype
        assert out[key].requires_grad == want.requires_grad == (key == "w")
        assert torch.equal(out[key], want)


def test_gradients_through_all_leaves_at_once():
    x, y = torch.rand(3, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    td = TensorDict({"x": x, "y": y}, [3])
    (td * td + td.exp()).apply(torch.sum, batch_size=[]).sum().to_dict()
    out = td * td + td.exp()
    (out["x"].sum() + out["y"].sum()).backward()
    torch.testing.assert_close(x.grad, (2 * x + x.exp()).detach())
    torch.testing.assert_close(y.grad, (2 * y + y.exp()).detach())


def test_nodes_with_batch_dims_of_their_own_keep_them():
    inner = TensorDict({"a": torch.rand(2, 3), "b": torch.rand(2, 3, 4)}, [2, 3])
    td = TensorDict({"n": inner}, [2])
    assert (td + td)["n"].batch_size == (2, 3)
    wide = TensorDict({"n": TensorDict({"a": torch.rand(2, 3), "b": torch.rand(2, 1)}, [2])}, [2])
    narrow = TensorDict({"n": TensorDict({"a": torch.rand(2, 1), "b": torch.rand(2, 1)}, [2, 1])}, [2])
    with pytest.raises(tdc.ShapeError, match="share 2 batch dims"):
        narrow + wide


def containers() -> list[Any]:
    x = tdc.pack([torch.tensor([1.0, -2.0]), torch.tensor([3.0])])
    return [x, x.to_padded(), TensorDict({"x": torch.tensor([1.0, -2.0, 3.0])}, [3])]


@pytest.mark.parametrize("x", containers(), ids=lambda x: x._kind)
class TestMethodsWhoseObjectIsTheSecondArgument:
    """`x.where(condition, other)` is `torch.where(condition, x, other)`."""

    def test_where(self, x: Any):
        want = flat(torch.where(x > 0, x, -7.0))
        for out in (x.where(x > 0, -7.0), x.where(x > 0, other=-7.0), x.where(condition=x > 0, other=-7.0)):
            assert type(out) is type(x)
            assert flat(out) == want == [1, -7, 3]
        assert flat(x.where(x > 0, x * 10)) == [1, -20, 3]

    def test_where_of_a_dense_object(self, x: Any):
        assert flat(torch.ones(1).where(x > 0, x)) == [1, -2, 1]
        compiled = torch.compile(lambda x: (x.where(x > 0, 0), torch.ones(1).where(x > 0, x)), backend="eager")
        assert [flat(y) for y in compiled(x)] == [[1, 0, 3], [1, -2, 1]]

    def test_where_of_a_condition_alone(self, x: Any):
        with pytest.raises((UnsupportedError, TypeError), match="condition"):
            x.where(x > 0)

    def test_polygamma(self, x: Any):
        for out in (x.polygamma(1), x.polygamma(n=1), torch.polygamma(1, x)):
            torch.testing.assert_close(flat(out), torch.polygamma(1, torch.tensor([1.0, -2, 3])).tolist())


def flat(x: Any) -> list[float]:
    """The real elements."""
    if isinstance(x, TensorDict):
        return x["x"].tolist()
    return (x if isinstance(x, tdc.NestedTensor) else x.to_packed()).values.tolist()


def test_no_other_method_has_its_object_elsewhere():
    """torch's own schemas say where the object of a method stands in the function of its name."""
    elsewhere = set()
    for rule in (r for r in RULES if getattr(torch, r.name, None) is r.op and hasattr(torch.Tensor, r.name)):
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{rule.name}")
        places = [[a.name for a in s.arguments].index("self") for s in schemas if "self" in str(s)]
        if any(places):
            elsewhere.add(rule.op)
    assert elsewhere == set(SELF_SECOND)


class TestADenseTensorExpandedAsABatch:
    """`y.expand_as(x)` broadcasts as `y + x` does, and is a batch of x's structure."""

    x: Any = tdc.pack([torch.rand(2, 4), torch.rand(0, 4), torch.rand(3, 4)])

    @pytest.mark.cases(2)
    @pytest.mark.parametrize("shape", [(3, 1, 4), (3, 3, 4), (4,), (1, 1, 1), ()], ids=str)
    def test_values_and_structure(self, shape: tuple[int, ...]):
        y = torch.rand(shape)
        for x in (self.x, self.x.to_padded()):
            out: Any = y.expand_as(x)
            want = x * 0 + y
            assert type(out) is type(x)
            assert torch.equal(out, want)
            compiled = torch.compile(lambda y, x: y.expand_as(x), backend="eager", fullgraph=True)
            assert torch.equal(compiled(y, x), want)

    def test_gradients_leave_padding_out(self):
        for x in (self.x, self.x.to_padded(length=5)):
            y = torch.rand(3, 1, 1, requires_grad=True)
            y.expand_as(x).sum().backward()
            assert y.grad is not None
            assert y.grad.flatten().tolist() == [8, 0, 12]

    @pytest.mark.parametrize("shape", [(3, 1, 5), (2, 1, 4), (1, 3, 1, 4)], ids=str)
    def test_sizes_that_do_not_broadcast(self, shape: tuple[int, ...]):
        for x in (self.x, self.x.to_padded()):
            with pytest.raises(tdc.ShapeError, match=r"tdc\.expand_as: expected an operand that broadcasts"):
                torch.rand(shape).expand_as(x)

    def test_of_a_tensordict(self):
        td: Any = TensorDict({"a": torch.rand(3, 2), "b": {"x": self.x}}, [3])
        y = torch.arange(3.0)
        out: Any = y.expand_as(td)
        assert torch.equal(out["a"], y[:, None].expand(3, 2))
        assert torch.equal(out["b", "x"], y.view(3, 1, 1).expand_as(self.x))
        assert out.batch_size == td.batch_size
        with pytest.raises(tdc.ShapeError, match="broadcasts against batch_size"):
            torch.ones(3, 2).expand_as(td)

    def test_another_batch_has_the_same_lengths(self):
        other: Any = tdc.pack([torch.rand(1, 1), torch.rand(1, 1), torch.rand(3, 1)])
        for x, y in ((self.x, other), (self.x.to_padded(), other.to_padded())):
            with pytest.raises(tdc.StructureError, match="rows of different lengths"):
                y.expand_as(x)

    def test_no_sizes_make_a_tensor_ragged(self):
        y = torch.ones(3, 3, 4)
        td: Any = TensorDict({"x": self.x}, [3])
        for x, hint in ((self.x, "nested_like"), (self.x.to_padded(), "with_data"), (td, "reshape")):
            for name in ("view_as", "reshape_as"):
                with pytest.raises(UnsupportedError, match=rf"tdc\.{name}: [^$]*{hint}"):
                    getattr(y, name)(x)


def test_a_static_dim_of_size_1_grows():
    rows = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]
    wide = torch.tensor([10.0, 20.0], requires_grad=True)
    for x in (tdc.pack(rows), tdc.pack(rows).to_padded(fill=float("nan"))):
        out: Any = wide - x
        for a, r in zip(out.unbind(0), rows, strict=True):
            assert torch.equal(a, wide - r)
        wide.grad = None
        out.sum().backward()
        assert wide.grad.tolist() == [3, 3]


@pytest.mark.parametrize("name", ["double", "contiguous", "clone", "to"])
@pytest.mark.parametrize("kind", ["nested", "masked"])
def test_a_memory_format_is_that_of_an_example(kind: str, name: str):
    x: Any = tdc.pack([torch.rand(3, 2, 4), torch.rand(3, 3, 2)], ragged_dim=(2, 3))
    x = x if kind == "nested" else x.to_padded()
    found = getattr(x, name)(memory_format=torch.channels_last)
    assert all([torch.equal(a, b.to(a.dtype)) for a, b in zip(found.unbind(), x.unbind(), strict=True)])


@pytest.mark.parametrize("name", ["double", "contiguous", "clone"])
def test_a_memory_format_of_leaves_is_kept(name: str):
    td: Any = tdc.TensorDict({"a": torch.rand(2, 3, 4, 4)}, batch_size=(2,))
    found = getattr(td, name)(memory_format=torch.channels_last)
    assert found["a"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.inf, torch.nan])
@pytest.mark.parametrize("op", [op for op in STEEP if op not in NO_SLOPE], ids=op_name)
def test_gradients_of_a_dense_operand_are_0_behind_row_ends(op: Callable[..., Any], bad: float):
    rows = [torch.rand(n, dtype=torch.float64) + 0.1 for n in (3, 1)]
    dense = torch.rand(2, 3, dtype=torch.float64) + 0.1
    dense[1, 1:] = bad
    for x, first in itertools.product((tdc.pack(rows), tdc.pack(rows).to_padded()), (True, False)):

        def loss(dense: Any, x: Any, first: bool = first) -> Any:
            pair = (dense, x) if first else (x, dense)
            return (op(x, *pair) if op is torch.addcdiv else op(*pair)).real.square()

        def of_batch(dense: Any, x: Any = x) -> Any:
            return sum([y.sum() for y in loss(dense, x).unbind()])

        def of_rows(dense: Any) -> Any:
            return sum([loss(d[: len(row)], row).sum() for d, row in zip(dense, rows, strict=True)])

        torch.testing.assert_close(torch.func.grad(of_batch)(dense), torch.func.grad(of_rows)(dense), equal_nan=True)
