"""Arguments in the wrong order, names that are nearly right, keys below a leaf: the hint names what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_mistakes import names
from torch._dynamo.exc import TorchDynamoException

import tdc

SWAPPED = """
    tdc.io.save("store", td)
    tdc.io.to_safetensors("td.safetensors", td)
    tdc.io.dcp_save("checkpoint", td)
    tdc.nested_like(x, torch.ones(2, 3, 4))
    tdc.MaskedBatch(torch.tensor([2, 3]), torch.ones(2, 3))
    tdc.from_padded(torch.tensor([2, 3]), torch.ones(2, 3))
    step(td, step.init())
    step(x, step.init())
"""
CALLS = {
    'td["x", "y"]': "expected a TensorDict at 'x', above 'x.y', got a leaf\nhint: td['x'] is the leaf",
    'td["n", "y", "z"]': "expected a TensorDict at 'n.y', above 'n.y.z', got a leaf\nhint: td['n', 'y'] is the leaf",
    'td.delete(("x", "y"))': "tdc.delete: expected a TensorDict at 'x'",
    'td.rename_keys({("x", "y"): "z"})': "tdc.rename_keys: expected a TensorDict at 'x'",
    'td.select(("x", "y"))': "tdc.select: expected a TensorDict at 'x'",
    'td.at[0].set({"x": {"y": 1}})': "tdc.at.set: expected a TensorDict at 'x'",
    'td["n", "z"]': "nearest keys: 'n.y', 'n'",
    "tdc.optim.chain([tdc.optim.sgd(0.1)])": "expected transforms one by one, got a list of them\nhint: chain(*parts)",
    "tdc.optim.chain((tdc.optim.sgd(0.1),))": "expected transforms one by one, got a tuple of them",
    "tdc.optim.sgd(0.1).init(net)": "got Linear\nhint: tdc.from_module(net)",
    'tdc.io.save(net, "store")': "got Linear\nhint: tdc.from_module(net)",
    "tdc.NestedTensor(torch.tensor([0, 2, 5]), torch.ones(5, 2))": "hint: tdc.NestedTensor(values, offsets)",
    "tdc.truncate(x, -1)": "expected a length of 0 or more, got -1",
    "tdc.truncate(m, -1)": "expected a length of 0 or more, got -1",
    "tdc.truncate(x, True)": "expected an int, got bool",
    "tdc.offsets_of(torch.tensor([2, -1]))": "tdc.offsets_of: expected lengths of 0 or more, got a negative one",
    'tdc.compile.counted(net, dynamic="a")': "expected True, False or None as dynamic, got str",
    'tdc.compile.report(net, x, dynamic="a")': "expected True, False or None as dynamic, got str",
    'tdc.compile.counted(net, backend="aot_eagre")': "hint: backend='aot_eager'",
    'tdc.compile.counted(net, options={"max_autotun": 1})': "expected options of Inductor with values that fit",
    'tdc.compile.counted(net, options={"max_autotune": "a"})': "got str should be bool",
    'tdc.compile.report(net, x, repeats="a")': "expected an int, got str",
    "tdc.compile.counted(net, options=3)": "expected a dict of options, got int",
}
STEP = "tdc.compile.train_step(net, lambda net, x: net(x).sum(), tdc.optim.sgd(0.1), {})"
SETTINGS = {
    'backend="inducto"': "tdc.compile.train_step: expected a function or the name of a backend of torch.compile",
    'mode="reduce-overhed"': "hint: mode='reduce-overhead'",
    'options={"max_autotun": True}': "expected options of Inductor with values that fit, got 'max_autotun'",
    "options=3": "expected a dict of options, got int",
    'dynamic="length"': "tdc.compile.train_step: expected True, False or None as dynamic, got str",
}


@pytest.mark.parametrize("line", [line.strip() for line in SWAPPED.strip().splitlines()])
def test_swapped_arguments_are_named(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tdc.TdcError, match=r"\nhint: swap the two arguments$"):
        exec(line, names())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", [*CALLS, *[STEP.format(given) for given in SETTINGS]])
def test_hints_name_what_to_write(line: str):
    said = {**CALLS, **{STEP.format(given): text for given, text in SETTINGS.items()}}[line]
    with pytest.raises(tdc.TdcError) as raised:
        exec(line, names())
    assert said in str(raised.value)


def test_lengths_that_vary_are_checked_in_graphs():
    x = names()["x"]
    cut: Any = tdc.compile.counted(lambda x, n: tdc.truncate(x, n).sum(1), backend="eager")
    for n in range(6):
        torch.testing.assert_close(cut(x, n), tdc.truncate(x, n).sum(1))
    assert cut.counts.compiles == 2
    with pytest.raises((tdc.TdcError, TorchDynamoException), match="expected a length of 0 or more"):
        cut(x, -1)
