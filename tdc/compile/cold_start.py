"""A file of all that a process compiled, so that the next one starts at once: a zip.

    meta.json          format, version of torch, processor
    artifacts          torch's own: graphs, Triton kernels
    libraries/...      C++ kernels, machine code of this processor

A file holds machine code: load only files you trust. A file for other graphs is of no use, and does no harm; nothing of
one for another torch or format is used, and no machine code for another processor.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from tdc.compile._torch.caches import artifacts, libraries, take_artifacts, take_libraries
from tdc.core.errors import DtypeError, FormatError, StructureError, describe, message

FORMAT = 1
INFO = Path("/proc/cpuinfo")


def save_cache(op: str, file: Any) -> Path:
    """Write what this process compiled."""
    path = checked(op, file)
    found = artifacts()
    if found is None:
        hint = "take a step first, or load_cache a file of one"
        raise StructureError(
            message(op, "a process that compiled something with Inductor", "one that did not", hint=hint)
        )
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
            files = {
                name.removeprefix("libraries/"): given.read(name)
                for name in given.namelist()
                if name.startswith("libraries/")
            }
    except FileNotFoundError:
        raise FormatError(message(op, "a file of save_cache", f"no file {path.name}", hint=hint)) from None
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise FormatError(
            message(op, "a file of save_cache", f"{type(error).__name__} in {path.name}", hint=hint)
        ) from None
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
