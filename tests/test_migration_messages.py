"""Names of tensordict, torch.nested and DanLing, and of earlier versions: each raises the spelling to use."""

from __future__ import annotations

import copy
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from texts import Says, ragged, says, tree

import tdc
from tdc import MaskedBatch, NestedTensor, TdcError, TensorDict
from tdc.core.errors import MethodError
from tdc.migration import INSTEAD, MODULE, MODULES, each

ROOT = Path(__file__).resolve().parents[1]
PAGE = runpy.run_path(str(ROOT / "docs" / "tools" / "make_migration.py"))
THEIRS = [row.theirs for rows in PAGE["ROWS"].values() for row in rows]
lib: Any = tdc  # to a type checker the names are errors
OWN = {"DataLoader", "None", "True", "MyData"}  # of torch and Python
SYNTAX = {"images"}  # a field of a tensorclass
HOOKS = {
    "arecv", "asend", "attrs", "clear_refs_for_compile_", "entry_class", "from_remote_init", "make_memmap_from_storage",
}  # fmt: skip
HOOKS |= {"make_memmap_from_tensor", "qint32", "qint8", "quint4x2", "quint8", "saved_path", "to_mds", "to_store"}


class Step(tdc.TensorClass):
    x: torch.Tensor
    names: str = "field"


OBJECTS: dict[str, tuple[type, Any]] = {
    "TensorDict": (TensorDict, tree()),
    "tensorclass": (TensorDict, Step(torch.zeros(2), batch_size=[2])),
    "NestedTensor": (NestedTensor, ragged()),
    "MaskedBatch": (MaskedBatch, ragged().to_padded()),
}


SAYS: dict[str, Says] = {
    "a lock": (lambda: tree().lock_(), """\
MethodError
tdc.lock_: expected no change in place, got TensorDict.lock_
hint: no TensorDict ever changes; m = td.mutate() is a builder that does, and td = m.finish() what it built"""),
    "a property": (lambda: tree().is_locked, """\
MethodError
tdc.is_locked: expected a name of TensorDict, got TensorDict.is_locked
hint: no TensorDict ever changes; m = td.mutate() is a builder that does, and td = m.finish() what it built"""),
    "a class method": (lambda: lib.TensorDict.stack([tree(), tree()]), """\
MethodError
tdc.stack: expected a name of TensorDict, got TensorDict.stack
hint: torch.stack(tds)"""),
    "a write": (lambda: tree().set_("tokens", 0), """\
MethodError
tdc.set_: expected no change in place, got TensorDict.set_
hint: tdc.copy_(td['a'], x) writes into memory; td = td.set('a', x) does not"""),
    "a method of a tensorclass": (lambda: lib.tensorclass(Step).from_module(torch.nn.Linear(1, 1)), """\
MethodError
tdc.from_module: expected a name of TensorDict, got TensorDict.from_module
hint: params = tdc.from_module(net)"""),
    "a nested tensor": (lambda: ragged().concat, """\
MethodError
tdc.concat: expected a name of NestedTensor, got NestedTensor.concat
hint: x.values"""),
    "a masked batch": (lambda: ragged().to_padded().tensor, """\
MethodError
tdc.tensor: expected a name of MaskedBatch, got MaskedBatch.tensor
hint: x.filled(0)"""),
    "a change in place whose copy has no name": (lambda: tree().tril_(), """\
MethodError
tdc.tril_: expected no change in place, got x.tril_
hint: apply it leaf by leaf with td.apply(fn)"""),
    "a name of the module": (lambda: lib.TensorDictModule, """\
MethodError
tdc.TensorDictModule: expected a name of tdc, got tdc.TensorDictModule
hint: td = td.set('z', torch.relu(td['a']))"""),
    "a name of a submodule": (lambda: lib.nn.TensorDictSequential, """\
MethodError
tdc.TensorDictSequential: expected a name of tdc.nn, got tdc.nn.TensorDictSequential
hint: run = lambda td: td.set('z', td['a'] + 1).set('y', td['e'] * 2); run(td)"""),
}  # fmt: skip
test_says = says(SAYS)


@pytest.mark.parametrize("kind", OBJECTS)
def test_every_name_raises_and_is_hidden(kind: str):
    owner, x = OBJECTS[kind]
    fields = vars(type(x)) if type(x) is not owner else {}
    names = [(name, text) for name, text in each(INSTEAD[owner]) if name not in fields and name != "to_tensordict"]
    assert len(names) > 12
    shown = dir(x)
    for name, text in names:
        with pytest.raises(MethodError, match=re.escape(f"\nhint: {text}")):
            getattr(x, name)
        assert not hasattr(x, name)
        assert name not in shown


