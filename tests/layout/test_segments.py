"""What depends on offsets alone is computed once for each structure, and never kept where it would be wrong later."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import tdc
from tdc import NestedTensor
from tdc.layout import structure
from tdc.layout.padding import pack_index, pad_index
from tdc.layout.segments import (
    lengths_of,
    lengths_on_host,
    local_positions,
    longest,
    mirrored,
    offsets_int32,
    row_ids,
    sizes_of,
)
from tdc.layout.structure import Structure
from tdc.ragged.nested import build_nested

LENGTHS = (2, 0, 3)
TOTAL = sum(LENGTHS)


def batch(*lengths: int, features: int = 2) -> NestedTensor:
    generator = torch.Generator().manual_seed(0)
    return tdc.pack([torch.randn(n, features, generator=generator) for n in lengths or LENGTHS])


def kept(s: Structure) -> dict[str, Any]:
    """What is kept of a structure."""
    return getattr(s, "_memo", {})


@contextmanager
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many row ids each computation of them is for."""
    found: list[int] = []
    repeat = torch.repeat_interleave

    def counted(repeats: Tensor, *, output_size: int) -> Tensor:
        found.append(output_size)
        return repeat(repeats, output_size=output_size)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "repeat_interleave", counted)
        yield found


ONCE: dict[str, Callable[[Structure], Any]] = {
    "lengths": lengths_of, "sizes": sizes_of, "host lengths": lengths_on_host, "int32 offsets": offsets_int32,
    "row ids": lambda s: row_ids(s, TOTAL), "local ids": lambda s: local_positions(s, TOTAL),
    "mirrored": lambda s: mirrored(s, TOTAL), "pad index": lambda s: pad_index(s, (3,)),
    "pack index": lambda s: pack_index(s, TOTAL, (3,), False),
}  # fmt: skip


@pytest.mark.parametrize("name", ONCE)
def test_one_object_for_each_structure(name: str):
    s = batch().structure
    assert ONCE[name](s) is ONCE[name](s)
    assert ONCE[name](s.moved(1, 0)) is ONCE[name](s), "only its axes are elsewhere"


def test_longest_is_read_once():
    s = Structure(batch().offsets)
    assert longest(s) == (3,)
    assert longest(s) is longest(s)


def test_a_chain_finds_row_ids_once(monkeypatch: pytest.MonkeyPatch):
    x = batch()
    with computed(monkeypatch) as found:
        y = torch.softmax(x, 1) * x.sum(1)
        y.transpose(1, 2).amax(2)
        y.to_padded().to_packed(total=TOTAL)
        y.std(1), y.log_softmax(1)
    assert found == [TOTAL, TOTAL], "one for x, one for the structure that to_packed makes"


def test_arguments_are_told_apart():
    s = batch().structure
    assert pad_index(s, (3,))[1].shape == (3, 3)
    assert pad_index(s, (4,))[1].shape == (3, 4)


def test_small_results_are_kept_for_each_argument(monkeypatch: pytest.MonkeyPatch):
    """Few at a time, and nothing else is forgotten with them."""
    calls: list[int] = []
    monkeypatch.setattr(structure, "MANY", 3)
    times = structure.once_for_each(lambda s, n: calls.append(n) or s.offsets * n)
    s = batch().structure
    lengths = lengths_of(s)
    for n in (1, 2, 1, 2, 3, 1, 4, 1):
        assert torch.equal(times(s, n), s.offsets * n)
    assert calls == [1, 2, 3, 4, 1]
    assert lengths_of(s) is lengths


def test_changes_in_place_are_seen():
    x = batch()
    assert x.sum(1).shape == (3, 2)
    x.lengths.zero_()
    assert x.lengths.tolist() == [2, 0, 3], "a result that was changed is computed anew"
    x.offsets.copy_(torch.tensor([0, 1, 4, 5]))
    assert x.lengths.tolist() == [1, 3, 1]
    torch.testing.assert_close(x.sum(1), torch.stack([x.values[:1].sum(0), x.values[1:4].sum(0), x.values[4]]))


def test_padded_batches_have_lengths_of_their_own():
    x = batch()
    a, b = x.to_padded(), x.to_padded()
    tdc.copy_(a, x[[1, 1, 1]].to_padded(length=3))
    assert (a.lengths.flatten().tolist(), b.lengths.flatten().tolist()) == ([0, 0, 0], [2, 0, 3])
    assert x.lengths.tolist() == [2, 0, 3]


def test_several_ragged_dims():
    x = tdc.pack([torch.ones(2, 3), torch.ones(1, 4)], ragged_dim=(1, 2))
    assert sizes_of(x.structure) is x.structure.shapes
    assert row_ids(x.structure, 10) is row_ids(x.structure, 10)
    assert x.sum((1, 2)).tolist() == [6, 4]


