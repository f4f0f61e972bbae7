"""The file of an exported function: torch's `.pt2` archive with one more entry, `extra/tdc.json`.

The entry holds format, versions, signature, and the SHA-256 of the names and contents of all other entries, which finds
a damaged file, not a forged one. torch itself can load the archive, from Python and from C++.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tdc.core.errors import FormatError, StructureError, describe, dtype_name, message, refuse_wrong
from tdc.core.keys import show
from tdc.tensordict.storage import is_tensordict

OP = "compile.load"
FORMAT = 1
ENTRY = "extra/tdc.json"
AGAIN = "export the function again with this version"


def seal(path: Path, data: Mapping[str, Any]) -> None:
    """Add our entry."""
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        versions = {"format": FORMAT, "tdc": sys.modules["tdc"].__version__, "torch": torch.__version__}
        text = json.dumps({**versions, "sha256": checksum(archive), **data}, indent=1)
        archive.writestr(f"{root}/{ENTRY}", text)


def unseal(path: Path) -> dict[str, Any]:
    """Read our entry of a file, once its checksum is right; a FormatError says why the file cannot be used."""
    if not path.is_file():
        got, hint = f"nothing at {path.name}", "exported.save(path) writes one"
        if path.is_dir():
            got, hint = f"a folder at {path.name}", "tdc.io.load reads stores"
        raise FormatError(message(OP, "a file", got, hint=hint))
    try:
        with zipfile.ZipFile(path) as archive:
            own = [name for name in archive.namelist() if name.endswith(f"/{ENTRY}")]
            data = json.loads(archive.read(own[0])) if own else None
            found = checksum(archive)
    except (zipfile.BadZipFile, json.JSONDecodeError, EOFError, OSError) as error:
        got = f"{path.name}, which is damaged: {type(error).__name__}"
        raise FormatError(message(OP, "a .pt2 file", got, hint="copy or save it again")) from None
    if data is None:
        hint = "torch.export.load or torch._inductor.aoti_load_package reads it"
        raise FormatError(message(OP, "a file that tdc wrote", f"{path.name}, which has no {ENTRY}", hint=hint))
    if data["format"] > FORMAT:
        got = f"format {data['format']}, written by tdc {data['tdc']}"
        raise FormatError(message(OP, f"format {FORMAT} or older", got, hint="install that version of tdc"))
    if data["sha256"] != found:
        got = f"{path.name}, whose contents changed since"
        raise FormatError(message(OP, "the contents that were saved", got, hint="copy or save it again"))
    check_torch(data)
    return data


def check_torch(data: Mapping[str, Any]) -> None:
    """Refuse machine code of another version of torch; warn of a graph."""
    made, here = [".".join(v.split("+")[0].split(".")[:2]) for v in (data["torch"], torch.__version__)]
    if made == here:
        return
    if data["kind"] == "aoti":
        raise FormatError(message(OP, f"a package compiled for torch {here}", f"one for torch {made}", hint=AGAIN))
    text = message(OP, f"a program exported by torch {here}", f"one by torch {made}", hint=AGAIN)
    warnings.warn(text, UserWarning, stacklevel=4)


def checksum(archive: zipfile.ZipFile) -> str:
    """SHA-256 of names and contents of all entries but our own."""
    digest = hashlib.sha256()
    for name in sorted(archive.namelist()):
        if not name.endswith(f"/{ENTRY}"):
            digest.update(f"{name}\0{archive.getinfo(name).file_size}\0".encode())
            with archive.open(name) as entry:
                while block := entry.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


# -- weights in a file of their own


def save_weights(package: Path, program: Any) -> dict[str, Any]:
    """Write the tensors of a program by name beside its package, and say what they are; its constants stay."""
    path = package.with_name(f"{package.stem}.weights.pt")
    weights = {n: x for n, x in {**program.state_dict, **program.constants}.items() if isinstance(x, Tensor)}
    torch.save({n: x.detach() for n, x in weights.items()}, path)
    forms = {n: [dtype_name(x.dtype), list(x.shape)] for n, x in weights.items()}
    ties: dict[int, list[str]] = {}
    for n, x in weights.items():
        ties.setdefault(id(x), []).append(n)
    digest, fixed = hashlib.sha256(path.read_bytes()).hexdigest(), [n for n in forms if n in program.constants]
    tied = [names for names in ties.values() if len(names) > 1]
    return {"file": path.name, "sha256": digest, "forms": forms, "fixed": fixed, "ties": tied}


def read_weights(source: Any, data: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read weights by name, from a TensorDict, a state, a mapping, or a `.pt` or `.safetensors` file.

    None reads the file written with the package, which must be unchanged. `data` is from `save_weights`, with its
    folder. Of tied tensors one is enough.
    """
    if isinstance(source, (str, os.PathLike)):
        source = tensors_in(Path(source))
    if is_tensordict(source):
        is_state = "params" in source._nodes and "optimizer" in source and "step" in source._leaves
        parts = [source[key] for key in ("params", "buffers") if key in source._nodes] if is_state else [source]
        source = {show(p): x for part in parts for p, x in part._leaves.items()}
    given = dict(source or {})
    for names in data.get("ties", []):
        there = [given[n] for n in names if n in given]
        given |= {n: there[0] for n in names if there and n not in given}
    if source is None or any([n not in given for n in data["fixed"]]):
        path = Path(data["folder"], data["file"])
        changed = path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != data["sha256"]
        if changed or not path.is_file():
            got, hint = f"{data['file']}, which {'changed' if changed else 'is missing'}", "load(path, weights=...)"
            raise FormatError(message(OP, "the weights saved with the package", got, hint=hint))
        own = torch.load(path, weights_only=True)
        given = own if source is None else {n: own[n] for n in data["fixed"]} | given
    check_weights(given, data["forms"])
    return {n: given[n].detach() for n in data["forms"]}


def check_weights(weights: Mapping[str, Any], forms: Mapping[str, Any]) -> None:
    """Refuse weights other than the package takes; every difference is named."""
    wrong = {n: "missing" for n in forms if n not in weights}
    wrong |= {n: "unknown" for n in weights if n not in forms}
    for name, (dtype, shape) in forms.items():
        x = weights.get(name)
        if x is not None and (not isinstance(x, Tensor) or [dtype_name(x.dtype), list(x.shape)] != [dtype, shape]):
            wrong[name] = f"{describe(x)} instead of {dtype}{shape}"
    expected, which = "weights as the function was exported with", f"that differ{'s' * (len(wrong) == 1)}"
    hint = "tdc.from_module(net) of the net that was exported; step.load_into(net, state) fills it from a state"
    refuse_wrong(StructureError, "compile.Exported.load_weights", expected, wrong, which, hint)


def tensors_in(path: Path) -> Any:
    """Tensors by name in a `.safetensors` file, or in one of `torch.save`, nested or flat."""
    if not path.is_file():
        got = f"nothing at {path.name}"
        raise FormatError(message("compile.Exported.load_weights", "a file", got, hint="give its path"))
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, weights_only=True)
