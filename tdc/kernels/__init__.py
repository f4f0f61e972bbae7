"""Operators of our own on tensors and offsets. The only room that may ask for device or mode; it knows no containers.

A rule is plain torch, which Dynamo traces. An operator stands beside it only where a plain rule cannot be exact, or
where whole models or steps are at least 1.5 times faster, with one thread and with two. `OPERATORS` lists all of them,
also those of other rooms; `tests/architecture` compares the list with the registered operators.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """Why an operator is there.

    Attributes:
        plain: the plain rule that it stands for; empty where there is none.
        why: what the plain rule lacks.
        figure: how much faster which model is, and the benchmark that says so; empty where it is not there for speed.
    """

    plain: str
    why: str
    figure: str = ""


VMAP = "torch's batching rules read sizes as numbers, so that a graph would be compiled for each"
ATTENTION = "training step of a stock encoder over padding 0.19 to 0.74, one thread: bench_default"
VISION = "training step of ResNet-18 over padding 0.54 to 0.92: bench_vision"
TAGGER = "training step of a tagger over plain cells 0.34, with two threads 0.41: bench_rnn"
OPERATORS: dict[str, Entry] = {
    "as_size": Entry("", "a total that depends on data becomes a size of the graph, without a guard"),
    "require": Entry("torch's own assertion", "in a loop of several threads its error ends the process"),
    "refused": Entry("", "a derivative that torch would get wrong is an error when it runs, not when it is traced"),
    "to_host": Entry("x.cpu()", "a graph may drop the copy and its way back, which saves memory"),
    "from_host": Entry("x.to(device)", "the same"),
    "take": Entry("torch.index_select, torch.gather", VMAP),
    "put": Entry("torch.index_add, torch.scatter_add", VMAP),
    "extreme_each": Entry("torch.scatter_reduce", VMAP),
    "varlen_attention": Entry("attend_rectangle", "padding, and scores of padding", ATTENTION),
    "varlen_attention_backward": Entry("attend_rectangle", "the same", ATTENTION),
    "cached_attention": Entry(
        "F.scaled_dot_product_attention", "a mask over all memory", "decoding over masks 0.36 to 0.74: bench_decode"
    ),
    "conv_rows": Entry("F.conv2d of a rectangle", "padding", VISION),
    "conv_rows_input": Entry("its gradient", "padding", VISION),
    "conv_rows_weight": Entry("its gradient", "padding", VISION),
    "ctc_loss": Entry("F.ctc_loss", "it reads the width of a table from the lengths, which no graph takes"),
    "ctc_loss_backward": Entry("its gradient", "the same"),
    "rnn": Entry("run_cells", "a call for each step", TAGGER),
    "rnn_backward": Entry("run_cells", "a call for each step", TAGGER),
    "adam_": Entry("arithmetic of each leaf", "nodes of a graph, and passes over memory", "bench_compile, bench_train"),
    "sgd_": Entry("arithmetic of each leaf", "nodes of a graph, and passes over memory", "bench_compile, bench_train"),
}
