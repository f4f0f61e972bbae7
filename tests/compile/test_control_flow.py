"""cond, while_loop, scan, associative_scan and scan_map of containers: eager, compiled, gradients, messages.

Eager code is a Python loop, so it is the reference of compiled code; it is held against raw tensors itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from versions import refused

import tdc
from tdc import DtypeError, ShapeError, StructureError, TensorDict, UnsupportedError
from tdc.core.asserts import require

Fn = Callable[..., Any]


def tree() -> TensorDict:
    return TensorDict({"a": torch.rand(3, 4), "n": {"x": torch.rand(3)}}, [3])


def steps() -> TensorDict:
    return TensorDict({"r": torch.rand(5, 3, 4), "d": torch.rand(5, 3)}, [5, 3])


def ragged() -> tdc.NestedTensor:
    return tdc.pack([torch.randn(n, 4) for n in (2, 0, 3)])


def tensors(x: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(x) if isinstance(t, Tensor)]


def gradients(out: Any, wrt: Sequence[Tensor]) -> list[Tensor]:
    """Of a function of the whole result, so that every part counts."""
    total = sum([t.square().sum() * (i + 1) for i, t in enumerate(tensors(out)) if t.requires_grad], torch.zeros(()))
    found = torch.autograd.grad(total, wrt, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(wrt, found, strict=True)]


def same(fn: Fn, *args: Any, wrt: Sequence[Tensor] = (), backend: Any = "aot_eager") -> Any:
    """Compiled code gives what eager code gives: tree, values, gradients. Returns the eager result."""
    want = fn(*args)
    got = torch.compile(fn, fullgraph=True, backend=backend)(*args)
    assert pytree.tree_structure(got) == pytree.tree_structure(want)
    for x, y in zip(tensors(got), tensors(want), strict=True):
        torch.testing.assert_close(x, y)
    for x, y in zip(gradients(got, wrt), gradients(want, wrt), strict=True) if wrt else ():
        torch.testing.assert_close(x, y)
    return want


def weight(*sizes: int) -> Tensor:
    return torch.randn(*sizes or (4, 4), requires_grad=True)


class TestEager:
    """Against raw tensors."""

    def test_cond_runs_one_branch(self):
        td = tree()
        assert torch.equal(tdc.cond(td["a"].sum() > 0, lambda t: t["a"], lambda t: 1 / 0, (td,)), td["a"])
        assert tdc.cond(False, lambda: 1, lambda: {"b": 2}) == {"b": 2}

    def test_while_loop(self):
        out = tdc.while_loop(lambda n, t: n < 3, lambda n, t: (n + 1, t * 2), (torch.tensor(0), td := tree()))
        assert out[0] == 3
        assert torch.equal(out[1]["n", "x"], td["n", "x"] * 8)
        (none,) = tdc.while_loop(lambda t: t["a"].sum() < 0, lambda t: (t,), [td])
        assert torch.equal(none["a"], td["a"])

    @pytest.mark.parametrize("reverse", [False, True])
    def test_scan(self, reverse: bool):
        xs, w, h = steps(), torch.rand(4, 4), torch.zeros(3, 4)
        last, ys = tdc.scan(
            lambda h, x: (torch.tanh(x["r"] + h @ w), x.set("h", h)), torch.zeros(3, 4), xs, reverse=reverse
        )
        before: dict[int, Tensor] = {}
        for t in reversed(range(5)) if reverse else range(5):
            before[t] = h
            h = torch.tanh(xs["r"][t] + h @ w)
        assert torch.equal(last, h)
        assert ys.batch_size == (5, 3)
        assert torch.equal(ys["h"], torch.stack([before[t] for t in range(5)]))
        assert torch.equal(ys["d"], xs["d"])

    def test_scan_along_another_dim(self):
        xs = steps()
        last, ys = tdc.scan(lambda c, x: (c + x["d"], x), torch.zeros(5), xs, dim=-1)
        torch.testing.assert_close(last, xs["d"].sum(1))
        assert ys.batch_size == (5, 3)
        assert torch.equal(ys["r"], xs["r"])

    def test_associative_scan(self):
        xs = TensorDict({"r": torch.rand(5, 3)}, [5])
        for reverse in (False, True):
            out = tdc.associative_scan(lambda a, b: a + b, xs, 0, reverse, combine_mode="generic")
            want = xs["r"].flip(0).cumsum(0).flip(0) if reverse else xs["r"].cumsum(0)
            torch.testing.assert_close(out["r"], want)

    def test_map(self):
        xs = steps()
        out = tdc.scan_map(lambda x, k: x.set("s", x["r"].sum(-1) * k), xs, 2)
        assert out.batch_size == (5, 3)
        assert torch.equal(out["s"], xs["r"].sum(-1) * 2)

    def test_what_has_no_tensors(self):
        assert tdc.scan(lambda c, x: (c, None), torch.zeros(2), torch.rand(3))[1] is None
        assert tdc.cond(torch.tensor(True), lambda x: x, lambda x: None, ("text",)) == "text"

    def test_under_vmap_of_eager_code(self):
        xs = torch.rand(3, 5)
        out = torch.vmap(lambda x: tdc.scan(lambda c, x: (c + x, None), torch.zeros(()), x)[0])(xs)
        torch.testing.assert_close(out, xs.sum(1))
        with pytest.raises(UnsupportedError, match=r"torch\.where"):
            torch.vmap(lambda x: tdc.cond(x > 0, lambda: x, lambda: -x))(torch.rand(3))


class TestCompiled:
    """Against eager code."""

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_cond_with_another_structure_than_its_operands(self):
        w = weight()
        up, down = lambda t: t.set("b", t["a"] @ w), lambda t: t.set("b", t["a"] * 0)

        def fn(td: TensorDict) -> TensorDict:
            return tdc.cond(td["a"].sum() > 0, up, down, (td,))

        assert "b" in same(fn, tree(), wrt=[w])
        assert same(fn, -tree())["b"].abs().sum() == 0

    def test_one_graph_for_both_outcomes(self):
        f = tdc.compile.counted(
            lambda td: tdc.cond(td["a"].sum() > 0, lambda t: t * 2, lambda t: t, (td,)), backend="eager"
        )
        td = tree()
        assert torch.equal(f(td)["a"], td["a"] * 2)
        assert torch.equal(f(-td)["a"], -td["a"])
        assert (f.counts.graphs, f.counts.compiles) == (1, 1)

    @pytest.mark.slow
    def test_cond_of_ragged_batches(self):
        w, x, y = weight(4), ragged(), ragged()
        assert x.structure is not y.structure

        def fn(x: Any, y: Any) -> Any:
            return tdc.cond(x.values.sum() > 100, lambda a, b: a + b, lambda a, b: a * w, (x, y))

        same(fn, x, y, wrt=[w])

    @pytest.mark.slow
    def test_an_assertion_of_the_branch_not_taken(self):
        x, y = ragged(), tdc.pack([torch.randn(n, 4) for n in (1, 1, 3)])

        def fn(x: Any, y: Any) -> Any:
            return tdc.cond(
                (x.offsets == y.offsets).all(), lambda a, b: a.values + b.values.sum(), lambda a, b: a.values, (x, y)
            )

        def checks(x: Any, y: Any) -> Any:
            return tdc.cond((x.offsets == y.offsets).all(), lambda a, b: (a + b).sum(1), lambda a, b: a.sum(1), (x, y))

        same(fn, x, y)
        same(checks, x, y)

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_cond_with_constants(self):
        td = tree()
        same(
            lambda t: tdc.cond(
                t["a"].sum() > 0, lambda t, n, k: (t * k, n, "s"), lambda t, n, k: (t, n, "s"), (t, None, 3)
            ),
            td,
        )

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_while_loop_over_a_tensordict(self):
        w = weight()
        same(
            lambda td: tdc.while_loop(
                lambda n, t: n < 3, lambda n, t: (n + 1, t.set("a", torch.tanh(t["a"] @ w))), (torch.tensor(0), td)
            ),
            tree(),
            wrt=[w],
        )

    def test_while_loop_over_a_ragged_batch(self):
        w, x = weight(4), ragged()

        def fn(x: Any) -> Any:
            return tdc.while_loop(lambda n, h: n < 3, lambda n, h: (n + 1, torch.tanh(h * w + x)), (torch.tensor(0), x))

        out = same(fn, x, wrt=[w])
        assert isinstance(out[1], tdc.NestedTensor)

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_while_loop_over_a_padded_batch(self):
        w, x = weight(4), ragged().to_padded()
        f = lambda x: tdc.while_loop(lambda n, h: n < 2, lambda n, h: (n + 1, torch.tanh(h * w)), (torch.tensor(0), x))  # noqa: E731
        assert isinstance(same(f, x, wrt=[w])[1], tdc.MaskedBatch)

    def test_while_loop_whose_condition_is_a_python_bool(self):
        """`torch.where` took no bool where the loop was differentiated."""
        w = weight(3)

        def loop(flag: bool) -> Any:
            return lambda w: tdc.while_loop(lambda h: flag, lambda h: (h * w,), (w * 2,))

        same(loop(False), w, wrt=[w])
        with pytest.raises(Exception, match="expected a predicate that reads the carry, got True"):
            torch.compile(loop(True), fullgraph=True, backend="eager")(w)

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_values_that_change_places(self):
        x = torch.rand(3)
        f = lambda x: tdc.while_loop(lambda n, a, b: n < 3, lambda n, a, b: (n + 1, b, a + 1), (torch.tensor(0), x, x))  # noqa: E731
        same(f, x)

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_scan_with_a_module(self):
        cell, xs = nn.GRUCell(4, 4), steps()

        def step(h: Tensor, x: TensorDict) -> Any:
            h = cell(x["r"], h)
            return h, TensorDict({"h": h, "z": h.sum(-1)}, [3])

        same(lambda xs: tdc.scan(step, torch.zeros(3, 4), xs, reverse=True), xs, wrt=list(cell.parameters()))

    @pytest.mark.cases(slow=1)
    @pytest.mark.parametrize(
        "rows", [pytest.param(False, id="dense"), pytest.param(True, id="ragged")]
    )
    @pytest.mark.slow
    def test_scan_over_layers(self, rows: bool):
        """A module takes its parameters in the body: one layer in the graph, however many there are."""
        layers = [nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True) for _ in range(3)]
        stacked = tdc.stack_modules(layers)
        params = {path: x.detach().requires_grad_() for path, x in stacked.items(True, True)}
        x = ragged() if rows else torch.randn(3, 5, 4)

        def deep(x: Any) -> Any:
            td = TensorDict(params, stacked.batch_size)
            return tdc.scan(lambda h, p: (tdc.functional_call(layers[0], p, (h,)), None), x, td)[0]

        want = same(deep, x, wrt=list(params.values()))
        torch.testing.assert_close(tensors(want)[0], tensors(layers[2](layers[1](layers[0](x))))[0])

    @pytest.mark.slow
    def test_scan_of_a_ragged_carry_and_closure(self):
        w, x, xs = weight(4), ragged(), steps()
        f = lambda x, xs: tdc.scan(lambda h, s: (torch.tanh(h + x * w * s["r"][0]), h.values.sum()), x * 0, xs)  # noqa: E731
        same(f, x, xs, wrt=[w])

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_integers_in_the_carry_and_among_results(self):
        w, xs = weight(), steps()

        def step(c: Any, x: TensorDict) -> Any:
            h = torch.tanh(x["r"] * c[0] + c[2] @ w)
            return (c[0] - 1, ~c[1], h), (h, c[0] * 2**40 + 1, h > 0, c[0].int())

        start = (torch.tensor(3), torch.tensor(True), torch.zeros(3, 4))
        out = same(lambda xs: tdc.scan(step, start, xs), xs, wrt=[w])
        assert out[1][1].tolist() == [k * 2**40 + 1 for k in (3, 2, 1, 0, -1)]

    @pytest.mark.slow
    def test_map_and_associative_scan(self):
        w, xs = weight(), steps()
        same(lambda xs: tdc.scan_map(lambda s, w: (s.set("r", torch.sin(s["r"] @ w)), s["d"] > 0), xs, w), xs, wrt=[w])
        f = lambda xs: tdc.associative_scan(lambda a, b: a * b, xs * w.mean(), 1, True, combine_mode="generic")  # noqa: E731
        same(f, xs, wrt=[w])

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_carries_that_the_body_hands_back(self):
        w, xs = weight(), steps()
        last, _ = same(lambda xs: tdc.scan(lambda h, s: (h, s["r"] @ w), torch.zeros(2), xs), xs, wrt=[w])
        assert last.tolist() == [0, 0]
        x = torch.rand(2)
        assert torch.equal(same(lambda x: tdc.while_loop(lambda x: x.sum() < 0, lambda x: (x,), (x,)), x)[0], x)

    def test_export(self):
        class Model(nn.Module):
            def forward(self, td: TensorDict) -> Any:
                return tdc.cond(td["a"].sum() > 0, lambda t: t * 2, lambda t: t * 3, (td,))

        program = torch.export.export(Model(), (td := tree(),), strict=True)
        for x in (td, -td):
            torch.testing.assert_close(program.module()(x)["a"], Model()(x)["a"])

    @pytest.mark.cases(1, 0)
    @pytest.mark.parametrize("strict", [False, True])
    def test_export_asserts_in_the_branch_that_runs(self, strict: bool):
        class Model(nn.Module):
            def forward(self, pred: Tensor, x: Tensor) -> Tensor:
                def positive(x: Tensor) -> Tensor:
                    require((x > 0).all(), "tdc.test: expected positive numbers, got others")
                    return x * 2

                return tdc.cond(pred, lambda x: x + 1, positive, (x,))

        run = torch.export.export(Model(), (torch.tensor(True), torch.ones(3)), strict=strict).module()
        assert run(torch.tensor(True), -torch.ones(3)).tolist() == [0, 0, 0]
        assert run(torch.tensor(False), torch.ones(3)).tolist() == [2, 2, 2]
        with pytest.raises(Exception, match="expected positive numbers"):
            run(torch.tensor(False), -torch.ones(3))

    @pytest.mark.sweep
    @pytest.mark.cases(0, 1)
    @pytest.mark.parametrize("outer", ["while", "scan", "cond"])
    @pytest.mark.parametrize("inner", ["while", "scan", "cond"])
    def test_nests(self, outer: str, inner: str):
        w, xs = weight(), steps()
        count = torch.tensor(0)
        turn = {
            "while": lambda f, h: tdc.while_loop(lambda n, h: n < 2, lambda n, h: (n + 1, f(h)), (count, h))[1],
            "scan": lambda f, h: tdc.scan(lambda h, x: (f(h) + x["r"], None), h, xs)[0],
            "cond": lambda f, h: tdc.cond(h.sum() > -9, f, lambda h: h * 2, (h,)),
        }
        fn = lambda h: turn[outer](lambda h: turn[inner](lambda h: torch.tanh(h @ w), h), h)  # noqa: E731
        if outer == "scan" and inner != "cond":
            with pytest.raises(Exception, match=r"expected a loop outside of scan"):
                same(fn, torch.zeros(3, 4), wrt=[w])
        else:
            same(fn, torch.zeros(3, 4), wrt=[w])

    @pytest.mark.cases(1, 1)
    @pytest.mark.parametrize("op", ["cond", "scan", "while_loop"])
    def test_gradients_around_compiled_operators(self, op: str):
        """Autograd takes them, since torch's operators of loops have no rule for `torch.func.grad`."""
        fn, w = AROUND[op], torch.rand(3)
        with torch.no_grad(), refused(rf"tdc\.{op}: expected no transform of torch.func around it"):
            found = torch.compile(lambda w: tdc.value_and_grad(fn)(w), fullgraph=True, backend="aot_eager")(w)
            torch.testing.assert_close(found, tdc.value_and_grad(fn)(w))

    @pytest.mark.cases(2, 3)
    @pytest.mark.parametrize("op", ["cond", "scan"])
    @pytest.mark.parametrize(
        ("around", "name"),
        [
            (torch.func.grad, "grad"),
            (tdc.grad, "grad"),
            (lambda fn: torch.func.grad(lambda w: tdc.grad(fn)(w).sum()), "grad"),
            (lambda fn: lambda w: torch.vmap(tdc.grad(fn))(w.expand(2, 3)), "grad"),
            (lambda fn: lambda w: torch.vmap(fn)(w.expand(2, 3)), "vmap"),
        ],
        ids=["torch", "differentiable", "second", "members", "vmap"],
    )
    def test_transforms_around_compiled_operators_are_refused(self, op: str, around: Any, name: str):
        mode = torch.enable_grad() if around is tdc.grad else torch.no_grad()
        with (
            mode,
            pytest.raises(Exception, match=rf"tdc\.{op}: expected no transform of torch\.func around it, got {name}"),
        ):
            torch.compile(around(AROUND[op]), fullgraph=True, backend="eager")(torch.rand(3))


