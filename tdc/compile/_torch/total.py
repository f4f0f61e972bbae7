"""Total code: traced code that runs on any finite values without an error, and with a finite derivative.

Code for inactive examples must not run on values it was not written for, else errors, and NaN in gradients, come from
there. Most code is `total`: additions, products, indices that are numbers; it needs no `cond` around it.

    getitem(x, 0)         total: its sizes are known      getitem(x, i)         not: a tensor may be out of range
    div(x, 2)             total                           div(x, y), log, exp   not
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.fx import Node

from tdc.compile._torch.dynamo import current_tracer, has_comptime
from tdc.compile._torch.tracing import (
    BEGINNINGS,
    at_trace_time,
    note_beginning,
    remove_assertions,
    trace_outside,
    translator,
)
from tdc.core.dynamo import constant

X = TypeVar("X")
POINTWISE = (
    "abs", "add", "and_", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "celu", "clamp",
    "clamp_max", "clamp_min", "cos", "dropout", "elu", "eq", "fill", "floor", "ge", "gelu", "gt", "hardsigmoid",
    "hardswish", "hardtanh", "invert", "isfinite", "isinf", "isnan", "le", "leaky_relu", "logical_and", "logical_not",
    "logical_or", "logical_xor", "logsigmoid", "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "multiply",
    "ne", "neg", "not_", "or_", "pos", "relu", "relu6", "round", "rsub", "selu", "sigmoid", "sign", "silu", "sin",
    "softplus", "softsign", "square", "sub", "subtract", "tanh", "trunc", "where", "xor",
)  # fmt: skip
REDUCING = (
    "all", "amax", "amin", "any", "argmax", "argmin", "argsort", "count_nonzero", "cumsum", "log_softmax", "max",
    "mean", "min", "softmax", "sort", "sum", "var",
)  # fmt: skip
PRODUCTS = (
    "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "dot", "einsum", "group_norm", "layer_norm", "linear",
    "matmul", "mm", "mv", "outer", "rms_norm",
)  # fmt: skip
SHAPES = (
    "broadcast_to", "cat", "chunk", "clone", "concat", "contiguous", "detach", "diff", "dim", "expand", "expand_as",
    "flatten", "flip", "movedim", "narrow", "numel", "permute", "repeat", "reshape", "roll", "size", "split", "squeeze",
    "stack", "sym_max", "sym_min", "t", "transpose", "tril", "triu", "unbind", "unflatten", "unsqueeze", "view",
    "view_as",
)  # fmt: skip
MAKING = (
    "arange", "bool", "double", "eye", "float", "full", "full_like", "half", "int", "long", "new_full", "new_ones",
    "new_zeros", "ones", "ones_like", "tensor", "to", "type_as", "zeros", "zeros_like",
)  # fmt: skip
LEVELS = (  # of vmap
    "_add_batch_dim", "_remove_batch_dim", "_vmap_decrement_nesting", "_vmap_increment_nesting", "is_batchedtensor",
    "pop_dynamic_layer_stack", "push_dynamic_layer_stack",
)  # fmt: skip
TOTAL = frozenset((*POINTWISE, *REDUCING, *PRODUCTS, *SHAPES, *MAKING, *LEVELS))
DIVISIONS = ("div", "divide", "floor_divide", "floordiv", "fmod", "mod", "remainder", "true_divide", "truediv")
ATTRIBUTES = ("T", "H", "mT", "mH", "dtype", "device", "ndim", "shape")


def traced_for_all(fn: Callable[..., X], *args: Any) -> tuple[X, bool]:
    """Call `fn`; the bool is True if its code is total, and so part of the graph.

    Other code, and code outside of Dynamo, is traced by `trace_outside`, and again inside an operator.
    """
    if not torch.compiler.is_dynamo_compiling() or not has_comptime():
        return trace_outside(fn, *args), False
    at_trace_time(note_beginning)
    out = fn(*args)
    if is_total():
        at_trace_time(forget_beginning)
        return out, True
    at_trace_time(remove_assertions)
    return out, False


def forget_beginning(context: Any) -> None:
    """Take back the last `note_beginning`."""
    BEGINNINGS[translator(context).output.graph].pop()


@constant
def is_total() -> bool:
    """True if all nodes since the last `note_beginning` are total."""
    tracer = current_tracer()
    if tracer is None:
        return False
    graph = tracer.graph
    begin = BEGINNINGS[graph][-1]
    for node in reversed(graph.nodes):
        if node is begin:
            break
        if not total_node(node):
            return False
    return True


def total_node(node: Node) -> bool:
    """True if a node of a graph is total."""
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.op not in ("call_function", "call_method") or "out" in node.kwargs or node.kwargs.get("inplace"):
        return False
    if node.op == "call_method":
        name = str(node.target)
    else:
        module = getattr(node.target, "__module__", None) or ""
        name = getattr(node.target, "__name__", "") if module.partition(".")[0] in ("torch", "_operator") else ""
    given = node.args[1] if len(node.args) > 1 else None
    if name in TOTAL:
        return name != "narrow" or not has_node((node.args[1:], node.kwargs))
    if name == "getitem":
        return not has_node(given)
    if name == "getattr":
        return given in ATTRIBUTES
    if name in DIVISIONS:
        return isinstance(given, (int, float)) and given != 0
    return name == "pow" and given in (1, 2)


def has_node(given: Any) -> bool:
    """True if an index or arguments have a tensor or a size that varies."""
    found: list[Node] = []
    torch.fx.map_arg(given, found.append)
    return bool(found)
