"""Rules of users: `tdc.ops.implements`, `tdc.testing.check_rule`, `tdc.testing.forbid`, `tdc.unbatched`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tdc
from tdc import DtypeError, MaskedBatch, NestedTensor, ShapeError, StructureError, TensorDict, UnsupportedError
from tdc.core.rules import DISPATCH, IMPLS, RULES
from tdc.ops.extend import USER_RULES
from tdc.testing import assert_one_graph, check_rule, forbid


@torch.library.custom_op("tdc_tests::squash", mutates_args=())
def squash(x: Tensor, k: float) -> Tensor:
    return torch.tanh(x * k)


@squash.register_fake
def squash_fake(x: Tensor, k: float) -> Tensor:
    return torch.empty_like(x)


squash.register_autograd(
    lambda ctx, grad: (grad * ctx.k * (1 - ctx.saved_tensors[0] ** 2), None),
    setup_context=lambda ctx, inputs, output: (ctx.save_for_backward(output), setattr(ctx, "k", inputs[1]))[0],
)
squash.register_vmap(lambda info, in_dims, x, k: (squash(x, k), in_dims[0]))


@torch.overrides.wrap_torch_function(lambda x, dim: (x,))
def peak(x: Tensor, dim: int) -> Tensor:
    return x.abs().amax(dim) if x.shape[dim] else x.new_zeros(x.sum(dim).shape)


KINDS = {
    "nested": lambda op, x, *args: x.with_values(op(x.values, *args)),
    "masked": lambda op, x, *args: x.with_data(op(x.data, *args)),
    "tensordict": lambda op, x, *args: x.apply(lambda leaf: op(leaf, *args)),
}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No rule of a test outlives it."""
    before = {kind: dict(table) for kind, table in DISPATCH.items()}, dict(IMPLS), list(USER_RULES)
    yield
    for kind, table in DISPATCH.items():
        table.clear()
        table.update(before[0][kind])
    IMPLS.clear()
    IMPLS.update(before[1])
    USER_RULES[:] = before[2]


def rows(lengths: tuple[int, ...]) -> NestedTensor:
    return tdc.pack([torch.randn(n, 3) for n in lengths])


def install_squash(*kinds: str, **kwargs: Any) -> None:
    for kind in kinds:
        run = KINDS[kind]
        tdc.ops.implements(squash, kind, **kwargs)(lambda x, k, run=run: run(squash, x, k))


# -- implements


def test_a_custom_op_is_reached_by_all_its_names():
    known = len(USER_RULES)
    install_squash("nested")
    x = rows((2, 0, 3))
    for op in (squash, torch.ops.tdc_tests.squash, torch.ops.tdc_tests.squash.default):
        assert torch.equal(op(x, 0.5).values, torch.tanh(x.values * 0.5))
    assert not hasattr(x, "squash")
    assert [(rule.name, rule.kind) for rule in USER_RULES[known:]] == [("squash", "nested")]
    assert not [rule for rule in RULES if rule.family == "user"]


def test_a_rule_returns_itself_and_compiles_to_one_graph():
    install_squash("nested")
    assert_one_graph(lambda x: squash(x, 0.5).sum(1), rows((2, 0, 3)), rows((4, 1)), backend="eager")


@pytest.mark.parametrize("mode", ["eager", "grad", "compile", "vmap", "export"])
def test_a_pointwise_rule_holds_in_every_mode(mode: str):
    install_squash(*KINDS)
    check_rule(squash, lambda lengths: (rows(lengths), 0.5), modes=mode)


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("mode", ["eager", "grad", "compile", "vmap", "export"])
def test_a_reduction_holds_in_every_mode(mode: str):
    @tdc.ops.implements(peak, "nested", identity=0.0)
    def peak_nested(x: NestedTensor, dim: int) -> Any:
        return peak(x.to_padded(0.0).data, dim)

    @tdc.ops.implements(peak, "masked", identity=0.0)
    def peak_masked(x: MaskedBatch, dim: int) -> Any:
        return peak(x.filled(0.0), dim)

    check_rule(peak, lambda lengths: (rows(lengths), 1), modes=mode, ref=lambda row, dim: peak(row, dim - 1))


def test_a_row_of_torch_that_is_missing():
    x = rows((2, 3))
    with pytest.raises(UnsupportedError, match=r"tdc\.fft: "):
        torch.fft.fft(x)

    @tdc.ops.implements(torch.fft.fft, ref=torch.fft.fft)
    def fft_nested(x: NestedTensor) -> NestedTensor:
        return x.with_values(torch.fft.fft(x.values))

    full = ((3, 5, 1), (2, 6, 1, 4))  # MKL transforms no empty row
    check_rule(torch.fft.fft, lambda lengths: (rows(lengths),), modes=("eager", "grad", "compile"), lengths=full)


