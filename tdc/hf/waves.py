"""Encoders of transformers that begin with convolutions over raw waves, such as Wav2Vec2 and HuBERT, on ragged batches.

    model = tdc.hf.attend(Wav2Vec2ForCTC(config))
    logits = model(input_values=waves).logits       # NestedTensors (B, -1) and (B, -1, C)

In one packed sequence convolutions would read over the ends of rows. So the model itself runs on the NestedTensor, and
its layers are operations of this library; attention is asked for by name, as of models of tokens.
"""

from __future__ import annotations

from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from tdc.core.errors import TdcError, UnsupportedError, describe, first_line, message
from tdc.hf.attention import NAME, OP, PADDED, register, require_set
from tdc.hf.check import at_rest
from tdc.ragged.nested import NestedTensor
from tdc.ragged.pack import pack

INPUT = "input_values"
FRAMES = (9, 2, 4)  # of the rows of the check, about
CLOSE = 1e-4
REFUSED = {
    "attention_mask": "leave it out: the rows have lengths",
    "labels": "F.ctc_loss(output.logits.log_softmax(-1), labels, None, None)",
    "mask_time_indices": "config.apply_spec_augment = False",
    "output_attentions": "leave it out: there are no weights of all pairs",
}


def attend_waves(model: Any, inner: Any, check: bool) -> Any:
    """`attend` for a model of waves; `inner` is its forward as a function of the model."""
    before, rows = model.config._attn_implementation, rows_of(model) if check else []
    expected = [outputs(model, row[None]) for row in rows]
    own = vars(model).get("forward")
    register()
    try:
        model.set_attn_implementation(NAME)
        model.forward = MethodType(ragged_forward(inner), model)
        if check:
            require_equal(model, outputs(model, pack(rows)), expected)
    except BaseException:
        vars(model).pop("forward", None)
        if own is not None:
            model.forward = own
        model.set_attn_implementation(before)
        raise
    return model


def ragged_forward(inner: Any) -> Any:
    """The forward of a model, which refuses what it would read over the ends of rows."""

    @wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        waves = args[0] if args else kwargs.get(INPUT)
        if not isinstance(waves, NestedTensor):
            return inner(self, *args, **kwargs)
        require_set(self)
        given = {name: x for name, x in kwargs.items() if x is not None and x is not False}
        of_rows = getattr(given.get("labels"), "ndim", 2) == 1
        wrong = [name for name in REFUSED if name in given and not (name == "labels" and of_rows)]
        if wrong or len(args) > 1:
            name = wrong[0] if wrong else "attention_mask"
            raise UnsupportedError(message(OP, f"ragged waves without {name}", "it", hint=REFUSED[name]))
        if self.training and getattr(self.config, "apply_spec_augment", False) and self.config.mask_time_prob > 0:
            hint = "model.config.apply_spec_augment = False"
            raise UnsupportedError(message(OP, "training without masks of time", "apply_spec_augment=True", hint=hint))
        return inner(self, *args, **kwargs)

    forward.tdc_ragged = True  # type: ignore[attr-defined]  # by which `attend` knows it again
    return forward


def rows_of(model: Any) -> list[Tensor]:
    """A few short waves."""
    config = model.config
    step, reach = 1, 1
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        reach, step = reach + (kernel - 1) * step, step * stride
    weight = next(model.parameters())
    points = [torch.arange(reach + n * step + i, device=weight.device) for i, n in enumerate(FRAMES)]
    return [torch.sin(p * p * 0.01).to(weight.dtype) for p in points]


def outputs(model: Any, waves: Any) -> dict[str, Any]:
    """The results of a model in evaluation, by name."""
    try:
        with at_rest(model):
            found = model(**{INPUT: waves})
    except (TdcError, RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        got = f"{type(model).__name__}, which fails: {first_line(error)}"
        expected = "a model of waves whose layers take ragged batches"
        raise UnsupportedError(message(OP, expected, got, hint=PADDED)) from error
    return {name: x for name, x in found.items() if isinstance(x, (Tensor, NestedTensor))}


def require_equal(model: Any, found: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    """An UnsupportedError unless each row has the results that it has alone."""
    for name, x in found.items():
        wanted = [row[name][0] for row in expected]
        same = [a.shape == b.shape and bool((a - b).abs().max() <= CLOSE * b.abs().max().clamp(min=1))
                for a, b in zip(x.unbind(), wanted, strict=True)]  # fmt: skip
        if not all(same):
            got = f"{type(model).__name__}, whose {name} differs: {describe(x)}"
            raise UnsupportedError(message(OP, "a model that sees each row alone", got, hint=PADDED))
