"""What does a store cost against the memory and files that it is made of, and against what people use today?

    write     1 GiB in 16 tensors, into the page cache: raw `write`, tdc.io.save, safetensors, torch.save, tensordict
    open      the same, mapped, nothing read: numpy.memmap, tdc.io.load, safetensors, tensordict
    read      open it and copy everything, against a copy of tensors that are in memory
    leaves    open 4096 tensors of 4 KiB in 64 nodes; write them to one file, with fsync

Files are in the page cache, and nothing but the fsync waits for the disk. The clock is that of the measuring thread,
and the wall's for the fsync. `--quick` writes less. Batches of rows are the question of `bench_data`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tdc
from bench._timing import Call, Report, arguments, in_turns, peer, ratio
from tdc import TensorDict


def write_raw(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """A file for each tensor, by hand."""
    folder.mkdir()
    for name, x in tensors.items():
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        data = memoryview(x.numpy()).cast("B")
        while data:
            data = data[os.write(file, data) :]
        os.close(file)


def pack_raw(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One file of names, shapes and bytes, on the disk when it returns, by hand."""
    head, parts, end = {}, [], 0
    for name, x in tensors.items():
        parts.append(memoryview(x.numpy()).cast("B"))
        head[name] = [str(x.dtype), list(x.shape), end, end := end + len(parts[-1])]
    with open(path, "wb") as file:
        file.write(json.dumps(head).encode() + b"".join(parts))
        file.flush()
        os.fsync(file.fileno())


def large(report: Report, folder: Path) -> None:
    """Writing, opening and reading a few large tensors."""
    length = (1 << 24) // (16 if report.quick else 1)
    tensors = {f"k{i}": torch.rand(length) for i in range(16)}
    td = TensorDict(tensors)
    out, safe, dicts = folder / "out", peer("safetensors.torch", report), peer("tensordict", report)
    calls: dict[str, Call] = {
        "raw": lambda: write_raw(out, tensors),
        "tdc": lambda: tdc.io.save(td, out, sync=False),
        "torch.save": lambda: torch.save(tensors, out),
    }
    if safe is not None:
        calls["safetensors"] = lambda: safe.save_file(tensors, out)
    if dicts is not None:
        other = dicts.TensorDict(tensors)
        calls["tensordict"] = lambda: other.memmap(out)
    times = in_turns(
        calls, 3 if report.quick else 7, after=lambda: shutil.rmtree(out) if out.is_dir() else out.unlink()
    )
    what = f"{16 * length * 4 >> 20} MiB in 16 tensors"
    report.row(f"write {what}", times, "raw")
    report.limit(f"write {what}: tdc to raw", ratio(times["tdc"], times["raw"]), 1.2)

    write_raw(folder / "raw", tensors)
    tdc.io.save(td, folder / "store", sync=False)
    opens: dict[str, Callable[[], Any]] = {
        "numpy": lambda: {k: np.memmap(folder / "raw" / k, "f4", "c") for k in tensors},
        "tdc": lambda: tdc.io.load(folder / "store"),
    }
    if safe is not None:
        safe.save_file(tensors, folder / "one.safetensors")
        opens["safetensors"] = lambda: safe.load_file(folder / "one.safetensors")
    if dicts is not None:
        other.memmap(folder / "other")
        opens["tensordict"] = lambda: dicts.TensorDict.load_memmap(folder / "other")
    times = in_turns(opens, 15, 10)
    report.row(f"open {what}", times, "numpy")
    report.limit(f"open {what}: tdc to numpy.memmap", ratio(times["tdc"], times["numpy"]), 2.0)

    target = torch.empty(length)

    def copied(read: Callable[[], Any]) -> Call:
        return lambda: [target.copy_(torch.as_tensor(x)) for x in read().values()]

    reads = {"memory": copied(lambda: tensors), **{name: copied(read) for name, read in opens.items()}}
    times = in_turns(reads, 3 if report.quick else 7)
    report.row(f"open and read {what}", times, "memory")
    report.limit(f"open and read {what}: tdc to a copy in memory", ratio(times["tdc"], times["memory"]), 1.5)


def many(report: Report, folder: Path) -> None:
    """Opening many small tensors."""
    td = TensorDict({f"m{i}": {f"k{j}": torch.ones(1024) for j in range(64)} for i in range(64)})
    tdc.io.save(td, folder / "many", sync=False)
    names = [folder / "many" / f"m{i}" / f"k{j}.memmap" for i in range(64) for j in range(64)]
    calls: dict[str, Call] = {
        "numpy": lambda: [np.memmap(name, "f4", "c") for name in names],
        "tdc": lambda: tdc.io.load(folder / "many"),
    }
    before = len(os.listdir("/proc/self/fd"))
    kept = tdc.io.load(folder / "many")
    held = len(os.listdir("/proc/self/fd")) - before
    del kept
    times = in_turns(calls, 5 if report.quick else 15)
    report.row("open 4096 tensors", times, "numpy", descriptors=held)
    each = [t * 1e6 / 4096 for t in times["tdc"]]
    report.limit("open 4096 tensors: tdc for each", ratio(each, [1.0] * len(each)), 30.0, unit="us")

    tensors, out = {".".join(k): x for k, x in td.items(True, True)}, folder / "out"
    packs: dict[str, Call] = {
        "by hand": lambda: pack_raw(out, tensors),
        "tdc": lambda: tdc.io.to_safetensors(td, out),
    }
    safe = peer("safetensors.torch", report)
    if safe is not None:
        packs["safetensors, no fsync"] = lambda: safe.save_file(tensors, out)
    times = in_turns(packs, 5 if report.quick else 15, after=out.unlink, clock=time.perf_counter)
    report.row("write 4096 tensors to one file", times, "by hand")
    report.limit("write 4096 tensors to one file: tdc to by hand", ratio(times["tdc"], times["by hand"]), 2.0)


def main() -> None:
    args = arguments("bench_store")
    question = "What does a store cost against the memory and files that it is made of?"
    report = Report("bench_store", question, quick=args.quick)
    torch.manual_seed(0)
    for measure in (large, many):
        with tempfile.TemporaryDirectory() as folder:
            measure(report, Path(folder))
    report.write()


if __name__ == "__main__":
    main()
