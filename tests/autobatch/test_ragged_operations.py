"""Operations on whole ragged examples in functions of `tdc.batch`, beside the loop over examples."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autobatch.ragged_samples import BAD, operations, outcomes
from opinfo.sweep import named
from torch import Tensor, nn

import tdc
from tdc.autobatch.per_example.table import NESTED, ROWS
from tdc.core import pytree
from tdc.ragged.storage import is_ragged

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it of arguments
LENGTHS = (3, 1, 5, 2)


def compiled(fn: Any) -> Callable[..., Any]:
    """The function of batches in one graph."""
    torch.compiler.reset()
    return torch.compile(lambda *args: fn(*args), fullgraph=True, backend="eager")


MODES = {"eager": lambda fn: fn, "graph": compiled}


def rows(*size: int, dim: int = 0) -> list[Tensor]:
    """Examples that are ragged in one dim."""
    shapes = [[*size[:dim], n, *size[dim:]] for n in LENGTHS]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def dense(*size: int) -> list[Tensor]:
    return [torch.randn(size, dtype=torch.float64, requires_grad=True) for _ in LENGTHS]


def batched(column: list[Tensor], dim: int) -> Any:
    same = len({x.shape for x in column}) == 1
    return tdc.lanes(torch.stack(column)) if same else tdc.pack(column, ragged_dim=dim + 1)


def agrees(fn: Any, *columns: list[Tensor], run: Callable[..., Any] | None = None, dim: int = 0) -> None:
    """The batch has the values and gradients of the loop."""
    f = fn if isinstance(fn, nn.Module) else tdc.batch(fn)
    alone = [pytree.tree_flatten(fn(*row))[0] for row in zip(*columns, strict=True)]
    found = pytree.tree_flatten((run or (lambda g: g))(f)(*[batched(c, dim) for c in columns]), is_leaf=is_ragged)[0]
    ours = [part for leaf in found for part in leaf.unbind()]
    theirs = [torch.as_tensor(example[i]) for i in range(len(found)) for example in alone]
    torch.testing.assert_close(ours, theirs)
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    leaves = [x for column in columns for x in column if x.requires_grad]
    pairs = [(a, b, torch.randn_like(b)) for a, b in zip(ours, theirs, strict=True) if b.requires_grad]
    if not leaves or not pairs:
        return
    options = {"allow_unused": True, "materialize_grads": True}
    got = torch.autograd.grad([a for a, _, _ in pairs], leaves, [w for *_, w in pairs], **options)
    want = torch.autograd.grad([b for _, b, _ in pairs], leaves, [w for *_, w in pairs], **options)
    torch.testing.assert_close(got, want)


# -- torch's own samples


def test_the_first_samples_of_some_operations():
    """Each passes or is refused in words, and most have one that passes."""
    warnings.simplefilter("ignore")
    passing = set()
    for op in operations()[::8]:
        results = list(outcomes(op, torch.float64, 3, most=2))
        bad = [call for call in results if call[2] in BAD]
        assert not bad, (named(op), bad)
        if any(call[2] == "pass" for call in results):
            passing.add(named(op))
    assert len(passing) > 35


def test_a_wrong_row_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ROWS, NESTED[torch.cumsum], lambda input, dim: torch.cumsum(input, 1 if dim else -1))
    (op,) = operations("^cumsum$")
    assert "differs" in [call[2] for call in outcomes(op, torch.float64, 3)]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "most", [pytest.param(3, marks=pytest.mark.slow), pytest.param(10**6, marks=pytest.mark.sweep)], ids=["few", "all"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool], ids=str)
def test_samples_of_all_operations(dtype: torch.dtype, most: int):
    warnings.simplefilter("ignore")
    for op in operations():
        bad = [call for call in outcomes(op, dtype, most, most=most) if call[2] in BAD]
        assert not bad, (named(op), bad)


# -- operators, sizes, indices


def operators(xs, h):
    whole, part = xs.detach(), h.detach()
    left = xs + h, xs - h, xs * h, xs / h, whole // part, whole % part, xs.abs() ** h, xs < h, xs >= h, xs == h
    right = h + xs, h - xs, h / xs, part // whole, part % whole, h.abs() ** xs, h < xs, h >= xs, h != xs
    numbers = 2 - xs, 2 / xs, 2**xs, xs > 1, -xs, abs(xs), ~(xs > 0), (xs > 0) & (h > 0), (h > 0) | (xs > 0)
    products = xs @ h, h @ xs.T, xs @ xs.mT, xs.matmul(h), h.matmul(xs.T)
    return left, right, numbers, products


def shapes(xs, h):
    n = xs.size(0)
    made = xs.new_zeros(n, 2), xs.new_ones(xs.shape), xs.new_full((n,), 7), xs.new_zeros(2, n)
    moved = xs.reshape(n, 2, -1), xs.view(-1, 2, 2), xs.reshape(-1), xs.view(-1, 2), xs[None].expand(3, n, 4)
    joined = torch.cat([xs, h[None]]), torch.cat([h[None], xs, xs[1:]]), torch.stack([xs, xs * 2], 1), h.expand_as(xs)
    return made, moved, joined, xs.flatten(), xs.unflatten(1, (2, 2)).flatten(0, 1), n * 2, xs.numel()


def indices(xs, h):
    n = xs.size(0)
    order = xs[:, 0].argsort()
    place = torch.ones_like(xs[:, 0]).cumsum(0) - 1
    table = torch.arange(20.0, dtype=torch.float64).reshape(10, 2)
    last = n - 1
    spans = xs[1:], xs[:-1], xs[:, 1:3], xs[..., 0], xs[:, None], xs[:last], table[:n], table[n:], h[:n]
    return spans, xs[0], xs[last], xs[-1, 1], xs[order], xs[xs[:, 0] > 0], place, table[place.long()], xs[:, -1]


def changed(xs, h):
    ys = xs * 1
    ys[0] = h
    zs = xs * 1
    zs[xs > 0] = 0.0
    return ys, zs, (xs if h.sum() > 0 else -xs), (xs if h.sum() > 0 else xs * 2), xs.masked_fill(xs < 0, h[0])


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fn", [operators, shapes, indices, changed], ids=lambda f: f.__name__)
def test_what_python_writes(fn: Any, mode: str):
    torch.manual_seed(1)
    agrees(fn, rows(4), dense(4), run=MODES[mode])


def functions(xs, h):
    """As they are called most: by torch's names, with keywords."""
    near = F.softmax(xs, dim=0), F.log_softmax(xs, -1), xs.T.contiguous().view(4, -1), F.normalize(xs, dim=-1), xs.std()
    kinds = torch.einsum("td,sd->ts", xs, xs), torch.sum(input=xs, dim=0), xs.sum(axis=1, keepdims=True), xs.norm(dim=0)
    pairs = F.scaled_dot_product_attention(h[None], xs, xs), F.scaled_dot_product_attention(xs, h[None], h[None])
    loss = F.mse_loss(xs, h.expand_as(xs)), F.cross_entropy(xs, xs.argmax(1)), F.cross_entropy(xs, xs.softmax(1))
    return (
        near, kinds, pairs, loss, xs.max(0).values, xs.argmax(), xs.T.argmax(), xs.topk(1, 0)[0],
        F.pad(xs, (0, 0, 1, 0)),
    )  # fmt: skip


