"""A file of all that a process compiled, so that the next one starts at once: a zip (torch 2.11-2.15).

    meta.json          format, version of torch, processor
    artifacts          torch's own: graphs, Triton kernels
    libraries/...      C++ kernels, machine code of this processor

`torch.compiler.save_cache_artifacts` packs only the source of C++ kernels, and the next machine compiles it again. So
their libraries are added; Inductor finds them by names that hash source and flags of the compiler.

A file holds machine code: load only files you trust. A file for other graphs is of no use, and does no harm; nothing of
one for another torch or format is used, and no machine code for another processor.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from tdc.compile._torch.symbolic import setting
from tdc.core.errors import DtypeError, FormatError, StructureError, describe, message
from tdc.core.private import find, optional

LIBRARIES = (".so", ".o", ".pyd", ".dll", ".dylib")
FORMAT = 1
INFO = Path("/proc/cpuinfo")
PROBE = b"chk_kernel"  # in the sources of those small programs that Inductor asks which instructions a processor has


def save_cache(op: str, file: Any) -> Path:
    """Write what this process compiled."""
    path = checked(op, file)
    found = artifacts()
    if found is None:
        hint = "take a step first, or load_cache a file of one"
        expected = "a process that compiled something with Inductor"
        raise StructureError(message(op, expected, "one that did not", hint=hint))
    meta = {"format": FORMAT, "torch": torch.__version__, "processor": processor()}
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as out:
            out.writestr("meta.json", json.dumps(meta))
            out.writestr("artifacts", found)
            for name, data in libraries().items():
                out.writestr(f"libraries/{name}", data)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def load_cache(op: str, file: Any) -> bool:
    """Load what another process compiled; True if its machine code could be used."""
    path = checked(op, file)
    hint = "write it again with step.save_cache(file)"
    try:
        with zipfile.ZipFile(path) as given:
            meta: dict[str, Any] = json.loads(given.read("meta.json"))
            found = given.read("artifacts")
            names = [name for name in given.namelist() if name.startswith("libraries/")]
            files = {name.removeprefix("libraries/"): given.read(name) for name in names}
    except FileNotFoundError:
        raise FormatError(message(op, "a file of save_cache", f"no file {path.name}", hint=hint)) from None
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        got = f"{type(error).__name__} in {path.name}"
        raise FormatError(message(op, "a file of save_cache", got, hint=hint)) from None
    version = (meta.get("format"), meta.get("torch"))
    if version != (FORMAT, torch.__version__):
        got = f"format {version[0]} of torch {version[1]}"
        raise FormatError(message(op, f"a file of format {FORMAT} and torch {torch.__version__}", got, hint=hint))
    outside = [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
    if outside or not take_artifacts(found):
        raise FormatError(message(op, "a file of save_cache", f"another in {path.name}", hint=hint))
    same = meta.get("processor") == processor()
    if same:
        take_libraries(files)
    return same


def checked(op: str, file: Any) -> Path:
    """Return a path; refuse other types."""
    if not isinstance(file, (str, os.PathLike)):
        raise DtypeError(message(op, "a path", describe(file), hint='step.save_cache("step.cache")'))
    return Path(os.fspath(file))


def processor() -> str:
    """Hash of the processor's properties for which machine code differs."""
    lines = INFO.read_text().splitlines() if INFO.exists() else []
    told = sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))})
    text = "\n".join([platform.machine(), platform.system(), torch.backends.cpu.get_cpu_capability(), *told])
    return hashlib.sha256(text.encode()).hexdigest()


# -- what is in it


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
