"""tdc.testing.assert_batched_equal: right functions pass, and each kind of fault is found, in the run that has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, nn

import tdc
from tdc.autobatch.decorator import BatchFunction
from tdc.testing import assert_batched_equal
from tdc.testing.examples import captured

W = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


@tdc.batch
def halved(x: Tensor, y: Tensor) -> Any:
    n = 0
    while x.sum() > 1:
        x, n = x / 2, n + 1
    return {"a": (x * W, n), "y": x.sum() * y}


@tdc.batch
def summed(rows: Tensor) -> Tensor:
    s = rows.new_zeros(2)
    for row in rows:
        s = s + row * W[:2]
    return s


@tdc.batch
def chosen(x: Tensor, y: Tensor) -> Tensor:
    if x.sum() > 1:
        x = x * 2
    return x * W * y


PAIRS = [(torch.tensor([1.0, 2.0, k]), torch.tensor(k - 1.5)) for k in (0.0, 9.0, -4.0, 2.0)]
ROWS = [torch.arange(2.0 * n).reshape(n, 2) - 1 for n in (2, 0, 3)]


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    @tdc.batch
    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return (self.linear(x) + h).tanh()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    @tdc.batch
    def forward(self, xs: Tensor, h: Any = None) -> Tensor:
        h = torch.zeros(2) if h is None else h
        for x in xs:
            h = self.cell(x, h)
        return h


# -- what is right


def test_plain_functions_modules_and_methods():
    assert_batched_equal(halved.fn, PAIRS, backends=())
    module = Recurrent()
    assert_batched_equal(module, ROWS, backends=())
    assert_batched_equal(module.forward, ROWS, backends=())
    assert_batched_equal(module, [(rows, torch.ones(2) * i) for i, rows in enumerate(ROWS)], backends=())


def test_graphs():
    before = chosen._options
    assert_batched_equal(chosen, PAIRS, backends="eager", lowers="while")
    assert chosen._options is before


@pytest.mark.sweep
def test_all_runs():
    assert_batched_equal(tdc.batch(max_iters=5)(chosen.fn), PAIRS[:2])
    assert_batched_equal(halved, PAIRS[:2], backends="aot_eager", lowers="unroll", max_iters=5)
    assert_batched_equal(Recurrent(), ROWS, backends="aot_eager", lowers="auto")


@tdc.batch
def many(x: Any, scale: Tensor, names: Any) -> Any:
    return tdc.TensorDict({"x": x["a"][0] * scale, "n": x["n"] + 1}), names, x["n"] > 1, 1.5


def test_trees_shared_arguments_and_other_dims():
    examples = [({"a": [torch.ones(2) * k], "n": torch.tensor(k)}, W.detach()[:2], ("p", None)) for k in range(3)]
    assert_batched_equal(many, examples, in_dims=(0, None, None), backends=())
    assert_batched_equal(chosen, PAIRS, in_dims=(1, 0), backends=())
    td = [tdc.TensorDict({"rows": rows, "k": torch.tensor(1.0)}) for rows in ROWS]
    assert_batched_equal(keyed, td, backends=())


@tdc.batch
def keyed(td: Any) -> Any:
    s = td["k"] * 1
    for row in td["rows"]:
        s = s + row.sum()
    return s


@pytest.mark.parametrize("backends", [(), pytest.param("eager", marks=pytest.mark.slow)])
def test_numbers_and_nan(backends: Any):
    """What ways through a function have of different dtypes has their common one; NaN is a result like others."""

    def mixed(x: Tensor) -> Any:
        if x > 1:
            return 1, x.log(), 2.5
        return x, x.double(), 0.5

    numbers = [torch.tensor(k) for k in (-2.0, 0.5, 3.0)]
    assert_batched_equal(mixed, numbers, backends=backends, lowers="while", grads=False)
    assert_batched_equal(log, numbers, backends=())


def log(x: Tensor) -> Tensor:
    return x.log()


@pytest.mark.slow
def test_one_example_and_other_dims_in_a_graph():
    assert_batched_equal(chosen, PAIRS, in_dims=(1, 0), backends="eager", lowers="while", grads=False)
    assert_batched_equal(chosen, PAIRS[:1], backends="eager", lowers="while", grads=False)


def test_the_arguments_are_left_alone():
    def in_place(x: Tensor, k: Tensor) -> Tensor:
        x[0] = 7
        return x * k

    x = torch.ones(2)
    assert_batched_equal(in_place, [(x, torch.tensor(2.0)), (x, torch.tensor(3.0))], in_dims=(0, 0), backends=())
    assert x.tolist() == [1, 1]
    assert not x.requires_grad


def test_what_is_captured():
    scale = torch.ones(2, requires_grad=True)
    module = Recurrent()

    def outer(x: Tensor, k: Any = scale) -> Tensor:
        return inner(x) * W + module(x) * k

    def inner(x: Tensor) -> Tensor:
        return x * shift["a"][0]

    shift = {"a": [torch.ones(2, requires_grad=True), torch.ones(2)]}
    names = {"inner": 0, "module.cell.linear.weight": 1, "module.cell.linear.bias": 1, "W": 1}
    found = captured("", tdc.batch(outer))
    assert {*names} - {"inner"} < {*found}
    assert {id(t) for t in found.values()} == {id(t) for t in (scale, W, shift["a"][0], *module.parameters())}
    assert "shift['a'][0]" in found
    assert [*captured("", module)] == ["cell.linear.weight", "cell.linear.bias"]


# -- what is wrong


Change = Callable[[Any, tuple[Any, ...], BatchFunction], Any]


def patched(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Let `map` return something else."""
    right = BatchFunction.map

    def wrong(self: BatchFunction, *args: Any, **kwargs: Any) -> Any:
        return change(right(self, *args, **kwargs), args, self)

    monkeypatch.setattr(BatchFunction, "map", wrong)


