"""The attention mask that a model of transformers gets while its batch is packed.

A packed batch goes through a model as one sequence (1, N, ...), the rows behind one another. Only attention must know
where rows begin, and only the attention mask goes to each attention of a model, through its layers, their checkpoints
and the functions that make masks. So the rows travel as the mask.

Invariants: it is no tensor, so whatever computes with it as one fails, and does not see other rows; what lies in it is
never changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tdc.layout.structure import Structure

OP = "hf.attend"
CROSS = "tdc_cross"  # the argument for attention whose mask the model leaves out, of targets to sources
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
