"""Operations on a TensorDict beyond the conformance matrix: named results, ragged leaves, other names, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from catalogue import samples, title
from harness import case_of
from texts import Says, T, Texts, says, tree

import tdc
from tdc import MaskedBatch, NestedTensor, TensorDict
from tdc.core.errors import op_name
from tdc.core.rules import DISPATCH
from tdc.ops import RULES
from tdc.ops.install import ALIASES, CLASSES
from tdc.testing.batches import differences, tensors, unbuild


def numbers(*size: int) -> TensorDict:
    return TensorDict({"a": torch.randn((*size, 3)), "b": {"c": torch.randn(size)}}, size)


def ragged() -> TensorDict:
    rows = [torch.arange(float(n)) for n in (2, 0, 3, 1)]
    packed = tdc.pack(rows)
    return TensorDict({"x": torch.arange(8.0).view(4, 2), "n": packed, "m": packed.to_padded()}, [4])


def test_a_stack_of_ragged_leaves():
    first, second = torch.stack([ragged(), ragged() + 1]).unbind(0)
    assert first["n"].tolist() == first["m"].to_packed().tolist() == ragged()["n"].tolist()
    assert second["n"].tolist() == second["m"].to_packed().tolist() == (ragged() + 1)["n"].tolist()


@pytest.mark.parametrize("alias", ALIASES, ids=op_name)
def test_another_name_runs_the_rows_of_the_operation(alias: Any):
    op = ALIASES[alias]
    method = getattr(torch.Tensor, op_name(alias), None)
    for kind, cls in CLASSES.items():
        row = DISPATCH[kind].get(op)
        assert DISPATCH[kind].get(alias) is row
        if row is not None and method is not None:
            assert DISPATCH[kind][method] is not None
            assert callable(getattr(cls, op_name(alias)))


@pytest.mark.parametrize("alias", [a for a, op in ALIASES.items() if op in DISPATCH["tensordict"]], ids=op_name)
def test_another_name_means_the_same_on_a_tensor(alias: Any):
    rule = next(rule for rule in RULES if rule.op is ALIASES[alias] and rule.kind == "tensordict")
    case = case_of(rule, samples(rule)[0], (3, 1))
    args, kwargs = torch.utils._pytree.tree_unflatten(
        [case.inputs.pop(0) if slot else x for slot, x in zip(case.slots, case.constants, strict=True)], case.spec
    )
    kwargs = {k: v for k, v in kwargs.items() if k != "inplace"}
    if alias in (torch.dropout, torch.alpha_dropout, torch.feature_dropout):
        args, kwargs = (*args[:1], *(args[1:2] or (kwargs.get("p", 0.5),)), kwargs.get("training", False)), {}
    assert differences(unbuild(alias(*args, **kwargs)), case.want, "tensordict") == []


def test_results_have_the_names_of_torch():
    td = numbers(4, 2)
    for found in (td.sort(0), td.topk(2, 0), td.max(0), td.min(1), td.median(0), td.mode(0), td.cummax(0)):
        assert set(found.values.keys()) == set(found.indices.keys()) == {"a", "b"}
        assert type(found.values) is type(found.indices) is TensorDict
    assert torch.equal(td.aminmax(dim=0).max, td.amax(0))
    assert type(td.max()) is TensorDict
    assert type(torch.std_mean(td)) is tuple


def test_indices_go_back_into_lookups():
    td = numbers(4, 2)
    order = td.argsort(0)
    assert torch.equal(td.take_along_dim(order, 0), td.sort(0).values)
    assert torch.equal(td.gather(0, order), td.msort())


def test_without_leaves_batch_sizes_follow():
    td = TensorDict({}, [4, 2])
    found = (td.sum(0), td.std(), td.sort(0).values, td.flip(0), td.movedim(0, 1), F.pad(td, (1, 1)), td.repeat(2, 1))
    assert [list(x.batch_size) for x in found] == [[2], [], [4, 2], [4, 2], [2, 4], [4, 4], [8, 2]]
    assert [list(x.batch_size) for x in td.split(3)] == [[3, 2], [1, 2]]


def test_without_batch_dims_a_reduction_sees_one_example():
    td = numbers()
    assert torch.equal(td.sum(), td)
    assert torch.equal(td.max(), td)
    assert td.argmax()["a"].tolist() == [0, 0, 0]


def test_inner_batch_dims_stay():
    inner = TensorDict({"c": torch.randn(4, 5, 3)}, [4, 5])
    td = TensorDict({"a": torch.randn(4), "b": inner}, [4])
    assert td.sum(0)["b"].batch_size == (5,)
    assert td.cumsum(0)["b"].batch_size == (4, 5)
    assert [x["b"].batch_size for x in td.split(2)] == [(2, 5), (2, 5)]
    assert F.mse_loss(td, td)["b"].batch_size == ()


# -- ragged leaves


def check_rows(td: TensorDict, rows: list[int]) -> None:
    want = ragged()
    assert td.batch_size == (len(rows),)
    assert type(td["n"]) is NestedTensor
    assert type(td["m"]) is MaskedBatch
    for key in ("x", "n", "m"):
        for got, i in zip(td[key].unbind(), rows, strict=True):
            assert got.tolist() == want[key].unbind()[i].tolist()


def test_split_chunk_and_tensor_split_of_ragged_leaves():
    td = ragged()
    for parts, want in (
        (td.split(3), [[0, 1, 2], [3]]), (td.split([1, 0, 3]), [[0], [], [1, 2, 3]]),
        (td.chunk(3), [[0, 1], [2, 3]]), (td.tensor_split(3), [[0, 1], [2], [3]]),
        (td.tensor_split([1]), [[0], [1, 2, 3]]),
    ):  # fmt: skip
        assert len(parts) == len(want)
        for part, rows in zip(parts, want, strict=True):
            check_rows(part, rows)
    check_rows(torch.cat(td.split(3)), [0, 1, 2, 3])


def test_unbind_of_ragged_leaves():
    rows = ragged().unbind(0)
    assert [list(row["n"].shape) for row in rows] == [list(row["m"].shape) for row in rows] == [[2], [0], [3], [1]]
    assert all(row.batch_size == () for row in rows)


def test_casts_and_copies_reach_ragged_leaves():
    td = ragged()
    casts = ((td.double(), torch.float64), (td.int(), torch.int32), (td.clone().contiguous(), torch.float32))
    for found, dtype in casts:
        assert [found[key].dtype for key in ("x", "n", "m")] == [dtype] * 3
    assert td.cpu().device == torch.device("cpu")


def compiled(fn: Any) -> Any:
    return torch.compile(fn, fullgraph=True, backend="eager")


def test_a_stack_of_ragged_batches_is_indexed():
    td = ragged().select("x", "n")
    both = torch.stack([td, td + 1])
    for part in (both[1], both[T(1)], list(both)[1], both.unbind(0)[1], both[[1]][0], both.reshape(8)[4:]):
        assert torch.equal(part, td + 1)
    assert torch.equal(both[:, 2:][1], (td + 1)[2:])
    assert torch.equal(both[:, 2]["n"], torch.stack([td["n"][2], td["n"][2] + 1]))


def test_parts_of_an_empty_batch():
    td, x = numbers(0), torch.zeros(0)
    assert [t.batch_size for t in td.split(4)] == [t.shape for t in x.split(4)]
    assert [t.batch_size for t in td.chunk(3)] == [t.shape for t in x.chunk(3)]


@pytest.mark.parametrize("how", [-1, 0, 1.5, "a", None, [5, -1], [1.5, 2.5]], ids=str)
def test_parts_of_no_length(how: Any):
    for x in (ragged(), ragged()["n"], ragged()["m"]):
        with pytest.raises(tdc.ShapeError, match="expected a length of at least 1, or a list of lengths, got"):
            x.split(how)
        with pytest.raises(tdc.ShapeError, match="expected a number of parts of at least 1, got"):
            x.chunk(how)


def test_writes_compile():
    td = numbers(3)

    def fn(td: TensorDict) -> Any:
        return td.at[0].add(1.0).at[1:].mul(2).at[0].min(0.5).at[2].max(T(0.1))

    assert torch.equal(compiled(fn)(td), fn(td))


COUNTED = {
    "squeeze": lambda td: td.squeeze(), "squeeze -1": lambda td: td.squeeze(-1), "expand": lambda td: td.expand(2, 3),
    "view": lambda td: td.view(3, -1), "reshape": lambda td: td.reshape(1, 2, 3),
    "unflatten": lambda td: td.unflatten(1, (-1, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_shapes_of_as_many_examples_as_a_mask_has(name: str):
    """A graph does not know how many they are; torch takes such sizes, and checks them when the graph runs."""
    fn = compiled(lambda td, mask: COUNTED[name](td[:, mask]))
    td: Any = numbers(2, 5)
    for mask in (T([True, False, True, True, False]), T([False, True, True, False, True])):
        want, found = COUNTED[name](td[:, mask]), fn(td, mask)
        assert found.batch_size == want.batch_size
        assert torch.equal(found["b", "c"], want["b", "c"])
    if name in ("expand", "reshape"):
        with pytest.raises(RuntimeError):
            fn(td, T([True, False, True, False, False]))


def test_minus_one_keeps_a_batch_dim_that_is_there():
    with pytest.raises(tdc.ShapeError, match=r"tdc.expand: expected sizes that extend batch_size \[3\], got \[-1, 3\]"):
        numbers(3).expand(-1, 3)


def test_equal_reads_ragged_leaves():
    td = ragged()
    assert td.equal(ragged())
    assert td.allclose(ragged())
    assert not td.equal(td + 1)
    assert not td.equal(td.set("n", td["x"]))
    assert not td.equal(td[torch.tensor([0, 2, 1, 3])])


# -- random numbers


DRAWS = (
    torch.rand_like, torch.randn_like, lambda x: torch.randint_like(x, 9), lambda x: torch.bernoulli(torch.sigmoid(x)),
)  # fmt: skip


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_are_drawn_leaf_by_leaf(draw: Any):
    td = numbers(4)
    torch.manual_seed(3)
    got = draw(td)
    torch.manual_seed(3)
    want = [draw(td["a"]), draw(td["b", "c"])]
    assert all(torch.equal(a, b) for a, b in zip(tensors(unbuild(got)), want, strict=True))


# -- errors


SAYS: dict[str, Says] = {
    "a dim beyond the batch": (lambda: tree().cumsum(2), """\
