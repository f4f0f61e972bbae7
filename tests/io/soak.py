"""Stores under attack, by the hour: mutated manifests, writers that are killed, a reader beside a writer.

python tests/io/soak.py --fuzz 5000 --kills 200 --seconds 8      `make soak`; prints counts, and fails on a bad one

Each part returns counts by outcome; `is_bad` says of which there must be none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from stores import contents, every_kind, opened_outside, root_of, same, sealed

from tdc import FormatError, TensorDict
from tdc.io import from_safetensors, load, save, to_safetensors

JUNK: list[Callable[[random.Random], Any]] = [
    lambda r: None, lambda r: r.random() < 0.5, lambda r: -1, lambda r: 0, lambda r: r.randrange(10), lambda r: 2**62,
    lambda r: 10**30, lambda r: 1.5, lambda r: "", lambda r: "../../etc/passwd", lambda r: "tensor", lambda r: "tie",
    lambda r: "node", lambda r: "jagged", lambda r: "padded", lambda r: "objects", lambda r: "json", lambda r: "int64",
    lambda r: "float32", lambda r: "bool", lambda r: [], lambda r: [3], lambda r: [0, 3, 2**61], lambda r: {},
    lambda r: {"kind": "tie", "key": ["weight"]}, lambda r: {"kind": "tie", "key": ["text"], "part": "offsets"},
    lambda r: {"kind": "tensor", "dtype": "float32", "shape": [3]}, lambda r: [[[[[[1]]]]]], lambda r: "\udc80",
]  # fmt: skip
LEAVES, LENGTH = 16, 1 << 17  # 8 MiB in float32


class Late(Exception):
    """A load that did not end."""


def fuzz(count: int, seed: int) -> Counter[str]:
    """Loads of manifests with random faults, of which the digest tells or, in every second, does not."""
    rng, counts = random.Random(seed), Counter[str]()
    signal.signal(signal.SIGALRM, late)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        torch.manual_seed(seed)
        td = every_kind()
        save(td, store)
        right = (store / "meta.json").read_bytes()
        clean = load(store)
        before = contents(store)
        for i in range(count):
            kind, data = mutated(right, root_of(store), rng, forged=i % 2 == 1)
            (store / "meta.json").write_bytes(data)
            counts[f"{kind}: {outcome(store, clean)}"] += 1
            (store / "meta.json").write_bytes(right)
            if contents(store) != before:
                counts["BAD files changed"] += 1
        signal.alarm(0)
    return counts


def fuzz_packed(count: int, seed: int) -> Counter[str]:
    """The same of headers of safetensors files, which have no digest but that of the manifest in them."""
    rng, counts = random.Random(seed), Counter[str]()
    signal.signal(signal.SIGALRM, late)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "packed")
        torch.manual_seed(seed)
        to_safetensors(every_kind(), file)
        clean, right = from_safetensors(file), file.read_bytes()
        length = int.from_bytes(right[:8], "little")
        head, data = right[8 : 8 + length], right[8 + length :]
        for i in range(count):
            if i % 2:
                root = json.loads(head)
                change(root, rng)
                text = json.dumps(root).encode()
            else:
                text = mutated(head, None, rng, forged=False, whole=True)[1]
            size = len(text) if rng.random() < 0.9 else rng.randrange(2 * len(text))
            wrong = size.to_bytes(8, "little") + text + data
            file.write_bytes(wrong)
            counts[f"packed: {outcome(file, clean, from_safetensors)}"] += 1
            if file.read_bytes() != wrong:
                counts["BAD files changed"] += 1
        signal.alarm(0)
    return counts


def late(*args: Any) -> None:
    raise Late


def outcome(store: Path, clean: TensorDict, read: Callable[..., Any] = load) -> str:
    """What a load does, in a word; whatever it gives must be fit for use."""
    signal.alarm(10)
    try:
        with opened_outside(store) as strangers:
            td = read(store)
        if strangers:
            return f"BAD opened {strangers[0]}"
        for x in td.values(True, True):
            if hasattr(x, "unbind"):
                repr([repr(y) for y in x.unbind()] if x.ndim else x)
        return "same" if same(td, clean) else "different"
    except FormatError as error:
        return "FormatError" if "\nhint: " in str(error) else "BAD text"
    except Exception as error:
        return f"BAD {type(error).__name__}"


def mutated(right: bytes, root: Any, rng: random.Random, forged: bool, whole: bool = False) -> tuple[str, bytes]:
    """A manifest with one to three faults: in its bytes, or in its data, and then with the right digest if forged."""
    if whole or (not forged and rng.random() < 0.5):
        data = bytearray(right)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            choice = rng.randrange(4)
            if choice == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif choice == 1:
                del data[at : at + rng.randint(1, 40)]
            elif choice == 2:
                data[at:at] = data[rng.randrange(len(data)) :][: rng.randint(1, 40)]
            else:
                data = data[: at + 1]
        return "bytes", bytes(data)
    for _ in range(rng.randint(1, 3)):
        change(root, rng)
    if forged:
        return "forged", sealed(root)
    head = json.loads(right)
    return "data", json.dumps({**head, "root": root}, separators=(",", ":")).encode()


def change(root: Any, rng: random.Random) -> None:
    """One fault in JSON data: another value, a number one off, an entry that is gone, moved or there twice."""
    places: list[tuple[Any, Any]] = []

    def visit(x: Any) -> None:
        for key in x if isinstance(x, dict) else range(len(x)):
            places.append((x, key))
            if isinstance(x[key], (dict, list)):
                visit(x[key])

    visit(root)
    if not places:
        return
    (a, i), (b, j) = rng.choice(places), rng.choice(places)
    choice = rng.randrange(6)
    if choice == 0:
        a[i] = rng.choice(JUNK)(rng)
    elif choice == 1 and isinstance(a[i], int):
        a[i] = a[i] + rng.choice((-1, 1, 7))
    elif choice == 2:
        del a[i]
    elif choice == 3:
        a[i], b[j] = json.loads(json.dumps(b[j])), json.loads(json.dumps(a[i]))
    elif choice == 4 and isinstance(a, dict):
        a[rng.choice(["kind", "shape", "class", "part", "x"])] = rng.choice(JUNK)(rng)
    else:
        a[i] = json.loads(json.dumps(b[j]))


# -- writers that are killed


def version(n: int, leaves: int = LEAVES, length: int = LENGTH) -> TensorDict:
    """A TensorDict that holds its version everywhere."""
    return TensorDict({"part": {f"k{i}": torch.full((length,), float(n)) for i in range(leaves)}})


def seen(path: Path) -> str:
    """The version of a store or packed file, if all of it is of one."""
    if not path.exists():
        return "absent"
    read = load if path.is_dir() else from_safetensors
    try:
        found = {float(v) for x in read(path).values(True, True) for v in (x.min(), x.max())}
    except FormatError:
        return "BAD unreadable"
    return f"version {found.pop():.0f}" if len(found) == 1 else "BAD torn"


def kills(count: int, seed: int, overwrite: bool, sync: bool, save: Callable[..., None]) -> Counter[str]:
    """Writers killed at a random moment: what is at the path afterwards, and whether the next save cleans up."""
    rng, counts = random.Random(seed), Counter[str]()
    kind = f"{'overwrite' if overwrite else 'fresh'}{', fsync' if sync else ''}, {save.__name__}"
    with tempfile.TemporaryDirectory() as folder:
        path, old, new = Path(folder, "store"), version(1), version(2)
        save(old, Path(folder, "try"), sync=sync)
        begin = time.perf_counter()
        save(new, Path(folder, "try"), overwrite=True, sync=sync)
        whole = time.perf_counter() - begin
        clear(Path(folder, "try"))
        for _ in range(count):
            if overwrite:
                save(old, path, overwrite=True, sync=False)
            killed(lambda: save(new, path, overwrite=overwrite, sync=sync), rng.uniform(0, 1.3 * whole))
            counts[f"{kind}: {seen(path)}"] += 1
            left = [name for name in os.listdir(folder) if name != "store"]
            counts[f"{kind}: left a folder behind"] += bool(left)
            if not overwrite:
                clear(path)
        save(old, path, overwrite=True, sync=False)
        counts["BAD left after the next save"] += os.listdir(folder) != ["store"]
    return counts


def clear(path: Path) -> None:
    """Remove a store or a file, if it is there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def killed(work: Callable[[], None], seconds: float) -> None:
    """Run something in a process of its own, and kill that after some time."""
    ready, done = os.pipe()
    child = os.fork()
    if not child:
        os.write(done, b".")
        try:
            work()
        finally:
            os._exit(0)
    os.read(ready, 1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(done)


def side_by_side(seconds: float) -> Counter[str]:
    """One process replaces a store again and again while this one loads it."""
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "store")
        save(version(0, 8, 4096), path, sync=False)
        writer = os.fork()
        if not writer:
            n = 0
            while True:
                n += 1
                save(version(n, 8, 4096), path, overwrite=True, sync=False)
        last, end = "", time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                now = seen(path)
            except OSError as error:
                now = f"BAD {type(error).__name__}"
            counts["loads"] += 1
            counts["new versions"] += now != last
            counts[now] += now.startswith(("BAD", "absent"))
            last = now
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/io/soak.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fuzz", type=int, default=10_000, help="mutated manifests (default: 10000)")
    parser.add_argument("--kills", type=int, default=200, help="killed writers of each kind (default: 200)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a reader beside a writer (default: 8)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    total = fuzz(options.fuzz, options.seed)
    total += fuzz_packed(options.fuzz, options.seed)
    for write in (save, to_safetensors):
        for overwrite in (False, True):
            for sync in (False, True):
                total += kills(options.kills, options.seed, overwrite, sync, write)
    total += side_by_side(options.seconds)
    for name, count in sorted(total.items()):
        print(f"{count:7d}  {name}")
    bad = {name: count for name, count in total.items() if count and is_bad(name)}
    print(f"BAD: {bad}" if bad else "all well")
    return int(bool(bad))


def is_bad(outcome: str) -> bool:
    """Whether an outcome must not occur: those named so, and a changed manifest that loads though its digest tells."""
    return "BAD" in outcome or outcome in ("bytes: different", "data: different", "absent")


if __name__ == "__main__":
    sys.exit(main())
