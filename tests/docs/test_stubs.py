"""The stubs of methods: written by their generator, and true of what the rows return."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from catalogue import samples
from harness import case_of
from torch import Tensor

import tdc
from tdc.core.rules import DISPATCH
from tdc.ops import RULES

ROOT = Path(__file__).resolve().parents[2]
TOOL = runpy.run_path(str(ROOT / "docs" / "tools" / "make_stubs.py"))
STUBS: dict[Path, str] = TOOL["render"]()
CONTAINERS: dict[str, type] = {"nested": tdc.NestedTensor, "masked": tdc.MaskedBatch, "tensordict": tdc.TensorDict}
CLASSES = {
    "nested": ("RaggedOperations", "NestedOperations"), "masked": ("RaggedOperations", "MaskedOperations"),
    "tensordict": ("TensorDictOperations",),
}  # fmt: skip
PLAIN = {"_bool": bool, "_int": int, "Tensor": Tensor}


def declared(kind: str) -> dict[str, list[str]]:
    """The results of each method by the stub, of all its overloads."""
    found: dict[str, list[str]] = {}
    for text in STUBS.values():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name in CLASSES[kind]:
                for item in node.body:
                    if isinstance(item, ast.FunctionDef) and item.returns:
                        found.setdefault(item.name, []).append(ast.unparse(item.returns))
    return found


def fits(result: Any, text: str, kind: str) -> bool:
    """Whether a result is of the type that an annotation says."""
    if text in ("Any", "Self"):
        return text == "Any" or isinstance(result, CONTAINERS[kind])
    if text in PLAIN or "[" not in text:
        return isinstance(result, PLAIN.get(text) or getattr(tdc, text))
    match = re.fullmatch(r"(\w+)\[(\w+)(?:, \.\.\.)?\]", text)
    assert match, f"no rule for {text}"
    several, inner = match.groups()
    fields = TOOL["RESULTS"].get(several, ())
    if not isinstance(result, tuple) or len(fields) not in (0, len(result)):
        return False
    return all(hasattr(result, field) for field in fields) and all(fits(r, inner, kind) for r in result)


@pytest.mark.skipif(not torch.__version__.startswith(TOOL["RELEASE"]), reason="the stubs are of another torch")
@pytest.mark.parametrize("path", STUBS, ids=lambda path: f"{path.parent.name}")
def test_stubs_are_up_to_date(path: Path):
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    if not first.endswith(f"for torch {TOOL['RELEASE']}; a test fails when it is out of date."):
        pytest.skip("written for another torch")
    assert path.read_text(encoding="utf-8") == STUBS[path], "run python docs/tools/make_stubs.py"


@pytest.mark.parametrize("kind", CONTAINERS)
def test_results_are_as_declared(kind: str):
    methods, wrong = declared(kind), []
    for rule in RULES:
        method = DISPATCH[kind].get(getattr(torch.Tensor, rule.name, None))
        if rule.kind != kind or not rule.modes or rule.name not in methods or method != DISPATCH[kind][rule.op]:
            continue
        for sample in samples(rule):
            case = case_of(rule, sample, sample.batches[0])
            if not isinstance(case.inputs[0], CONTAINERS[kind]):
                continue
            result = case.run(*case.inputs)
            if not any([fits(result, text, kind) for text in methods[rule.name]]):
                wrong.append(f"{rule.name}, {sample.label}: {type(result).__name__}, expected {methods[rule.name]}")
    assert not wrong, "\n".join(wrong)
