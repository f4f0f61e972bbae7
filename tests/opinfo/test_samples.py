"""torch's own samples as batches: a spread of them, most passes of it among the slow tests, and all with `-m sweep`.

`python tests/opinfo/sweep.py --all` prints the counts of everything; `docs/torch_samples.md` has them.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from opinfo.sweep import BAD, DTYPES, PASSES, start, sweep, sweep_pass
from torch.testing._internal.common_methods_invocations import op_db

from tdc.core.rules import DISPATCH, KINDS, ROWS

PARTS = 4
SPREAD: dict[str, dict[str, Any]] = {
    "values": {"dtypes": (torch.float32,), "limit": 2},
    "dtypes": {"dtypes": (torch.int64, torch.uint8, torch.bool, torch.float16, torch.complex64), "limit": 1},
    "padding": {"fill": 0, "kinds": ["masked"], "dtypes": (torch.float32, torch.int64), "limit": 1},
    "names": {"spelling": "all by name", "dtypes": (torch.float32,), "limit": 1},
    "methods": {"spelling": "method", "dtypes": (torch.float32,), "limit": 1},
    "in place": {"spelling": "in place", "dtypes": (torch.float32,), "limit": 2},
    "second": {"level": "second", "dtypes": (torch.float64,), "limit": 1},
    "forward": {"level": "forward", "dtypes": (torch.float64,), "limit": 1},
    "errors": {"level": "errors", "dtypes": (torch.float32,), "limit": 2},
}
QUICK = ("values", "errors")  # the rest of the spread takes minutes, and is slow
WHOLE = {name: how for name, how in PASSES.items() if how.get("mode", "eager") == "eager"}
USUAL: dict[str, Any] = {
    "ops": "", "dtypes": DTYPES, "limit": 30, "most": 10**6,
    "kinds": list(KINDS), "level": "values", "spelling": "sample",
    "mode": "eager", "fill": "nan", "v": False, "parts": PARTS,
}  # fmt: skip


def check(how: dict[str, Any], part: int) -> None:
    """Each call gives what the loop over examples gives, or is refused in words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts, calls = sweep(argparse.Namespace(**{**USUAL, **how, "part": part}))
    assert [call for call in calls if call[-2] in BAD] == []
    assert sum(sum(c.values()) for c in counts.values()) > 0


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in SPREAD])
def test_a_spread_of_the_samples(name: str, part: int) -> None:
    check(SPREAD[name], part)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", WHOLE)
def test_all_samples(name: str, part: int) -> None:
    check(WHOLE[name], part)


def test_the_sweep_finds_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    row = DISPATCH["nested"][torch.sin]
    monkeypatch.setattr(ROWS, row, lambda x: x.cos())
    _, calls = sweep(
        argparse.Namespace(**{**USUAL, "ops": "^sin$", "dtypes": (torch.float32,), "limit": 1, "parts": 1, "part": 0})
    )
    assert {call[-2] for call in calls if call[0] == "nested"} == {"differs"}


class Deadly:
    """Ends the process that it is sent to."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


@pytest.mark.sweep
def test_a_process_that_dies_is_counted_and_can_be_run_again(tmp_path: Path) -> None:
    how = {**USUAL, "ops": "^si(n|nc)$", "dtypes": (torch.float32,), "limit": 1, "parts": len(op_db), "out": tmp_path}
    with ThreadPoolExecutor(1, initializer=start) as threads:
        died = sweep_pass("values", argparse.Namespace(**how, resume=False, deadly=Deadly()), threads)
        assert [call[:2] + call[-2:] for _, calls in died for call in calls] == [
            (kind, name, "crashed", "") for name in ("sin", "sinc") for kind in KINDS
        ]
        again = argparse.Namespace(**{**how, "ops": "^sin$"}, resume=False)
        counts = dict(zip(("sin", "sinc"), sweep_pass("values", again, threads), strict=True))
        assert set(counts["sin"][0]["nested"]) == {"pass"}
        assert counts["sinc"][0]["nested"] == {"crashed": 1}
        sweep_pass("values", argparse.Namespace(**how, resume=True), threads)
    lines = [json.loads(line)[0] for line in (tmp_path / "values.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines == ["sin", "sinc", "sin"]
