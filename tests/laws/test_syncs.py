"""No hidden syncs: on CUDA an operation reads nothing on the host but what its row says.

Every sample of the rule table runs on fake CUDA tensors, which take the ways of CUDA and have no elements to read. The
structures know their sizes on the host, as those that `pack` makes do. Common operations make no read on structures
that do not know them either, where they carry a bound. On a GPU the same samples run under torch's own check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from catalogue import samples, title
from fake_cuda import fake_cuda, on_fake_cuda
from harness import Sample, case_of
from torch import nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

import tdc
from tdc.core import pytree
from tdc.core.dynamo import readable, watching
from tdc.core.rules import Rule
from tdc.layout import segments
from tdc.layout.segments import sizes_of, sizes_on_host
from tdc.layout.structure import remember, remembered
from tdc.ops import RULES
from tdc.ops.elementwise import pairs
from tdc.ops.products import einsum
from tdc.ragged.nested import NestedTensor
from tdc.testing import forbid
from tdc.testing.conformance import is_input

UNFAKED = ("cuda", "geqrf", "ctc_loss", "contiguous")  # torch asks for the device before its fake kernel runs
LIVE = [rule for rule in RULES if not rule.reason and rule.name not in UNFAKED]
SILENT = [rule for rule in LIVE if not rule.syncs]
READING = [rule for rule in LIVE if rule.syncs]
FAMILIES = sorted({rule.family for rule in SILENT})
FEW = 1  # samples of a row in the default run
COMMON = ("pointwise", "reduction", "norm", "loss", "positionwise")  # families that read nothing, whatever is known
COMMON_ROWS = ("scaled_dot_product_attention", "cat", "pad", "matmul", "linear", "embedding", "stack", "unsqueeze")
COUNTING = (
    "scan", "shape", "split", "indexing", "join", "einsum", "matmul", "resample", "reduction", "conv", "pool",
    "pointwise",
)  # fmt: skip
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def reads(rule: Rule, some: Iterable[Sample], told: bool = True) -> Iterator[tuple[Sample, str]]:
    """The samples of a row, and what each reads; empty for one that reads nothing."""
    for sample in some:
        case = case_of(rule, sample, sample.batches[0], device="cpu")
        inputs = on_fake_cuda(tuple(case.inputs), told)
        try:
            with forbid(padding=False, loops=False, syncs=True):
                case.run(*inputs)
        except AssertionError as error:
            yield sample, str(error)
        else:
            yield sample, ""


def drawn(rule: Rule) -> list[Sample]:
    """The samples of a row that run eagerly."""
    return [sample for sample in samples(rule) if "eager" in sample.modes]


def check_silent(family: str, which: slice) -> None:
    wrong = []
    with fake_cuda():
        for rule in SILENT:
            if rule.family == family:
                found = reads(rule, drawn(rule)[which])
                wrong += [f"{title(rule)}, {rule.kind}, {sample.label}: {text}" for sample, text in found if text]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_read_nothing(family: str):
    check_silent(family, slice(FEW))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_read_nothing_in_other_samples(family: str):
    check_silent(family, slice(FEW, None))


@pytest.mark.parametrize("rule", READING, ids=lambda rule: f"{title(rule)}-{rule.kind}")
def test_rows_that_say_so_read(rule: Rule):
    with fake_cuda():
        assert any(text for _, text in reads(rule, drawn(rule)))


def is_simple(x: Any) -> bool:
    """Whether a batch has one ragged dim, and a bound of its lengths."""
    return not isinstance(x, NestedTensor) or (x.structure.ragged_ndim == 1 and x.structure.extent is not None)


def test_common_operations_need_no_sizes_on_the_host():
    wrong = []
    with fake_cuda():
        for rule in SILENT:
            if rule.kind == "nested" and (rule.family in COMMON or rule.name in COMMON_ROWS):
                some = (s for s in drawn(rule) if all(map(is_simple, case_of(rule, s, s.batches[0]).inputs)))
                found = reads(rule, islice(some, 1), told=False)
                wrong += [f"{title(rule)}, {sample.label}: {text}" for sample, text in found if text]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, "flash"), (torch.float32, "efficient")])
def test_attention_by_kernels_for_packed_rows_reads_nothing(dtype: torch.dtype, kernel: str):
    x = tdc.pack([torch.randn(n, 4, 16).to(dtype) for n in (3, 5, 2)]).transpose(1, 2)
    ran: list[str] = []
    with fake_cuda():
        q = on_fake_cuda(x, told=False)
        with forbid(syncs=True), watching(lambda op, args, kwargs: ran.append(str(op))):
            F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.1)
    assert f"tdc.varlen_attention.{kernel}" in ran


@pytest.mark.parametrize(
    "module",
    [nn.Linear(8, 4), nn.LayerNorm(8), nn.RMSNorm(8), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)),
     nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
     nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_modules_read_nothing(module: nn.Module):
    x = tdc.pack([torch.randn(n, 8) for n in (3, 5, 2)])
    with fake_cuda():
        parameters, x = on_fake_cuda((dict(module.named_parameters()), x), told=False)
        with forbid(syncs=True):
            torch.func.functional_call(module, parameters, (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_reads_nothing(dtype: torch.dtype):
    cache = tdc.nn.KVCache.allocate(3, 8, heads=2, head_dim=16, dtype=dtype)
    prompts = tdc.pack([torch.randn(n, 2, 16).to(dtype) for n in (3, 5, 2)])
    token = torch.randn(3, 1, 4, 16).to(dtype)
    with fake_cuda():
        key, value, length, x, q = on_fake_cuda((cache.key, cache.value, cache.length, prompts, token), told=False)
        there = cache.replace(key=key, value=value, length=length)
        with forbid(syncs=True):
            there.append_(x, x).attend(q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stock_stacks_train_without_padding(dtype: torch.dtype):
    """`nn.Transformer` with default arguments: dropout, masks that say causal, sources of other lengths."""
    net = nn.Transformer(16, 2, 1, 2, 32, batch_first=True).to(dtype)
    source, target = [tdc.pack([torch.randn(n, 16).to(dtype) for n in lengths]) for lengths in ((3, 5, 2), (4, 1, 6))]
    causal = net.generate_square_subsequent_mask(6)
    with fake_cuda():
        parameters, x, y = on_fake_cuda((dict(net.named_parameters()), source, target), told=False)
        with forbid(syncs=True):
            torch.func.functional_call(net, parameters, (x, y), {"tgt_mask": causal, "tgt_is_causal": True})


Call = Callable[[Any], Any]
METHODS: dict[str, Call] = {
    "x[:, 1:3]": lambda x: x[:, 1:3], "x[:, :-1]": lambda x: x[:, :-1], "x[1:]": lambda x: x[1:],
    "x[::2]": lambda x: x[::2], "x[0]": lambda x: x[0], "x[:, ::2]": lambda x: x[:, ::2], "x[:, 0]": lambda x: x[:, 0],
    "x.unbind()": lambda x: x.unbind(), "x[1:][:, 1:]": lambda x: x[1:][:, 1:],
    "x.to_padded()": lambda x: x.to_padded(), "x.to_padded(length=4)": lambda x: x.to_padded(length=4),
    "cat, then an index": lambda x: torch.cat([x, x], 1)[:, 1:], "x.flip(0)": lambda x: x.flip(0),
}  # fmt: skip
READ_SIZES = [name for name in METHODS if name not in ("x[:, 0]", "x.to_padded()", "x.to_padded(length=4)")]


@pytest.mark.parametrize("name", METHODS)
def test_methods_read_sizes_once_and_never_of_packed_rows(name: str):
    x = tdc.pack([torch.randn(n, 2) for n in (2, 3, 1)])
    with fake_cuda():
        told, silent = on_fake_cuda(x), on_fake_cuda(x, told=False)
        with forbid(padding=False, loops=False, syncs=True):
            METHODS[name](told)
            if name in READ_SIZES:
                with pytest.raises(AssertionError, match="expected no syncs"):
                    METHODS[name](silent)
            else:
                METHODS[name](silent)


@pytest.mark.parametrize(
    "read",
    [lambda t: t.sum().item(), lambda t: t.tolist(), lambda t: t.nonzero(), lambda t: t[t > 0], lambda t: bool(t.any()),
     lambda t: torch.repeat_interleave(t.long()), lambda t: t.unique(), lambda t: torch.equal(t, t), lambda t: t.cpu(),
     lambda t: torch.tensor([1, 2], device="cuda"), lambda t: t[[0, 1]], lambda t: t.masked_select(t > 0),
     lambda t: torch.ops.aten.copy_(t, torch.ones(3)), lambda t: torch.ops.aten.copy_(torch.ones(3), t)],
)  # fmt: skip
def test_forbid_sees_what_reads(read: Callable[[Any], Any]):
    with fake_cuda():
        x = torch.zeros(3, device="cuda")
        with pytest.raises(AssertionError, match="expected no syncs, got a read by aten"), forbid(syncs=True):
            read(x)


@pytest.mark.parametrize(
    "run",
    [lambda t: t[1:], lambda t: t + 1, lambda t: t * torch.tensor(2.0), lambda t: t.masked_fill(t > 0, 1.0),
     lambda t: torch.repeat_interleave(t.long(), output_size=4), lambda t: t.repeat_interleave(2), lambda t: t.sum(),
     lambda t: torch.arange(3, device="cuda"), lambda t: t[t.long()], lambda t: torch.full((2,), 1.0, device="cuda"),
     lambda t: torch.ones(3).tolist(), lambda t: torch.ones(3)[torch.ones(3) > 0], lambda t: t.to(torch.float64)],
)  # fmt: skip
def test_forbid_lets_the_rest_run(run: Callable[[Any], Any]):
    with fake_cuda(), forbid(syncs=True):
        run(torch.zeros(3, device="cuda"))


def test_forbid_keeps_what_structures_know():
    """Under a mode that only watches, a structure still reads once."""
    x = tdc.NestedTensor(torch.randn(5, 2), torch.tensor([0, 2, 5]))
    with forbid(loops=False, syncs=True):
        assert x.lengths is x.lengths
        assert x.max_length == 3


def told_truly(x: Any) -> bool:
    """Whether what a structure was told is so."""
    known = remembered(sizes_on_host, x.structure) if isinstance(x, NestedTensor) else None
    return known is None or torch.equal(known, sizes_of(x.structure))


@pytest.mark.cases(4, 4)
@pytest.mark.parametrize("family", COUNTING)
def test_sizes_on_the_host_are_those_of_the_device(family: str, monkeypatch: pytest.MonkeyPatch):
    """The values of what is computed on the host for CUDA, on CPU."""
    for module in (segments, einsum, pairs):
        monkeypatch.setattr(module, "counts_on_host", lambda s: readable())
    for rule in LIVE:
        for sample in drawn(rule) if rule.family == family and rule.kind == "nested" else ():
            case = case_of(rule, sample, sample.batches[0], device="cpu")
            result = case.run(*case.inputs)
            assert not case.compare(result)
            assert all(map(told_truly, pytree.tree_leaves(result, is_leaf=is_input))), f"{rule}, {sample.label}"


@pytest.mark.parametrize("name", METHODS)
def test_methods_tell_what_is_so(name: str, monkeypatch: pytest.MonkeyPatch):
    x = tdc.pack([torch.randn(n, 2) for n in (2, 3, 1)])
    want = METHODS[name](x)
    for module in (segments, einsum, pairs):
        monkeypatch.setattr(module, "counts_on_host", lambda s: readable())
    for y in (x, tdc.NestedTensor(x.values, x.offsets, max_length=3)):
        found = METHODS[name](y)
        assert all(map(told_truly, pytree.tree_leaves(found, is_leaf=is_input)))
        tdc.testing.assert_close(found, want)


def test_a_structure_forgets_what_it_was_told_when_offsets_change(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(segments, "counts_on_host", lambda s: readable())
    x = tdc.NestedTensor(torch.randn(5, 2), torch.tensor([0, 2, 5]))
    remember(sizes_on_host, x.structure, torch.tensor([[2], [3]]))
    assert x[:, 1:].lengths.tolist() == [1, 2]
    x.offsets[1] = 4
    assert remembered(sizes_on_host, x.structure) is None
    assert x[:, 1:].lengths.tolist() == [3, 0]


def test_batches_of_the_cpu_know_their_sizes_elsewhere():
    x = tdc.pack([torch.randn(n, 2, 3) for n in (2, 3)], ragged_dim=(1, 2))
    for there in (x.to("meta"), tdc.TensorDict({"x": x}, [2]).to("meta")["x"]):
        known = remembered(sizes_on_host, there.structure)
        assert known is not None
        assert torch.equal(known, x.sizes)


KNOWN_TOTALS: dict[str, Call] = {
    "cat": lambda x: torch.cat([x, x * 2], 1), "flip": lambda x: x.flip(1), "roll": lambda x: x.roll(1, 1),
    "pad": lambda x: F.pad(x, (0, 0, 1, 2)), "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "softmax": lambda x: x.softmax(1), "cat of rows": lambda x: torch.cat([x, x]),
}  # fmt: skip


@pytest.mark.cases(2, 2)
@pytest.mark.parametrize("name", KNOWN_TOTALS)
def test_graphs_know_sizes_that_follow_from_the_operands(name: str):
    unbacked: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        values = [node.meta.get("example_value") for node in graph.graph.nodes]
        unbacked.append([v for v in values if isinstance(v, torch.Tensor) and free_unbacked_symbols(v)])
        return graph

    x = tdc.pack([torch.randn(n, 2) for n in (2, 3, 1)])
    run = torch.compile(KNOWN_TOTALS[name], backend=backend, fullgraph=True)
    tdc.testing.assert_close(run(x), KNOWN_TOTALS[name](x))
    assert unbacked == [[]]


def test_rows_that_are_chosen_have_their_own_longest_or_keep_the_bound():
    x, rows = tdc.pack([torch.randn(n, 2) for n in (2, 3, 1)]), torch.tensor([2, 0])
    assert [y.max_length for y in (x[rows], x[x.lengths < 2], x[::2], x[2:])] == [2, 1, 2, 1]
    assert x[:0].max_length == x[[]].max_length == 0
    run = torch.compile(lambda x, rows: x[rows].to_padded(), backend="eager", fullgraph=True)
    assert run(x, rows).data.shape == x[rows].to_padded().data.shape == (2, 2, 2)  # read there
    assert torch.equal(run(x, rows).data[:, :2], x[rows].to_padded().data)
    with fake_cuda():
        y = on_fake_cuda(x)
        assert segments.extent_of_rows(y.structure, lambda: x.sizes.to("meta")) is y.structure.extent
        with forbid(syncs=True):
            assert [y[::2].max_length, y[2:].max_length, y[:0].max_length] == [2, 1, 0]


@GPU
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_read_nothing_on_a_gpu(family: str):
    for rule in SILENT:
        for sample in drawn(rule)[:FEW] if rule.family == family else ():
            case = case_of(rule, sample, sample.batches[0], device="cpu")
            inputs = pytree.tree_map(lambda x: x.to("cuda"), tuple(case.inputs), is_leaf=is_input)
            case.run(*inputs)  # the first call may load a kernel
            try:
                torch.cuda.set_sync_debug_mode("error")
                case.run(*inputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