AROUND: dict[str, Any] = {
    "cond": lambda w: tdc.cond(torch.tensor(True), lambda w: w.sin(), lambda w: w.cos(), (w,)).sum(),
    "scan": lambda w: tdc.scan(lambda h, x: (h * x, None), torch.ones(()), w)[0],
    "while_loop": lambda w: tdc.while_loop(lambda n, h: n < 3, lambda n, h: (n + 1, h * w.sin()), (one(), w))[1].sum(),
}


def one() -> Tensor:
    return torch.tensor(0)


MESSAGES: list[tuple[str, Fn, type[Exception], str]] = [
    ("several", lambda td: tdc.cond(td["a"] > 0, one, one), ShapeError,
     r"a predicate of one element, got Tensor bool\[3, 4\]"),
    ("no_bool", lambda td: tdc.cond(td["a"].sum(), one, one), DtypeError, r"a bool predicate, got Tensor float32\[\]"),
    ("number", lambda td: tdc.cond(1, one, one), DtypeError,
     "a bool predicate, got int"),  # type: ignore[arg-type]  # wrong
    ("operands", lambda td: tdc.cond(True, one, one, td), StructureError, "a tuple of operands, got TensorDict"),
    ("counter", lambda td: tdc.while_loop(lambda n: n < 3, lambda n: (n + 1,), (0,)), DtypeError, r"at \[0\]: int"),
    ("count", lambda td: tdc.while_loop(lambda t: td["a"].sum() > 0, lambda t: t, (td,)), StructureError,
     "1 values from body_fn, got TensorDict"),
    ("keys", lambda td: tdc.while_loop(lambda t: td["a"].sum() > 0, lambda t: (t.set("b", t["a"]),), (td,)),
     StructureError,
     r"at the carry: tuple of \[0\]\['a'\]: .*\nat the result of body_fn: .*\[0\]\['b'\]: Tensor float32\[3, 4\]"),
    ("dtype", lambda td: tdc.while_loop(lambda t: td["a"].sum() > 0, lambda t: (t.double(),), (td,)), StructureError,
     r"at \[0\]\['a'\]: Tensor float32\[3, 4\] in the carry, Tensor float64\[3, 4\] in the result"),
    ("shape", lambda td: tdc.while_loop(lambda t: td["a"].sum() > 0, lambda t: (t[:2],), (td,)), StructureError,
     r"float32\[3\] in the carry, Tensor float32\[2\] in"),
    ("condition", lambda td: tdc.while_loop(lambda t: t["a"].sum(), lambda t: (t,), (td,)), DtypeError,
     "a bool predicate"),
    ("pair", lambda td: tdc.scan(lambda c, x: c, one(), td), StructureError,
     r"a pair \(carry, y\) from combine_fn, got Tensor"),
    ("carry", lambda td: tdc.scan(lambda c, x: ((c, c), x), one(), td), StructureError,
     r"at the carry: Tensor of value: Tensor int64\[\]\nat the carry of combine_fn: tuple of \[0\]"),
    ("no_xs", lambda td: tdc.scan(lambda c, x: (c, x), one(), {}), ShapeError, "at least one tensor in xs, got none"),
    ("no_steps", lambda td: tdc.scan(lambda c, x: (c, x), one(), td[:0]), ShapeError, "at least one step at dim 0"),
    ("lengths", lambda td: tdc.scan(lambda c, x: (c, c), one(), (td, torch.ones(4))), ShapeError,
     r"got different lengths\nat \[0\]\['a'\]: .*\n.*\nat \[1\]: Tensor float32\[4\]"),
    ("dim", lambda td: tdc.scan(lambda c, x: (c, x), one(), td, dim=1), ShapeError, r"a dim in \[-1, 0\], got 1"),
    ("init", lambda td: tdc.scan(lambda c, x: (c + 1, x), 0, td), DtypeError,
     "in init, got leaves of other types\nat value: int"),
    ("ragged_xs", lambda td: tdc.scan(lambda c, x: (c, c), one(), {"x": ragged()}), UnsupportedError,
     r"at \['x'\]: NestedTensor .*\nhint: scan x.to_padded\(\)"),
    ("ragged_leaf", lambda td: tdc.scan(lambda c, x: (c, c), one(), td.set("q", ragged())), UnsupportedError,
     r"at \['q'\]: Nested"),
    ("ragged_y", lambda td: tdc.scan(lambda c, x: (c, ragged()), one(), td), UnsupportedError,
     r"hint: return x.values"),
    ("pointwise", lambda td: tdc.associative_scan(torch.add, torch.ones(3), 0), UnsupportedError,
     'combine_mode="generic"'),
    ("mode", lambda td: tdc.associative_scan(torch.add, torch.ones(3), 0, combine_mode="x"), StructureError,
     "'pointwise' or"),
    ("form", lambda td: tdc.associative_scan(lambda a, b: a["a"], td, 0, combine_mode="generic"), StructureError,
     "the result of combine_fn in the form of a slice of xs"),
    ("map", lambda td: tdc.scan_map(lambda x: one(), (td, torch.ones(4))), ShapeError,
     r"tdc\.scan_map: .*different lengths"),
    ("map_y", lambda td: tdc.scan_map(lambda x: ragged(), td), UnsupportedError, "ragged or padded batches"),
]  # fmt: skip


