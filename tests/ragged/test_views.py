"""Images as views: the same as by a gather, or by lines, for every operation, with all derivatives."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from versions import refused

import tdc
from tdc.ragged import views

SIZES = [(3, 4), (0, 2), (5, 1), (2, 0), (4, 4)]
MOVES: dict[str, Callable[[Any], Any]] = {
    "crop": lambda x: x[:, :, 1:-1, -3:],
    "lines": lambda x: x[:, :, 1:],
    "steps": lambda x: x[:, :, ::2, 1::3],
    "turned": lambda x: x[:, :, ::-1, -2::-1],
    "turned by steps": lambda x: x[:, :, ::-2, :3],
    "ends of rows": lambda x: tdc.truncate(x, torch.tensor([1, 2, 3, 4, 2])),
    "mirrored": lambda x: x.flip(3),
    "mirrored twice": lambda x: x.flip(2, 3),
    "turned round": lambda x: x.transpose(2, 3),
    "rolled": lambda x: x.roll((1, -2), (3, 2)),
    "columns sorted": lambda x: x.sort(2).values,
    "lines sorted": lambda x: x.sort(-1, descending=True, stable=True).values,
    "order of lines": lambda x: x * x.argsort(3),
    "columns summed": lambda x: x.sum(2),
    "scan of lines": lambda x: x.cumsum(3),
    "scan of columns": lambda x: x.cummax(2).values,
    "positions of a scan": lambda x: x * x.cummin(3).indices,
    "differences": lambda x: x.diff(dim=2),
    "second differences": lambda x: x.diff(2, dim=3),
    "softmax of columns": lambda x: x.softmax(2),
    "log-softmax of lines": lambda x: x.float().log_softmax(3, dtype=torch.float64),
    "lines of norm 1": lambda x: torch.nn.functional.normalize(x, dim=3),
}
REDUCTIONS: dict[str, Callable[[Any], Any]] = {  # of images that have elements
    "sum of lines": lambda x: x.sum(3),
    "mean of columns, kept": lambda x: x.mean(2, keepdim=True),
    "largest of lines, kept": lambda x: x.amax(3, keepdim=True),
    "largest of columns and channels": lambda x: x.amax((1, 2)),
    "lines and channels": lambda x: x.logsumexp((1, 3), keepdim=True),
    "largest with positions": lambda x: x.max(3).values + x.max(3, keepdim=True).indices.squeeze(3),
    "positions": lambda x: x.argmin(2) * x.sum(2),
    "both ends": lambda x: torch.sub(*torch.aminmax(x, dim=3)),
    "medians": lambda x: x.median(2).values,
    "deviation": lambda x: x.std(3, correction=0),
    "norms": lambda x: torch.linalg.vector_norm(x, 3, dim=2),
    "every one": lambda x: (x > -9).all(3).double() * x.sum(3),
}


def images(dtype: torch.dtype = torch.float64, sizes: Any = SIZES) -> Any:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, h, w, generator=generator, dtype=dtype) for h, w in sizes]
    return tdc.pack(rows, ragged_dim=(2, 3))


COPIES = ["numpy", "torch"]
DTYPES = [
    torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def by(copies: str, monkeypatch: pytest.MonkeyPatch, always: bool = True) -> None:
    """Let moves go by views that numpy copies, or torch; always, or where it can."""
    monkeypatch.setattr(views, "LEAST", 1)
    monkeypatch.setattr(views, "mirrors_by_arrays", lambda *_: copies == "numpy")
    if always:
        monkeypatch.setattr(views, "copy_tensors" if copies == "numpy" else "copy_arrays", None)
    if copies == "torch":
        monkeypatch.setattr(views, "array_of", lambda x, dims: None)


def both(monkeypatch: pytest.MonkeyPatch, fn: Callable[[], Any]) -> tuple[Any, Any]:
    """What a call gives by a gather and by views, which it then takes."""
    gathered = fn()
    calls: list[int] = []
    monkeypatch.setattr(views, "LEAST", 1)
    for name in ("views", "views_of_array"):
        run = getattr(views, name)
        monkeypatch.setattr(views, name, lambda *args, run=run: calls.append(1) or run(*args))
    found = fn()
    assert calls
    return gathered, found


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("name", [*MOVES, *REDUCTIONS])
def test_values_and_derivatives(monkeypatch: pytest.MonkeyPatch, name: str, copies: str):
    def run() -> list[Tensor]:
        x = (images() if name in MOVES else images(sizes=[(3, 4), (5, 1), (1, 1), (4, 4)])).requires_grad_()
        y = (MOVES | REDUCTIONS)[name](x)
        tdc.validate(y)
        (grad,) = torch.autograd.grad((y.values**3).sum(), x.values, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x.values)
        return [y.values, y.sizes if hasattr(y, "sizes") else y.lengths, grad, second]

    if copies == "torch":
        monkeypatch.setattr(views, "array_of", lambda x, dims: None)
    with refused("derivative for aten::aminmax is not implemented", name == "both ends"):
        for a, b in zip(*both(monkeypatch, run), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_beside_an_empty_image(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(views, "LEAST", 1)
    x = images(sizes=[(3, 4), (0, 3), (2, 0), (2, 2)])
    found, rows = REDUCTIONS[name](x).unbind(), x.unbind()
    for b in (0, 3):
        (alone,) = REDUCTIONS[name](tdc.pack([rows[b]], ragged_dim=(2, 3))).unbind()
        torch.testing.assert_close(found[b], alone)


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("name", ["crop", "mirrored", "turned round"])
def test_in_a_direction(monkeypatch: pytest.MonkeyPatch, name: str, copies: str):
    def run() -> Any:
        x = images()
        with fwd.dual_level():
            y = MOVES[name](x.with_values(fwd.make_dual(x.values, x.values.cos())))
            return fwd.unpack_dual(y.values).tangent

    if copies == "torch":
        monkeypatch.setattr(views, "array_of", lambda x, dims: None)
    torch.testing.assert_close(*both(monkeypatch, run))


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_channels_behind(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, copies: str):
    """Of random bits, NaN among them, as the same of bytes."""
    by(copies, monkeypatch)
    most = 2 if dtype == torch.bool else 256
    rows = [torch.randint(most, (h, w, 3, dtype.itemsize), dtype=torch.uint8) for h, w in SIZES]
    of_bytes: Any = tdc.pack(rows, ragged_dim=(1, 2))
    x = of_bytes.with_values(of_bytes.values.view(dtype))
    turns = copies == "numpy" or dtype != torch.float8_e4m3fn  # of which torch has no flip (2.11-2.13)
    y = (x[:, 1:, ::-1].flip(1) if turns else x[:, 1:, ::2]).transpose(1, 2)
    for found, row in zip(y.unbind(), rows, strict=True):
        want = (row[1:].flip(0, 1) if turns else row[1:, ::2]).transpose(0, 1)
        assert torch.equal(found.contiguous().view(torch.uint8), want)


def random_slice(draw: random.Random) -> slice:
    step = draw.choice([None, 1, 2, 3, -1, -1, -2, 9, -9, sys.maxsize, -(2**70)])
    begin, end = [draw.choice([None, None, draw.randint(-6, 6)]) for _ in range(2)]
    return slice(begin, end, step)


def random_layout(draw: random.Random, values: Tensor) -> Tensor:
    """The same values elsewhere: behind others, apart from one another, in another order of dims."""
    axes = draw.sample(range(values.ndim), values.ndim)
    other = values.permute(axes).contiguous().permute([axes.index(d) for d in range(values.ndim)])
    axis = draw.randrange(values.ndim)
    apart = torch.stack([values, values], axis + 1).select(axis + 1, 1)
    behind = torch.cat([values.new_zeros(3), values.flatten()])[3:].view(values.shape)
    return draw.choice([values, other, apart, behind])


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("seed", range(60))
def test_random_moves(monkeypatch: pytest.MonkeyPatch, seed: int, copies: str):
    """Of examples with two or three ragged dims, dims of size 0 and static dims around them, against a loop."""
    by(copies, monkeypatch, always=False)
    draw, count = random.Random(seed), 2 + seed % 2
    front, behind = [[draw.randint(1, 3) for _ in range(draw.randint(0, 2))] for _ in range(2)]
    sizes = [[3] * count, *[[draw.randint(0, 5) for _ in range(count)] for _ in range(draw.randint(0, 4))]]
    rows = [torch.randn(*front, *size, *behind) for size in sizes]
    e, dims = len(front), tuple(range(1 + len(front), 1 + len(front) + count))
    packed: Any = tdc.pack(rows, ragged_dim=dims)
    x = packed.with_values(random_layout(draw, packed.values))
    slices, order = [random_slice(draw) for _ in dims], draw.sample(range(count), count)
    turned, shift, r = draw.sample(range(count), 2), draw.randint(-7, 7), draw.randrange(count)
    axes = [*range(dims[0]), *[dims[k] for k in order], *range(dims[-1] + 1, x.ndim)]
    results = [
        x[(slice(None),) * dims[0] + tuple(slices)],
        x.flip([dims[k] for k in turned]),
        x.roll(shift, dims[r]),
        x.permute(axes),
    ]

    def cropped(row: Tensor) -> Tensor:
        for axis, part in enumerate(slices, e):
            row = row.index_select(axis, torch.tensor([*range(row.shape[axis])[part]], dtype=torch.int64))
        return row

    wanted: list[Callable[[Tensor], Tensor]] = [
        cropped,
        lambda row: row.flip([e + k for k in turned]),
        lambda row: row.roll(shift, e + r),
        lambda row: row.permute([axis - 1 for axis in axes[1:]]),
    ]
    for found, want in zip(results, wanted, strict=True):
        tdc.validate(found)
        for a, row in zip(found.unbind(), rows, strict=True):
            assert torch.equal(a, want(row))


@pytest.mark.parametrize("copies", COPIES)
def test_ends_that_are_data(monkeypatch: pytest.MonkeyPatch, copies: str):
    by(copies, monkeypatch)
    x, begin, end = images(), torch.tensor([-2, 1, 4, 0, -9]), torch.tensor([9, -1, 0, 2, 3])
    for step in (1, 2, -1, -2):
        found = x[:, :, begin:end:step, end::step].unbind()
        for row, a, i, j in zip(x.unbind(), found, begin.tolist(), end.tolist(), strict=True):
            lines, columns = range(row.shape[1])[i:j:step], range(row.shape[2])[j::step]
            assert torch.equal(a, row[:, [*lines]][:, :, [*columns]])
    with pytest.raises(tdc.ShapeError, match="one end for each of 5 rows"):
        x[:, :, : begin[1:]]


def test_conjugates_and_negatives(monkeypatch: pytest.MonkeyPatch):
    """Whose memory does not say what they are."""
    monkeypatch.setattr(views, "LEAST", 1)
    x = images(torch.complex128)
    for values in (x.values.conj(), x.values.conj().imag):
        found = x.with_values(values)[:, :, ::-1].flip(3).unbind()
        for a, row in zip(found, x.with_values(values.clone()).unbind(), strict=True):
            assert torch.equal(a, row.flip(1, 2))


def test_large_images_go_to_all_threads(monkeypatch: pytest.MonkeyPatch):
    """torch splits their copies, numpy does not."""
    x = tdc.pack([torch.randn(200, 200), torch.randn(210, 200)], ragged_dim=(1, 2))
    calls: list[str] = []
    monkeypatch.setattr(views, "mirrors_by_arrays", lambda *_: True)
    for name in COPIES:
        run = getattr(views, f"copy_{name}".replace("numpy", "arrays").replace("torch", "tensors"))
        monkeypatch.setattr(views, run.__name__, lambda *args, name=name, run=run: calls.append(name) or run(*args))
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        x.flip(1)
        x[:, :50, ::2].flip(2)
    assert calls == ["numpy", "numpy", "numpy", "torch", "torch", "numpy"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wins", COPIES)
def test_lines_are_mirrored_by_what_a_trial_found_faster(
    wins: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Lines, and images of small elements: large ones backwards, and lines in another order, are numpy's."""
    times = {"by_array": 1, "by_tensor": 0} if wins == "torch" else {"by_array": 0, "by_tensor": 1}
    monkeypatch.setattr(views, "timeit", lambda run, number: run() or times[run.__name__])
    found, calls = views.mirrors_by_arrays.__wrapped__(4, 3), []
    assert found == (wins == "numpy")
    monkeypatch.setattr(views, "mirrors_by_arrays", lambda size, behind: found)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    run = views.copy_arrays
    monkeypatch.setattr(views, "copy_arrays", lambda *args: calls.append(1) or run(*args))
    rows = [torch.randn(30, 20, 3).to(dtype), torch.randn(25, 31, 3).to(dtype)]
    x = tdc.pack(rows, ragged_dim=(1, 2))
    for dims, by_array in (((2,), found), ((1, 2), found or dtype == torch.float32), ((1,), True)):
        calls.clear()
        for a, row in zip(x.flip(dims).unbind(), rows, strict=True):
            assert torch.equal(a, row.flip([d - 1 for d in dims]))
        assert bool(calls) == by_array, dims


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.uint16, torch.float8_e4m3fn, torch.complex32, torch.complex128]
)
@pytest.mark.parametrize("by_array", [False, True])
def test_any_dtype_is_mirrored(dtype: torch.dtype, by_array: bool, monkeypatch: pytest.MonkeyPatch):
    """Dtypes that torch cannot reverse are among them."""
    monkeypatch.setattr(views, "mirrors_by_arrays", lambda *_: by_array)
    rows = [torch.arange(h * w * 16, dtype=torch.uint8).view(dtype).reshape(h, w, -1) for h, w in ((20, 30), (17, 16))]
    x = tdc.pack(rows, ragged_dim=(1, 2))
    for a, row in zip(x.flip(2).unbind(), rows, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), row.view(torch.uint8).flip(1))


