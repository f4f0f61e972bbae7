"""The arguments of an operation that takes dims, as its row writes them: torch's names in torch's order.

    "input dim**=None keepdim dtype"     ** one dim or several; without one all elements
    "input k dim*=-1 largest sorted"     * one dim; without one the last
    "input dim* index+ src+"             a dim that must be given; + operands with the dims of the first

Rows for other containers are derived from this text: a TensorDict counts the dims among its batch dims, a batch of two
levels among those of an inner example, and `tdc.batch` among those of one example.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NEEDED: Any = object()  # the default of a dim that must be given
MARKS = "*+"


@dataclass(frozen=True, slots=True)
class Dims:
    """The arguments of an operation, and which of them are dims.

    Attributes:
        names: all arguments; the first is the batch.
        defaults: each dim with its default: a number, None for all elements, or NEEDED.
        operands: the arguments that have the dims of the batch.
        several: True if torch takes a tuple of dims.
    """

    names: tuple[str, ...]
    defaults: tuple[tuple[str, Any], ...]
    operands: tuple[str, ...]
    several: bool

    @property
    def default(self) -> Any:
        """The default of the first dim."""
        return self.defaults[0][1]

    @property
    def position(self) -> int:
        """Position of the first dim behind the batch."""
        return self.names.index(self.defaults[0][0]) - 1


def read_dims(text: str) -> Dims:
    """The arguments that a row is written as."""
    names: list[str] = []
    operands: list[str] = []
    defaults: list[tuple[str, Any]] = []
    for word in text.split():
        marked, _, default = word.partition("=")
        names.append(marked.rstrip(MARKS))
        if "*" in marked:
            value = NEEDED if not default else None if default == "None" else int(default)
            defaults.append((names[-1], value))
        elif "+" in marked:
            operands.append(names[-1])
    return Dims(tuple(names), tuple(defaults), tuple(operands), "**" in text)
