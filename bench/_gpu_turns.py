"""Jobs in processes of their own that prepare side by side and measure one at a time, within a budget of minutes.

    prepare     imports, compiles, warms up: all jobs at once, as many as there are cores
    measure     the ready ones, in the order in which jobs are given; nothing else runs meanwhile
    the end     what has not measured by then is ended and named

A job that is still preparing when most of its time is over no longer holds up the others: it measures last, if it can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

PREPARE, GRACE, POLL = 0.6, 15.0, 0.1  # part of the time that is for preparing; seconds
Job = tuple[str, str]


@dataclass(frozen=True)
class Clock:
    """By when a job is to have prepared and measured, as of `time.time()`."""

    prepared: float
    end: float


Work = Callable[[Job, Clock, Callable[[], None], dict[str, Any]], bool]  # job, clock, wait, options -> all is well


def run(work: Work, job: Job, clock: Clock, pipe: Any, options: dict[str, Any]) -> None:
    """A job in its process: it waits for its turn between preparing and measuring."""

    def wait() -> None:
        pipe.send("ready")
        pipe.recv()

    if not work(job, clock, wait, options):
        raise SystemExit(1)


class Turn:
    """The process of one job."""

    def __init__(self, work: Work, job: Job, clock: Clock, options: dict[str, Any]) -> None:
        context = get_context("spawn")
        self.job = job
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=run, args=(work, job, clock, theirs, options))
        self.process.start()
        theirs.close()

    def is_ready(self) -> bool:
        """True if it has prepared, or ended."""
        return self.pipe.poll()

    def measure(self, seconds: float) -> bool:
        """Let it measure; False if it fails or takes longer."""
        with suppress(OSError):  # it has ended
            self.pipe.send("go")
        self.process.join(max(seconds, 0))
        return self.end() == 0

    def end(self) -> int | None:
        """End the process if it still runs. Returns its exit code, 0 for success."""
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return self.process.exitcode


def in_turns(work: Work, jobs: Sequence[Job], minutes: float, at_once: int, options: dict[str, Any]) -> list[Job]:
    """Run all jobs, up to a number side by side. Return those that failed or had no time left."""
    waves = [jobs[k : k + at_once] for k in range(0, len(jobs), at_once)]
    end, failed = time.time() + 60 * minutes - GRACE, []
    for n, wave in enumerate(waves):
        begin = time.time()
        until = begin + (end - begin) / (len(waves) - n)
        clock = Clock(begin + PREPARE * (until - begin), until)
        failed += one_wave([Turn(work, job, clock, options) for job in wave], clock)
    return failed


def one_wave(turns: list[Turn], clock: Clock) -> list[Job]:
    """Measure jobs that prepare side by side."""
    left, failed = list(turns), []
    while left and time.time() < clock.end:
        ready = [turn for turn in left if turn.is_ready()]
        if not ready or (len(ready) < len(left) and time.time() < clock.prepared):
            time.sleep(POLL)
            continue
        left.remove(ready[0])
        if not ready[0].measure(clock.end + GRACE / 2 - time.time()):
            failed.append(ready[0].job)
    for turn in left:
        turn.end()
        print(f"left out: {' '.join(turn.job)}: no time left", flush=True)
    return failed + [turn.job for turn in left]