def test_functions_of_torch():
    torch.manual_seed(4)
    agrees(functions, rows(4), dense(4))


def composed(xs, h):
    """Those that are others put together."""
    x = xs[:, 0]
    turned = torch.flipud(xs), xs.fliplr(), torch.msort(xs), torch.diag(x, 1), torch.diag(xs @ xs.T), torch.diagflat(xs)
    joined = torch.dstack([xs, xs * 2]), torch.dstack([x, x]), torch.column_stack([x, xs]), torch.atleast_2d(x)
    wide = torch.atleast_3d(x), torch.atleast_3d(xs), *torch.atleast_1d(xs, x)
    parts = *torch.hsplit(xs, 2), *torch.vsplit(xs, [1]), *xs[None].dsplit([2]), *x.hsplit([1, 2])
    places = torch.searchsorted(torch.arange(-2.0, 2.0).double(), xs.detach(), right=True)
    products = torch.inner(xs, h), torch.inner(xs, xs), torch.tensordot(xs, xs, ([0], [0])), torch.tensordot(h, xs.T, 1)
    losses = [F.triplet_margin_loss(xs, h[None], -xs, swap=True)]
    losses += [F.triplet_margin_loss(xs, xs + 1, h[None], 2.0, reduction="none")]
    losses += [F.kl_div(xs, xs.softmax(1), reduction="batchmean")]
    return turned, joined, wide, parts, places, products, losses


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.slow)])  # of thirty operations
def test_operations_that_are_others_put_together(mode: str):
    torch.manual_seed(5)
    agrees(composed, rows(4), dense(4), run=MODES[mode])


