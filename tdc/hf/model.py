"""Models of transformers that take ragged batches, unmodified.

    model = tdc.hf.attend(BertForMaskedLM(config))
    output = model(input_ids=x, labels=y)          # NestedTensors (B, -1)

`attend` sets our attention implementation, and wraps the forward of the model: arguments are packed before (`inputs`,
`encoder_decoder`), outputs nested behind (`outputs`). The rows go to attention as the attention mask (`attention`), and
positions in rows to what counts them itself (`positions`). A call without ragged arguments is left as it is.

Heads that give one result for each row (`...ForSequenceClassification`) take positions of rows, such as the first; they
are called with padded hidden states, and the model below them is packed: its forward is wrapped, too, and takes and
gives what is between.

A forward is wrapped and not hooked, since `torch.compile(model)` begins its graph behind the hooks (torch 2.13).

Invariants: the model keeps its class, weights and names; before it is returned, its outputs for a few short rows are
compared with those of each row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

from torch import nn

from tdc.core.errors import DtypeError, UnsupportedError, describe, message
from tdc.hf.attention import NAME, OP, PADDED, library, register, require_set
from tdc.hf.check import alone, check_packed
from tdc.hf.encoder_decoder import EncoderDecoder, encoder_decoder_forward, is_encoder_decoder
from tdc.hf.inputs import BELOW, Head, packed_arguments, packed_below, parameters_of
from tdc.hf.outputs import nest_output, settle_output
from tdc.hf.positions import Side, counted, hook_positions
from tdc.hf.waves import INPUT, attend_waves

OF_TOKENS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification", "ForPreTraining")
OF_ROWS = ("ForSequenceClassification", "ForNextSentencePrediction", "ForQuestionAnswering")
CAUSAL = ("ForCausalLM", "LMHeadModel")
OF_ENCODER_DECODER = ("ForConditionalGeneration", "MTModel")


def attend(model: Any, *, check: bool = True) -> Any:
    """Let a model of transformers take ragged batches, padding-free, in training and evaluation.

    Shapes:
        input_ids, token_type_ids, position_ids and labels of tokens are NestedTensors `(B, -1)`, inputs_embeds
        `(B, -1, D)`, all of one structure; or one TensorDict of them, as `from_hf` gives. Hidden states and logits come
        back as NestedTensors, results of rows as tensors `(B, ...)`, the loss as that of the batch.

        Of encoder and decoder, input_ids or inputs_embeds have one structure, and decoder_input_ids or
        decoder_inputs_embeds and labels another. Whisper's input_features `(B, F, T)` are dense. Of models of waves,
        such as Wav2Vec2, input_values are a NestedTensor `(B, -1)`; `F.ctc_loss` takes their logits.

    Args:
        model: a model that asks transformers for its attention function: most do. It is changed in place.
        check: compare three short rows with each row alone; where rotary frequencies follow the length, also rows at
            both sides of their context, up to 4096 tokens. Without it a model may look beyond rows unnoticed.

    Returns:
        The same model. Padded batches and `generate` work as before; `model.set_attn_implementation` undoes it.

    Raises:
        DtypeError: no model of transformers.
        UnsupportedError: a model with its own attention, an unknown head, or outputs that differ from rows alone.

    Compile:
        One graph for all lengths. Attend first, then compile: the check is no part of the graph.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=20)
        >>> model = attend(BertModel(BertConfig(**sizes)).eval())
        >>> from tdc.ragged.pack import from_list
        >>> model(input_ids=from_list([[5, 6], [7, 8, 9]])).last_hidden_state.shape
        torch.Size([2, -1, 8])
    """
    expect_model(model)
    if hasattr(model.forward, "tdc_ragged"):  # it is done already, and another attention may have been set since
        model.set_attn_implementation(NAME)
        return model
    if model.main_input_name == INPUT and hasattr(model.config, "conv_kernel"):
        return attend_waves(model, unbound(model.forward), check)
    known = encoder_decoder_of(model) if is_encoder_decoder(model) else head_of(model)
    before = model.config._attn_implementation
    expected = alone(model) if check else None
    register()
    if "labels" in known.names and not is_encoder_decoder(model):  # which have losses of their own
        model.loss_function = model.loss_function  # else each call looks for it, and some warn, which no graph does
    undo = [wrap(m) for m in {id(m): m for m in (model.base_model, model)}.values()]
    undo += hook_positions(model)
    try:
        model.set_attn_implementation(NAME)
        require_taken(model)
        if expected is not None:
            check_packed(model, expected)
    except BaseException:
        for restore in undo:
            restore()
        model.set_attn_implementation(before)
        raise
    return model


def wrap(model: Any) -> Callable[[], None]:
    """Wrap the forward of a model, if it is not wrapped already; a function that puts back what was there."""
    if hasattr(model.forward, "tdc_ragged"):
        return lambda: None
    own, inner = vars(model).get("forward"), unbound(model.forward)
    if is_encoder_decoder(model):
        ragged = encoder_decoder_forward(encoder_decoder_of(model), inner)
    else:
        ragged = ragged_forward(head_of(model), inner)
    ragged.tdc_ragged = True  # by which it is known again
    model.forward = MethodType(ragged, model)

    def restore() -> None:
        vars(model).pop("forward")
        if own is not None:
            model.forward = own

    return restore


def unbound(forward: Any) -> Any:
    """A forward as a function of the model, which copies of the model can share; what others put there as it is."""
    if isinstance(forward, MethodType):
        return forward.__func__
    return wraps(forward)(lambda model, *args, **kwargs: forward(*args, **kwargs))


def ragged_forward(head: Head, inner: Any) -> Any:
    """The forward of a model, which takes and gives ragged batches, and as the model below a head packed ones."""

    @wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        ragged = packed_arguments(head, args, kwargs)
        given = packed_below(head.names, args, kwargs) if ragged is None else ragged
        if given is None:
            return inner(self, *args, **kwargs)
        require_set(self)
        if self.base_model is self:
            rows = given["attention_mask"]
            with counted(Side(rows.keys, rows.totals[1]), "position_ids" in given):
                output = inner(self, **given)
            output = settle_output(output, rows, getattr(self, "pooler", None))
        else:
            output = inner(self, **given)
        if ragged is None or (packed := given[BELOW if head.of_rows else "attention_mask"]).flat:
            return output
        return nest_output(output, packed)

    return forward


def expect_model(model: Any, op: str = OP) -> None:
    """A DtypeError for what is no model of transformers, or one that is wrapped."""
    known = library().PreTrainedModel
    if not isinstance(model, known):
        inside = isinstance(model, nn.Module) and any([isinstance(m, known) for m in model.modules()])
        hint = "tdc.hf.attend(model) first, then compile or wrap it" if inside else "AutoModel.from_config(config)"
        got = f"a {type(model).__name__}" if isinstance(model, nn.Module) else describe(model)
        raise DtypeError(message(op, "a model of transformers", got, hint=hint))


def head_of(model: Any) -> Head:
    """Facts about a model; an UnsupportedError for an unknown head."""
    name, below = type(model).__name__, model.base_model
    if below is not model and not name.endswith((*OF_TOKENS, *OF_ROWS)):
        hint = f"attend({name}.base_model) and a head of your own, or to_hf(batch) for a padded call"
        got = f"{name}, whose head may cross rows"
        raise UnsupportedError(message(OP, f"a model ...{', ...'.join([*OF_TOKENS, *OF_ROWS])}", got, hint=hint))
    require_named(model)
    names = parameters_of(model)
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    last = name.endswith(OF_ROWS) and hasattr(model, "score")  # what such heads are called
    return Head(
        names,
        name.endswith(OF_ROWS),
        name.endswith(CAUSAL),
        first_position(below),
        pad or 0,
        parameters_of(below),
        last,
    )


def encoder_decoder_of(model: Any) -> EncoderDecoder:
    """The arguments of a model of encoder and decoder, or an UnsupportedError for a head that is not known."""
    name, names = type(model).__name__, parameters_of(model)
    if model.base_model is not model and not name.endswith(OF_ENCODER_DECODER):
        hint = f"attend({name}.base_model) and a head of your own, or to_hf(batch) for a padded call"
        got = f"{name}, whose head may cross rows"
        raise UnsupportedError(message(OP, f"a model ...{' or ...'.join(OF_ENCODER_DECODER)}", got, hint=hint))
    require_named(model)
    if not {"encoder_outputs", "decoder_attention_mask"} <= set(names):
        raise UnsupportedError(message(OP, "a model that takes encoder_outputs and targets", name, hint=PADDED))
    if hasattr(model.config, "expert_capacity"):
        got = f"{name}, whose experts take so many tokens of a batch"
        raise UnsupportedError(message(OP, "a model that sees each row alone", got, hint=PADDED))
    return EncoderDecoder(names, parameters_of(model.get_encoder()))


def require_named(model: Any) -> None:
    """An UnsupportedError for a model whose outputs are tuples, or some of which are those of the whole batch."""
    if getattr(model.config, "return_dict", True) is False:
        hint = "model.config.return_dict = True"
        raise UnsupportedError(message(OP, "a model whose outputs have names", "return_dict=False", hint=hint))
    for name in ("output_attentions", "output_router_logits"):
        if getattr(model.config.get_text_config(), name, False):
            hint = f"model.config.{name} = False"
            raise UnsupportedError(message(OP, "outputs that belong to rows", f"{name}=True", hint=hint))


def first_position(model: Any) -> int:
    """The first position id: RoBERTa and its kin count from their padding index, and say so in this method."""
    found = [m for m in model.modules() if hasattr(m, "create_position_ids_from_input_ids")]
    return found[0].padding_idx + 1 if found else 0


def require_taken(model: Any) -> None:
    """An UnsupportedError for a model, or a part of it, that does not take attention functions."""
    parts = [m for m in model.modules() if isinstance(m, library().PreTrainedModel)]
    left = sorted({type(m).__name__ for m in parts if m.config._attn_implementation != NAME})
    if left:
        got, hint = f"{left[0]}, which has its own attention", PADDED
        raise UnsupportedError(message(OP, "a model that takes attention functions", got, hint=hint))
