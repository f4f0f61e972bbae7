"""`progress=` of map, loader and save: a bar of tqdm, a line without it, a function of what is done and the total."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tdc
from tdc import DtypeError, TensorDict
from tdc.core import progress

BYTES = 10 * 8 + 10 * 3 * 4


def data() -> TensorDict:
    return TensorDict({"x": torch.arange(10), "y": torch.ones(10, 3)}, [10])


class Bar:
    """A stand-in for `tqdm.tqdm`."""

    made: Bar

    def __init__(self, **settings: Any) -> None:
        self.settings, self.n, self.closed = settings, settings["initial"], False
        Bar.made = self

    def update(self, n: int) -> None:
        self.n += n

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: Any) -> None:
        self.closed = True


@pytest.fixture
def bar(monkeypatch: pytest.MonkeyPatch) -> type[Bar]:
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=Bar))
    return Bar


@pytest.fixture
def no_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(progress, "EVERY", 0)


def test_bar_of_a_loader(bar: type[Bar]):
    batches = tdc.data.loader(data(), 3, progress=True)
    assert len(list(batches)) == 4
    assert (bar.made.settings["total"], bar.made.n, bar.made.closed) == (4, 4, True)
    for _ in batches:
        break
    assert bar.made.closed  # a loop that is left


def test_a_resumed_loader_begins_where_it_was():
    told: list[tuple[int, int]] = []
    batches = tdc.data.loader(data(), 3, progress=lambda *now: told.append(now))
    iterator = iter(batches)
    next(iterator), next(iterator)
    state = batches.state_dict()
    told.clear()
    batches = tdc.data.loader(data(), 3, progress=lambda *now: told.append(now))
    batches.load_state_dict(state)
    assert len(list(batches)) == 2
    assert told == [(3, 4), (4, 4)]


def test_bytes_of_a_store(tmp_path: Path, bar: type[Bar]):
    tdc.io.save(data(), tmp_path / "a", progress=True)
    assert (bar.made.settings["total"], bar.made.n, bar.made.settings["unit"]) == (BYTES, BYTES, "B")
    told: list[tuple[int, int]] = []
    data().memmap(tmp_path / "b", progress=lambda *now: told.append(now))
    assert told == [(80, BYTES), (BYTES, BYTES)]


@pytest.mark.usefixtures("no_tqdm")
def test_line_without_tqdm(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tdc.io.save(data(), tmp_path / "a", progress=True)
    assert capsys.readouterr().err == "\rsave: 0/0 MiB\rsave: 0/0 MiB\n"
    assert len(list(tdc.data.loader(data(), 5, progress=True))) == 2
    assert capsys.readouterr().err == "\rloader: 1/2\rloader: 2/2\n"


def test_wrong_kinds(tmp_path: Path):
    wrong: Any = "bar"
    with pytest.raises(DtypeError, match=r"data\.loader: expected a bool or a function for progress, got str"):
        tdc.data.loader(data(), 3, progress=wrong)
    with pytest.raises(DtypeError, match=r"io\.save: expected a bool or a function for progress, got str"):
        tdc.io.save(data(), tmp_path / "a", progress=wrong)
    assert not list(tmp_path.iterdir())