def test_numbers_of_examples_keep_the_dtype_of_tensors():
    def f(xs, n):
        return xs.float() * n, xs.long() + n, torch.where(xs > 0, xs.float(), n)

    agrees(f, rows(2), dense())


def test_ragged_dims_anywhere():
    def f(xs, h):
        return xs.sum(1), xs.softmax(-1), xs.transpose(0, 1) @ h, xs[0], xs.flatten()

    agrees(f, rows(3, dim=1), dense(3), dim=1)


def test_examples_counted_by_another_dim():
    @tdc.batch
    def f(xs):
        return xs.sum(1)

    parts = rows(3)
    x = tdc.pack(parts).transpose(0, 2)
    torch.testing.assert_close(f.map(x, in_dims=2), torch.stack([p.sum(0) for p in parts]))


def test_a_result_that_is_ragged_twice():
    @tdc.batch
    def scores(xs, ys):
        return xs @ ys.T

    @tdc.batch
    def top(s):
        return s.amax(1)

    xs, ys = rows(2), rows(2)[::-1]
    found = scores(tdc.pack(xs), tdc.pack(ys))
    assert found.ragged_dims == (1, 2)
    alone = [x @ y.T for x, y in zip(xs, ys, strict=True)]
    torch.testing.assert_close(list(found.unbind()), alone)
    torch.testing.assert_close(list(top(found).unbind()), [s.amax(1) for s in alone])


# -- layers


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv1d(4, 6, 3, padding=1), nn.AdaptiveMaxPool1d(2)
        self.lstm, self.gru = nn.LSTM(4, 5, 2, bidirectional=True), nn.GRU(4, 5, batch_first=True)
        self.attention, self.norm = nn.MultiheadAttention(4, 2), nn.GroupNorm(2, 4)

    @tdc.batch
    def forward(self, xs):
        found, weights = self.attention(xs, xs, xs)
        states, (last, _) = self.lstm(xs)
        ends = self.gru(xs)[1]
        return self.pool(self.conv(xs.T)), states, last, ends, found, weights, self.norm(xs), self.conv(xs.T[None])[0]


def test_layers_of_torch():
    module = Layers().to(torch.float64)
    agrees(module, rows(4))


@pytest.mark.parametrize("mode", MODES)
def test_dropout_draws_for_each_element(mode: str):
    @tdc.batch
    def f(xs):
        return F.dropout(xs, 0.25), torch.rand_like(xs)

    x = tdc.pack([torch.ones(n, 20) for n in (200, 300, 200)])
    torch.manual_seed(0)
    dropped, drawn = MODES[mode](f)(x)
    assert abs((dropped.values == 0).float().mean() - 0.25) < 0.02
    assert set(dropped.values.unique().tolist()) == {0.0, float(torch.tensor(1) / 0.75)}
    a, _, b = dropped.unbind()
    assert not torch.equal(a, b)
    assert len((dropped.values == 0).unique(dim=0)) > 600
    assert abs(drawn.values.mean() - 0.5) < 0.02
    assert len(drawn.values.unique()) > 13000


# -- control flow around whole examples


