"""tdc.compile.counted and tdc.compile.backend: modes, static shapes, and what a newcomer may mistype."""

from __future__ import annotations

import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import own_lines
from texts import said

import tdc
from tdc.compile import counted
from tdc.compile._torch.inductor import asks_no_example

N = 6000  # of a sum beyond the 4096 terms that Inductor asks about


def test_unknown_backend():
    assert said(tdc.UnsupportedError, lambda: counted(torch.relu, backend="nope")) == (
        "tdc.compile.counted: expected a function or the name of a backend of torch.compile, such as 'inductor', "
        "'aot_eager' or 'eager', got 'nope'\nhint: backend=tdc.compile.backend"
    )


def test_unknown_mode():
    assert said(tdc.UnsupportedError, lambda: counted(torch.relu, mode="fast")) == (
        "tdc.compile.counted: expected a mode of default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs, "
        "got 'fast'\nhint: mode='max-autotune'"
    )


def test_mode_is_of_inductor():
    text = said(tdc.UnsupportedError, lambda: counted(torch.relu, backend="eager", mode="max-autotune"))
    assert text == (
        "tdc.compile.counted: expected modes and options of Inductor only, got mode='max-autotune', options=None for "
        "backend 'eager'\nhint: leave backend out"
    )


def wrong_key(td: Any) -> Any:
    return td["tokns"]


def wrong_length(td: Any) -> Any:
    return td["tokens"] + td["tokens"][:, :, None]


def wrong_dim(td: Any) -> Any:
    return td["tokens"].sum("rows")


@pytest.mark.parametrize(
    ("fn", "error"), [(wrong_key, tdc.KeyPathError), (wrong_length, tdc.ShapeError), (wrong_dim, tdc.TdcError)]
)
def test_errors_of_the_library_are_raised_as_they_are(fn: Any, error: type[Exception]):
    td = tdc.TensorDict({"tokens": tdc.pack([torch.ones(2), torch.ones(3)])}, [2])
    with pytest.raises(error) as eager:
        fn(td)
    with pytest.raises(error) as traced:
        counted(fn, backend="eager")(td)
    assert str(traced.value) == str(eager.value)
    assert traced.value.__suppress_context__
    assert [note.partition(" in ")[0][:18] for note in traced.value.__notes__] == ["at test_counts.py:"]


