"""Training steps of several processes: many cases in one start of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_processes

SCRIPT = Path(__file__).with_name("rank_processes.py")
FAST = [
    "collectives_in_losses", "collectives_in_losses_in_float16", "empty_ranks", "evaluation_of_all",
    "dtypes_that_travel", "leaves_spread_over_ranks", "parts_of_the_optimizer",
    "dtypes_of_parts_and_messages", "errors_of_one_rank",
]  # fmt: skip
SLOW = [
    "collectives_in_graphs", "collectives_in_losses_in_parts", "parts_in_graphs", "buckets_go_while_the_backward_does",
]  # fmt: skip


def run(names: list[str], folder: Path, world: int) -> list[str]:
    """What each of several processes writes to stderr."""
    return run_processes(SCRIPT, lambda rank: [",".join(names), f"{folder}/meeting", str(rank), str(world)], world)


def test_ranks_take_the_step_of_the_whole_batch(tmp_path: Path) -> None:
    assert run(FAST, tmp_path, 2) == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_take_the_step_of_the_whole_batch_in_graphs(world: int, tmp_path: Path) -> None:
    assert run(SLOW if world == 2 else FAST, tmp_path, world) == [""] * world
