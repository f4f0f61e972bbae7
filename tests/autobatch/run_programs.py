"""Check random programs: `PYTHONPATH=tests python tests/autobatch/run_programs.py --count 500 --mode eager`."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import tdc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autobatch.check import Compiler, NotANumber, check
from autobatch.generate import STATEMENTS, Program, program

WORDS = ("while ", "for ", "if ", "break", "continue", "return ", "other(", "else:", "elif ", "append")


def compiled(backend: Any) -> Compiler:
    """Compiles a function as one graph."""

    def compiler(fn: Any) -> Any:
        torch.compiler.reset()
        return torch.compile(fn, backend=backend, fullgraph=True)

    return compiler


def compiled_without_reuse(fn: Any) -> Any:
    """Compiled by Inductor, which then gives each value a buffer of its own."""
    torch.compiler.reset()
    return torch.compile(fn, options={"allow_buffer_reuse": False}, fullgraph=True)


MOST = 8  # rounds of each loop
REFUSED = {"expected a bound for a list that grows": MOST, "expected a loop of at most max_iters": 3 * MOST}
MODES: dict[str, tuple[Compiler | None, dict[str, Any]]] = {
    "eager": (None, {}), "graph": (compiled("eager"), {}), "while": (compiled("eager"), {"lower": "while"}),
    "inference": (compiled("eager"), {"grads": False}),
    "unroll": (compiled("eager"), {"lower": "unroll", "max_iters": MOST}), "aot_eager": (compiled("aot_eager"), {}),
    "inductor": (compiled("inductor"), {}), "inductor without reuse": (compiled_without_reuse, {}),
    "backend": (compiled(tdc.compile.backend), {}),
}  # fmt: skip


def run(
    count: int, start: int, mode: str, limit: int = 10, calls: bool = True, statements: int = STATEMENTS,
    log: Path | None = None,
) -> tuple[Counter[str], list[str]]:  # fmt: skip
    """Check programs of successive seeds. Returns what they contain, and what failed.

    Args:
        log: a file of those that passed before, which are not run again, and to which the others are added.
    """
    seen: Counter[str] = Counter()
    failed: list[str] = []
    passed = log.read_text().splitlines() if log is not None and log.exists() else []
    for seed in range(start, start + count):
        key = f"{mode} {seed} {statements} {calls}"
        if key in passed:
            seen.update({"programs": 1, "passed before": 1})
            continue
        p = program(seed, calls, statements)
        if mode != "eager" and p.style == "lanes":
            p = Program(**{**vars(p), "style": "map"})
        seen["programs"] += 1
        try:
            compiler, options = MODES[mode]
            try:
                found = check(p, compiler, **options)
            except Exception as error:
                bound = next((most for text, most in REFUSED.items() if text in str(error)), None)
                if bound is None:
                    raise
                found = check(p, compiler, **{**options, "max_iters": bound})
                seen["needed max_iters, or more of it"] += 1
            seen["gradients that are not zero"] += found
            if log is not None:
                with log.open("a") as out:
                    print(key, file=out)
        except NotANumber:
            seen.update({"programs": -1, "left out, since examples give NaN by themselves": 1})
            continue
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            failed.append(f"seed {seed}: {type(error).__name__} {last.filename}:{last.lineno} {str(error)[:600]}")
            print(failed[-1], flush=True)
            if len(failed) >= limit:
                break
        seen.update({f"{p.rows} rows": 1, f"{p.size} examples": 1, f"given as {p.style}": 1})
        if seen["programs"] % 50 == 0:
            print(f"{seen['programs']} programs, {len(failed)} failed", flush=True)
        for word in WORDS:
            seen[word.strip()] += sum([word in line for line in p.text.splitlines()])
    return seen, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=list(MODES), default="eager")
    parser.add_argument("--limit", type=int, default=10, help="stop after so many failures")
    parser.add_argument("--no-calls", action="store_true", help="programs that call no other function")
    parser.add_argument("--statements", type=int, default=STATEMENTS, help="of a program, about; fewer compile faster")
    parser.add_argument("--log", type=Path, help="of programs that passed: run again, it goes on behind them")
    given = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = not given.no_calls
        seen, failed = run(given.count, given.seed, given.mode, given.limit, calls, given.statements, given.log)
    for text, n in seen.most_common():
        print(f"{n:6} {text}")
    passed = seen["programs"] - len(failed)
    print(
        f"{given.mode}: {passed} of {seen['programs']} programs equal the loop, in {time.perf_counter() - begin:.0f} s"
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