def second(x: Tensor) -> Tensor:
    """1 for the second example, else 0."""
    return (torch.arange(x.shape[0], device=x.device) == 1).to(x.dtype).view(-1, *[1] * (x.ndim - 1))


def nothing(x: Tensor) -> Tensor:
    """0, with a gradient."""
    return x - x.detach()


FAULTS: dict[str, tuple[Change, str]] = {
    "a value": (lambda out, args, f: out | {"y": out["y"] + second(out["y"]) * 1e-3}, r"example 1, value\.y: "),
    "a dtype": (lambda out, args, f: out | {"y": out["y"].double()}, r"example 0, value\.y: .*torch\.float64 != "),
    "a dtype of numbers": (
        lambda out, args, f: out | {"a": (out["a"][0], out["a"][1].float())}, r"value\.a\.1: .*float32 != torch\.int64"
    ),
    "another form": (lambda out, args, f: out | {"a": [*out["a"]]}, r"value\.a: list, expected tuple"),
    "a key": (lambda out, args, f: {"a": out["a"]}, r"value\.y: missing"),
    "a shape": (lambda out, args, f: out | {"y": out["y"][:, None]}, r"value\.y: Tensor float32\[1\], expected "),
    "too few examples": (lambda out, args, f: out | {"y": out["y"][1:]}, r"value\['y'\]: .*, expected 4 examples"),
    "one for all": (lambda out, args, f: out | {"y": 1.0}, r"value\['y'\]: float, expected a tensor of 4 examples"),
    "a gradient of one example": (
        lambda out, args, f: out | {"y": out["y"] + second(out["y"]) * nothing(args[1])},
        r"example 1, gradient of y: Absolute difference",
    ),
    "a gradient that is cut": (lambda out, args, f: out | {"y": out["y"].detach()}, r"example 0, gradient of y: "),
    "a gradient of what is captured": (
        lambda out, args, f: out | {"a": (out["a"][0] + second(out["a"][0]) * nothing(W), out["a"][1])},
        r"gradient of W: .*, through example 1 \(",
    ),
    "examples in another order": (lambda out, args, f: out | {"y": out["y"].flip(0)}, r"example 2, value\.y: "),
    "an error": (lambda out, args, f: out["b"], r"KeyError: 'b'"),
}  # fmt: skip


@pytest.mark.cases(3, 4)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    change, text = FAULTS[name]
    patched(monkeypatch, change)
    with pytest.raises(AssertionError, match=text):
        assert_batched_equal(halved, PAIRS, backends=())


ARRANGED: dict[str, tuple[Change, str]] = {
    "alone": (lambda out, args, f: out | {"y": out["y"] + (len(out["y"]) == 1)}, r"\(eager: example 0 alone\)"),
    "reversed": (
        lambda out, args, f: out | {"y": out["y"] + (args[1][0] == 0.5) * (args[1][-1] == -1.5)},
        r"\(eager: reversed\)",
    ),
    "all equal": (
        lambda out, args, f: out | {"y": out["y"] + (len(out["y"]) > 1) * (args[1] == args[1][0]).all()},
        r"\(eager: all equal\)",
    ),
    "one more": (lambda out, args, f: out | {"y": out["y"] + (len(out["y"]) == 5)}, r"\(eager: one more\)"),
}


