"""Mistakes, by section: each is refused in words, in three lines and one for each wrong leaf.

A line is a program whose names are those of `names`, refused in a place, or by a way to it, that no other test takes.
Python's own errors (an unknown keyword, a missing argument) and those of torch's parser, which no container meets, are
left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mistakes import MISTAKES
from mistakes_graphs import IN_GRAPHS
from torch import nn

import tdc

torch.manual_seed(0)
ROWS = [torch.randn(2, 4), torch.randn(3, 4)]
PACKED = tdc.pack(ROWS)


@tdc.tensorclass
class Point:
    x: torch.Tensor
    name: str


def names() -> dict[str, Any]:
    """What the programs call things."""
    net = nn.Linear(4, 2)
    return {
        "tdc": tdc, "torch": torch, "np": np, "nn": nn, "F": F, "ROWS": ROWS, "Point": Point, "x": PACKED,
        "m": PACKED.to_padded(), "other": tdc.pack([torch.ones(1, 4), torch.ones(4, 4)]),
        "ids": tdc.pack([torch.arange(2), torch.arange(3)]),
        "q": tdc.pack([torch.randn(2, 2, 4), torch.randn(3, 2, 4)]).transpose(1, 2), "net": net,
        "tl": tdc.pack([tdc.pack([torch.ones(2, 4), torch.ones(3, 4)]), tdc.pack([torch.ones(1, 4)])]),
        "td": tdc.TensorDict({"x": torch.zeros(3, 2), "n": {"y": torch.zeros(3)}}, [3]),
        "step": tdc.compile.train_step(net, lambda n, x: n(x).sum(), tdc.optim.sgd(0.1), compile=False),
    }  # fmt: skip


def answer(line: str) -> str:
    """What a program gets that is not refused in words; empty for an error of the library in three lines."""
    try:
        exec(line, names())
    except tdc.TdcError as error:
        told = [said for said in str(error).splitlines() if not said.startswith("at ")]
        return "" if len(told) <= 3 else f"{line}: {len(told)} lines"
    except Exception as error:
        return f"{line}: {type(error).__name__}: {error}"
    return f"{line}: no error"


def answer_in_a_graph(line: str) -> str:
    """The same for a program that calls `run`: the text of the library is in the error of Dynamo, which has a class of
    its own."""

    def run(fn: Any, *args: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(fn, fullgraph=True, backend="eager")(*args)

    try:
        exec(line, {**names(), "run": run})
    except Exception as error:
        said = str(error)
        found = said[said.find("tdc.") :]
        return "" if "expected" in found[:200] and "got" in found[:400] else f"{line}: {said[:300]}"
    return f"{line}: no error"


@pytest.mark.parametrize("section", MISTAKES)
def test_mistakes_are_refused_in_words(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert [said for line in MISTAKES[section].strip().splitlines() if (said := answer(line.strip()))] == []


@pytest.mark.slow
def test_mistakes_in_graphs_are_refused_in_words():
    assert [said for line in IN_GRAPHS.strip().splitlines() if (said := answer_in_a_graph(line.strip()))] == []
