"""torch's own samples of modules as code for one dense example: `f.map` beside the loop over examples."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree
from torch_samples import forget_callers

import tdc

forget_callers()

COUNT = 3
OF_A_MASK = "expected (tests that tdc.batch sees|operations that vmap has)"  # whether it is causal, or left aligned
REFUSED = {
    "nn.GaussianNLLLoss": "expected tests that tdc.batch sees",
    "nn.LinearCrossEntropyLoss": "expected results of one shape",
    "nn.Transformer": OF_A_MASK,
    "nn.TransformerEncoder": OF_A_MASK,
    "nn.TransformerDecoder": OF_A_MASK,
}
WITHOUT_GRADIENT = {"nn.LinearCrossEntropyLoss"}  # torch's own rule for vmap loses that of the input (2.13)
ONE_BY_ONE = {  # torch's vmap runs these example by example, and says so
    "nn.Bilinear", "nn.CTCLoss", "nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d", "nn.KLDivLoss",
    "nn.MarginRankingLoss", "nn.MultiLabelMarginLoss", "nn.MultiMarginLoss", "nn.SoftMarginLoss",
}  # fmt: skip


def samples(info: Any, most: int) -> Iterator[tuple[nn.Module, Any, Any]]:
    """Modules, and their arguments as leaves and form."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        given = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=False, training=False)
        for sample in list(given)[:most]:
            if sample.forward_input is not None:
                module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
                args, kwargs = sample.forward_input.args, sample.forward_input.kwargs
                yield module.double().eval(), *pytree.tree_flatten((args, kwargs))


def batched(module: nn.Module, leaves: list[Any], form: Any) -> tuple[Any, list[Tensor]]:
    """The call of one example as a function of `batch`, and its tensors for all examples."""
    where = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

    def call(*tensors: Any) -> Any:
        own = dict(zip(where, tensors, strict=True))
        args, kwargs = pytree.tree_unflatten([own.get(i, x) for i, x in enumerate(leaves)], form)
        return module(*args, **kwargs)

    names = ", ".join([f"x{i}" for i in where])
    text = f"def f({names}):\n    return call({names})\n"
    scope = {"call": call}
    exec(text, scope)
    noise = [torch.randn(COUNT, *leaves[i].shape, dtype=torch.float64) for i in where]
    whole = [torch.stack([leaves[i]] * COUNT) for i in where]
    targets = type(module).__name__.endswith("Loss")  # which have no derivative
    inside = (0, 1) if isinstance(module, nn.BCELoss) else None  # of a probability
    changed = [x + 0.1 * n if x.is_floating_point() else x for x, n in zip(whole, noise, strict=True)]
    changed = [x.clamp(*inside) if inside and x.is_floating_point() else x for x in changed]
    return tdc.batch(scope["f"], source=text), [
        x.requires_grad_(x.is_floating_point() and not (targets and i)) for i, x in enumerate(changed)
    ]


def tensors(out: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]


def gradients(out: list[Tensor], leaves: list[Tensor]) -> Any:
    total = sum(
        [(x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in out], torch.zeros(())
    )
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


def check(name: str, run: Any, fn: Any, module: nn.Module, xs: list[Tensor]) -> None:
    """Values, and gradients of arguments and weights."""
    columns = zip(*[tensors(fn.fn(*one)) for one in zip(*xs, strict=True)], strict=True)
    want = [torch.stack(column) for column in columns]
    found = tensors(run(*xs))
    assert_close(found, want, equal_nan=True, msg=lambda text: f"{name}: {text}")
    leaves = [x for x in (*xs, *module.parameters()) if x.requires_grad]
    if leaves and name not in WITHOUT_GRADIENT and all(x.requires_grad and x.isfinite().all() for x in want):
        assert_close(gradients(found, leaves), gradients(want, leaves), msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("most", [2, pytest.param(10**6, marks=pytest.mark.sweep)])
def test_modules(most: int) -> None:
    seen = set()
    for info in module_db:
        for module, leaves, form in samples(info, most):
            fn, xs = batched(module, leaves, form)
            if not xs:
                continue
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    check(info.name, fn.map, fn, module, xs)
                except tdc.UnsupportedError as error:
                    text = str(error)
                    if info.name not in REFUSED or not re.search(REFUSED[info.name], text):
                        raise
                    continue
            assert info.name in ONE_BY_ONE or not [w for w in caught if "batching rule" in str(w.message)], info.name
            seen.add(info.name)
    assert len(seen) > 80


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("name", ["nn.LSTMCell", "nn.GRUCell", "nn.RNNCell", "nn.TransformerEncoderLayer"])
def test_in_graphs(name: str) -> None:
    (info,) = [m for m in module_db if m.name == name]
    module, leaves, form = next(samples(info, 1))
    fn, xs = batched(module, leaves, form)
    torch.compiler.reset()
    check(name, torch.compile(fn.map, backend="aot_eager", fullgraph=True), fn, module, xs)


def test_weights_of_each_example() -> None:
    layer = nn.GRU(2, 3)
    weights = {name: torch.stack([p, p]) for name, p in layer.named_parameters()}
    x = torch.rand(4, 1, 2)
    with pytest.raises(tdc.UnsupportedError, match="whose weights all examples share"):
        torch.vmap(lambda p: torch.func.functional_call(layer, p, (x,))[0])(weights)