@pytest.mark.parametrize("name", ARRANGED)
def test_a_fault_of_one_arrangement_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    change, text = ARRANGED[name]
    patched(monkeypatch, change)
    with pytest.raises(AssertionError, match=text) as caught:
        assert_batched_equal(halved, PAIRS, backends=())
    runs = [line.rpartition(" (")[2] for line in str(caught.value).splitlines() if line.startswith("at ")]
    assert all([name in run and "in order" not in run for run in runs]), runs


class Leak(torch.autograd.Function):
    """0, whose gradient reaches padding alone."""

    @staticmethod
    def forward(ctx: Any, data: Tensor) -> Tensor:
        ctx.save_for_backward(data)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return ctx.saved_tensors[0].isnan().float()


PADDINGS: dict[str, tuple[Change, str]] = {
    "a value": (lambda out, args, f: out + args[0].data.sum() * 0, r"example 0, value: .*nan.*\(eager, padded: "),
    "a gradient": (lambda out, args, f: out + Leak.apply(args[0].data), r"at gradient of rows: padding has one \("),
}  # fmt: skip


@pytest.mark.parametrize("name", PADDINGS)
def test_padding_that_leaks_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    change, text = PADDINGS[name]
    patched(monkeypatch, lambda out, args, f: change(out, args, f) if isinstance(args[0], tdc.MaskedBatch) else out)
    with pytest.raises(AssertionError, match=text):
        assert_batched_equal(summed, ROWS, backends=())


def test_whole_numbers_of_padding_are_large(monkeypatch: pytest.MonkeyPatch):
    patched(monkeypatch, lambda out, args, f: out + args[0].data.amax() * isinstance(args[0], tdc.MaskedBatch))
    with pytest.raises(AssertionError, match=r"value: Absolute difference: 77777 \(eager, padded: "):
        assert_batched_equal(keyed_sum, [torch.arange(n) for n in (2, 3)], backends=())


@tdc.batch
def keyed_sum(xs: Tensor) -> Any:
    s = 0
    for x in xs:
        s = s + x
    return s


@pytest.mark.slow
def test_a_fault_of_one_lowering_is_found(monkeypatch: pytest.MonkeyPatch):
    patched(monkeypatch, lambda out, args, f: out + (f._options.lower == "unroll"))
    with pytest.raises(AssertionError, match=r"value: .*\(graph of eager, lower='unroll': in order, ") as caught:
        assert_batched_equal(chosen, PAIRS[:2], backends="eager", lowers=("while", "unroll"), max_iters=5)
    assert "lower='while'" not in str(caught.value)


def test_a_fault_of_one_backend_is_found():
    def broken(graph: Any, inputs: Any) -> Any:
        return lambda *args: [x.detach() if x.is_floating_point() else x for x in graph(*args)]

    with pytest.raises(AssertionError, match=r"gradient of x: .*\(graph of function, lower='while': ") as caught:
        assert_batched_equal(chosen, PAIRS[:2], backends=("eager", broken), lowers="while")
    assert "graph of eager" not in str(caught.value)


@pytest.mark.slow
def test_a_second_compilation_is_found(monkeypatch: pytest.MonkeyPatch):
    def unrolled(out: Any, args: Any, f: Any) -> Any:
        for _ in range(len(out)):
            out = out * 1
        return out

    patched(monkeypatch, unrolled)
    text = r"compiled 2 times for 4 batches, expected once \(graph of eager, lower='while': in order, reversed"
    with pytest.raises(AssertionError, match=text):
        assert_batched_equal(chosen, PAIRS, backends="eager", lowers="while")


@pytest.mark.slow
def test_a_graph_break_is_found(monkeypatch: pytest.MonkeyPatch):
    def broken(out: Any, args: Any, f: Any) -> Any:
        torch._dynamo.graph_break()
        return out

    patched(monkeypatch, broken)
    with pytest.raises(AssertionError, match=r"Unsupported: .*\(graph of eager, lower='while': in order"):
        assert_batched_equal(chosen, PAIRS, backends="eager", lowers="while")


