"""Files name classes and functions by their paths: pickles, `torch.save`, exported programs. These paths stay."""

from __future__ import annotations

import pickle
import pickletools
import pkgutil
from typing import Any

import optree
import torch
from torch.utils import _pytree as pytree

import tdc


@tdc.tensorclass
class Point:
    """A tensorclass of a user."""

    x: torch.Tensor


def names_in(x: Any) -> set[str]:
    """What a pickle of `x` names in tdc, as `module:name`."""
    found, strings = set(), []
    for op, arg, _ in pickletools.genops(pickle.dumps(x)):
        if op.name == "STACK_GLOBAL":
            found.add(":".join(strings[-2:]))
        elif op.name in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"):
            strings.append(arg)
    return {name for name in found if name.startswith("tdc.")}


def test_pickles_name_these():
    packed = tdc.pack([torch.ones(2), torch.ones(3)])
    restore = {"tdc.core.frozen:restore"}
    nested = restore | {"tdc.ragged.nested:NestedTensor", "tdc.layout.structure:Structure"}
    td = restore | {"tdc.tensordict.tensordict:TensorDict"}
    assert names_in(packed) == nested
    assert names_in(tdc.pack([packed])) == nested | {"tdc.ragged.two_level:TwoLevelTensor"}
    assert names_in(packed.to_padded()) == restore | {"tdc.ragged.masked:MaskedBatch"}
    assert names_in(tdc.TensorDict({"a": torch.ones(2)}, [2])) == td
    inner = tdc.TensorDict({"a": packed, "b": {"c": torch.ones(2)}, "s": tdc.Static("s")}, [2])
    assert names_in(inner) == nested | td | {"tdc.tensordict.nodes:Static"}
    objects = tdc.TensorDict({"o": tdc.ObjectArray(["a", "b"])}, [2])
    assert names_in(objects) == td | {"tdc.tensordict.leaf:wrap_leaf", "tdc.tensordict.object_array:ObjectArray"}
    assert names_in(Point(torch.ones(2), batch_size=[2])) == {
        "tdc.tensordict.tensordict:build_td",
        "tdc.tensordict.nodes:Typed",
    }
    for x in (packed, inner, objects, Point(torch.ones(2), batch_size=[2])):
        assert type(pickle.loads(pickle.dumps(x))) is type(x)


def test_exported_programs_name_these():
    names = {
        tdc.TensorDict: "tdc.TensorDict",
        tdc.NestedTensor: "tdc.NestedTensor",
        tdc.MaskedBatch: "tdc.MaskedBatch",
        Point: f"{Point.__module__}.Point",
    }
    known = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    assert {cls: [name for name, found in known.items() if found is cls] for cls in names} == {
        cls: [name] for cls, name in names.items()
    }
    assert optree.tree_leaves(tdc.TensorDict({"a": torch.ones(2)}, [2]))[0].shape == (2,)


def test_what_files_name_can_be_loaded_safely():
    safe = torch.serialization.get_safe_globals()
    for path in (
        "tdc.core.frozen:restore",
        "tdc.ragged.nested:NestedTensor",
        "tdc.layout.structure:Structure",
        "tdc.ragged.masked:MaskedBatch",
        "tdc.tensordict.tensordict:TensorDict",
        "tdc.tensordict.tensordict:build_td",
        "tdc.tensordict.nodes:Static",
        "tdc.tensordict.nodes:Typed",
        "tdc.tensordict.leaf:wrap_leaf",
    ):
        assert pkgutil.resolve_name(path) in safe
