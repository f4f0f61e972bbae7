"""Gradients by example: `tdc.vmap(tdc.grad(loss))` over the rows of ragged batches, as a loop over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tdc
from tdc import DtypeError, ShapeError, TensorDict, UnsupportedError
from tdc.compile import counted

LENGTHS = (2, 0, 3), (1, 4, 2, 2), (3, 1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)

    def forward(self, row: Any) -> Any:
        return self.layer(self.first(row))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.last = nn.Embedding(9, 4), nn.RMSNorm(4), nn.Linear(4, 2)

    def forward(self, row: Any) -> Any:
        return self.last(self.norm(self.table((row[:, 0] * 8).long())))


NETS: dict[str, Any] = {
    "mlp": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 1)),
    "attention": Encoder,
    "embedding": Words,
}


def setup(name: str = "mlp", dtype: torch.dtype = torch.float32) -> tuple[Any, TensorDict]:
    """A loss of the parameters and a row, and parameters."""
    net = NETS[name]().eval().to(dtype)

    def loss(params: Any, row: Any) -> Tensor:
        return tdc.functional_call(net, params, row).square().sum()

    return loss, tdc.from_module(net).apply(torch.clone)


def rows(lengths: tuple[int, ...] = LENGTHS[0], dtype: torch.dtype = torch.float32) -> Any:
    return tdc.pack([torch.rand(n, 3, dtype=dtype) for n in lengths])


def product(w: Any, row: Any) -> Tensor:
    return (row @ w).exp().sum()


def loop(loss: Any, params: TensorDict, x: Any) -> Any:
    return torch.stack([tdc.grad(loss)(params, row) for row in x.unbind()])


def close(found: Any, want: Any, **tolerance: float) -> None:
    tdc.testing.assert_close(found, want, **tolerance)


class TestGradients:
    @pytest.mark.parametrize("name", NETS)
    def test_those_of_a_loop(self, name: str):
        loss, params = setup(name)
        for lengths in LENGTHS:
            x = rows(lengths)
            found = tdc.vmap(tdc.grad(loss), in_dims=(None, 0))(params, x)
            assert found.batch_size == (len(lengths),)
            close(found, loop(loss, params, x), rtol=1e-5, atol=1e-5)

    @pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo finds no function of tdc.batch in an attribute")
    def test_one_graph(self):
        run = counted(tdc.vmap(tdc.grad(product), in_dims=(None, 0)), backend="aot_eager")
        w = torch.rand(3)
        for lengths in LENGTHS:
            x = rows(lengths)
            close(run(w, x), torch.stack([tdc.grad(product)(w, row) for row in x.unbind()]))
        assert run.counts.graphs == run.counts.compiles == 1

    @pytest.mark.cases(slow=1)
    @pytest.mark.slow
    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize("name", NETS)
    def test_one_graph_of_layers(self, name: str, inside: bool):
        loss, params = setup(name)
        outside: Any = tdc.vmap(tdc.grad(loss), in_dims=(None, 0))
        made = lambda p, x: tdc.vmap(tdc.grad(loss), in_dims=(None, 0))(p, x)  # noqa: E731
        run = counted(made if inside else outside, backend="aot_eager")
        for lengths in LENGTHS:
            x = rows(lengths)
            close(run(params, x), loop(loss, params, x), rtol=1e-5, atol=1e-5)
        assert run.counts.graphs == run.counts.compiles == 1

    def test_half_precision(self):
        loss, params = setup(dtype=torch.bfloat16)
        x = rows(dtype=torch.bfloat16)
        close(tdc.vmap(tdc.grad(loss), in_dims=(None, 0))(params, x), loop(loss, params, x), rtol=0.05, atol=0.05)

    def test_values_aux_and_several_arguments(self):
        def loss(w: Any, row: Any, scale: Any) -> Any:
            y = (row @ w).exp().sum() * scale
            return y, row.sum(0)

        w, x, scale = torch.rand(3), rows(), torch.rand(3)
        by_row: Any = tdc.vmap(tdc.value_and_grad(loss, argnums=(0, 1), has_aux=True), in_dims=(None, 0, 0))
        (values, aux), (of_w, of_x) = by_row(w, x, scale)
        one = tdc.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        want = [one(w, row, s) for row, s in zip(x.unbind(), scale, strict=True)]
        close(values, torch.stack([v for (v, _), _ in want]))
        close(aux, torch.stack([a for (_, a), _ in want]))
        close(of_w, torch.stack([g for _, (g, _) in want]))
        close(list(of_x.unbind()), [g for _, (_, g) in want])

    def test_padded_batches_and_tensordicts_of_rows(self):
        def loss(w: Any, row: Any) -> Any:
            return (row["x"] @ w).square().sum() * row["y"]

        w, x, y = torch.rand(3), rows(), torch.rand(3)
        for leaf in (x, x.to_padded()):
            found = tdc.vmap(tdc.grad(loss), in_dims=(None, 0))(w, TensorDict({"x": leaf, "y": y}, [3]))
            want = [tdc.grad(loss)(w, {"x": row, "y": s}) for row, s in zip(x.unbind(), y, strict=True)]
            close(found, torch.stack(want))

    def test_a_function_of_each_row(self):
        def total(w: Any, row: Any) -> Any:
            return (row * w).exp()

        x, w = rows(), torch.rand(3)
        close(tdc.vmap(total, in_dims=(None, 0))(w, x), (x * w).exp())

    @pytest.mark.cases(slow=0)
    @pytest.mark.parametrize("graph", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_clipped_and_noised_sums(self, graph: bool):
        loss, params = setup()

        def private(params: Any, x: Any, noise: Any) -> Any:
            grads = tdc.vmap(tdc.grad(loss), in_dims=(None, 0))(params, x)
            norms = sum(g.flatten(1).square().sum(1) for g in grads.values(True, True)).sqrt()
            return (grads * (1.0 / norms.clamp(min=1.0))).sum(0) + noise

        run: Any = counted(private, backend="aot_eager") if graph else private
        for lengths in LENGTHS:
            x, noise = rows(lengths), params.apply(torch.randn_like)
            parts = []
            for row in x.unbind():
                g = tdc.grad(loss)(params, row)
                parts.append(g / tdc.optim.global_norm(g).clamp(min=1.0))
            close(run(params, x, noise), torch.stack(parts).sum(0) + noise, rtol=1e-5, atol=1e-5)
        assert not graph or run.counts.graphs == run.counts.compiles == 1


def f(w: Any, row: Any) -> Any:
    return (row @ w).sum()


def wide(w: Any, row: Any) -> Any:
    return row @ w


def convolved(w: Any, row: Any) -> Any:
    return torch.nn.functional.conv1d(row.T, w).sum()


W, X = torch.rand(3), rows()
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "lambda": (lambda: tdc.vmap(lambda row: row.sum())(X), UnsupportedError, "begins with def"),
    "out_dims": (lambda: tdc.vmap(f, (None, 0), out_dims=1)(W, X), ShapeError, "examples of ragged rows at dim 0"),
    "chunk_size": (lambda: tdc.vmap(f, (None, 0), chunk_size=2)(W, X), UnsupportedError, "hint: x.i : i . n."),
    "wide": (lambda: tdc.vmap(tdc.grad(wide), (None, 0))(W, X), ShapeError, "returns one number"),
    "count": (lambda: tdc.vmap(tdc.grad(f), (0, 0))(torch.rand(2, 3), X), ShapeError, "tdc.batch"),
    "shared": (lambda: tdc.vmap(tdc.grad(f), (None, 0))(X, X), UnsupportedError, "a ragged argument of each example"),
    "numbers": (lambda: tdc.vmap(tdc.grad(f), (None, 0))(3.0, X), DtypeError, "tensors to differentiate"),
    "weights": (
        lambda: tdc.vmap(tdc.grad(convolved), (None, 0))(torch.rand(2, 3, 1), X), UnsupportedError,
        "conv1d with an argument that differs between examples",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str):
    call, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        call()
