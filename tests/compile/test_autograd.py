"""`torch.autograd.grad` and `backward` of containers, and `tdc.autograd_grad`, which graphs take, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tdc
from tdc import CallError, DtypeError, ShapeError, Static, StructureError, TensorDict, UnsupportedError
from tdc.compile import counted

autograd: Any = torch.autograd  # whose types are of tensors alone
LENGTHS = (2, 0, 3)


@tdc.tensorclass
class Pair:
    a: Tensor
    b: Tensor


def params(**more: Any) -> Any:
    td = TensorDict({"a": torch.rand(3), "b": {"c": torch.rand(2)}}).apply(torch.Tensor.requires_grad_)
    return td.update(more)


def ragged(dtype: torch.dtype = torch.float32, lengths: tuple[int, ...] = LENGTHS) -> Any:
    x = tdc.pack([torch.rand(n, 4, dtype=dtype) for n in lengths])
    return x.with_values(x.values.requires_grad_())


def loss_of(td: TensorDict) -> Tensor:
    return (td["a"] ** 2).sum() * td["b", "c"].sum()


def rows(x: Any) -> list[Tensor]:
    return list(x.unbind())


class TestGrad:
    def test_a_tensordict_has_the_gradients_of_its_leaves(self):
        td = params()
        want = autograd.grad(loss_of(td), [td["a"], td["b", "c"]])
        for given in (td, td.update({"i": torch.arange(2), "name": Static("n")})):
            (grads,) = autograd.grad(loss_of(td), given)
            torch.testing.assert_close([grads["a"], grads["b", "c"]], list(want))
            assert "i" not in grads
            assert torch.equal(tdc.autograd_grad(loss_of(td), given)["a"], want[0])

    def test_a_tensorclass_stays_one(self):
        pair = Pair(a=torch.rand(3, requires_grad=True), b=torch.rand(3, requires_grad=True), batch_size=[3])
        grads = tdc.autograd_grad((pair.a * pair.b).sum(), pair)
        assert type(grads) is Pair
        assert grads.batch_size == (3,)
        assert torch.equal(grads.a, pair.b)

    def test_inputs_of_several_kinds(self):
        td, x = params(), ragged()
        y = torch.rand(4, requires_grad=True)
        loss = lambda: loss_of(td) + (x * y).sum()  # noqa: E731
        tuples = autograd.grad(loss(), [td, x, y]), tdc.autograd_grad(loss(), (td, x, y))
        for a, b, c in tuples:
            torch.testing.assert_close(a["a"], autograd.grad(loss(), td["a"])[0])
            torch.testing.assert_close(rows(b), [y.expand(n, 4) for n in LENGTHS])
            torch.testing.assert_close(c, x.values.sum(0))
        named = tdc.autograd_grad(loss(), {"td": td, "y": y})
        assert list(named) == ["td", "y"]
        assert torch.equal(named["y"], x.values.sum(0))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("padded", [False, True])
    def test_ragged_batches_as_a_loop_over_examples(self, padded: bool, dtype: torch.dtype):
        x: Any = ragged(dtype).detach()
        x = x.to_padded() if padded else x
        x = x.with_data(x.data.requires_grad_()) if padded else x.with_values(x.values.requires_grad_())
        seeds = torch.rand_like(x)
        (found,) = autograd.grad(x.exp(), x, seeds)
        assert type(found) is type(x)
        for g, row, seed in zip(rows(found), rows(x), rows(seeds), strict=True):
            leaf = row.detach().requires_grad_()
            torch.testing.assert_close(g, autograd.grad(leaf.exp(), leaf, seed)[0])

    def test_two_levels(self):
        x: Any = tdc.pack([tdc.pack([torch.rand(2), torch.rand(0)]), tdc.pack([torch.rand(3)])])
        x = x.with_values(x.values.with_values(x.values.values.requires_grad_()))
        grads = tdc.autograd_grad((x * x).sum(), x)
        assert type(grads) is type(x)
        torch.testing.assert_close(grads.values.values, 2 * x.values.values)

    def test_outputs_that_are_tensordicts(self):
        td = params()
        losses = TensorDict({"one": td["a"].sum(), "two": 3 * td["b", "c"].sum()})
        assert torch.equal(tdc.autograd_grad(losses, td)["b", "c"], torch.full((2,), 3.0))
        assert torch.equal(tdc.autograd_grad(td * 2, td, torch.ones_like(td))["a"], torch.full((3,), 2.0))
        outs = [td * 2, td["a"].sum()]
        assert torch.equal(tdc.autograd_grad(outs, td, [torch.ones_like(td), None])["a"], torch.full((3,), 3.0))

    def test_unused_inputs(self):
        td = params(z=torch.rand(2, requires_grad=True))
        x = ragged()
        with pytest.raises(CallError, match=r"at z: Tensor float32\[2\]\nhint: allow_unused=True"):
            autograd.grad(loss_of(td), td)
        found, none = autograd.grad(loss_of(td), [td, x], allow_unused=True)
        assert found.keys() == ("a", "b")
        assert none is None
        found, zeros = autograd.grad(loss_of(td), [td, x], materialize_grads=True)
        assert not found["z"].any()
        assert zeros.lengths.tolist() == list(LENGTHS)
        assert not zeros.values.any()

    def test_second_derivatives_and_kept_graphs(self):
        td = params()
        first = tdc.autograd_grad(loss_of(td), td, create_graph=True)
        second = tdc.autograd_grad(first["a"].sum(), td)
        torch.testing.assert_close(second["a"], 2 * td["b", "c"].sum().expand(3))
        loss = loss_of(td)
        both = [tdc.autograd_grad(loss, td, retain_graph=True) for _ in range(2)]
        assert torch.equal(both[0]["a"], both[1]["a"])

    def test_under_vmap(self):
        td = params()
        seeds = torch.stack([torch.ones_like(td), 2 * torch.ones_like(td)])
        found = tdc.vmap(lambda g: autograd.grad(td * 3, td, g)[0])(seeds)
        assert found["a"].tolist() == [[3.0] * 3, [6.0] * 3]

    def test_gradient_edges_beside_containers(self):
        td = params()
        y = td["a"] ** 2
        edge = torch.autograd.graph.get_gradient_edge(y)
        of_edge, of_td = autograd.grad(y.sum(), [edge, td.select("a")])
        assert torch.equal(of_edge, torch.ones(3))
        torch.testing.assert_close(of_td["a"], 2 * td["a"])


class TestGraphs:
    @pytest.mark.skipif(torch.__version__ < "2.13", reason="torch traces autograd.grad from 2.13 on")
    def test_one_graph_for_all_lengths(self):
        def step(td: TensorDict, x: Any) -> Any:
            td = td.apply(lambda leaf: leaf.detach().requires_grad_())
            x = x.with_values(x.values.detach().requires_grad_())
            return tdc.autograd_grad((x * td["a"]).exp(), [td, x], torch.ones_like(x), allow_unused=True)

        run = counted(step, backend="aot_eager")
        td = TensorDict({"a": torch.rand(4), "z": torch.rand(2)})
        for lengths in (LENGTHS, (1, 4, 0, 2), (3, 3)):
            x = ragged(lengths=lengths).detach()
            found, want = run(td, x), step(td, x)
            assert found[0].keys() == ("a",)
            torch.testing.assert_close(found[0]["a"], want[0]["a"])
            torch.testing.assert_close(rows(found[1]), rows(want[1]))
        assert run.counts.graphs == run.counts.compiles == 1

    def test_a_compiled_forward(self):
        forward = counted(lambda td, x: (x * td["a"]).exp().sum(), backend="aot_eager")
        td = TensorDict({"a": torch.rand(4, requires_grad=True)})
        for lengths in (LENGTHS, (1, 4, 0, 2), (3, 3)):
            x = ragged(lengths=lengths)
            found, of_x = autograd.grad(forward(td, x), [td, x])
            want = [autograd.grad((row * td["a"]).exp().sum(), [td["a"], row]) for row in rows(x)]
            torch.testing.assert_close(found["a"], torch.stack([g for g, _ in want]).sum(0))
            torch.testing.assert_close(rows(of_x), [g for _, g in want])
        assert forward.counts.graphs == forward.counts.compiles == 1


class TestBackward:
    def test_gradients_are_added(self):
        td, x = params(), ragged()
        for _ in range(2):
            autograd.backward([td * 2, x * x], [torch.ones_like(td), torch.ones_like(x)])
        assert td.grad["a"].tolist() == [4.0] * 3
        torch.testing.assert_close(rows(x.grad), [4 * row for row in rows(x.detach())])

    def test_only_the_inputs(self):
        td = params()
        loss_of(td).backward(inputs=[td.select("a")])
        assert td.grad.keys() == ("a",)
        autograd.backward(TensorDict({"l": td["a"].sum()}), inputs=[td["a"]])
        want = 2 * td["a"] * td["b", "c"].sum() + 1
        torch.testing.assert_close(td.grad["a"], want.detach())

    def test_results_of_operations_keep_no_gradient(self):
        td = TensorDict({"a": torch.rand(3, requires_grad=True)}, [3])
        rows = [td] if torch.__version__ >= "2.13" else []  # which torch goes through since
        for given in (*rows, [td * 2]):
            with pytest.raises(CallError, match=r"results of operations\nat a: (?s:.*)hint: inputs=\[td\], a list"):
                td["a"].sum().backward(inputs=given)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no grad": (
        lambda: autograd.grad(loss_of(params()), params(z=torch.rand(2))), CallError,
        r"inputs that require grad, got others\nat z: Tensor float32\[2\]\nhint: td.filter",
    ),
    "outputs": (lambda: autograd.grad(params().detach(), params()), CallError, r"outputs that require .*\nat a:"),
    "wide": (lambda: autograd.grad(ragged() * 2, ragged()), CallError, "one number.*\nat NestedTensor"),
    "form": (lambda: autograd.grad(ragged() * 2, ragged(), torch.ones(5, 4)), ShapeError, "in the form of its"),
    "keys": (
        lambda: autograd.grad(params() * 2, params(), params().select("a")), StructureError,
        "of 1 tensors for TensorDict .* of 2",
    ),
    "count": (
        lambda: autograd.grad(params() * 2, params(), [params(), params()]), StructureError,
        "one entry of grad_outputs for each output, got 2 for 1",
    ),
    "integers": (
        lambda: autograd.grad(loss_of(params()), TensorDict({"i": torch.arange(3)})), DtypeError,
        "floating-point tensors, got TensorDict",
    ),
    "a number": (lambda: autograd.grad(loss_of(params()), [params(), 3]), DtypeError, "containers, got int"),
    "batched": (
        lambda: autograd.grad(params() * 2, params(), params(), is_grads_batched=True), UnsupportedError,
        "hint: tdc.vmap",
    ),
    "td.backward": (lambda: params().backward(), AttributeError, r"hint: .*autograd.backward\(losses\)"),  # type: ignore[attr-defined]  # an error, as it says
    "nt.backward": (lambda: ragged().backward(), AttributeError, r"hint: x.sum\(\).backward\(\)"),  # type: ignore[attr-defined]  # an error, as it says
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str):
    call, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        call()


def test_a_freed_graph_is_refused_in_the_words_of_torch():
    td = params()
    loss = loss_of(td)
    autograd.grad(loss, td)
    with pytest.raises(CallError, match="hint: torch: Trying to backward through the graph a second time"):
        autograd.grad(loss, td)
