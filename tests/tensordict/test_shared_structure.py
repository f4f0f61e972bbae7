"""Leaves of a TensorDict that share a structure share the one of the result, and it is made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tdc
from tdc import NestedTensor, TensorDict
from tdc.compile._torch.tracing import is_assertion

ROWS = [torch.arange(2.0 * n).view(n, 2) + 10 * n for n in (2, 3, 1, 4)]
MASK = torch.tensor([True, False, True, True])
MOVES: dict[str, Callable[[Any], Any]] = {
    "rows": lambda td: td[torch.tensor([2, 0, -1])], "list": lambda td: td[[1, 1]], "slice": lambda td: td[1:],
    "steps": lambda td: td[::2], "mask": lambda td: td[MASK], "new dim": lambda td: td[None],
    "cat": lambda td: torch.cat([td, td[1:]]), "stack": lambda td: torch.stack([td, td * 2]),
    "index_select": lambda td: td.index_select(0, torch.tensor([2, 0])),
    "gather": lambda td: td.gather(0, torch.tensor([2, 0])), "masked_select": lambda td: td.masked_select(MASK),
    "chunk": lambda td: td.chunk(2)[1], "split": lambda td: td.split([3, 1])[0], "roll": lambda td: td.roll(1, 0),
    "flip": lambda td: td.flip(0), "repeat": lambda td: td.repeat(2),
}  # fmt: skip


def together(kind: str = "nested", leaves: int = 2) -> Any:
    """Tokens, labels and more of one structure."""
    x: Any = tdc.pack(ROWS)
    x = x if kind == "nested" else x.to_padded()
    return TensorDict({"n": torch.arange(4), **{f"x{i}": x * (i + 1) for i in range(leaves)}}, [4])


def lone(td: TensorDict) -> TensorDict:
    """The same leaves, each with a structure of its own."""
    return td.apply(lambda x: x.clone() if isinstance(x, Tensor) else rebuilt(x))


def rebuilt(x: Any) -> Any:
    if isinstance(x, NestedTensor):
        return NestedTensor(x.values, x.offsets.clone(), max_length=x.max_length)
    return tdc.MaskedBatch(x.data, x.lengths.clone(), ragged_dims=x.ragged_dims)


def share(a: Any, b: Any) -> bool:
    return a.structure is b.structure if isinstance(a, NestedTensor) else a.lengths is b.lengths


def parts(x: Any) -> list[Tensor]:
    return [x.values, x.offsets] if isinstance(x, NestedTensor) else [x.filled(0), x.lengths]


@pytest.mark.parametrize("kind", ["nested", "masked"])
@pytest.mark.parametrize("move", MOVES)
def test_results_share(move: str, kind: str):
    td = together(kind)
    assert not share(lone(td)["x0"], lone(td)["x1"])
    got, want = MOVES[move](td), MOVES[move](lone(td))
    assert share(got["x0"], got["x1"])
    for key in ("x0", "x1"):
        torch.testing.assert_close(parts(got[key]), parts(want[key]), rtol=0, atol=0)
    assert share(got["x0"] + got["x1"], got["x0"])


def test_leaves_of_other_structures_keep_theirs():
    td = together().set("other", tdc.pack([r[:1] for r in ROWS]))
    got = td[[0, 2]]
    assert share(got["x0"], got["x1"])
    assert got["other"].lengths.tolist() == [1, 1]
    assert got["x0"].lengths.tolist() == [2, 1]


class Ops(TorchDispatchMode):
    """How many operations of torch run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("move", ["rows", "slice", "mask", "index_select", "cat"])
def test_one_operation_more_for_a_leaf_more(move: str):
    counts = []
    for leaves in (1, 2, 3):
        td = together(leaves=leaves)
        others = td[1:]
        with Ops() as ops:
            torch.cat([td, others]) if move == "cat" else MOVES[move](td)
        counts.append(ops.count)
    assert counts[2] - counts[1] == counts[1] - counts[0] == 1
    assert counts[0] > 1


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("move", ["rows", "slice", *[pytest.param(m, marks=pytest.mark.slow) for m in ("mask", "cat")]])
def test_in_a_graph(move: str):
    """As many nodes more for the third leaf as for the second, and these fit without a comparison of offsets."""
    sizes: list[int] = []

    def note(graph: Any, inputs: Any) -> Any:
        sizes.append(len(list(graph.graph.nodes)))
        assert not [node for node in graph.graph.nodes if is_assertion(str(node.target))]
        return graph.forward

    for leaves in (1, 2, 3):
        torch._dynamo.reset()
        td = together(leaves=leaves)

        def run(td: TensorDict, n: int = leaves) -> Any:
            out = MOVES[move](td)
            return [(out["x0"] + out[f"x{i}"]).values for i in range(n)]

        got = torch.compile(run, backend=note, fullgraph=True)(td)
        torch.testing.assert_close(got, run(td), rtol=0, atol=0)
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] <= 9
