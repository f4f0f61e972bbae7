"""What a compile report holds: numbers, and the compiles, breaks and kernels that they count."""

from __future__ import annotations

from dataclasses import dataclass

from tdc.compile.report.kernels import Kernel
from tdc.compile.report.reasons import Break


@dataclass(frozen=True, slots=True)
class Compile:
    """One compile of one graph.

    Attributes:
        graph: which of the pieces of the function, counted from 0.
        ops: operations in the graph.
        seconds: spent in the backend.
        causes: why the compiles before it could not be used; none for the first.
        guards: conditions that each call is checked for.
        kernels: what the backend generated and what it calls; only Inductor tells.
        bytes_moved: read and written by its kernels, estimated for the sizes it was compiled with; None if unknown.
    """

    graph: int
    ops: int
    seconds: float
    causes: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    bytes_moved: int | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """What compiling a function over some examples did; see `Report`."""

    name: str
    backend: str
    examples: int
    breaks: tuple[Break, ...]
    compiles: tuple[Compile, ...]
    call_us: float | None = None
    raw_us: float | None = None
    peak_bytes: int | None = None

    @property
    def newest(self) -> tuple[Compile, ...]:
        """The newest compile of each graph."""
        return tuple({c.graph: c for c in self.compiles}.values())

    @property
    def graphs(self) -> int:
        """Pieces the function was cut into; 1: it compiled whole."""
        return len(self.newest)

    @property
    def recompiles(self) -> tuple[Compile, ...]:
        """Compiles of a graph that had been compiled before."""
        seen: set[int] = set()
        return tuple([c for c in self.compiles if c.graph in seen or seen.add(c.graph)])

    @property
    def guards(self) -> tuple[str, ...]:
        """Conditions that a call is checked for."""
        return tuple([guard for c in self.newest for guard in c.guards])

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Kernels generated for a call."""
        return tuple([k for c in self.newest for k in c.kernels if k.generated])

    @property
    def externs(self) -> tuple[Kernel, ...]:
        """Functions of libraries that a call uses, such as a matrix product."""
        return tuple([k for c in self.newest for k in c.kernels if not k.generated])

    @property
    def bytes_moved(self) -> int | None:
        """Bytes that the kernels of a call read and write, estimated; None where the backend does not tell."""
        known = [c.bytes_moved for c in self.newest if c.bytes_moved is not None]
        return sum(known) if known else None

    @property
    def overhead_us(self) -> float | None:
        """Microseconds of a warm call beyond the compiled graphs: guards, taking containers apart, building results."""
        return None if self.call_us is None or self.raw_us is None else self.call_us - self.raw_us
