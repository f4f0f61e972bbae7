"""Stock modules on ragged batches, with the samples of torch: each constructor variant, both modes and kinds."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from opinfo.modules import REASONS, outcomes
from torch.testing._internal.common_modules import module_db

INFOS = {info.module_cls.__name__: info for info in module_db}
SPREAD = 2  # samples of each module in the fast tests
REFUSED = {  # what a ragged batch cannot be asked, by module
    "FractionalMaxPool": "the regions of its windows are random",
    "MultiLabel|MultiMargin|CosineEmbedding": "1 static dims at the end",
    "CrossEntropy|NLL": "logits and targets that are both",
}  # fmt: skip
ALWAYS = {**REASONS, "FractionalMaxPool2d": "", "FractionalMaxPool3d": ""}  # modules no sample of which passes
UNMAPPED = re.compile("no dim that may be ragged|no example$|refuses an example|by a mask which positions|draws random")


def check(name: str, limit: int) -> dict[str, int]:
    """Every call passes, or is refused or left out for a reason that is known; how many there are of each."""
    counts = {"pass": 0, "refused": 0, "unmapped": 0}
    warnings.simplefilter("ignore")
    for training in (True, False):
        for call in outcomes(INFOS[name], training, limit=limit):
            *_, result, text = call
            assert result not in ("raw", "differs"), call
            if result == "refused":
                assert any(re.search(m, name) and words in text for m, words in REFUSED.items()), call
            if result == "unmapped":
                assert text == REASONS.get(name) or UNMAPPED.search(text), call
            counts[result] += 1
    return counts


@pytest.mark.slow
def test_a_spread_of_all_modules():
    """The first samples of each; among them one that passes, unless none can."""
    torch.set_num_threads(1)
    silent = {name for name in INFOS if not check(name, SPREAD)["pass"]}
    assert silent >= ALWAYS.keys() & INFOS.keys()  # those of this torch


@pytest.mark.cases(0, 4)
@pytest.mark.parametrize("name", INFOS)
def test_module(name: str):
    counts: Any = check(name, 10**6)
    assert bool(counts["pass"]) is (name not in ALWAYS), counts
