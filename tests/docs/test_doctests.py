"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib.util
import pkgutil
from typing import Any

import pytest

import examples.demo
import tdc

PACKAGES = {"tdc.": tdc.__path__, "examples.demo.": examples.demo.__path__}
MODULES = [m.name for prefix, path in PACKAGES.items() for m in pkgutil.walk_packages(path, prefix)]
MODULES.remove("tdc.__main__")
LATE = {"tdc.doctor", "examples.demo.data"}  # one compiles with Inductor, one reads every docstring of the library


OPTIONAL = {  # examples that need another package
    "tdc.data.arrow": "pyarrow", "tdc.hf.model": "transformers",
    "tdc.hf.generate": "transformers", "tdc.einops.backend": "einops",
}  # fmt: skip
CLIENTS = ("tdc.hf", "tdc.einops")  # that `make test-clients` runs


def marked(name: str) -> Any:
    without = name in OPTIONAL and importlib.util.find_spec(OPTIONAL[name]) is None
    marks = [pytest.mark.skip(reason=f"{OPTIONAL[name]} is not installed")] if without else []
    marks += [pytest.mark.sweep] if name in LATE else []
    return pytest.param(name, marks=[*marks, *([pytest.mark.clients] if name.startswith(CLIENTS) else [])])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Dynamo's weak keys, torch 2.13
@pytest.mark.parametrize("name", [marked(name) for name in ["tdc", *MODULES]])
def test_examples(name: str):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    found = [t.name for name in MODULES for t in finder.find(importlib.import_module(name)) if t.examples]
    known = {"tdc.tensordict.tensordict.TensorDict", "tdc.ragged.pack.pack", "tdc.ragged.convert.to_padded"}
    assert known <= set(found)


def test_a_wrong_example_fails():
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed == 1
