"""Each architecture of transformers is taken, and equals its rows alone, or is refused in words."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.clients
DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "architectures_hf.md").read_text(encoding="utf-8")
TOOL = DOCS / "tools" / "make_architectures_hf.py"
SOME = {"llama": "", "glm": "", "t5": "", "mamba": "computes with its attention mask", "wav2vec2-bert": "of tokens"}


@pytest.mark.filterwarnings("ignore")
def test_some_architectures():
    found = dict(runpy.run_path(str(TOOL))["outcomes"]([*SOME]))
    for name, text in SOME.items():
        assert text in (found[name] or ""), name
        assert (found[name] == "") == (text == ""), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(f"transformers {transformers.__version__}." not in PAGE, reason="the page is of another version")
def test_page_is_up_to_date():
    tool = runpy.run_path(str(TOOL))
    found = tool["everything"]()
    assert not [name for name, text in found.items() if text and text.startswith(("RAW", "WRONG"))]
    assert tool["render"](found) == PAGE, "run python docs/tools/make_architectures_hf.py"
