"""Our packed attention as an attention implementation of transformers, beside the function that makes its masks.

    query (1, H, N, D), key and value (1, G, M, D)  ->  (1, N, H, D)

A packed batch goes through a model as one sequence (1, N, ...), the rows behind one another. Only attention must know
where rows begin, and only the attention mask goes to each attention of a model, through its layers, their checkpoints
and the functions that make masks. So the rows travel as the mask, `Packed`. It is no tensor: whatever computes with it
as one fails, and does not see other rows.

transformers looks both up by name for each layer. Where the mask is `Packed`, each row attends to itself; any other
call of the model, a padded batch or `generate`, goes on to transformers' own `sdpa`.

Invariants: what is in a `Packed` is never changed; whether a layer is causal, and its window, come from the layer
itself, and `check` compares them with the mask function of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.errors import ShapeError, UnsupportedError, message
from tdc.core.extras import extra
from tdc.kernels.attention.rectangle import causal_mask, shared_heads
from tdc.layout.structure import Structure
from tdc.ops.attention.scaled_dot_product import varlen_attention
from tdc.ragged.nested import NestedTensor

OP = "hf.attend"
CROSS = "tdc_cross"  # the argument for attention whose mask the model leaves out, of targets to sources
NAME = "tdc"
PADDED = "tdc.interop.to_hf(batch) for a padded call"
UNKNOWN = {"position_bias": "a bias of positions", "s_aux": "attention sinks"}  # arguments that change the weights
Rule = Callable[[Any, Any, Any, Any], Any]


class Asked(NamedTuple):
    """One call of attention: by which module, what it attends to, and the rule of transformers that says so."""

    module: Any
    causal: bool
    window: int | None
    rule: Rule | None


@dataclass(eq=False)
class Packed:
    """Rows of queries and of keys in place of an attention mask (1, 1, N, M).

    Attributes:
        totals: N and M.
        inputs: of a model whose head takes rows, the inputs of the model below the head.
        asked: where each call of attention is written down, while a model is checked.
        rule: the mask function of transformers, `rule(batch, head, query, key)`.
        flat: the batch came as (1, N), and outputs stay so.
    """

    queries: Structure
    keys: Structure
    totals: tuple[int, int]
    inputs: dict[str, Any] | None = None
    asked: list[Asked] | None = None
    rule: Rule | None = None
    flat: bool = False
    ndim: ClassVar[int] = 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the mask that this stands for."""
        return (1, 1, *self.totals)

    def with_rule(self, rule: Rule) -> Packed:
        """The same rows, to be attended to by a rule."""
        return Packed(self.queries, self.keys, self.totals, self.inputs, self.asked, rule, self.flat)

    def with_inputs(self, inputs: dict[str, Any]) -> Packed:
        """The same rows, for a model whose head takes rows."""
        return Packed(self.queries, self.keys, self.totals, inputs, self.asked, self.rule, self.flat)


def register() -> None:
    """Make the implementation known to transformers by its name."""
    transformers = library()
    plain = import_module("transformers.integrations.sdpa_attention"), import_module("transformers.masking_utils")
    transformers.AttentionInterface.register(NAME, partial(attention, plain[0].sdpa_attention_forward))
    transformers.AttentionMaskInterface.register(NAME, partial(mask, plain[1].sdpa_mask))


def library() -> Any:
    """transformers, which `import tdc` does without."""
    return extra("hf", "transformers", "torch-tdc[hf]")


def require_set(model: Any) -> None:
    """An UnsupportedError where another attention was set behind our back."""
    found = model.config._attn_implementation
    if found != NAME:
        hint = "tdc.hf.attend(model) once more"
        raise UnsupportedError(message(OP, f"attention by {NAME!r} for a ragged batch", repr(found), hint=hint))


def attention(
    plain: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention as transformers asks for it: rows to themselves, or `plain` where the batch is padded."""
    if isinstance(query, NestedTensor):
        return of_waves(module, query, key, value, **options)
    if attention_mask is None:
        attention_mask = options.get(CROSS)
    if not isinstance(attention_mask, Packed):
        if options.get("softcap") is None:
            return plain(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]  # untyped
        return capped(module, query, key, value, attention_mask, **options)
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    window: int | None = options.get("sliding_window")
    refuse_unknown(module, options)
    if attention_mask.asked is not None:
        attention_mask.asked.append(Asked(module, causal, window, attention_mask.rule))
    rows, keys = attention_mask.queries, attention_mask.keys
    q, k, v = [t[0].transpose(0, 1) for t in (query, key, value)]
    if (q.shape[0], k.shape[0]) != attention_mask.totals:
        got = f"{q.shape[0]} queries and {k.shape[0]} keys for {attention_mask.totals} positions of the batch"
        raise ShapeError(message(OP, "attention of all positions", got, hint="use_cache=False, or a padded batch"))
    how: dict[str, Any] = {"causal": causal, "scale": options.get("scaling"), "dropout": options.get("dropout", 0.0)}
    how["window"] = window
    if (cap := options.get("softcap")) is not None:
        how["score_mod"] = lambda score, *at: bent(score, cap)
    elif (bias := options.get("position_bias")) is not None and bias.ndim:  # (1, H, L, M): a row reads its corner
        how["mask"] = bias
    return varlen_attention(q, k, v, rows, keys, **how)[None], None


def of_waves(
    module: Any, query: Any, key: Any, value: Any, scaling: float | None = None, dropout: float = 0.0, **options: Any
) -> tuple[Any, None]:  # fmt: skip
    """Attention of the rows of a model of waves, each to itself: (B, H, -1, D) -> (B, -1, H, D)."""
    refuse_unknown(module, options)
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", False) if causal is None else causal)
    out: Any = F.scaled_dot_product_attention(query, key, value, None, dropout, causal, scale=scaling)
    return out.transpose(1, 2), None


def capped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float,
    scaling: float | None = None, dropout: float = 0.0, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention to padded keys with a soft cap, for which there is no `sdpa`: (B, H, L, D) -> (B, L, H, D)."""
    key, value = [shared_heads(t, query.shape[1]) for t in (key, value)]
    if mask is None and getattr(module, "is_causal", True) and query.shape[2] > 1:
        mask = causal_mask((query.shape[2], key.shape[2]), query.device)
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    scores = bent(scores.float(), softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = F.dropout(scores.softmax(-1), dropout).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


def mask(plain: Any, *args: Any, mask_function: Any, attention_mask: Any = None, **options: Any) -> Any:
    """The mask of a layer as transformers asks for it: the rows with the rule, or `plain` where there are none."""
    if isinstance(attention_mask, Packed):
        return attention_mask.with_rule(mask_function)
    return plain(*args, mask_function=mask_function, attention_mask=attention_mask, **options)


def refuse_unknown(module: Any, options: dict[str, Any]) -> None:
    """An UnsupportedError where a layer asks for more than rows can do, rather than weights without it."""
    alone = options.get("sliding_window") is None and options.get("softcap") is None
    of_distances = hasattr(module, "compute_bias") and alone  # as in T5: the same in each row
    for name, what in UNKNOWN.items():
        if options.get(name) is not None and not (name == "position_bias" and of_distances):
            raise UnsupportedError(message(OP, "attention by scores of queries and keys", what, hint=PADDED))
    if options.get("output_attentions"):
        raise UnsupportedError(message(OP, "attention without its weights", "output_attentions=True", hint="leave it"))


def bent(score: Tensor, cap: float) -> Tensor:
    """A score under a soft cap."""
    return torch.tanh(score / cap) * cap
