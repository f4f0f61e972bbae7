"""Draw and check random programs: `python tests/programs/run.py --count 5000 --seed 0`."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, given, seed, settings
from programs.program import begin, check_compiled, check_gradients, grow
from programs.steps import TABLE

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example)


def check_programs(count: int, start: int = 0, compiled: int = 50) -> Counter[str]:
    """Draw so many programs, compile one of so many, and say what was refused.

    Raises:
        AssertionError: a program differs; the smallest one that does is shown.
    """
    seen: Counter[str] = Counter()
    refused: Counter[str] = Counter()

    @seed(start)
    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=SLOW, report_multiple_bugs=False,
    )  # fmt: skip
    @given(st.data(), st.integers(3, 8), st.integers(0, compiled - 1))
    def one(data: Any, length: int, turn: int) -> None:
        p = begin(data.draw)
        grow(p, TABLE, length, refused)
        seen["programs"] += 1
        seen["steps"] += len(p.steps)
        if p.steps:
            check_gradients(p)
        if p.steps and turn == 1:
            seen[check_compiled(p)] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one()
    return seen + Counter({f"refused {text}": n for text, n in refused.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", type=int, default=50, help="compile one of so many")
    given_args = parser.parse_args()
    torch.set_num_threads(1)
    found = check_programs(given_args.count, given_args.seed, given_args.compiled)
    for text, n in found.most_common():
        print(n, text)


if __name__ == "__main__":
    main()
