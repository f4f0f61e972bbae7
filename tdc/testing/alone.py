"""Results and gradients of a function on each example alone, and their differences from those of a batch.

The loss of a batch is a weighted sum of all numbers of its results, with weights of their own for each example. So
errors of several examples do not cancel, and the gradients of a batch are sums of those of its examples, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from tdc.core import pytree
from tdc.core.errors import describe
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.storage import is_ragged, with_data
from tdc.testing.batches import TOLERANCE, gradients
from tdc.testing.close import mismatches
from tdc.testing.examples import Examples, Given, is_float, rows

Pair = tuple[list[Tensor], list[Tensor]]
LONGER = 10  # tolerance of gradients over that of values: gradients are longer sums


@dataclass(frozen=True)
class One:
    """Result of one example, weights of its floating leaves by position, gradients of its own and shared tensors."""

    result: Any
    weights: dict[int, Tensor]
    own: dict[str, Tensor]
    common: dict[str, Tensor]


class Alone:
    """Results of a function on each example; `differences` compares a batch with them.

    Args:
        fn: the function of one example.
        common: shared tensors by name.
        rtol, atol: None for those of the dtypes.
    """

    def __init__(
        self, fn: Callable[..., Any], examples: Examples, common: dict[str, Tensor],
        rtol: float | None = None, atol: float | None = None,
    ) -> None:  # fmt: skip
        self.examples = examples
        self.common = common if examples.grads else {}
        self.rtol, self.atol = rtol, atol
        self.ones = [self._one(fn, i) for i in range(examples.size)]

    def _one(self, fn: Callable[..., Any], i: int) -> One:
        given = self.examples.alone(i)
        with torch.set_grad_enabled(self.examples.grads):
            result = fn(*given.args)
        leaves = pytree.tree_leaves(result, is_leaf=is_ragged)
        generator = torch.Generator().manual_seed(i)
        weights = {
            k: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
            for k, x in enumerate(leaves) if is_float(x)
        }  # fmt: skip
        asked = {**given.leaves, **self.common}
        found = gradients([leaves[k] for k in weights], list(weights.values()), list(asked.values()))
        by_name = dict(zip(asked, found, strict=True))
        own, common = [{name: by_name[name] for name in part} for part in (given.leaves, self.common)]
        detached = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, result)
        return One(detached, weights, own, common)

    def differences(
        self, run: Callable[..., Any], order: Sequence[int], padded: bool = False, graph: bool = False
    ) -> list[str]:
        """Run a batch of some examples, and compare. A graph has the dtypes of all examples, not only of these."""
        given = self.examples.batch(order, padded, graph)
        with torch.set_grad_enabled(self.examples.grads):
            found = run(*given.args)
        wrong = not_of_size(found, len(order))
        if wrong:
            return wrong
        taken = taken_apart(found, len(order))
        dtypes = self.dtypes(range(len(self.ones)) if graph else order)
        for at, i in enumerate(order):
            result = expected(taken[at], self.ones[i].result, dtypes)
            label = self.label(order, at)
            for path, text in mismatches(taken[at], result, (), self.compare(1)):
                wrong.append(f"{label}, {'.'.join(('value', *path))}: {text}")
        comparable = [fits(x, self.ones[i].result) for x, i in zip(taken, order, strict=True)]
        if not self.examples.grads or not all(comparable):
            return wrong
        return wrong + self.gradients(run, taken, given, order, padded, graph)

    def label(self, order: Sequence[int], at: int) -> str:
        """Name of an example of a batch in reports."""
        i = order[at]
        return f"example {i}" if order.count(i) == 1 else f"example {i} in place {at}"

    def compare(self, times: int) -> Callable[[Any, Any], None]:
        """A function that raises if two tensors differ; integers must be equal."""

        def close(a: Any, b: Any) -> None:
            own = TOLERANCE.get(a.dtype, 3e-5) if is_float(a) else 0.0
            rtol, atol = [(own if t is None else t) * times * is_float(a) for t in (self.rtol, self.atol)]
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)

        return close

    def dtypes(self, order: Sequence[int]) -> list[Any]:
        """The common dtype of each leaf of the results; [] for trees of several forms."""
        flat = [pytree.tree_flatten(self.ones[i].result, is_leaf=is_ragged) for i in order]
        if any([spec != flat[0][1] for _, spec in flat]):
            return []
        return [common_dtype(column) for column in zip(*[leaves for leaves, _ in flat], strict=True)]

    # -- gradients

    def gradients(
        self, run: Callable[..., Any], taken: list[Any], given: Given, order: Sequence[int], padded: bool,
        graph: bool,
    ) -> list[str]:  # fmt: skip
        """All differences of the gradients of a batch."""
        asked = [*given.leaves.values(), *self.common.values()]
        found = gradients(*self.loss(taken, order), asked)
        own = dict(zip(given.leaves, found, strict=False))
        common = dict(zip(self.common, found[len(own) :], strict=True))
        wrong: list[str] = []
        for name, gradient in own.items():
            whole = with_data(given.whole[name], gradient)
            for at, (row, i) in enumerate(zip(rows(whole, given.dims[name]), order, strict=True)):
                wrong += self.unequal(f"{self.label(order, at)}, gradient of {name}", row, self.ones[i].own[name])
            if isinstance(whole, MaskedBatch) and bool((whole.data != whole.filled(0)).any()):
                wrong.append(f"gradient of {name}: padding has one")
        for name, gradient in common.items():
            truth = sum([self.ones[i].common[name] for i in order], torch.zeros_like(gradient))
            text = self.unequal(f"gradient of {name}", gradient, truth)
            wrong += text and [f"{text[0]}{self.through(name, run, order, padded, graph)}"]
        return wrong

    def loss(self, taken: list[Any], order: Sequence[int], only: int | None = None) -> Pair:
        """The numbers of a batch and their weights, 0 for all examples but `only` if it is given."""
        outs: list[Tensor] = []
        weights: list[Tensor] = []
        for at, (x, i) in enumerate(zip(taken, order, strict=True)):
            leaves = pytree.tree_leaves(x, is_leaf=is_ragged)
            for k, weight in self.ones[i].weights.items():
                outs.append(leaves[k])
                weights.append((weight if only in (None, at) else torch.zeros_like(weight)).to(leaves[k].dtype))
        return outs, weights

    def through(self, name: str, run: Callable[..., Any], order: Sequence[int], padded: bool, graph: bool) -> str:
        """Examples through which a gradient is wrong."""
        found = []
        for at, i in enumerate(order):
            given = self.examples.batch(order, padded, graph)
            taken = taken_apart(run(*given.args), len(order))
            (gradient,) = gradients(*self.loss(taken, order, at), [self.common[name]])
            found += [self.label(order, at)] * bool(self.unequal("", gradient, self.ones[i].common[name]))
        return f", through {', '.join(found)}" if found else ""

    def unequal(self, label: str, a: Tensor, b: Tensor) -> list[str]:
        return [f"{label}: {text}" for _, text in mismatches(a, b, (), self.compare(LONGER))]


def not_of_size(x: Any, size: int) -> list[str]:
    """Leaves of a batch with another number of examples."""
    wrong = []
    for path, leaf in pytree.tree_flatten_with_path(x, is_leaf=is_ragged)[0]:
        if isinstance(leaf, Tensor) or is_ragged(leaf):
            found = len(leaf) if is_ragged(leaf) or leaf.ndim else None
            if found != size:
                wrong.append(f"value{pytree.keystr(path)}: {describe(leaf)}, expected {size} examples")
        elif isinstance(leaf, Number):
            wrong.append(f"value{pytree.keystr(path)}: {describe(leaf)}, expected a tensor of {size} examples")
    return wrong


def taken_apart(x: Any, size: int) -> list[Any]:
    """Split the results of a batch into those of its examples."""
    leaves, spec = pytree.tree_flatten(x, is_leaf=is_ragged)
    columns = [rows(leaf) if isinstance(leaf, Tensor) or is_ragged(leaf) else [leaf] * size for leaf in leaves]
    return [pytree.tree_unflatten([column[i] for column in columns], spec) for i in range(size)]


def common_dtype(column: Sequence[Any]) -> torch.dtype | None:
    """The common dtype of one leaf of the examples; None for Python floats, which take that of the other operand."""
    tensors = [x.dtype for x in column if isinstance(x, Tensor)]
    numbers: list[Any] = [x for x in column if isinstance(x, Number)]
    if not tensors:
        dtype = reduce(torch.promote_types, [torch.as_tensor(x).dtype for x in numbers], torch.bool)
        return None if dtype.is_floating_point else dtype
    dtype = reduce(torch.promote_types, tensors)
    return reduce(torch.promote_types, [torch.result_type(torch.empty(1, dtype=dtype), x) for x in numbers], dtype)


def expected(found: Any, result: Any, dtypes: list[Any]) -> Any:
    """The result of one example as in a batch: numbers are tensors, dtypes are those of all examples together."""
    ours, spec = pytree.tree_flatten(found, is_leaf=is_ragged)
    leaves, own = pytree.tree_flatten(result, is_leaf=is_ragged)
    if spec != own or not dtypes:
        return result

    def leaf(x: Any, like: Any, dtype: torch.dtype | None) -> Any:
        if not isinstance(x, (Tensor, Number)):
            return x
        if dtype is None:
            dtype = like.dtype if is_float(like) else torch.get_default_dtype()
        return torch.as_tensor(x, dtype=dtype, device=getattr(like, "device", None))

    return pytree.tree_unflatten([leaf(*each) for each in zip(leaves, ours, dtypes, strict=True)], spec)


def fits(found: Any, result: Any) -> bool:
    """True if gradients of a result of the batch can be compared with those of the example."""
    ours, spec = pytree.tree_flatten(found, is_leaf=is_ragged)
    leaves, own = pytree.tree_flatten(result, is_leaf=is_ragged)
    pairs = zip(ours, leaves, strict=False)
    return spec == own and all(not is_float(b) or (is_float(a) and a.shape == b.shape) for a, b in pairs)
