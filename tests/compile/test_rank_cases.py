"""Training steps of several processes: many cases in one start of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_processes

SCRIPT = Path(__file__).with_name("rank_processes.py")
EAGER = [
    "collectives_in_losses", "dtypes_that_travel", "dtypes_of_parts_and_messages", "bytes_of_parts",
    "collectives_in_losses_in_float16", "collectives_in_losses_in_parts", "empty_ranks", "evaluation_of_all",
    "leaves_spread_over_ranks", "parts_of_the_optimizer", "parts_of_the_parameters", "errors_of_one_rank",
]  # fmt: skip
GRAPHS = ["collectives_in_graphs", "parts_in_graphs", "buckets_go_while_the_backward_does"]


def run(names: list[str], folder: Path, world: int) -> list[str]:
    """What each of several processes writes to stderr."""
    return run_processes(SCRIPT, lambda rank: [",".join(names), f"{folder}/meeting", str(rank), str(world)], world)


@pytest.mark.slow
@pytest.mark.parametrize(("names", "world"), [(GRAPHS, 2), (EAGER, 4)], ids=["graphs", "eager"])
def test_ranks_take_the_step_of_the_whole_batch(names: list[str], world: int, tmp_path: Path) -> None:
    assert run(names, tmp_path, world) == [""] * world
