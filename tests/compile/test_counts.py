"""tdc.compile.counted and tdc.compile.backend: modes, static shapes, and what a newcomer may mistype."""

from __future__ import annotations

import pytest
import torch

import tdc
from tdc.compile import counted

N = 6000  # of a sum beyond the 4096 terms that Inductor asks about


def text_of(error: type[Exception], run) -> str:
    with pytest.raises(error) as caught:
        run()
    return str(caught.value)


def test_unknown_backend():
    assert text_of(tdc.UnsupportedError, lambda: counted(torch.relu, backend="nope")) == (
        "tdc.compile.counted: expected a function or the name of a backend of torch.compile, such as 'inductor', "
        "'aot_eager' or 'eager', got 'nope'\nhint: backend=tdc.compile.backend"
    )


def test_unknown_mode():
    assert text_of(tdc.UnsupportedError, lambda: counted(torch.relu, mode="fast")) == (
        "tdc.compile.counted: expected a mode of default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs, "
        "got 'fast'\nhint: mode='max-autotune'"
    )


def test_mode_is_of_inductor():
    text = text_of(tdc.UnsupportedError, lambda: counted(torch.relu, backend="eager", mode="max-autotune"))
    assert text == (
        "tdc.compile.counted: expected modes and options of Inductor only, got mode='max-autotune', options=None for "
        "backend 'eager'\nhint: leave backend out"
    )


def test_static_shapes_compile_each_size():
    f = counted(lambda x: x * 2, backend="eager", dynamic=False)
    for n in (3, 4, 5, 4):
        f(torch.ones(n))
    assert f.counts.compiles == 3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_reach_inductor(mode: str):
    """On CPU without CUDA graphs; the numbers and the one graph for all lengths stay."""
    f = counted(lambda x: x.sum(1), mode=mode)
    for lengths in ((3, 2), (N, 1, 4)):
        x = tdc.pack([torch.arange(float(n)) for n in lengths])
        torch.testing.assert_close(f(x), x.sum(1))
    assert f.counts.compiles == 1


def test_modes_reach_torch_compile():
    f = torch.compile(lambda x: x + 1, backend=tdc.compile.backend, mode="max-autotune", fullgraph=True)
    assert f(torch.ones(3)).tolist() == [2.0] * 3


def test_backend_lowers_slices():
    """torch 2.11 could not under the flag that the backend sets: `mean` slices the offsets."""
    f = counted(lambda x: x.mean(1))
    for lengths in ((3, 2), (5, 1, 4)):
        x = tdc.pack([torch.arange(float(n)) for n in lengths])
        torch.testing.assert_close(f(x), x.mean(1))
    assert f.counts.compiles == 1
