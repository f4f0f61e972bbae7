"""Control flow in exported functions: as a graph, from a file, as machine code. And the tag of caches it is kept by.

Each branch asserts what holds only where it runs, so an assertion of the branch not taken shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from versions import refused

import tdc
from tdc import TensorDict
from tdc.compile import export, load
from tdc.compile import inductor as module


def positive(td: TensorDict) -> TensorDict:
    torch._assert_async((td["x"] > 0).all(), "all are positive")
    return td.set("x", td["x"] * 2)


def negative(td: TensorDict) -> TensorDict:
    torch._assert_async((td["x"] < 0).all(), "all are negative")
    return td.set("x", -td["x"])


def by_sign(td: TensorDict) -> TensorDict:
    return tdc.cond(td["x"].sum() > 0, positive, negative, (td,))


def of_columns(x: Tensor) -> Tensor:
    """What branches read lies in memory as they were traced, transposed or not."""
    return tdc.cond(x.sum() > 0, lambda v: v[0] * 1, lambda v: v.sum(0), ((x * 0.5).t(),))


def halved(x: Tensor) -> Any:
    def body(n: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        torch._assert_async((x.norm() > 1).all(), "it is to be halved")  # of a loop that does not run it does not hold
        return n + 1, x / 2

    return tdc.while_loop(lambda n, x: x.norm() > 1, body, (torch.tensor(0), x))


def running(x: Tensor) -> Any:
    return tdc.scan(lambda carry, row: (carry + row, {"product": carry * row}), torch.zeros(2), x)


def rows(x: Tensor) -> TensorDict:
    return TensorDict({"x": x}, [x.shape[0]])


X = torch.tensor([[8.0, 3.0], [1.0, 2.0], [4.0, 4.0]])
CASES: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "cond": (by_sign, [rows(X), rows(-X), rows(-X[:2])]),
    "transposed": (of_columns, [X, -X, X[:2]]),
    "while_loop": (halved, [X, X / 100, X[:2] * 50]),
    "scan": (running, [X, X[:2], X.repeat(3, 1)]),
}


def forms(fn: Any, example: Any, path: Path, format: str) -> Any:
    """A function, exported."""
    exported = export(fn, (example,))
    return exported if format == "graph" else load(exported.save(path / "fn.pt2", format=format))


@pytest.mark.cases(1, 0)
@pytest.mark.parametrize("format", ["graph", "export", pytest.param("aoti", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_eager(name: str, format: str, tmp_path: Path):
    fn, examples = CASES[name]
    with refused("AssertionError", when=name == "scan" and format == "aoti"):
        exported = forms(fn, examples[0], tmp_path, format)
        for example in examples:
            assert_close(plain(exported(example)), plain(fn(example)))


def plain(out: Any) -> Any:
    """A result without TensorDicts."""
    return out.to_dict() if isinstance(out, TensorDict) else out


@pytest.mark.parametrize("format", ["graph", "export"])
def test_the_branch_taken_asserts(format: str, tmp_path: Path):
    exported = forms(by_sign, rows(X), tmp_path, format)
    with pytest.raises(RuntimeError, match="all are positive"):
        exported(rows(torch.tensor([[9.0, -1.0]]).repeat(3, 1)))


def test_tags_of_caches_add_up(monkeypatch: pytest.MonkeyPatch):
    """The backend's tag replaced that of loops without donation, and a user's own."""
    config: Any = torch.compiler.config
    seen: list[str] = []

    def note(graph: Any, *rest: Any) -> Any:
        seen.append(config.cache_key_tag)
        return graph

    monkeypatch.setattr(module, "compile_graph", note)
    with config.patch(cache_key_tag="mine"):
        torch.compile(halved, backend=tdc.compile.backend, fullgraph=True)(X)
        torch.compile(torch.sin, backend=tdc.compile.backend, fullgraph=True)(X)
    assert all(tag.startswith("mine") for tag in seen)
    assert ["undonated" in tag for tag in seen] == [True, False]
    assert all("tdc" in tag for tag in seen)