def test_a_foreign_op_does_not_take_the_tensor_method_of_its_name():
    @torch.overrides.wrap_torch_function(lambda x: (x,))
    def cholesky(x: Tensor) -> Tensor:
        return x + 1

    before = DISPATCH["nested"].get(torch.Tensor.cholesky)
    tdc.ops.implements(cholesky)(lambda x: x + 1)
    assert DISPATCH["nested"].get(torch.Tensor.cholesky) == before


def test_override_replaces_every_name_of_a_row():
    x: Any = rows((2, 3))
    with pytest.raises(StructureError, match=r"without a row, got 'sub', which has one for NestedTensor\n"):
        tdc.ops.implements(torch.sub)
    tdc.ops.implements(torch.sub, override=True)(lambda a, b: a.with_values(a.values * 0 + 7))
    results: list[Any] = [x - 1, x.sub(1), torch.sub(x, 1), torch.subtract(x, 1)]
    for result in results:
        assert result.values.eq(7).all()
    number = torch.tensor(3.0)  # Dynamo traces `number - x` as a method of its own
    tdc.ops.implements(torch.sub, override=True)(lambda a, b: b.with_values(b.values * 0 + 7))
    assert torch.compile(lambda x: number - x, fullgraph=True, backend="eager")(x).values.eq(7).all()


def test_override_replaces_the_method_of_what_comes_second():
    x: Any = rows((2, 3))
    tdc.ops.implements(torch.where, override=True)(lambda condition, a, b: a.with_values(a.values * 0 + 7))
    assert x.where(x > 0, 0).values.eq(7).all()


