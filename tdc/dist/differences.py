"""Lines of errors that say in which keys the forms of ranks differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tdc.dist.form import Form
from tdc.io.filenames import Keys, dotted, first
from tdc.io.manifest import Entry, stored_at


def lines(form: Form) -> dict[str, str]:
    """A line for each key of a form."""
    found: dict[str, str] = {}
    for keys, entry in form.table.items():
        if isinstance(entry, Entry):
            kind = {"json": "Static", "objects": "ObjectArray"}.get(entry.kind, entry.kind)
            shown = [repr(entry.data["value"])] if entry.kind == "json" else []
            shown += [shown_tensor(form, keys, part) for part in entry.parts]
            found[dotted(keys)] = " ".join([kind, *shown])
        elif keys and entry.cls:
            found[dotted(keys)] = entry.cls
    root: Any = form.table[()]
    return {"the root": f"{form.ndim} batch dims {root.cls}".strip(), **found}


def shown_tensor(form: Form, keys: Keys, part: str) -> str:
    """A tensor in one word, as in `float32[B0, 3]`."""
    dtype, template = form.templates[stored_at(form.table, keys, part)]
    dims = ", ".join([str(d) if type(d) is int else shown_size(form, d) for d in template])
    return f"{part}{' ' * bool(part)}{str(dtype).removeprefix('torch.')}[{dims}]"


def shown_size(form: Form, size: Any) -> str:
    return ("B" if size.slot < form.ndim else "n") + f" + {size.plus}" * (size.plus > 0)


def differences(forms: Mapping[str, Form]) -> list[str]:
    """Lines for the keys that differ between the forms of some ranks."""
    by_rank = {rank: lines(form) for rank, form in forms.items()}
    keys = dict.fromkeys([key for found in by_rank.values() for key in found])
    wrong: list[str] = []
    for key in keys:
        said: dict[str, list[str]] = {}
        for rank, found in by_rank.items():
            said.setdefault(found.get(key, "not there"), []).append(rank)
        if len(said) > 1:
            wrong.append(f"{key}: " + "; ".join([f"{text} on rank {', '.join(ranks)}" for text, ranks in said.items()]))
    return first(wrong)
