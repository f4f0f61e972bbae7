"""Runs small programs where torch lacks one of the private names that the library finds, one name after the other.

    python tests/hide_names.py --names          the names that these programs make the library look up
    python tests/hide_names.py [NAME ...]       hide each of them, or of all: a line for each, and a count

A process that has imported torch and the compiler, but not the library, forks for each name, hides it from
`pkgutil.resolve_name`, and imports the library. What then runs must give right numbers, or be refused in words.
"""

from __future__ import annotations

import os
import pkgutil
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parents[1]
REFUSED = ("tdc.private", "tdc.cond", "tdc.while_loop", "tdc.compile.backend")
resolve = pkgutil.resolve_name


def hide(name: str) -> None:
    """Let `resolve_name` find everything but one name."""

    def resolved(path: str) -> Any:
        if path == name:
            raise AttributeError(f"{name} is hidden")
        return resolve(path)

    pkgutil.resolve_name = resolved


def record(name: str) -> None:
    """Let `resolve_name` print what it is asked for."""

    def resolved(path: str) -> Any:
        print(f"asked {path}", flush=True)
        return resolve(path)

    pkgutil.resolve_name = resolved


def run_programs() -> None:
    """A counted call, a loop, a training step and an export, each compared with eager numbers."""
    import tdc
    from tdc.compile import counted, export, train_step

    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    batches = [tdc.pack([torch.randn(n, 3) for n in lengths]) for lengths in ((3, 2), (4, 1, 5))]
    attend = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True, dropout=0.0).eval()
    embed = nn.Linear(3, 4)

    def rows(x: Any) -> Any:
        return attend(embed(x)).sum(1)

    compiled = counted(rows)
    for x in batches:
        torch.testing.assert_close(compiled(x), rows(x), rtol=1e-4, atol=1e-5)

    def loss(net: Any, x: Any) -> Any:
        return net(x).sum(1).square().mean()

    step = train_step(net, loss, tdc.optim.adamw(1e-2))
    state = step.init()
    state, out = step(state, batches[0])
    torch.testing.assert_close(out["loss"], loss(net, batches[0]).detach(), rtol=1e-4, atol=1e-5)
    state, out = step(state, batches[1])
    with torch.no_grad():
        assert not torch.equal(out["loss"], loss(net, batches[1]))

    program = export(net, batches[0])
    for x in batches:
        torch.testing.assert_close(program(x).values, net(x).values)

    def loop(x: Any) -> Any:
        start = torch.zeros((), dtype=torch.int64), x.cos(), x.sin()
        _, y, z = tdc.while_loop(
            lambda i, y, z: i < 3, lambda i, y, z: (i + 1, y * 0.5, z + torch.zeros_like(z)), start
        )
        return z, x.sin().exp() @ y

    x = torch.randn(5, 5)
    try:
        for got, wanted in zip(counted(loop)(x), loop(x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    except Exception as error:
        if not any(text in str(error) for text in REFUSED):
            raise


def tried(name: str, change: Callable[[str], None] = hide) -> tuple[bool, list[str]]:
    """True if the programs ran in a process in which names are looked up in another way; and what was said."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1)
        os.dup2(write, 2)
        status = 1
        try:
            change(name)
            warnings.simplefilter("ignore")
            run_programs()
            status = 0
            from tdc.core.private import OFF

            print("off:", "; ".join(OFF) or "nothing", flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    return os.waitpid(child, 0)[1] == 0, text.splitlines()


def names() -> list[str]:
    """The private names that the programs make the library look up."""
    ok, lines = tried("", record)
    assert ok, "\n".join(lines)
    found = {line.removeprefix("asked ") for line in lines if line.startswith("asked ")}
    few = ("add", "lerp", "copy_")  # of some fifty that one function finds
    found = {name for name in found if not name.startswith("torch:_foreach_") or name.endswith(few)}
    return sorted(name for name in found if "._" in name or ":_" in name or "torch.fx" in name)


def main(arguments: list[str]) -> int:
    """Hide names one by one, and print what is off without each."""
    torch.set_num_threads(1)
    for module in ("torch._dynamo", "torch._inductor.compile_fx", "torch.export"):
        resolve(module)
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    inductor.fx_graph_cache = functorch.enable_autograd_cache = False  # a cache would say nothing
    if arguments == ["--names"]:
        print(*names(), sep="\n")
        return 0
    failed = 0
    for name in arguments or names():
        ok, lines = tried(name)
        failed += not ok
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {lines[-1] if ok else chr(10).join(lines[-40:])}", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
