"""The public names: few, each with one path, and none without its room; their signatures are in docs/reference."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from typing import Any

import pytest

from tdc.core import errors
from tdc.core.rules import RULES

ROOMS = ("compile", "data", "dist", "hf", "interop", "io", "nn", "ops", "optim", "testing")
SPACES = ("tdc", *[f"tdc.{room}" for room in ROOMS])
INTERNAL = {"migration"}  # imported for its effect alone


def facade(space: str) -> dict[str, Any]:
    """What a namespace offers: names written as `from x import name as name`, of `tdc` also the namespaces in it."""
    module = sys.modules[space]
    names = re.findall(r" as (\w+)$", inspect.getsource(module), re.MULTILINE)
    found = {name: getattr(module, name) for name in names if name not in INTERNAL}
    return {n: x for n, x in found.items() if space == "tdc" or not isinstance(x, types.ModuleType)}


def test_there_are_few_names():
    assert len(facade("tdc")) <= 76


def test_every_object_has_one_path():
    paths: dict[int, list[str]] = {}
    for space in SPACES:
        for name, x in facade(space).items():
            if not isinstance(x, types.ModuleType):
                paths.setdefault(id(x), []).append(f"{space}.{name}")
    assert [found for found in paths.values() if len(found) > 1] == []


def test_every_namespace_is_listed():
    assert {f"tdc.{n}" for n, x in facade("tdc").items() if isinstance(x, types.ModuleType)} == {*SPACES} - {"tdc"}


@pytest.mark.parametrize("space", SPACES)
def test_every_object_is_where_it_says(space: str):
    """So that `pickle` finds it, and help shows a path that can be imported."""
    for name, x in facade(space).items():
        if inspect.isclass(x) or inspect.isfunction(x):
            assert getattr(importlib.import_module(x.__module__), x.__qualname__) is x, name


def test_errors_and_their_classes_can_be_imported():
    raised = {n for n, x in vars(errors).items() if inspect.isclass(x) and issubclass(x, Exception)}
    assert raised <= set(facade("tdc"))


def test_packed_and_padded_batches_have_the_same_operations():
    nested, masked = [
        {rule.op for rule in RULES if rule.kind == kind and rule.family != "user"} for kind in ("nested", "masked")
    ]
    assert nested == masked