ShapeError
tdc.cumsum: expected a dim in [-2, 1], got 2
hint: count dims of the logical shape"""),
    "a missing dim": (lambda: tree().float().softmax(None), """\
ShapeError
tdc.softmax: expected a dim in [-2, 1], got None
hint: name the dim, e.g. dim=-1"""),
    "several dims where torch takes one": (lambda: tree().argmax((0, 1)), """\
ShapeError
tdc.argmax: expected one batch dim, got (0, 1)
hint: flatten batch dims first"""),
    "a flag in place of a dim": (lambda: tree().float().std(False), """\
ShapeError
tdc.std: expected one batch dim, got False
hint: name the argument, e.g. unbiased=False"""),
    "an index with features": (lambda: tree().gather(0, torch.zeros(1, 1, 1, dtype=torch.int64)), """\
ShapeError
tdc.gather: expected index with 2 batch dims, got Tensor int64[1, 1, 1]
hint: it is extended over the features of each leaf"""),
    "out": (lambda: torch.cumsum(tree(), 0, out=tree()), """\
UnsupportedError
tdc.cumsum: expected no out=, got out=
hint: use the returned object"""),
    "too many arguments": (lambda: tree().cumsum(0, 1), """\
UnsupportedError
tdc.cumsum: expected the arguments dim, got 2 of them
hint: leave the others out"""),
    "unique": (lambda: tree().unique(), """\