@pytest.mark.parametrize(
    ("op", "kwargs", "error", "text"),
    [
        (
            lambda x: x,
            {},
            DtypeError,
            r"a function that asks for __torch_function__, got the Python function '<lambda>'",
        ),
        (lambda x: x, {}, DtypeError, r"hint: decorate it with @torch\.overrides\.wrap_torch_function"),
        ("relu", {}, DtypeError, r"expected an operation, got str"),
        (torch.nn.ReLU, {}, DtypeError, r"expected an operation, got type"),
        (peak, {"kinds": "ragged"}, StructureError, r"kinds among tensordict, nested, masked, got 'ragged'"),
        (peak, {"kinds": ()}, StructureError, r"kinds among tensordict, nested, masked, got none"),
        (peak, {"modes": ("fast",)}, StructureError, r"modes among eager, .*, got 'fast'"),
    ],
)
def test_implements_checks(op: Any, kwargs: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        tdc.ops.implements(op, **kwargs)(lambda x: x)


def test_an_op_without_a_rule_is_named():
    with pytest.raises(UnsupportedError, match=r"got 'squash', which has none"):
        squash(rows((2, 1)), 0.5)
    with pytest.raises(UnsupportedError, match=r"got 'peak', which has none"):
        peak(rows((2, 1)), 1)


# -- check_rule finds what is wrong


def unrolled(x: NestedTensor, k: float) -> NestedTensor:
    for _ in range(x.values.shape[0]):
        pass
    return x.with_values(squash(x.values, k))


WRONG: dict[str, tuple[Any, str, str]] = {
    "value": (
        lambda x, k: x.with_values(squash(x.values, k) + 0.01),
        "eager",
        "example 0: values differ by up to 0.01",
    ),
    "container": (lambda x, k: squash(x.values, k), "eager", "batch size 9, expected 4"),
    "other container": (lambda x, k: x.to_padded(), "eager", "container masked, expected nested"),
    "dtype": (
        lambda x, k: x.with_values(x.values.double()),
        "eager",
        r"example 0: dtype torch\.float64, expected torch\.float32",
    ),
    "several": (lambda x, k: (x, x), "eager", "type tuple, expected NestedTensor"),
    "gradient": (
        lambda x, k: x.with_values(squash(x.values, k).detach() + 0 * x.values),
        "grad",
        r"gradient of leaf 0, \[3, 3\]: values differ by up to",
    ),
    "no gradient": (
        lambda x, k: x.with_values(squash(x.values, k).detach()),
        "grad",
        r"requires_grad \[False, False, False, False\], expected \[True, True, True, True\]",
    ),
    "recompiles": (unrolled, "compile", "3 compiles, expected 1"),
    "member": (lambda x, k: x.with_values(squash(x.values, float(x.values[0, 0].item()))), "vmap", "CallError"),
    "host": (lambda x, k: x.with_values(squash(x.values, float(x.values.sum()))), "export", "data-dependent"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_check_rule_rejects(fault: str):
    impl, mode, text = WRONG[fault]
    tdc.ops.implements(squash)(impl)
    with pytest.raises(AssertionError, match=text) as error:
        check_rule(squash, lambda lengths: (rows(lengths), 0.5), modes=mode)
    assert str(error.value).startswith("tdc.testing.check_rule: expected the results of 'squash' for each example")


def test_check_rule_rejects_a_leak_of_padding():
    tdc.ops.implements(peak, "masked")(lambda x, dim: (x.data * x.mask).abs().amax(dim))
    with pytest.raises(AssertionError, match=r"masked, eager: lengths \(3, 0, 5, 1\): example 0: values differ: 3 NaN"):
        check_rule(peak, lambda lengths: (rows(lengths), 1), modes="eager", ref=lambda row, dim: peak(row, dim - 1))


@pytest.mark.slow
def test_check_rule_on_rows_of_the_library():
    check_rule(torch.add, lambda lengths: (rows(lengths), torch.randn(3)), kinds="masked")
    ref = lambda row, dim: torch.cumsum(row, dim - 1)  # noqa: E731
    check_rule(torch.cumsum, lambda lengths: (rows(lengths), 1), kinds="nested", ref=ref, modes=("eager", "grad"))


def test_check_rule_checks_its_arguments():
    with pytest.raises(UnsupportedError, match=r"a row for MaskedBatch, got none for 'squash'"):
        check_rule(squash, lambda lengths: (rows(lengths), 0.5), kinds="masked")
    install_squash("nested")
    with pytest.raises(
        AssertionError, match=r"arguments with 4 rows of a NestedTensor, got Tensor float32\[4\], float"
    ):
        check_rule(squash, lambda lengths: (torch.ones(4), 0.5))
    with pytest.raises(AssertionError, match=r"modes among .*, got 'fast'"):
        check_rule(squash, lambda lengths: (rows(lengths), 0.5), modes="fast")


# -- forbid


def test_forbid_names_the_operation_and_the_line():
    x = rows((2, 0, 3))
    with forbid():
        assert x.relu().sum(1).shape == (3, 3)
    padding = r"expected no padding, got padding in 'to_padded'\nat test_extending\.py:\d+"
    with pytest.raises(AssertionError, match=padding), forbid():
        x.to_padded()
    loops = r"no loops, got a loop over examples in 'unbind'\nat test_extending"
    for loop in (lambda: x.unbind(), lambda: list(x), lambda: x.tolist(), lambda: x.to_padded().unbind()):
        with pytest.raises(AssertionError, match=loops), forbid(padding=False):
            loop()
    with forbid(loops=False):
        assert len(x.unbind()) == 3
    assert x.to_padded().shape == (3, 3, 3)


def padding_peak(x: NestedTensor) -> Any:
    return peak(x, 1)


def test_forbid_names_a_rule_that_pads():
    tdc.ops.implements(peak)(lambda x, dim: peak(x.to_padded(0.0).data, dim))
    x = rows((2, 0, 3))
    text = r"got padding in 'peak'\nat test_extending\.py:\d+ in padding_peak: return"
    with pytest.raises(AssertionError, match=text), forbid():
        padding_peak(x)


def test_forbid_when_traced_and_without_a_recompile():
    tdc.ops.implements(peak)(lambda x, dim: peak(x.to_padded(0.0).data, dim))
    x = rows((2, 0, 3))
    compiled = tdc.compile.counted(padding_peak, backend="eager")
    want = compiled(x)
    with forbid():  # compiled before: neither traced again nor guarded
        assert torch.equal(compiled(x), want)
    assert compiled.counts.compiles == 1
    torch.compiler.reset()
    text = r"no padding.*\nat test_extending\.py:\d+ in padding_peak: return peak"
    with pytest.raises(AssertionError, match=text), forbid():
        tdc.compile.counted(padding_peak, backend="eager")(x)


def test_forbid_nests():
    x = rows((2, 1))
    with forbid(loops=False), forbid(padding=False), pytest.raises(AssertionError, match="no padding"):
        x.to_padded()


# -- unbatched


def test_unbatched_ragged_and_stacked():
    x = rows((2, 0, 3))
    out = tdc.unbatched(lambda row: row.flip(0))(x)
    assert isinstance(out, NestedTensor)
    assert all(torch.equal(a, b.flip(0)) for a, b in zip(out, x, strict=True))
    assert torch.equal(tdc.unbatched(lambda row: row.sum(), ragged_dims=())(x), torch.stack([r.sum() for r in x]))
    assert tdc.unbatched(len, ragged_dims=())(x).tolist() == [2, 0, 3]
    pairs = tdc.unbatched(lambda row: row @ row.T, ragged_dims=(1, 2))(x)
    assert pairs.ragged_dims == (1, 2)
    equal = rows((2, 2))
    assert isinstance(tdc.unbatched(torch.relu)(equal), NestedTensor)  # declared, not seen in the sizes


def test_unbatched_keeps_the_container_and_gradients():
    x = rows((2, 0, 3)).requires_grad_()
    m = x.to_padded(float("nan"))
    out = tdc.unbatched(torch.cumsum)(m, 0)
    assert isinstance(out, MaskedBatch)
    out.filled(0.0).sum().backward()
    assert x.grad is not None
    assert x.grad.values[:, 0].tolist() == [2, 1, 3, 2, 1]


def test_unbatched_arguments():
    x, w, shared = rows((2, 0, 3)), torch.randn(3, 4, 3), torch.randn(3)
    out = tdc.unbatched(lambda row, w, s, *, k: row @ w.T * s.sum() * k, in_dims=(0, 0, None))(x, w, shared, k=2.0)
    assert all(torch.allclose(a, r @ v.T * shared.sum() * 2) for a, r, v in zip(out, x, w, strict=True))
    td = TensorDict({"x": x, "w": w}, [3])
    both = tdc.unbatched(lambda e: e.replace(x=e["x"] @ e["w"].T), ragged_dims={"x": 1})(td)
    assert both.batch_size == (3,)
    assert torch.equal(both["w"], w)
    assert both["x"].shape == (3, -1, 4)


def test_unbatched_several_results():
    x = rows((2, 0, 3))
    a, b = tdc.unbatched(lambda row: (row, row.sum()), ragged_dims=[1, ()])(x)
    assert torch.equal(a.values, x.values)
    assert b.shape == (3,)
    named = tdc.unbatched(lambda row: {"n": len(row), "rows": row}, ragged_dims={"rows": 1})(x)
    assert named["n"].tolist() == [2, 0, 3]
    assert named["rows"].shape == (3, -1, 3)


def test_unbatched_compiles_unrolled():
    x = rows((2, 0, 3))
    out = torch.compile(tdc.unbatched(lambda row: row.sum(), ragged_dims=()), backend="eager")(x)
    assert torch.allclose(out, x.sum((1, 2)))


UNBATCHED: tuple[tuple[Any, type[Exception], str], ...] = (
    (lambda x: tdc.unbatched(torch.sum)(x), ShapeError, r"with a dim 1, .* got numbers.*\nhint: ragged_dims=\(\)"),
    (lambda x: tdc.unbatched(torch.relu, ragged_dims=())(x), ShapeError, r"of one shape.* 2 others\nat result of e"),
    (lambda x: tdc.unbatched(str)(x), DtypeError, r"that are tensors, got 3 that are not\nat result of example 0"),
    (lambda x: tdc.unbatched(torch.relu)(torch.ones(2)), StructureError, r"got none\nhint: pass a NestedTensor"),
    (lambda x: tdc.unbatched(torch.add, (0, 0))(x, torch.ones(2)), StructureError, r"sizes\nat argument 0: 3"),
    (lambda x: tdc.unbatched(torch.add, (0,))(x, 1), DtypeError, r"one entry of in_dims for each .*, got 1 for 2"),
    (lambda x: tdc.unbatched(torch.add, (0, 0))(x, 1), DtypeError, r"to take apart, got int\nat argument 1: int"),
    (lambda x: tdc.unbatched(lambda r: [r] * len(r))(x), StructureError, r"results of one form.* got 2 others"),
    (lambda x: tdc.unbatched(lambda r: (r, r), ragged_dims=[1])(x), StructureError, r"each result, got 1 for 2"),
    (lambda x: tdc.unbatched(torch.relu)(x[:0]), StructureError, r"at least one example, got a batch of no rows"),
    (lambda x: tdc.unbatched(str)(TensorDict({}, [2, 2])), ShapeError, r"one batch dim, got batch size \[2, 2\]"),
)


@pytest.mark.parametrize(("call", "error", "text"), UNBATCHED)
def test_unbatched_checks(call: Any, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        call(rows((2, 0, 3)))


def test_unbatched_is_forbidden_by_its_name():
    with pytest.raises(AssertionError, match=r"got a loop over examples in 'unbatched'"), forbid():
        tdc.unbatched(torch.relu)(rows((2, 1)))