def test_errors_of_torch_are_short():
    layer = torch.nn.Linear(5, 2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    with pytest.raises(RuntimeError, match="fake tensor") as error:
        counted(forward, backend="eager")(torch.ones(3, 4))
    text = "".join(traceback.format_exception(error.value)).splitlines()
    assert len(text) < 60
    assert re.fullmatch(r"at test_counts.py:\d+ in forward: return layer\(x\)", text[-1])


def test_other_errors_are_those_of_torch():
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("tdc.relu: not of the library")

    with pytest.raises(RuntimeError, match="raised exception ValueError"):
        counted(refuse, backend="eager")(torch.ones(1))


def test_static_shapes_compile_each_size():
    f = counted(lambda x: x * 2, backend="eager", dynamic=False)
    for n in (3, 4, 5, 4):
        f(torch.ones(n))
    assert f.counts.compiles == 3


@pytest.mark.sweep
@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_reach_inductor(mode: str):
    """On CPU without CUDA graphs; the numbers and the one graph for all lengths stay."""
    f = counted(lambda x: x.sum(1), mode=mode)
    for lengths in ((3, 2), (N, 1, 4)):
        x = tdc.pack([torch.arange(float(n)) for n in lengths])
        torch.testing.assert_close(f(x), x.sum(1))
    assert f.counts.compiles == 1


@pytest.mark.sweep
@pytest.mark.slow
def test_a_backward_serves_all_lengths():
    """Attention pooling: Inductor asks of its products whether there are at most 16 rows, and of sums whether more than
    4096; one graph of each pass serves both, and is found again in the cache on disk."""
    score = torch.nn.Linear(4, 1)

    def pool(x):
        return (score(x).softmax(1) * x).sum(1)

    f, cache = counted(pool), torch._dynamo.utils.counters["inductor"]
    bypassed = cache["fxgraph_cache_bypass"]
    for lengths in ((3, 2), (8, 20), (N, 1, 4)):
        made: list[Any] = [tdc.pack([torch.linspace(0, 1, 4 * n).view(n, 4) for n in lengths]) for _ in range(2)]
        x, y = [batch.requires_grad_() for batch in made]
        found, want = f(x), pool(y)
        torch.testing.assert_close(found, want)
        for out in (found, want):
            out.square().sum().backward()
        torch.testing.assert_close(x.grad.values, y.grad.values)
    assert f.counts.compiles == (1 if asks_no_example() else 2)  # torch 2.11 asks about the sum
    assert cache["fxgraph_cache_bypass"] == bypassed


@pytest.mark.sweep
@pytest.mark.slow
def test_modes_reach_torch_compile():
    f = torch.compile(lambda x: x + 1, backend=tdc.compile.backend, mode="max-autotune", fullgraph=True)
    assert f(torch.ones(3)).tolist() == [2.0] * 3


@pytest.mark.slow
def test_backend_lowers_slices():
    """torch 2.11 could not under the flag that the backend sets: `mean` slices the offsets."""
    f = counted(lambda x: x.mean(1))
    for lengths in ((3, 2), (5, 1, 4)):
        x = tdc.pack([torch.arange(float(n)) for n in lengths])
        torch.testing.assert_close(f(x), x.mean(1))
    assert f.counts.compiles == 1


@pytest.mark.sweep
@pytest.mark.slow
def test_backend_writes_into_slices_without_an_end():
    """Behind an operator that writes the slice of all columns stays in the graph; torch could not tell that it ends."""

    def step(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        bump_(state)
        state[1:3, :].add_(x[:2].sin())
        return x + 1

    run = torch.compile(step, backend=tdc.compile.backend, fullgraph=True, dynamic=True)
    for n in (4, 5):
        state, x = torch.ones(n, n).t(), torch.arange(float(n * n)).view(n, n)
        expected = state.clone()
        torch.testing.assert_close(run(state, x), step(expected, x))
        torch.testing.assert_close(state, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check`:FutureWarning")  # of torch itself
def test_backend_takes_a_diagonal_of_any_matrix():
    """Of which side is shorter the graph has a guard; torch could not tell under the flag that the backend sets."""
    f = counted(lambda x: x.diagonal() + 1, dynamic=True)
    for shape in ((3, 5), (4, 6), (5, 3)):
        x = torch.arange(15.0 if 3 in shape else 24.0).view(shape)
        assert torch.equal(f(x), x.diagonal() + 1)
    assert f.counts.compiles == 2


@torch.library.custom_op("tdc_tests::bump_", mutates_args={"x"})
def bump_(x: torch.Tensor) -> None:
    x.mul_(0.5)


@pytest.mark.parametrize("join", [torch.cat, torch.stack, torch.concat])
def test_batches_in_a_tuple(join: Any):
    """Dynamo (2.11-2.15) looks for `__torch_function__` in lists alone."""
    f = counted(lambda x: join((x, x * 2), -1), backend="eager")
    for rows in ((2, 3), (4, 1, 5)):
        x = tdc.pack([torch.randn(n, 4) for n in rows])
        torch.testing.assert_close(f(x).values, join((x, x * 2), -1).values)
    assert f.counts.compiles == 1


FIRST = """
import sys
import torch, tdc

assert "torch._dynamo" not in sys.modules
x = tdc.pack([torch.ones(2, 4), torch.ones(3, 4)])
td = tdc.TensorDict({"x": torch.ones(2)}, [2])
join = torch.compile(lambda x: torch.cat((x, x), 1), fullgraph=True, backend="eager")
print(join(x).lengths.tolist())
print(list(torch.compile(lambda td: torch.stack((td, td)), fullgraph=True, backend="eager")(td).batch_size))
"""


@pytest.mark.slow  # a process of its own
def test_batches_in_a_tuple_are_joined_by_the_first_operation_of_a_process():
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[4, 6]", "[2, 2]"], done.stderr


QUIET = """
import sys
import torch, tdc

class Last(torch.nn.Module):
    def forward(self, x):
        return x[:, -1]

x = tdc.pack([torch.ones(3, 8), torch.ones(2, 8)])
tdc.compile.peak_bytes(lambda: x + 1)
if len(sys.argv) > 1:
    program = tdc.compile.export(Last(), x)
    tdc.compile.load(program.save(sys.argv[1], format="aoti"))(x)
"""


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("packaged", [False, True])
def test_nothing_is_printed(packaged: bool, tmp_path: Path):
    """Neither by the profiler nor by Inductor, which tell what they do."""
    command = [sys.executable, "-c", QUIET, *([str(tmp_path / "x.pt2")] if packaged else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert own_lines(done.stdout + done.stderr) == ""
