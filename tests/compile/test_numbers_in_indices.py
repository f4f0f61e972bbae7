"""Numbers of an index that vary from call to call: as many graphs as for a plain tensor, and the numbers of eager."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tdc
from tdc import TensorClass, TensorDict
from tdc.compile import counted

Fn = Callable[..., Any]
LENGTHS = (6, 8, 6, 7, 9, 6, 6, 8)
SPELLED: dict[str, Fn] = {
    "x[i]": lambda x, i: x[i],
    "x[-i]": lambda x, i: x[-i],
    "x[:i]": lambda x, i: x[:i],
    "x[i:]": lambda x, i: x[i:],
    "x[-i:]": lambda x, i: x[-i:],
    "x[::i]": lambda x, i: x[::i],
    "x[i:i + 2]": lambda x, i: x[i : i + 2],
    "x[i - 2:i:2]": lambda x, i: x[i - 2 : i : 2],
    "x[..., None][:i]": lambda x, i: x[..., None][:i],
    "x[None, i]": lambda x, i: x[None, i],
    "x[i, None]": lambda x, i: x[i, None],
    "x[[i, 1]]": lambda x, i: x[[i, 1]],
    "x[[i]]": lambda x, i: x[[i]],
    "x[None, [i, 1]]": lambda x, i: x[None, [i, 1]],
    "x[None, i:]": lambda x, i: x[None, i:],
    "narrow": lambda x, i: torch.narrow(x, 0, 1, i),
    "x * i": lambda x, i: x * i,
    "x * 0.5 * i": lambda x, i: x * (0.5 * i),
    "x == i": lambda x, i: x == i,
    "x < 0.5 * i": lambda x, i: x < 0.5 * i,
    "i != x": lambda x, i: i != x,
    "x[torch.tensor(i)]": lambda x, i: x[torch.tensor(i)],
    "x[torch.tensor(-i)]": lambda x, i: x[torch.tensor(-i)],
}  # fmt: skip
BEHIND: dict[str, Fn] = {
    "x[:, i]": lambda x, i: x[:, i], "x[:, -i]": lambda x, i: x[:, -i], "x[:, i:]": lambda x, i: x[:, i:],
    "x[:, :i]": lambda x, i: x[:, :i], "x[:, -i:]": lambda x, i: x[:, -i:], "x[:i, :i]": lambda x, i: x[:i, :i],
    "x[..., i]": lambda x, i: x[..., i], "x[:, :, :i]": lambda x, i: x[:, :, :i],
    "x[:, :i, :i]": lambda x, i: x[:, :i, :i], "x[..., :i, None]": lambda x, i: x[..., :i, None],
    "narrow(2)": lambda x, i: torch.narrow(x, 2, 1, i), "x[None, :i]": lambda x, i: x[None, :i],
}  # fmt: skip
WRITTEN: dict[str, Fn] = {
    "at[i].set": lambda x, i: x.at[i].set(x[0]), "at[i].add": lambda x, i: x.at[i].add(x[0]),
    "at[:i].set": lambda x, i: x.at[:i].set(0.5), "at[i:i + 2].set": lambda x, i: x.at[i : i + 2].set(x[:2]),
    "at[-i].set": lambda x, i: x.at[-i].set(x[0]), "at[i].set(mode)": lambda x, i: x.at[i].set(x[0], mode="drop"),
    "at[0].set(i)": lambda x, i: x.at[0].set(i), "at[0].set(0.5 * i)": lambda x, i: x.at[0].set(0.5 * i),
    "at[i].mul(i)": lambda x, i: x.at[i].mul(i), "at[i].max(i, mode)": lambda x, i: x.at[i].max(i, mode="clip"),
    "at[1].set({x: i})": lambda x, i: x.at[1].set({"x": i}),
}  # fmt: skip

GRID: dict[str, Fn] = {  # of two batch dims
    "x[i, 1]": lambda x, i: x[i, 1],
    "x[i, i]": lambda x, i: x[i, i],
    "x[..., i]": lambda x, i: x[..., i],
    "x[:, i]": lambda x, i: x[:, i],
    "x[:, -i]": lambda x, i: x[:, -i],
    "x[i, 1:]": lambda x, i: x[i, 1:],
    "x[1, i:]": lambda x, i: x[1, i:],
    "x[i, None, i]": lambda x, i: x[i, None, i],
    "x[i, [1, 0]]": lambda x, i: x[i, [1, 0]],
    "x[:, [i, 1]]": lambda x, i: x[:, [i, 1]],
    "x[torch.tensor(1), i]": lambda x, i: x[torch.tensor(1), i],
    "at[:, i].set": lambda x, i: x.at[:, i].set(0.5),
    "at[None, i].add": lambda x, i: x.at[None, i].add(1),
    "at[[i, 1]].mul": lambda x, i: x.at[[i, 1]].mul(2),
    "at[:, i].set(mode)": lambda x, i: x.at[:, i].set(1, mode="drop"),
    "at[i, 1:].apply": lambda x, i: x.at[i, 1:].apply(torch.neg),
    "copy_(i:)": lambda x, i: tdc.copy_(x, 1, slice(i, None)),
    "copy_(:, i)": lambda x, i: tdc.copy_(x, 1, (slice(None), i)),
    "copy_(i, 1:)": lambda x, i: tdc.copy_(x, x[0, 1:] * 2, (i, slice(1, None))),
    "copy_([i, 1])": lambda x, i: tdc.copy_(x, 3, [i, 1]),
    "copy_(i, rows)": lambda x, i: tdc.copy_(x, 3, (i, torch.tensor([0, 2]))),
}


class Point(TensorClass):
    x: Any


def rows() -> Any:
    return tdc.pack([torch.randn(n, 7) for n in LENGTHS])


MADE: dict[str, Callable[[], Any]] = {
    "packed": rows,
    "padded": lambda: rows().to_padded(),
    "two levels": lambda: tdc.pack([rows(), rows()[:6]]),
    "leaves": lambda: TensorDict({"x": torch.randn(8, 7)}, [8]),
    "ragged leaves": lambda: TensorDict({"x": rows()}, [8]),
    "fields": lambda: Point(x=torch.randn(8, 7), batch_size=[8]),
    "grid": lambda: TensorDict({"x": torch.randn(8, 7, 2), "n": torch.zeros(8, 7)}, [8, 7]),
}
CASES = [(kind, name, fn) for kind in MADE if kind not in ("grid", "two levels") for name, fn in SPELLED.items()]
CASES += [(kind, name, fn) for kind in ("packed", "padded") for name, fn in BEHIND.items()]
CASES += [(kind, name, fn) for kind in ("leaves", "fields") for name, fn in WRITTEN.items()]
CASES += [("two levels", name, BEHIND[name]) for name in ("x[:, i:]", "x[:, :i]", "x[:, :, :i]", "x[..., :i, None]")]
CASES += [("grid", name, fn) for name, fn in GRID.items()]


def tensors(x: Any) -> list[Tensor]:
    """The tensors of a result, without what pads them."""
    if isinstance(x, TensorDict):
        return [t for leaf in x.values() for t in tensors(leaf)]
    if isinstance(x, TensorClass):
        return tensors(x.to_tensordict())
    return [x] if isinstance(x, Tensor) else [t for row in x.unbind() for t in tensors(row)]


@pytest.mark.cases(5, 10)
@pytest.mark.parametrize(("kind", "name", "fn"), [pytest.param(*case, id=" ".join(case[:2])) for case in CASES])
def test_a_number_that_varies(kind: str, name: str, fn: Fn):
    x = MADE[kind]()
    run = counted(fn, backend="eager")
    for i in (2, 3, 4, 3, 5):
        got, want = tensors(run(copy.deepcopy(x), i)), tensors(fn(copy.deepcopy(x), i))
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    assert run.counts.compiles <= 2


NUMBERS: dict[str, Callable[[Any, int], Any]] = {
    "TensorDict": lambda td, i: TensorDict({"y": i, "z": 0.5 * i}),
    "a list": lambda td, i: TensorDict({"y": [i, 1, i], "z": [[0.5], [0.5 * i], [0.0]]}, [3]),
    "set": lambda td, i: td.set("y", i), "update": lambda td, i: td.update({"x": i}),
    "replace": lambda td, i: td.replace(x=0.5 * i), "setdefault": lambda td, i: td.setdefault("y", i),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_as_a_leaf(name: str):
    run, td = counted(NUMBERS[name], backend="eager"), TensorDict({"x": torch.ones(3)})
    for i in (2, 3, 4, 5):
        got, want = run(td, i), NUMBERS[name](td, i)
        assert (got == want).all()
        assert [x.dtype for x in got.values()] == [x.dtype for x in want.values()]
    assert run.counts.compiles <= 2


@pytest.mark.parametrize("first", [2, 0.5])
def test_the_first_comparison_of_a_process_may_be_with_a_number_that_varies(first: float):
    """Dynamo takes a container for different from any number that it traces (2.11-2.15)."""
    x = rows()
    run = counted(lambda x, i: x > i, backend="eager", dynamic=True)
    for i in (first, first + 1):
        assert run(x, i).values.equal(x.values > i)


@pytest.mark.parametrize("kind", ["packed", "padded", "ragged leaves"])
def test_a_row_in_a_tensor_that_is_out_of_range(kind: str):
    run = torch.compile(lambda x, i: x[i.sum()], backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="expected a row of the batch"):
        run(MADE[kind](), torch.tensor([8]))


def test_the_half_of_batches_of_other_sizes():
    """As many graphs as for batches of other sizes alone."""
    run = counted(lambda td: td[: len(td) // 2], backend="eager")
    for n in (4, 6, 7, 8, 9):
        assert run(TensorDict({"x": torch.randn(n, 2)}, [n])).batch_size == (n // 2,)
    assert run.counts.compiles <= 2


BEYOND: dict[str, tuple[Fn, str]] = {
    "x[i]": (lambda x, i: x[i], "got 9"), "x[-i]": (lambda x, i: x[-i], "got -9"),
    "select": (lambda x, i: torch.select(x, 0, i), "got 9"), "narrow": (lambda x, i: x.narrow(0, 0, i), "got 9 from 0"),
    "x[..., i]": (lambda x, i: x[..., i], "got 9"), "sum": (lambda x, i: x.sum(i), "a dim in [-3, 2], got 9"),
    "transpose": (lambda x, i: x.transpose(0, i), "a dim in [-3, 2], got 9"),
    "cat": (lambda x, i: torch.cat([x, x], i), "a dim in [-3, 2], got 9"),
    "reshape": (lambda x, i: x.reshape(i, -1), "got sizes [9, -1]"),
    "expand": (lambda x, i: x.expand(i, 3), "got [9, 3]"),
    "unflatten": (lambda x, i: x.unflatten(-1, (i, 2)), "got sizes [9, 2] for dim -1"),
}  # fmt: skip
BEYOND_LEAVES: dict[str, tuple[Fn, str]] = {
    "td[i]": (lambda x, i: x[i], "an index into batch_size [3], got 9 at dim 0\nhint: dim 0 takes -3 to 2"),
    "td[None, i]": (lambda x, i: x[None, i], "an index into batch_size [3], got 9"),
    "reshape": (lambda x, i: x.reshape(i, -1), "got [9, -1]"), "sum": (lambda x, i: x.sum(i), "got 9"),
    "TensorDict": (lambda x, i: TensorDict({"x": x["x"]}, [i]), "expected leaves of shape [9, ...]"),
    "set": (lambda x, i: x.set("y", torch.ones(i)), "at y: Tensor float32[9]"),
}
WRONG = [(kind, *case) for kind in ("packed", "padded") for case in BEYOND.items()]
WRONG += [("leaves", *case) for case in BEYOND_LEAVES.items()]


@pytest.mark.cases(5, 10)
@pytest.mark.parametrize(("kind", "name", "case"), [pytest.param(*w, id=" ".join(w[:2])) for w in WRONG])
def test_a_number_that_varies_is_named_where_it_is_wrong(kind: str, name: str, case: tuple[Fn, str]):
    """Dynamo knows no text of such a number (torch 2.11-2.15)."""
    x = tdc.pack([torch.ones(n, 4) for n in (2, 3, 1)])
    x = {"packed": x, "padded": x.to_padded(), "leaves": TensorDict({"x": torch.ones(3, 2)}, [3])}[kind]
    fn = counted(case[0], backend="eager")
    for i in (1, 2):
        with contextlib.suppress(tdc.TdcError):
            fn(x, i)
    with pytest.raises(tdc.TdcError) as raised:
        fn(x, 9)
    assert case[1] in str(raised.value)
    assert "\nhint: " in str(raised.value)
