"""flex_attention of batches: functions of scores and masks that are written for one example.

`torch.nn.attention.flex_attention.flex_attention` hands its operator on to containers, and so takes batches as well. A
BlockMask has sizes, which torch compares with those of queries and keys: batches have none in common, so a mask goes
to `tdc.ops.flex_attention`.

The plain rule is that of `varlen_attention`: packed rows are one document each where torch's kernel runs, a rectangle
elsewhere, whose scores the functions see one by one under `torch.vmap`, as they do in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect
from tdc.core.dtypes import widened
from tdc.core.dynamo import flex_module, is_zero
from tdc.core.errors import DtypeError, UnsupportedError, describe, message
from tdc.core.rules import DISPATCH, IMPLS
from tdc.core.torch_functions import flex_operator
from tdc.kernels.attention.rectangle import How, ScoreMod
from tdc.ops.attention.scaled_dot_product import alike, attend_batches, check_operands
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import Ragged, ragged_sizes

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of example, head, query and key
NAME = "flex_attention"
LEVELS = ((0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None), (0, 0, None, 0, 0))


def flex_attention(
    query: Any, key: Any, value: Any, score_mod: ScoreMod | None = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False,
) -> Ragged | Tensor:  # fmt: skip
    """Attention of each example's queries to its own keys, with functions of scores written for one example.

    Args:
        score_mod: `score_mod(score, b, h, q_idx, kv_idx) -> score`, of single numbers as in torch: a scaled score, the
            number of the example and of the head, and the positions of query and key within the example. It may index
            tensors, `slopes[h]`, and they may require grad.
        block_mask: `mask_mod(b, h, q_idx, kv_idx) -> bool`, True where the query attends, or a BlockMask, of which
            only the `mask_mod` counts: one mask serves examples of all lengths. No mask says which document a
            position belongs to: each example is one.
        scale: of scores, `1 / sqrt(D)` by default.
        enable_gqa: heads of queries share heads of keys.

    Shapes:
        query `(B, H, -1, D)`, key `(B, G, -1, D)` and value `(B, G, -1, E)`, packed or padded, floating point; some of
        them may be dense. The result is `(B, H, -1, E)` with the lengths of the queries. A query that may attend to
        nothing gives 0.

    Raises:
        DtypeError: no batch, or a function or mask that cannot be called.
        StructureError: other dims, keys and values of other lengths, or another number of examples.
        ShapeError: other heads of keys without `enable_gqa`.
        UnsupportedError: a BlockMask without a `mask_mod`.

    Compile:
        One graph for all lengths, with gradients. On CUDA torch's kernel for NestedTensors, whose blocks are those of
        the examples; elsewhere and eagerly the scores of a rectangle.

    Source:
        `torch.nn.attention.flex_attention.flex_attention`.

    Example:
        >>> import torch
        >>> from tdc.ragged.pack import pack
        >>> q = pack([torch.ones(2, 3, 4), torch.ones(2, 5, 4)], ragged_dim=2)
        >>> alibi = lambda score, b, h, q_idx, kv_idx: score - (q_idx - kv_idx)
        >>> causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
        >>> flex_attention(q, q, q, score_mod=alibi, block_mask=causal).lengths
        tensor([3, 5])
    """
    if score_mod is not None and not callable(score_mod):
        hint = "lambda score, b, h, q_idx, kv_idx: score"
        raise DtypeError(message(NAME, "a function as score_mod", describe(score_mod), hint=hint))
    return attend_pairs(query, key, value, score_mod, mask_mod_of(block_mask), scale, enable_gqa)


def mask_mod_of(block_mask: Any) -> MaskMod | None:
    """The function of pairs of a mask."""
    if block_mask is None:
        return None
    if callable(block_mask):
        function: Any = block_mask
        return function
    flex = flex_module()
    if not isinstance(block_mask, flex.BlockMask):
        hint = "lambda b, h, q_idx, kv_idx: q_idx >= kv_idx"
        raise DtypeError(message(NAME, "a mask_mod or a BlockMask as block_mask", describe(block_mask), hint=hint))
    if block_mask.mask_mod is flex.noop_mask:
        hint = "write it as a function of b, h, q_idx, kv_idx"
        raise UnsupportedError(message(NAME, "a BlockMask with a mask_mod", "one of blocks alone", hint=hint))
    found: MaskMod = block_mask.mask_mod
    return found


def attend_pairs(
    query: Any, key: Any, value: Any, score_mod: ScoreMod | None, mask_mod: MaskMod | None, scale: float | None,
    gqa: bool,
) -> Ragged | Tensor:  # fmt: skip
    """Attention of batches with functions of single scores."""
    (query, key, value), as_query = alike(query, key, value)
    expect(NAME, query, NestedTensor, MaskedBatch, of=" of queries, keys or values")
    check_operands((query, key, value), None, False, gqa, NAME)
    how = How(False, scale)
    if score_mod is not None or mask_mod is not None:
        queries, keys = [ragged_sizes(x)[:, 0] for x in (query, key)]
        how = how._replace(score_mod=each_score(score_mod, mask_mod, queries, keys))
    return as_query(attend_batches(query, key, value, how))


def each_score(score_mod: ScoreMod | None, mask_mod: MaskMod | None, queries: Tensor, keys: Tensor) -> ScoreMod:
    """A function of one score, and of a rectangle of scores with what is beside it in padding.

    A pair in padding has the positions of the example's last query and key, so that functions see real positions alone.
    """

    def one(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        changed = s if score_mod is None else score_mod(s, b, h, i, j)
        return changed if mask_mod is None else torch.where(mask_mod(b, h, i, j), changed, -math.inf)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if s.ndim == 0:
            return one(s, b, h, i, j)
        if any([is_zero(n) for n in s.shape]):  # of which functions may not index
            return s
        b, last_i, last_j = b.view(-1), (queries - 1).clamp(min=0), (keys - 1).clamp(min=0)
        own_i, own_j = i.view(1, -1).minimum(last_i[b, None]), j.view(1, -1).minimum(last_j[b, None])
        every: Any = one
        for dims in LEVELS:
            every = torch.vmap(every, dims)
        out: Tensor = every(widened(s), b, h.view(-1), own_i, own_j)
        return out

    return score


def flex_attention_operator(
    query: Any, key: Any, value: Any, score_mod: ScoreMod, block_mask: tuple[Any, ...], scale: float,
    kernel_options: dict[str, Any], *buffers: Any,
) -> tuple[Any, Tensor, Tensor]:  # fmt: skip
    """The operator that torch's function calls: the result, and no sums and maxima of scores."""
    asked = kernel_options.get("OUTPUT_LOGSUMEXP") and query.device.type == "cpu"  # elsewhere gradients ask, too
    if asked or kernel_options.get("OUTPUT_MAX"):
        hint = "leave return_aux and return_lse out"
        raise UnsupportedError(message(NAME, "the result of batches alone", "return_aux or return_lse", hint=hint))
    out = attend_pairs(query, key, value, score_mod, block_mask[-1], scale, True)
    none = torch.empty(0, device=query.device)
    return out, none, none


for _kind in ("nested", "masked"):
    DISPATCH[_kind][flex_operator] = f"{_kind}_flex_attention"
    IMPLS[f"{_kind}_flex_attention"] = flex_attention_operator
