"""How much does `import tdc` add to `import torch`?

Each import runs in a process of its own, the two in turns, after one run of each that warms the file cache. The time is
that of the import statement, not of the interpreter around it. `import tdc` contains `import torch`. When the limit is
missed, the heaviest modules that tdc adds are listed (`python -X importtime`, own time).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench._timing import Report, arguments, ratio

LIMIT = 1.1
ROOT = Path(__file__).resolve().parents[1]
CODE = "import time; begin = time.perf_counter(); import {}; print(time.perf_counter() - begin)"


def seconds(module: str) -> float:
    """Seconds of one import in a fresh process."""
    return float(run([sys.executable, "-c", CODE.format(module)]).stdout)


def own_times(module: str) -> dict[str, int]:
    """Microseconds that each imported module takes for itself."""
    text = run([sys.executable, "-X", "importtime", "-c", f"import {module}"]).stderr
    rows = [line.removeprefix("import time:").split("|") for line in text.splitlines() if "|" in line]
    return {name.strip(): int(own) for own, _, name in rows if own.strip().isdigit()}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # installed packages have bytecode
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)


def main() -> None:
    args = arguments("import_time")
    question = "What does `import tdc` cost, as a multiple of `import torch`?"
    report = Report("import_time", question, quick=args.quick)
    modules = ("torch", "tdc")
    times: dict[str, list[float]] = {name: [] for name in modules}
    for name in modules:
        seconds(name)
    for turn in range(7 if report.quick else 15):
        for name in modules if turn % 2 else modules[::-1]:
            times[name].append(seconds(name))
    report.row("import", times, "torch")
    figure = ratio(times["tdc"], times["torch"])
    report.limit("import tdc to import torch", figure, LIMIT)
    if figure.median > LIMIT:
        torch_alone, ours = own_times("torch"), own_times("tdc")
        added = sorted(((us, name) for name, us in ours.items() if name not in torch_alone), reverse=True)
        report.note("heaviest added modules: " + ", ".join(f"{name} {us / 1000:.1f} ms" for us, name in added[:12]))
    report.write()


if __name__ == "__main__":
    main()