UnsupportedError
tdc.unique: expected an operation with a rule for TensorDict, got results of other sizes from leaf to leaf
hint: of one leaf: td['key'].unique()"""),
    "where with a condition alone": (lambda: torch.where(tree() > 1), """\
UnsupportedError
tdc.where: expected a condition and two values, got a condition alone
hint: torch.where(condition, x, y), or masked_select"""),
    "masked select by leaves": (lambda: tree().masked_select(tree() > 1), """\
UnsupportedError
tdc.masked_select: expected a mask that is a tensor, got TensorDict [3, 4]
hint: a mask over batch dims, or torch.where(mask, td, other)"""),
    "padding of features": (lambda: F.pad(tree(), (1, 1, 1, 1, 1, 1)), """\
ShapeError
tdc.pad: expected at most 4 numbers, got 6
hint: two for each batch dim; features stay"""),
    "repeat of too few dims": (lambda: tree().repeat(2), """\
ShapeError
tdc.repeat: expected at least 2 numbers, got 1
hint: torch.tile adds what is missing"""),
    "too few dims to split": (lambda: torch.vsplit(tree()[0], 2), """\
ShapeError
tdc.vsplit: expected at least 2 batch dims, got 1
hint: torch.tensor_split(x, n, dim)"""),
    "parts that do not divide": (lambda: torch.hsplit(tree(), 3), """\
