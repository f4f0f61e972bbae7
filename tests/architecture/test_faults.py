"""The checks themselves: a small sound tree, and what each check must say when one thing in it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from .checks import CHECKS, check_facade
from .tree import Tree

pytestmark = pytest.mark.architecture

HEAD = '"""Doc."""\n'
SOUND = {
    "tdc/__init__.py": HEAD
    + "from .ops import relu as relu\nfrom .ragged.nested import (\n    NestedTensor as NestedTensor,\n)\n"
    + "__version__ = '0'\n__all__ = ['relu']\n",
    "tdc/core/__init__.py": HEAD,
    "tdc/core/errors.py": HEAD + "import torch\n",
    "tdc/core/keys.py": HEAD + "from .errors import KeyPathError\n",
    "tdc/core/dynamo.py": HEAD + "import torch\nactive = torch._C.active\n",
    "tdc/core/pytree.py": HEAD + "from torch.utils._pytree import _f, tree_map\n",
    "tdc/compile/_torch/inductor.py": HEAD + "from pkgutil import resolve_name\nNAME = 'torch._inductor.config'\n",
    "tdc/ragged/nested.py": HEAD
    + "from typing import TYPE_CHECKING\nfrom ..core import keys\nimport tdc.core.errors\n"
    + "if TYPE_CHECKING:\n    from tdc.ops import join\n",
    "tdc/tensordict/nodes.py": HEAD + "from tdc.core.keys import x\n",
    "tdc/ops/__init__.py": HEAD + "from .pointwise import relu\nfrom . import join\n",
    "tdc/ops/join.py": HEAD + "from .pointwise import relu\nfrom ..ragged.nested import NestedTensor\n",
    "tdc/ops/pointwise.py": HEAD + "def relu(x):\n    return x  # type: ignore[return]  # torch has no stub\n",
    "tdc/compile/__init__.py": HEAD + "import torch\nforked = torch.compiler.is_compiling\n",
    "tdc/viz/plots.py": HEAD
    + "import tdc.ops as ops\n\ndef plot():\n    import matplotlib.pyplot as plt\n    return plt\n",
    "tdc/doctor.py": HEAD + "import tdc\nfrom tdc.viz.plots import plot\n",
    "tdc/nn/layers.py": HEAD + "what = 'member'  # of both directions, a member of the class\n",
    "tdc/io/save.py": '"""True if it is saved."""\n',
    "tests/test_x.py": "import tdc\n",
    "docs/batch.md": "word " * 900 + "\n```python\na = 1\n```\n\n    $ code of four words\n\n| a | table |\n",
    "docs/support.md": "word " * 901,
    "README.md": "See https://example.org/home/ann and net/work/x.\n",
}
PRIVATE = (  # what a room may not say, and a part of the problem
    ("import torch\nx = torch._C.f()", "torch._C is private"),
    ("import torch._dynamo as d", "torch._dynamo is private"),
    ("from torch._guards import TracingContext", "torch._guards.TracingContext is private"),
    ("from torch.nn.attention import _utils", "torch.nn.attention._utils is private"),
    ("from torch import ops\nx = ops.aten._f", "torch.ops.aten._f is private"),
    ("import torch\nfn: Any = torch.functional\nx = fn._f", "torch.functional._f is private"),
    (
        "import torch as t\na = t.fx\nb = a.experimental\nx = b._config.patch",
        "torch.fx.experimental._config is private",
    ),
    ("import torch\ndef f():\n    fx: Any = torch.fx\n    return fx._x", "torch.fx._x is private"),
    ("import torch\nx = getattr(torch, '_C')", "torch._C is private"),
    ("import torch\nx = getattr(torch, f'_foreach_{1}')", "torch._foreach_ is private"),
    ("import torch\nx = vars(torch)['_C']", "torch._C is private"),
    ("import torch\nx = torch.__dict__['_C']", "_C is private"),
    ("def f(fn):\n    fn._torchdynamo_inline = f", "_torchdynamo_inline is a mark"),
    ("def f(x):\n    return hasattr(x, '_dynamo_weak_dynamic_indices')", "'_dynamo_weak_dynamic_indices' is a mark"),
    ("def f(x):\n    return x._dynamo_static_indices", "_dynamo_static_indices is a mark"),
    ("from pkgutil import resolve_name\nx = resolve_name('sympy')", "resolve_name finds modules by name"),
    ("import importlib\nx = importlib.import_module('torch.fx')", "import_module loads a part of torch"),
    ("x = __import__('torch')", "__import__ loads a part of torch"),
    ("NAME = 'torch._inductor.config'", "'torch._inductor.config' names a private part"),
    ("log = getLogger('torch.__trace')", "'torch.__trace' names a private part"),
    ("def f(x):\n    return x._cdata", "_cdata is a private name of another library"),
    ("def f(x):\n    return getattr(x, '_opoverload', x)", "'_opoverload', a private name of another library"),
    ("import torch\nx = torch.__version__ >= '2.12'", "asks for torch's version"),
    ("import torch\nx = torch.__version__.startswith('2')", "asks for torch's version"),
    ("import sys\nx = sys._getframe(1)", "sys._getframe"),
    ("import inspect\nx = inspect.stack()", "inspect.stack"),
    ("from inspect import currentframe", "inspect.currentframe"),
    ("import gc\ngc.disable()", "gc.disable"),
)
PLACEHOLDER = "/".join(["", "home", "ann", "data"])
LONG_FUNCTION = "def f():\n" + "    a = 1\n" * 60
BAD: tuple[tuple[str, str, str, str], ...] = (  # check, file, its new text, a part of the problem
    ("table", "tdc/helpers.py", HEAD, "'helpers' is not in ROOMS"),
    ("table", "tdc/extra/__init__.py", HEAD, "'extra' is not in ROOMS"),
    ("rooms", "tdc/core/errors.py", "from ..ragged.nested import NestedTensor", "'core' imports 'ragged'"),
    ("rooms", "tdc/ragged/nested.py", "from ..tensordict import nodes", "'ragged' imports 'tensordict'"),
    ("rooms", "tdc/tensordict/nodes.py", "import tdc.ragged.nested", "'tensordict' imports 'ragged'"),
    ("rooms", "tdc/core/errors.py", "import tdc.helpers", "imports 'helpers'"),
    ("rooms", "tdc/ops/join.py", "from ..compile import batch", "'ops' imports 'compile'"),
    ("rooms", "tdc/ops/join.py", "def f():\n    from tdc.viz.plots import plot", "'ops' imports 'viz'"),
    ("rooms", "tdc/ragged/nested.py", "from tdc import NestedTensor", "imports the facade"),
    ("rooms", "tdc/compile/__init__.py", "import tdc", "imports the facade"),
    ("cycles", "tdc/ops/pointwise.py", "from .join import cat", "pointwise -> tdc.ops.join -> tdc.ops.pointwise"),
    ("cycles", "tdc/ops/pointwise.py", "from . import relu", "tdc.ops -> tdc.ops.pointwise -> tdc.ops"),
    ("cycles", "tdc/core/errors.py", "import tdc", "import cycle"),
    ("sizes", "tdc/viz/plots.py", "a = 1\n" * 501, "tdc/viz/plots.py: 501 lines"),
    ("sizes", "tests/test_x.py", "a = 1\n" * 501, "tests/test_x.py: 501 lines"),
    ("sizes", "bench/speed.py", "a = 1\n" * 501, "bench/speed.py: 501 lines"),
    ("sizes", "tdc/viz/plots.py", LONG_FUNCTION, "f has 61 lines"),
    ("sizes", "tdc/viz/plots.py", "class A:\n  async " + LONG_FUNCTION.replace("\n", "\n  "), "f has 61 lines"),
    ("hidden imports", "tdc/ragged/nested.py", "def f():\n    import torch", "imports 'torch' in a function"),
    ("hidden imports", "tdc/ragged/nested.py", "def f():\n    import numpy", "imports 'numpy' in a function"),
    ("hidden imports", "tdc/viz/plots.py", "def f():\n    import json", "imports 'json' in a function"),
    (
        "hidden imports",
        "tdc/viz/plots.py",
        "def f():\n    from ..ragged.nested import x",
        "imports 'tdc.ragged.nested' in a function",
    ),
    (
        "hidden imports",
        "tdc/viz/plots.py",
        "class A:\n    async def f(self):\n        import torch",
        "'torch' in a function",
    ),
    (
        "hidden imports",
        "tdc/ragged/nested.py",
        "import importlib as i\ni.import_module('tdc.ops')",
        "'tdc.ops' in a fun",
    ),
    ("hidden imports", "tdc/viz/plots.py", "def f(name):\n    return __import__(name)", "imports '?' in a function"),
    ("hidden imports", "tdc/viz/plots.py", "import matplotlib", "imports 'matplotlib', an optional package"),
    (
        "hidden imports",
        "tdc/ragged/nested.py",
        "try:\n    import numpy\nexcept ImportError:\n    pass",
        "'numpy', an opt",
    ),
    ("forks", "tdc/ragged/nested.py", "import torch\nx = torch.compiler.is_compiling()", "is_compiling outside"),
    (
        "forks",
        "tdc/ragged/nested.py",
        "from torch.compiler import is_dynamo_compiling as busy",
        "is_dynamo_compiling outside",
    ),
    (
        "forks",
        "tdc/ragged/nested.py",
        "import torch\nx = getattr(torch.compiler, 'is_compiling')",
        "is_compiling outside",
    ),
    ("facade", "tdc/__init__.py", HEAD + "from .ops import relu\n__version__ = '0'", "from .ops import relu"),
    ("facade", "tdc/__init__.py", HEAD + "import torch\n__version__ = '0'", "import torch"),
    ("facade", "tdc/__init__.py", HEAD + "def f(): pass\n__version__ = '0'", "def f()"),
    ("facade", "tdc/__init__.py", HEAD + "from .ops import relu as relu", "no __version__"),
    ("facade", "tdc/__init__.py", "__version__ = '0'", "no docstring"),
    *(("internals", "tdc/ragged/nested.py", text, problem) for text, problem in PRIVATE),
    ("internals", "tdc/core/keys.py", "from torch.utils import _pytree", "torch.utils._pytree is private"),
    ("internals", "tdc/core/pytree.py", "import torch._dynamo", "torch._dynamo is private"),
    ("internals", "tdc/compile/inductor.py", "import torch._inductor.config", "torch._inductor.config is private"),
    ("internals", "tdc/core/dynamo.py", "import sys\nx = sys._getframe(1)", "sys._getframe"),
    ("internals", "tdc/core/dynamo.py", "from gc import disable", "gc.disable"),
    ("internals", "tdc/core/dynamo.py", "import torch\nx = torch._C._other", "may be gone in another torch"),
    ("internals", "tdc/ops/join.py", "NAME = 'torch:_C._other'", "names a private part of torch"),
    ("ignores", "tdc/ragged/nested.py", "x = 1  # type: ignore", "gives no reason"),
    ("ignores", "tests/test_x.py", "x = 1  # type: ignore[assignment]", "gives no reason"),
    ("ignores", "bench/speed.py", "x = 1  # pyright: ignore[reportX]", "gives no reason"),
    ("language", "tdc/doctor.py", '"""Whether it works."""', "tdc/doctor.py:1: begins with 'Whether'"),
    ("language", "tdc/optim/sgd.py", 'class A:\n    """What it does."""', "tdc/optim/sgd.py:2: begins with 'What'"),
    ("language", "tdc/optim/sgd.py", "x = 1  # for those who step", "'those who'"),
    ("language", "tdc/testing/close.py", "raise ValueError('Somebody reads it')", "'Somebody'"),
    ("language", "tdc/nn/lora.py", '"""Doc.\n\nMembers of a vmap.\n"""', "tdc/nn/lora.py:3: 'Members of a vmap'"),
    ("language", "tdc/nn/lora.py", "def f(x):\n    return f'{x} has a direction'", "'has a direction'"),
    ("pages", "docs/batch.md", "word " * 901, "docs/batch.md: 901 words"),
    ("pages", "docs/start/install.md", "# A\n" + "word " * 900, "902 words"),
    ("machine paths", "tdc/ragged/nested.py", f"x = '{PLACEHOLDER}'", "tdc/ragged/nested.py:1: machine path"),
    ("machine paths", "README.md", f"See {PLACEHOLDER}.", "README.md:1: machine path"),
    ("machine paths", ".ci/run", f"\ncd {PLACEHOLDER}", ".ci/run:2: machine path"),
    ("test names", "tests/ops/test_x.py", "", "tests/ops/test_x.py and tests/test_x.py have one name"),
)


def grow(root: Path, files: dict[str, str]) -> Tree:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return Tree(root)


@pytest.mark.parametrize("check", CHECKS)
def test_sound_tree_passes(tmp_path: Path, check: str):
    assert CHECKS[check](grow(tmp_path, SOUND)) == []


@pytest.mark.parametrize(("check", "path", "text", "problem"), BAD, ids=[f"{b[0]}-{n}" for n, b in enumerate(BAD)])
def test_planted_fault_is_found(tmp_path: Path, check: str, path: str, text: str, problem: str):
    found = CHECKS[check](grow(tmp_path, SOUND | {path: text}))
    assert [line for line in found if problem in line], f"nothing says {problem!r}: {found}"


def test_every_check_has_a_planted_fault():
    assert {bad[0] for bad in BAD} == set(CHECKS)


def test_empty_tree_has_no_facade(tmp_path: Path):
    assert check_facade(grow(tmp_path, {"tests/test_x.py": ""})) == ["tdc/__init__.py: missing"]