def test_small_images_move_by_an_index(monkeypatch: pytest.MonkeyPatch):
    """Whatever their channels; sums of lines, which lie in the packed axis, pay off later than those of columns."""
    calls: list[int] = []
    run = views.views_of_array
    monkeypatch.setattr(views, "views_of_array", lambda *args: calls.append(1) or run(*args))
    monkeypatch.setattr(views, "views", lambda *args, run=views.views: calls.append(2) or run(*args))
    for channels, side, expected in ((64, 15, []), (1, 17, [1, 1, 2]), (1, 40, [1, 1, 2, 2])):
        x = tdc.pack([torch.randn(channels, side, side) for _ in range(3)], ragged_dim=(2, 3))
        for y in (x.flip(2), x.sum(2), x.sum(3)):
            tdc.validate(y)
        assert calls == expected
        calls.clear()


def test_storages_can_still_be_resized(monkeypatch: pytest.MonkeyPatch):
    """`Tensor.numpy` would forbid it."""
    by("numpy", monkeypatch)
    x = images()
    y = x.flip(3)
    for values in (x.values, y.values):
        values.untyped_storage().resize_(0)


def test_a_backward_that_is_traced(monkeypatch: pytest.MonkeyPatch):
    """A trace records what torch does, not what numpy does."""
    monkeypatch.setattr(views, "LEAST", 1)
    x = images().requires_grad_()
    y = x.flip(3).values

    def backward(grad: Tensor) -> Tensor:
        return torch.autograd.grad(y, x.values, grad, retain_graph=True)[0]

    traced, other = make_fx(backward)(torch.zeros_like(y)), torch.randn_like(y)
    assert torch.equal(traced(other), backward(other))


