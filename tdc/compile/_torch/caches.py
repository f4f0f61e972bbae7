"""Compiled code of this process as bytes for another: torch's cache artifacts, and libraries of Inductor's C++ kernels.

`torch.compiler.save_cache_artifacts` packs only the source of C++ kernels, and the next machine compiles it again. So
their libraries are added; Inductor finds them by names that hash source and flags of the compiler (torch 2.11-2.15).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from tdc.compile._torch.symbolic import setting
from tdc.core.private import find, optional

LIBRARIES = (".so", ".o", ".pyd", ".dll", ".dylib")
PROBE = b"chk_kernel"  # in the sources of those small programs that Inductor asks which instructions a processor has


def artifacts() -> bytes | None:
    """torch's artifacts of all that was compiled in this process; None without any."""
    found = torch.compiler.save_cache_artifacts()
    return None if found is None else found[0]


def take_artifacts(data: bytes) -> bool:
    """Put artifacts into the caches on disk; True if they could be read."""
    return torch.compiler.load_cache_artifacts(data) is not None


def folder() -> Path:
    """Folder of Inductor's files."""
    return Path(find("torch._inductor.runtime.cache_dir_utils:cache_dir")())


@optional("libraries of C++ kernels saved", lost="time of a cold start on CPU", instead=dict)
def libraries() -> dict[str, bytes]:
    """Libraries of C++ kernels, and of Inductor's probes of the processor, by their paths in `folder`."""
    base = folder()
    keys = set(keys_of_kernels(find("torch._inductor.codecache:CppCodeCache")))
    keys |= {p.stem for p in base.glob("*/*.cpp") if p.stat().st_size < 1000 and PROBE in p.read_bytes()}
    paths = [path for key in sorted(keys) for path in sorted((base / key[1:3]).glob(f"{key}.*"))]
    return {p.relative_to(base).as_posix(): p.read_bytes() for p in paths if p.suffix in LIBRARIES}


def keys_of_kernels(cls: Any) -> Iterator[str]:
    """The keys of kernels that a class and those below it compiled."""
    yield from cls.cache
    for below in cls.__subclasses__():
        yield from keys_of_kernels(below)


@optional("libraries of C++ kernels loaded", lost="time of a cold start on CPU", instead=lambda files: None)
def take_libraries(files: Mapping[str, bytes]) -> None:
    """Put libraries where Inductor looks for them; those that are there stay."""
    write, base = find("torch._inductor.codecache:write_atomic"), folder()
    for name, data in files.items():
        path = base / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write(str(path), data)


@optional("graphs with autograd functions cached", lost="time of a cold start", instead=nullcontext)
def keep_functions() -> AbstractContextManager[Any]:
    """A context in which graphs with an `autograd.Function`, such as attention of packed batches, are cached."""
    name = "autograd_cache_allow_custom_autograd_functions"
    return setting("torch._functorch.config", **{name: True})
