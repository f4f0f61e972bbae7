"""Generated kernels and library calls, read from the code that Inductor wrote.

A Triton kernel and a C++ kernel are both a name that `async_compile` binds; calls of libraries are `extern_kernels.mm`
or `torch.ops.aten.…`. Which operations a kernel fused, and the user's line of them, Inductor says beside the code
(provenance, torch 2.11-2.13).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tdc.compile._torch.trace import Event
from tdc.compile.report.reasons import user_line

DEFINED = r"(?m)^(\w+) = async_compile\.(\w+)\("
EXTERN = r"(?<![\w.'\"])(extern_kernels\.\w+|torch\.ops\.(?!inductor)\w+\.\w+(?:\.\w+)?)\("
STAGE = r"# AOT ID: \['\d+_(\w+)'\]"
LANGUAGES = {"cpp_pybinding": "C++", "cpp": "C++", "triton": "Triton"}
NUMBER = r"_\d+$"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel that was generated, or one function of a library.

    Attributes:
        name: as in the generated code.
        language: "C++", "Triton" or another that Inductor writes; "library" for what it calls.
        ops: the operations in it, each once.
        where: the user's lines they come from.
        calls: how often one run calls it.
        stage: "forward", "backward" or "inference".
    """

    name: str
    language: str
    ops: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    calls: int = 1
    stage: str = "inference"

    @property
    def generated(self) -> bool:
        """Whether Inductor wrote it."""
        return self.language != "library"


def kernels_of(events: Iterable[Event]) -> tuple[Kernel, ...]:
    """The kernels of one compile, of its forward and backward code, in order of their first call."""
    codes: list[tuple[str, dict[str, list[str]], dict[str, list[str]]]] = []
    for event in events:
        if event.name == "inductor_output_code":
            codes.append((event.text, {}, {}))
        elif event.name == "inductor_provenance_tracking_node_mappings" and codes:
            codes[-1][1].update(json.loads(event.text).get("cppCodeToPost", {}))
        elif event.name == "inductor_provenance_tracking_kernel_stack_traces" and codes:
            codes[-1][2].update(json.loads(event.text))
    return tuple([kernel for code, nodes, stacks in codes for kernel in read(code, nodes, stacks)])


def read(code: str, nodes: Mapping[str, Sequence[str]], stacks: Mapping[str, Sequence[str]]) -> list[Kernel]:
    """The kernels of one generated module, and for each, whose name may end in `:` and a number, nodes and stacks."""
    stage = re.search(STAGE, code)
    languages = {name: LANGUAGES.get(how, how) for name, how in re.findall(DEFINED, code)}
    own = re.compile(rf"(?<![\w.'\"])(?<!def )({'|'.join(map(re.escape, languages)) or '(?!)'})(?:\.run)?\(")
    calls: dict[str, int] = {}
    for line in code.split("\n"):
        for name in [] if line.lstrip().startswith("#") else [*own.findall(line), *re.findall(EXTERN, line)]:
            calls[name] = calls.get(name, 0) + 1
    return [
        Kernel(
            name,
            str(languages.get(name, "library")),
            tuple(dict.fromkeys([re.sub(NUMBER, "", node) for node in entries(nodes, name)])),
            tuple(dict.fromkeys([line for stack in entries(stacks, name) if (line := user_line(stack))])),
            count,
            stage[1] if stage else "inference",
        )
        for name, count in calls.items()
    ]


def entries(table: Mapping[str, Sequence[str]], name: str) -> list[str]:
    """What a table holds for a kernel, of all its calls."""
    return [entry for key, found in table.items() if key.partition(":")[0] == name for entry in found]