class TestMessages:
    @pytest.mark.parametrize(("call", "error", "text"), [m[1:] for m in MESSAGES], ids=[m[0] for m in MESSAGES])
    def test_eager(self, call: Fn, error: type[Exception], text: str):
        with pytest.raises(error, match=text):
            call(tree())

    @pytest.mark.cases(1, 2)
    @pytest.mark.parametrize("name", ["several", "keys", "shape", "carry", "lengths", "ragged_xs"])
    def test_compiled(self, name: str):
        call = next(m[1] for m in MESSAGES if m[0] == name)
        with pytest.raises(Exception, match=r"tdc\.(cond|while_loop|scan): expected"):
            torch.compile(call, fullgraph=True, backend="eager")(tree())

    @pytest.mark.parametrize(("yes", "text"), [
        (lambda t: t.set("b", t["a"]), r"at the result of true_fn: .*'b'.*at the result of false_fn"),
        (lambda t: t.set("a", t["a"][:, :2]), r"float32\[3, 2\] in the result of true_fn, Tensor float32\[3, 4\]"),
        (lambda t: (t, 1), "another treedef"),
    ])  # fmt: skip
    def test_branches_that_differ(self, yes: Fn, text: str):
        fn = lambda td: tdc.cond(td["a"].sum() > 0, yes, lambda t: t, (td,))  # noqa: E731
        with pytest.raises(Exception, match=f"(?s){text}"):
            torch.compile(fn, fullgraph=True, backend="eager")(tree())

    def test_a_leaf_that_is_no_tensor(self):
        with pytest.raises(DtypeError, match=r"at \[1\]: set"):
            tdc.scan(lambda c, x: (c, c), one(), (tree(), {1}))