ShapeError
tdc.hsplit: expected a number of parts that divides 4, got 3
hint: torch.tensor_split(x, n, dim)"""),
    "lengths that do not add up": (lambda: ragged().split([1, 1]), """\
ShapeError
tdc.split: expected lengths that add up to 4, got 2
hint: torch.tensor_split(x, indices) takes the positions between parts"""),
    "allclose of other dtypes": (lambda: tree().allclose(tree().double()), """\
DtypeError
tdc.allclose: expected leaves of one dtype, got Tensor float32[3, 4, 2] and Tensor float64[3, 4, 2]
hint: convert one of them with .to(dtype)"""),
    "a loss of a tensor and a batch": (lambda: F.mse_loss(T([1.0]), numbers(1)), """\
StructureError
tdc.mse_loss: expected a TensorDict as input, got Tensor float32[1] and TensorDict [1]
hint: td.apply(lambda x: ...) for other calls"""),
}  # fmt: skip
test_says = says(SAYS)


class TestTexts(Texts):
    @pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no CUDA device")
    def test_no_cuda_device(self):
        self.says(lambda: tree().cuda(), """\
UnsupportedError
tdc.cuda: expected a CUDA device, got a machine without
hint: x.to(device)""")  # fmt: skip


def test_titles_differ():
    names = [title(rule) for rule in RULES if rule.kind == "tensordict"]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compile"])
@pytest.mark.parametrize("op", [torch.any, torch.all])
def test_truth_of_a_whole_tensordict(op, compiled):
    """Without a dim one answer for all elements of all leaves, features and ragged ones too; with one, one for each."""
    run = torch.compile(op, backend="eager", fullgraph=True) if compiled else op
    flags = torch.tensor([[True, False], [True, True]])
    td = TensorDict({"a": flags, "b": {"c": torch.ones(2, 2, 3), "p": tdc.pack([torch.ones(1), torch.ones(2)])}}, [2])
    assert run(td).shape == ()
    assert run(td).dtype == torch.bool
    assert run(td).item() == (op is torch.any)
    assert run(td.set("a", ~flags & flags)).item() == (op is torch.any)
    assert run(td.exclude("a")).item() is True
    assert run(td * 0).item() is False
    assert run(td, keepdim=True).shape == (1,)
    per_leaf = run(td.exclude(("b", "p")), dim=0)
    assert torch.equal(per_leaf["a"], op(flags, dim=0))
    assert per_leaf["b", "c"].shape == (2, 3)
    assert run(TensorDict({}, [2])).item() == (op is torch.all)
    assert bool((td == td).all())
