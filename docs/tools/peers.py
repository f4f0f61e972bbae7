"""Where each name that DanLing or torch.nested handles is found in `tdc.ops.RULES`: a row, a method, or a refusal.

`peers.json` holds the names: the registries of DanLing 0.4.8 with its own flag for compiled calls, and the operations
of torch 2.13's `njt_op_db` that have jagged samples, with what `python tests/njt_op_db.py --peer torch` finds.

How a name counts:
  - `torch.x`, `torch.Tensor.x` and `torch.nn.functional.x` are the function or the method of that name;
  - `aten.x.overload` is the public function x, `aten.linalg_x` is `torch.linalg.x`; an overload is no name of its own;
  - `x_backward` and `x_backward_data` are x: autograd goes through the row of x, whose gradient is tested;
  - `_x`, `native_x` and `x_copy` are x, and `INTERNAL` says what other internal names are the parts of;
  - `x_`, which changes a tensor in place, is refused for every x: containers are immutable;
  - `x.variant` of `njt_op_db` is x, `masked.x` is `torch.masked.x`, which has rows in graphs only.

Invariant: a name that none of this covers is found nowhere, and a test fails.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tdc import NestedTensor
from tdc.core.container import Absent
from tdc.core.rules import DISPATCH, RULES

PEERS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("peers.json").read_text(encoding="utf-8"))
MODULES = (("torch.", torch), ("F.", F), ("Tensor.", torch.Tensor), ("torch.linalg.", torch.linalg),
           ("torch.special.", torch.special))  # fmt: skip
IN_PLACE = "no: containers are immutable; the operation without `_` returns a new one"
INTERNAL = {
    "_native_multi_head_attention": "multi_head_attention_forward",
    "_transformer_encoder_layer_fwd": "multi_head_attention_forward",
    "_flash_attention_forward": "scaled_dot_product_attention",
    "_linalg_svd": "svd", "_linalg_eigh": "eigh", "_linalg_solve_ex": "solve",
    "_to_copy": "to", "alias": "clone", "constant_pad_nd": "pad", "slice": "narrow", "view_copy": "view",
    "native_dropout": "dropout", "feature_dropout": "dropout1d",
}  # fmt: skip
REFUSED = {
    "aten._linalg_check_errors": "no: a check inside torch.linalg, which its rows run",
    "aten._has_same_storage_numel": "no: a check inside autograd, which runs on the values",
    "aten.is_same_size": "no: sizes of rows are data, which `torch.equal` compares",
    "torch.nn.attention.flex_attention": "yes, without a BlockMask; `tdc.ops.flex_attention` takes masks",
    "jiterator": "no: functions that a user compiles for a GPU; `tdc.ops.implements` makes such a function a row",
}
PREFIX = re.compile(r"^(torch\.nn\.attention\.flex_attention|torch\.nn\.functional|torch\.Tensor|nn\.functional|"
                    r"torch\.linalg|torch|aten|prims|linalg|special|masked)\.")  # fmt: skip


def bare(name: str) -> str:
    """The name without module, overload, variant and the marks of internal functions."""
    found = PREFIX.sub("", name)
    if name.startswith(("aten.", "prims.")) or not found.startswith("_"):
        found = found.split(".")[0]
    if found in INTERNAL:
        return INTERNAL[found]
    found = re.sub(r"(_backward|_backward_data|(?<!index)_copy)$", "", found)
    found = re.sub(r"^(_|native_|linalg_|special_)(?=[a-z])", "", found)
    return INTERNAL.get(found, found)


def functions_called(name: str) -> list[Any]:
    """Object that users call by that name, the function before the method."""
    found = [(prefix, getattr(module, name, None)) for prefix, module in MODULES]
    return [(prefix + name, op) for prefix, op in found if callable(op)]


def find(name: str) -> tuple[str, str]:
    """What a peer's name is called here, and what NestedTensor does with it: "yes", "no: ..." or "" if not found."""
    refused = next((text for known, text in REFUSED.items() if name.startswith(known)), "")
    short = bare(name)
    if refused:
        return short, refused
    if name.startswith("masked."):
        return f"torch.masked.{short}", "yes, in graphs only"
    if short.endswith("_") and not short.endswith("__"):
        return f"Tensor.{short}", IN_PLACE
    reasons = {id(rule.op): rule.reason for rule in RULES if rule.kind == "nested"}
    ranked = functions_called(short)
    if "linalg" in name:
        ranked.sort(key=lambda entry: "linalg" not in entry[0])
    for label, op in ranked:
        if op in DISPATCH["nested"]:
            reason = reasons.get(id(op), "")
            return label, f"no: {reason}" if reason else "yes"
    own = next((vars(c)[short] for c in NestedTensor.__mro__ if short in vars(c)), None)
    if own is not None and not isinstance(own, Absent):
        return f"Tensor.{short}", "yes"
    return short, ""