def test_a_field_may_have_such_a_name():
    assert OBJECTS["tensorclass"][1].names == "field"
    assert copy.deepcopy(OBJECTS["tensorclass"][1]).names == "field"


@pytest.mark.parametrize("name", MODULES)
def test_names_of_a_module(name: str):
    module = sys.modules[name]
    files = {path.stem for path in Path(str(module.__file__)).parent.iterdir()}
    for missing, text in each(MODULES[name]):
        assert missing not in files
        assert not hasattr(module, missing)
        with pytest.raises(TdcError, match=re.escape(f"got {name}.{missing}\nhint: {text}")):
            getattr(module, missing)


def test_a_misspelt_name_of_the_module():
    with pytest.raises(AttributeError, match="module 'tdc' has no attribute 'stakc'"):
        tdc.stakc  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]  # must stay an error of type checkers


def test_an_import_says_it_too():
    with pytest.raises(ImportError, match=r"got tdc.TensorDictModule\nhint: td = td.set"):
        exec("from tdc import TensorDictModule")
    with pytest.raises(ImportError, match=r"got tdc.nn.TensorDictModule\nhint: td = td.set"):
        exec("from tdc.nn import TensorDictModule")
    with pytest.raises(ImportError, match=r"got tdc.compile.cond\nhint: tdc.cond"):
        exec("from tdc.compile import cond")
    with pytest.raises(ImportError, match="cannot import name 'stakc'"):
        exec("from tdc import stakc")
    exec("from tdc import doctor, nn; import tdc.io.show")


def test_a_graph_keeps_the_text():
    fn = torch.compile(lambda td: td.rename_key_("a", "z"), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"tdc.rename_key_: expected no change in place"):
        fn(tree())


def says_what_to_do(owner: Any, name: str) -> bool:
    with pytest.raises(MethodError, match="hint: "):
        getattr(owner, name)
    return True


def test_a_graph_asks_whether_a_name_is_there():
    def step(td: Any) -> Any:
        return td.lock_() if hasattr(td, "lock_") or getattr(td, "names", None) else td["tokens"] + 1

    fn = torch.compile(step, backend="eager", fullgraph=True)
    assert fn(tree()).sum() == 24


def test_every_name_of_the_migration_page_is_ours_or_says_what_to_do():
    holder = r"(?:td|TensorDict|params|data|MyData|tensordict|LazyStackedTensorDict(?:\(\.\.\.\))?)"
    seen = 0
    for theirs in THEIRS:
        for name in re.findall(rf"\b{holder}\.([a-z]\w*)", theirs):
            owner = tdc if "tensordict." in theirs else Step if "MyData" in theirs else tree()
            assert hasattr(owner, name) or name in SYNTAX or says_what_to_do(owner, name), theirs
            seen += 1
        for name in re.findall(r"(?<![.\w'])([A-Z]\w+|merge_tensordicts|set_\w+)\b", theirs):
            assert hasattr(tdc, name) or name in OWN or says_what_to_do(tdc, name), theirs
            seen += 1
    assert seen > 90


@pytest.mark.parametrize("kind", ["TensorDict", "NestedTensor", "MaskedBatch"])
def test_what_is_told_exists(kind: str):
    owner, x = OBJECTS[kind]
    spaces = {"tdc": tdc, "torch": torch, "F": F, "td": tree(), "x": x, "TensorDict": TensorDict}
    table = {**dict(each(MODULE)), **dict(each(INSTEAD[owner]))}
    for text in set(table.values()):
        for space, name in re.findall(r"(?<![.\w])(tdc|torch|F|td|x|TensorDict)\.(\w+)", text):
            assert hasattr(spaces[space], name), text


def test_every_name_of_tensordict_is_ours_or_says_what_to_do():
    # `import tensordict` would find the folder of our tests where the package is not installed; it has no `base`.
    theirs = pytest.importorskip("tensordict.base").TensorDictBase
    td, told = tree(), dict(each(INSTEAD[TensorDict]))
    public = {name for name in dir(theirs) if not name.startswith("_")}
    absent = {name for name in public - HOOKS - set(told) if not hasattr(td, name)}
    assert {name for name in absent if not hasattr(torch.Tensor, name)} == set()