class TestNothingLeaks:
    """Results of a position where tensors are of another kind are not kept, and kept ones not used there."""

    @pytest.mark.parametrize("before", [False, True])
    def test_inference_mode(self, before: bool):
        x = batch()
        if before:
            x.sum(1)
        with torch.inference_mode():
            torch.softmax(x, 1).sum(1)
            x.to_padded()
        assert kept(x.structure)
        values = x.values.clone().requires_grad_()
        y = torch.softmax(x.with_values(values), 1)
        y.to_padded().data.square().sum().backward()
        assert values.grad is not None
        assert not any([t.is_inference() for t in tensors_in(kept(x.structure))])

    def test_structures_of_inference_mode(self):
        with torch.inference_mode():
            x = batch()
            x.sum(1)
            assert kept(x.structure)
            x.offsets.copy_(torch.tensor([0, 1, 4, 5]))
            assert x.lengths.tolist() == [1, 3, 1]
            images = tdc.pack([torch.zeros(1, 2, 3), torch.zeros(1, 3, 2)], ragged_dim=(2, 3))
            held = x, images, x[1:], images[[1, 0]], images[1:], x[:, 1:]
            for y in held:
                y.to_padded()
            given = torch.tensor([0, 2, 5])
            own = NestedTensor(torch.zeros(5), given)
            own.sum(1)
            given.copy_(torch.tensor([0, 4, 5]))
            assert own.lengths.tolist() == [4, 1], "the offsets of users stay, and their changes are not counted"
        assert all([kept(y.structure) for y in held])

    def test_transforms(self):
        x = batch()

        def loss(values: Tensor) -> Tensor:
            return torch.softmax(x.with_values(values), 1).square().sum()

        assert torch.vmap(loss)(torch.randn(4, TOTAL, 2)).shape == (4,)
        grad = torch.func.grad(loss)(x.values)
        assert not kept(x.structure)
        torch.softmax(x, 1)
        assert kept(x.structure)
        torch.testing.assert_close(torch.func.grad(loss)(x.values), grad)

    def test_batched_offsets(self):
        offsets = torch.tensor([[0, 2, 5], [0, 4, 5]])
        out = torch.vmap(lambda o: lengths_of(Structure(o).moved(0, 0)))(offsets)
        assert out.tolist() == [[2, 3], [4, 1]]

    @pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
    def test_make_fx(self, mode: Any):
        x = batch()
        torch.softmax(x, 1)
        before = dict(kept(x.structure))
        if mode == "real":
            graph = make_fx(lambda values: x.with_values(values).sum(1))(x.values)
            assert any([node.target is torch.ops.aten.repeat_interleave.Tensor for node in graph.graph.nodes])

        def rebuilt(values: Tensor, offsets: Tensor) -> Tensor:
            return NestedTensor(values, offsets).sum(1)

        graph = make_fx(rebuilt, tracing_mode=mode)(x.values, x.offsets)
        other = batch(1, 3, 1) if mode != "symbolic" else batch(1, 2, 1, 5)
        torch.testing.assert_close(graph(other.values, other.offsets), other.sum(1))
        assert {k: v[1] for k, v in kept(x.structure).items()} == {k: v[1] for k, v in before.items()}

    def test_fake_tensors(self):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            x = batch()
            y = x.sum(1)
            assert type(y).__name__ == "FakeTensor"
            assert not kept(x.structure)
        del mode
        x = batch()
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert type(lengths_of(x.structure)).__name__ == "FakeTensor"
        assert lengths_of(x.structure).tolist() == list(LENGTHS)

    def test_export(self):
        x = batch()
        x.sum(1)

        class Sum(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                return torch.softmax(x, 1).sum(1)

        exported = torch.export.export(Sum(), (x,), strict=False)
        y = batch(3, 1, 1)
        torch.testing.assert_close(exported.module()(y), torch.softmax(y, 1).sum(1))

    def test_compiled_code_is_one_graph(self):
        run = tdc.compile.counted(lambda x: torch.softmax(x, 1).transpose(1, 2).sum(2), backend="eager")
        x, y = batch(), batch(4, 1)
        run(x)
        torch.softmax(x, 1), y.sum(1)
        run(x), run(y)
        assert (run.counts.graphs, run.counts.breaks, run.counts.compiles) == (1, 0, 1)

    def test_checkpoint(self):
        x = batch()
        grads = []
        for run in (lambda f, v: f(v), lambda f, v: checkpoint(f, v, use_reentrant=False)):
            values = x.values.clone().requires_grad_()
            run(lambda v: torch.softmax(build_nested(Structure(x.offsets), v), 1).square().sum(), values).backward()
            grads.append(values.grad)
        torch.testing.assert_close(grads[0], grads[1])


def tensors_in(memo: dict[str, Any]) -> list[Tensor]:
    """All tensors that are kept."""
    results = [entry[1] for entry in memo.values()]
    flat = [t for result in results for t in (result if isinstance(result, tuple) else (result,))]
    return [t for t in flat if isinstance(t, Tensor)]


@pytest.mark.parametrize(
    "copied",
    [
        lambda x: pickle.loads(pickle.dumps(x)),
        copy.deepcopy,
        lambda x: torch.utils._pytree.tree_map(lambda t: t, x),
        lambda x: x.to("meta"),
    ],
    ids=["pickle", "deepcopy", "pytree", "device"],
)
def test_copies_start_anew(copied: Callable[[Any], Any]):
    x = batch()
    size = len(pickle.dumps(x))
    torch.softmax(x, 1)
    assert kept(x.structure)
    assert kept(copied(x).structure).keys() <= {"sizes_on_host"}
    assert len(pickle.dumps(x)) == size


@pytest.mark.slow
def test_nothing_outlives_the_structure():
    gc.collect()
    gc.disable()
    try:
        x = batch()
        ids = weakref.ref(row_ids(x.structure.moved(1, 0), TOTAL))
        x.to_padded()
        assert ids() is not None
        del x
        assert ids() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams and graphs of CUDA")
class TestCuda:
    def test_each_stream_has_its_own(self):
        s = batch().to("cuda").structure
        side = torch.cuda.Stream()
        here = row_ids(s, TOTAL)
        assert row_ids(s, TOTAL) is here
        with torch.cuda.stream(side):
            assert row_ids(s, TOTAL) is not here

    def test_recorded_graphs_compute_anew(self):
        x = batch().to("cuda")
        out = x.sum(1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = x.sum(1)
        x.offsets.copy_(torch.tensor([0, 1, 4, 5]))
        graph.replay()
        torch.testing.assert_close(out[0], x.values[0])
        torch.testing.assert_close(out, x.sum(1))