def test_what_is_traced_outside_does_not_run():
    """A body that is traced for its form must not be run where the loop or branch does not come."""

    def divide(n: Tensor) -> Tensor:
        return tdc.cond(n > 0, lambda: 12 // n, lambda: n)

    compiled = torch.compile(divide, backend="eager", fullgraph=True)
    assert [int(compiled(torch.tensor(n))) for n in (4, 0)] == [3, 0]


@pytest.mark.sweep
@pytest.mark.slow
def test_scan_without_results_and_gradients():
    """Inductor fails where a loop has no results and nothing is differentiated."""

    def total(xs: Tensor) -> Any:
        return tdc.scan(lambda carry, x: (carry + x, None), xs.new_zeros(2), xs)[0]

    xs = torch.arange(6.0).reshape(3, 2)
    assert torch.equal(torch.compile(total, fullgraph=True)(xs), xs.sum(0))


@pytest.mark.sweep
@pytest.mark.slow
def test_branches_whose_gradients_lie_in_another_order():
    """A gradient that is a view, one that is transposed, and one of nothing, which is laid out as its operand."""

    def rows(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sum(1)

    def columns(x: Tensor, w: Tensor) -> Tensor:
        return (w.t() * x).sum(1)

    def alone(x: Tensor, w: Tensor) -> Tensor:
        return x.sum(0)[:1] * x.sum(1)

    x, w = torch.randn(3, 7).t().requires_grad_(), torch.randn(7, 3).t().requires_grad_()
    for yes, no in ((rows, columns), (columns, alone), (alone, rows)):
        for flag in (torch.tensor(True), torch.tensor(False)):
            same(lambda p, x, w, yes=yes, no=no: tdc.cond(p, yes, no, (x, w)), flag, x, w, wrt=(x, w))