@pytest.mark.parametrize("name", MOVES)
def test_frozen_values(monkeypatch: pytest.MonkeyPatch, name: str):
    """Without gradients, in inference mode, and as parameters: the same values."""
    monkeypatch.setattr(views, "LEAST", 1)
    x = images()
    want = MOVES[name](x).values
    learns = x.with_values(torch.nn.Parameter(x.values))
    assert MOVES[name](learns).values.requires_grad
    with torch.no_grad():
        found = MOVES[name](learns).values
    with torch.inference_mode():
        assert torch.equal(MOVES[name](images()).values, want)
    assert torch.equal(found, want)
    assert not found.requires_grad


IN_PLACE: dict[str, Callable[[Any, int], Any]] = {  # of a batch and a dim
    "cumsum": lambda x, d: x.cumsum(d),
    "cumsum of float64": lambda x, d: x.cumsum(d, dtype=torch.float64),
    "cumprod": lambda x, d: x.cumprod(d),
    "logcumsumexp": lambda x, d: x.logcumsumexp(d),
    "cummax": lambda x, d: x.cummax(d),
    "cummin": lambda x, d: x.cummin(d),
    "softmax": lambda x, d: x.softmax(d),
    "softmax of float64": lambda x, d: x.softmax(d, dtype=torch.float64),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "softmin": lambda x, d: torch.nn.functional.softmin(x, d),
    "sort": lambda x, d: x.sort(d, descending=True),
    "normalize": lambda x, d: torch.nn.functional.normalize(x, dim=d),
}
OF_INTEGERS = ["cumsum", "cumsum of float64", "cumprod", "cummax", "cummin", "softmax of float64", "sort"]