def parting(xs, h):
    """Whole examples on two ways, with other lengths on one of them."""
    if xs.mean() > 0:
        ys = xs[1:] * h
    else:
        ys = torch.cat([xs, xs - h])
    if ys.size(0) > 2:
        ys = ys.softmax(0)
    return ys, ys.sum(0)


def walking(xs, h):
    total = h
    for y in torch.cat([xs, xs * 2]).cumsum(0):
        if y.sum() > 0:
            total = total + y
    return total


def looping(xs, h):
    n = 0
    while xs.abs().sum() > 1:
        xs, n = xs / 2, n + 1
    return xs, n


@pytest.mark.parametrize("fn", [parting, walking, looping], ids=lambda f: f.__name__)
def test_control_flow(fn: Any):
    torch.manual_seed(2)
    agrees(fn, rows(3), dense(3))


def test_scores_part_and_meet():
    def f(xs):
        s = xs @ xs.T
        if xs.mean() > 0:
            s = s * 2
        return s.softmax(-1) @ xs

    torch.manual_seed(2)
    agrees(f, rows(3))


def test_len_is_a_number_of_each_example():
    def f(xs):
        return xs.sum(0) / len(xs) if len(xs) > 2 else xs.sum(0)

    torch.manual_seed(2)
    agrees(f, rows(3))


def parts(xs):
    """Of numbers that all examples have."""
    first, rest = xs.tensor_split(2)
    second, empty = rest[:1].split([1, 0])
    left, *right = xs.split(2, 1)
    return first, second, empty, left * right[0].chunk(2, dim=1)[0], xs.split(split_size=3, dim=-1)


@pytest.mark.slow
def test_parts_of_examples():
    torch.manual_seed(2)
    f, columns = tdc.batch(parts), [torch.randn(n, 4, dtype=torch.float64) for n in (3, 2, 4)]
    for g in (f, compiled(f)):
        found = pytree.tree_flatten(g(tdc.pack(columns)), is_leaf=is_ragged)[0]
        ours = zip(*[leaf.unbind() for leaf in found], strict=True)
        torch.testing.assert_close([[*one] for one in ours], [pytree.tree_flatten(parts(x))[0] for x in columns])


def methods_of_tensors(xs):
    """Found by hand: torch's own methods take no ragged batch."""
    other = xs * 2 + 1
    return xs[:, :1].expand_as(other), xs.view_as(other), xs.mT.reshape_as(xs.T), xs.unfold(1, 2, 1) * 3


@pytest.mark.slow
def test_methods_of_tensors():
    torch.manual_seed(2)
    agrees(methods_of_tensors, rows(3))
    agrees(methods_of_tensors, rows(3), run=compiled)


def asked(xs):
    """What an example is."""
    if isinstance(xs, Tensor) and torch.is_tensor(xs):
        y = xs * 2
    kinds = [isinstance(xs, (list, Tensor)), isinstance(xs, list), isinstance(3, int)]
    return y.sum(), *[k + 0 for k in kinds]


def test_an_example_is_a_tensor():
    agrees(asked, rows(2))
    agrees(asked, rows(2), run=compiled)


# -- what is refused