def test_without_gradients_none_is_compared(monkeypatch: pytest.MonkeyPatch):
    patched(monkeypatch, FAULTS["a gradient that is cut"][0])
    assert_batched_equal(halved, PAIRS, backends=(), grads=False)


def test_tolerances(monkeypatch: pytest.MonkeyPatch):
    patched(monkeypatch, FAULTS["a value"][0])
    assert_batched_equal(halved, PAIRS, backends=(), atol=1e-2)


TORCH = "Mismatched elements: 2 / 2 (100.0%), Greatest absolute difference"


class TestText(TestCase):
    def test_all_at_once(self):
        def wrong(x: Tensor, n: Tensor) -> Any:
            return x * n

        with pytest.MonkeyPatch.context() as monkeypatch:
            patched(monkeypatch, lambda out, args, f: out + second(out) * nothing(args[0]) + second(out) * 0.5)
            with pytest.raises(AssertionError) as caught:
                assert_batched_equal(wrong, [(torch.ones(2), torch.tensor(float(k))) for k in (1, 2)], backends=())
        text = str(caught.value).replace(TORCH, "...")
        self.assertExpectedInline(text, """\
tdc.testing.assert_batched_equal: expected a batch that gives what 'wrong' gives each example, got 6 differences
at example 1, value: ...: 0.5 at index (0,) (eager: in order, one more)
at example 1, gradient of x: ...: 0.6613521575927734 at index (0,) (eager: in order, one more)
at example 0, value: ...: 0.5 at index (0,) (eager: reversed)
at example 0, gradient of x: ...: 1.5409960746765137 at index (0,) (eager: reversed)
at example 1 in place 1, value: ...: 0.5 at index (0,) (eager: all equal)
at example 1 in place 1, gradient of x: ...: 0.6613521575927734 at index (0,) (eager: all equal)
hint: backends=() runs eagerly alone; f.tree shows what a batch runs""")  # fmt: skip


# -- what is refused


REFUSED: dict[str, tuple[Callable[[], Any], type[tdc.TdcError], str]] = {
    "no function": (lambda: assert_batched_equal(3, PAIRS), tdc.DtypeError, "a function"),
    "a module": (
        lambda: assert_batched_equal(nn.Linear(2, 2), ROWS), tdc.DtypeError,
        "expected a module whose forward is a function of tdc.batch, got Linear\nhint: @tdc.batch above its forward",
    ),
    "no list": (lambda: assert_batched_equal(halved, torch.ones(3)), tdc.DtypeError, "expected a list of examples"),
    "no examples": (lambda: assert_batched_equal(halved, []), tdc.ShapeError, "at least one example, got none"),
    "a batch": (
        lambda: assert_batched_equal(summed, [tdc.pack(ROWS)]), tdc.DtypeError,
        "expected tensors of one example, got others\nat rows of example 0: NestedTensor",
    ),
    "numbers that differ": (
        lambda: assert_batched_equal(halved, [1.0, 2.0]), tdc.StructureError, "one value for all examples, got several"
    ),
    "what is not shared": (
        lambda: assert_batched_equal(halved, PAIRS, in_dims=(0, None)), tdc.StructureError, "at y: Tensor float32"
    ),
    "other forms": (
        lambda: assert_batched_equal(summed, [[ROWS[0]], [ROWS[0], ROWS[0]]]), tdc.StructureError, "of one form"
    ),
    "other dims": (
        lambda: assert_batched_equal(summed, [torch.ones(2), torch.ones(2, 2)]), tdc.ShapeError, "one number of dims"
    ),
    "other numbers of arguments": (
        lambda: assert_batched_equal(halved, [PAIRS[0], PAIRS[0][:1]]), tdc.ShapeError, "one number of arguments"
    ),
    "dims of arguments": (
        lambda: assert_batched_equal(halved, PAIRS, in_dims=(0,)), tdc.ShapeError, "one entry of in_dims for each"
    ),
    "a dim of a name": (
        lambda: assert_batched_equal(halved, PAIRS, in_dims="0"), tdc.DtypeError, "an int or None in in_dims, got str"
    ),
    "no such dim": (
        lambda: assert_batched_equal(halved, PAIRS, in_dims=2), tdc.ShapeError, "expected a dim of a batch of x"
    ),
    "no such lowering": (
        lambda: assert_batched_equal(halved, PAIRS, lowers="loop"), tdc.StructureError, "a lowering among auto, while"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str):
    call, error, text = REFUSED[name]
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