def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each call whose results are written where they lie."""
    calls: list[int] = []
    run = views.written
    monkeypatch.setattr(views, "LEAST", 1)
    monkeypatch.setattr(views, "written", lambda *args: calls.append(1) or run(*args))
    return calls


def assert_of_each(fn: Callable[[Any, int], Any], x: Any, d: int, rows: list[Tensor]) -> None:
    """That a call gives what a loop gives, bit by bit but for norms, which torch sums in the order of memory."""
    found, want = fn(x, d), [fn(row, d - 1) for row in rows]
    near = None if fn is IN_PLACE["normalize"] else 0.0
    if isinstance(want[0], Tensor):
        results = [(found, want)]
    else:
        assert type(found) is type(want[0])
        results = [*zip(found, zip(*want, strict=True), strict=True)]
    for y, wanted in results:
        tdc.validate(y)
        for a, b in zip(y.unbind(), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=near, atol=near, equal_nan=True)


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in IN_PLACE for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    + [(name, dtype) for name in OF_INTEGERS for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64)],
    ids=str,
)
def test_results_where_they_lie(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, dim: int):
    """Of images of odd sizes, without elements, and of values that are not contiguous; the first image tells dtypes."""
    calls = written(monkeypatch)
    for sizes in (SIZES, [(0, 3), (37, 41), (1, 1)], [(2, 3)]):
        rows = [(torch.randn(2, 3, h, w) * 3).to(dtype) for h, w in sizes]
        packed: Any = tdc.pack(rows, ragged_dim=(3, 4))
        axes = [2, 0, 1]
        apart = packed.with_values(packed.values.permute(axes).contiguous().permute([axes.index(d) for d in range(3)]))
        for x in (packed, apart):
            assert_of_each(IN_PLACE[name], x, dim + 1, rows)
        behind = [row.movedim((0, 1), (2, 3)).contiguous() for row in rows]
        assert_of_each(IN_PLACE[name], tdc.pack(behind, ragged_dim=(1, 2)), dim - 1, behind)
    assert len(calls) == 9


@pytest.mark.parametrize("name", IN_PLACE)
def test_results_that_are_differentiated_are_packed(monkeypatch: pytest.MonkeyPatch, name: str):
    """And where nobody differentiates the same call writes them."""
    calls = written(monkeypatch)
    x = images(torch.float32, [(3, 4), (5, 1), (4, 4)])  # the direction of a logcumsumexp wants elements (torch 2.13)
    learns = x.with_values(x.values.clone().requires_grad_())
    rows = [row.requires_grad_() for row in x.unbind()]
    found, want = IN_PLACE[name](learns, 3), [IN_PLACE[name](row, 2) for row in rows]
    if not isinstance(want[0], Tensor):
        found, want = found[0], [both[0] for both in want]
    (got,) = torch.autograd.grad(found.values.square().sum(), learns.values)
    grads = torch.autograd.grad([y.square().sum() for y in want], rows)
    torch.testing.assert_close(got, tdc.pack(list(grads), ragged_dim=(2, 3)).values)
    with fwd.dual_level():
        y = IN_PLACE[name](x.with_values(fwd.make_dual(x.values, x.values.cos())), 3)
        assert fwd.unpack_dual((y if isinstance(y, tdc.NestedTensor) else y[0]).values).tangent is not None
    assert not calls
    with torch.no_grad():
        assert_of_each(IN_PLACE[name], learns, 3, [row.detach() for row in rows])
    with torch.inference_mode():
        assert_of_each(IN_PLACE[name], x.with_values(x.values.clone()), 3, [row.detach() for row in rows])
    assert len(calls) == 2


def test_graphs_and_transforms_gather(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(views, "LEAST", 1)
    monkeypatch.setattr(views, "views", None)
    monkeypatch.setattr(views, "views_of_array", None)
    x = images()
    with pytest.raises(TypeError):
        x.flip(3)
    torch.compile(lambda x: x.flip(3), backend="eager", fullgraph=True)(x)
    tdc.vmap(lambda v: x.with_values(v).flip(3).values)(x.values[None])
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert not views.by_views(x)


@pytest.mark.parametrize("name", MOVES)
def test_gradients_of_several_at_once(monkeypatch: pytest.MonkeyPatch, name: str):
    """The backward of a call that went by views runs under `vmap` then."""
    monkeypatch.setattr(views, "LEAST", 1)
    x = images().requires_grad_()
    y = MOVES[name](x).values
    both = torch.randn(2, *y.shape, dtype=y.dtype)
    (got,) = torch.autograd.grad(y, x.values, both, is_grads_batched=True, retain_graph=True)
    want = [torch.autograd.grad(y, x.values, one, retain_graph=True)[0] for one in both]
    torch.testing.assert_close(got, torch.stack(want))


@pytest.mark.parametrize("least", [1, views.LEAST])
@pytest.mark.parametrize("step", [sys.maxsize, -sys.maxsize, 2**70])
def test_steps_of_any_size(monkeypatch: pytest.MonkeyPatch, step: int, least: int):
    monkeypatch.setattr(views, "LEAST", least)
    x = images()
    for found, row in zip(x[:, :, ::step].unbind(), x.unbind(), strict=True):
        assert torch.equal(found, row[:, :1] if step > 0 else row[:, -1:])


@pytest.mark.parametrize("step", [1.5, "a"])
def test_steps_that_are_no_whole_numbers(step: Any):
    with pytest.raises(tdc.IndexingError, match="a whole number as step of a slice"):
        images()[:, :, ::step]