X = tdc.pack([torch.ones(n, 2) for n in (2, 3)])
PARTS = ("along a ragged dim, which gives each example its own number of parts", "x.tensor_split(n, dim), or for row")
REFUSED: dict[str, tuple[str, str]] = {
    "xs.nonzero()": ("an operation that ragged examples have, got x.nonzero", "walk along it with for, or compute"),
    "xs.data.mean()": ("an operation that ragged examples have, got x.data", "x.detach()"),
    "xs[0].data.mean()": ("operations that vmap has, got x.data", "x.detach()"),
    "xs.data_ptr()": ("an operation that ragged examples have, got x.data_ptr", "walk along it with for"),
    "torch.fft.fft(xs)": ("an operation that ragged examples have, got torch.fft", "walk along it with for"),
    "xs + torch.ones(3, 2)": ("a dense operand with one element there, got 3 elements along a", "x.unsqueeze(d)"),
    "xs.sum(2)": ("a dim in [-2, 1], got 2", "count dims of the logical shape"),
    "xs.sum(-3)": ("a dim in [-2, 1], got -3", "count dims of the logical shape"),
    "xs.squeeze()": ("an operation that ragged examples have, got torch.squeeze without a dim", "name the dim"),
    "xs.view(xs.size(0) + 1, 2)": ("the size of a ragged dim, got another number", "x.size(d) of its ragged dim"),
    "xs.view(2, 2)": ("a size for each ragged dim, side by side, got 0 sizes of ragged dims, of 1", "x.size(d)"),
    "torch.arange(xs.size(0))": ("tensors that stay tensors, got a number asked of one", "torch.ones_like(x[:, 0])"),
    "torch.ones(xs.size(0), xs.size(0))": ("got a number asked of one", "torch.ones_like(x[:, 0])"),
    "xs.new_ones(xs.size(0), xs.size(0))": ("got 2 sizes of ragged dims, of 1", "torch.zeros(99, 99), one size"),
    "list(xs)": ("an operation that ragged examples have, got an iteration inside of", "for row in x: ... as a"),
    "[x for x in xs]": ("what a list that grew differently can do, got one that is returned", "torch.stack(out)"),
    "(xs.sum(0), [x + 1 for x in xs])": ("a list that grew differently can do, got one", "torch.stack(out)"),
    "xs if xs > 0 else -xs": ("a condition of one element, got the truth of a ragged example", "x.any() or x.all()"),
    "xs[7]": ("positions inside each example, got one beyond", "positions count within each example"),
    "torch.stack([xs, torch.ones(2)])": ("ragged examples have, got ragged and dense examples in", "h.expand_as(xs)"),
    "torch.nn.functional.batch_norm(xs, None, None)": ("got torch.batch_norm", "layer_norm or group_norm"),
    "xs.index_select(1, xs.sum(0).argsort())": ("got torch.index_select with an argument that differs", "share it"),
    "xs.narrow(0, xs.size(0) - 1, 1)": ("got torch.narrow with an argument that differs between", "share it between"),
    "xs.topk(xs.size(0), 0)": ("got torch.topk with an argument that differs between", "share it between them"),
    **dict.fromkeys(("xs.split(2)", "torch.unsafe_split(xs, 1)", "torch.split_copy(xs, split_size=2)"), PARTS),
    **dict.fromkeys(("xs.chunk(2)", "torch.chunk(xs, chunks=2, dim=-2)", "xs.unsafe_chunk(2)"), PARTS),
    "xs.flip(bogus=1)": ("an operation that ragged examples have, got bogus= of a ragged example", "walk along it"),
    "torch.vmap(lambda h: xs * h)(torch.ones(2))": ("no transform between a block and its", "transform the function"),
}  # fmt: skip


@pytest.mark.parametrize("code", REFUSED)
def test_refused_in_words(code: str):
    scope: dict[str, Any] = {"torch": torch}
    text = f"def f(xs):\n    return {code}\n"
    exec(text, scope)
    expected, hint = REFUSED[code]
    with pytest.raises(tdc.TdcError) as caught:
        tdc.batch(scope["f"], source=text)(X)
    assert expected in str(caught.value)
    assert f"hint: {hint}" in str(caught.value)


def inverses(x):
    return torch.unique(x, return_inverse=True)[1], torch.unique_consecutive(x, return_inverse=True)[1]


@pytest.mark.parametrize("ragged_dim", [1, 2])
def test_positions_among_distinct_elements_have_the_shape_of_the_example(ragged_dim: int):
    rows = [torch.randint(0, 3, (n, 4)).movedim(0, ragged_dim - 1) for n in (3, 0, 5)]
    found = tdc.batch(inverses)(tdc.pack(rows, ragged_dim=ragged_dim))
    for got, want in zip(found, zip(*[inverses(row) for row in rows], strict=True), strict=True):
        for a, b in zip(got.unbind(), want, strict=True):
            assert a.equal(b)
