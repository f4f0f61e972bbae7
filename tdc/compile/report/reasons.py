"""Messages of torch.compile in the terms of the user's code: guards, causes of recompiles, graph breaks, kernels.

    tensor 'td._leaves['x']._values' size mismatch at index 0. expected 5, actual 7
    td['x'].values: size of dim 0 was 5, now 7

Reads texts, and generated code with its provenance, of torch 2.11-2.13; unknown texts stay, with the user's names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tdc.compile._torch.dynamo import Event

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
# Texts, which `re` compiles when they are first used: as patterns they would take 3 ms of each import of the package.
FRAME = r'File "(.+?)", line (\d+), in (\S+)'
GUARD = r"\+- ([A-Z_]+): (.+)"
ID = r"^(\d+)/(\d+): "
TYPE = r"___check_type_id\(((?:(?!___check).)+?), \d+\)"
CLASS = r", type=<class '(.+?)'>"
OBJECT = r"___check_obj_id\((.+?), \d+\)"
CAUSES = (  # guards that fail, and what is said of them: the first that fits
    (r"tensor '(.+)' (.+?) mismatch at index (\d+)\. expected (.+), actual (.+)", r"\1: \2 of dim \3 was \4, now \5"),
    (r"tensor '(.+)' (.+?) mismatch\. expected (.+), actual (.+)", r"\1: \2 was \3, now \4"),
    (TYPE + CLASS, r"type of \1 is not \2 any more"),
    (TYPE, r"type of \1 is another"),
    (OBJECT, r"\1 is another object"),
    (r"(len\(.+\)) [!=]= (\d+)$", r"\1 is not \2 any more"),
    (r".*BACKEND_MATCH", "compiled before with another backend"),
    (r"2 <= [^<>]+$", r"not \g<0> any more (torch compiles sizes 0 and 1 apart)"),
    (r".*", r"not \g<0> any more"),
)
CONDITIONS = (  # guards, and what is said of them
    (r"check_tensor\((.+), (\w+), DispatchKeySet\(.*?\), torch\.(\w+), (.+)\)$", r"\1 is a \2 of \3, \4"),
    (TYPE + CLASS, r"type of \1 is \2"),
    (TYPE, r"type of \1 is the same"),
    (OBJECT, r"\1 is the same object"),
    (r".*", r"\g<0>"),
)
NAMES = (
    (r"\b[LG]\['(\w+)'\]", r"\1"),
    (r"\._leaves\[\(?([^)\]]*)\)?\]", r"[\1]"),
    (r"len\((.+?)\._leaves\)", r"len(\1.keys())"),
    (r"\._(?:parameters|buffers|modules)\['([^\d]\w*)'\]", r".\1"),
    (r"\._modules\['(\d+)'\]", r"[\1]"),
    (r"\._structure\.extent\.size\(\)\[(\d+)\]", r".max_length[\1]"),
    (r"\._structure\.extent\b", ".max_length"),
    (r"\._structure\.(offsets|shapes)\b", r".\1"),
    (r"\._(values|data|lengths)\b", r".\1"),
    (r"\.(size|stride)\(\)\[(\d+)\]", r".\1(\2)"),
)
DEFINED = r"(?m)^(\w+) = async_compile\.(\w+)\("
EXTERN = r"(?<![\w.'\"])(extern_kernels\.\w+|torch\.ops\.(?!inductor)\w+\.\w+(?:\.\w+)?)\("
STAGE = r"# AOT ID: \['\d+_(\w+)'\]"
LANGUAGES = {"cpp_pybinding": "C++", "cpp": "C++", "triton": "Triton"}
NUMBER = r"_\d+$"


@dataclass(frozen=True, slots=True)
class Break:
    """Reason of a graph break, the user's line, and a hint."""

    reason: str
    where: str = ""
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.reason} at {self.where}" if self.where else self.reason


def user_terms(text: str) -> str:
    """Sources of guards as the user writes them.

    Example:
        >>> user_terms("2 <= L['td']._leaves['x']._values.size()[0]")
        "2 <= td['x'].values.size(0)"
    """
    for pattern, replacement in NAMES:
        text = re.sub(pattern, replacement, text)
    return text


def cause_of(text: str) -> str:
    """The guard that failed, in one line.

    Example:
        >>> cause_of("tensor 'x' size mismatch at index 0. expected 2, actual 3")
        'x: size of dim 0 was 2, now 3'
    """
    return told(re.sub(ID, "", text).split("\n")[0], CAUSES)


def told(text: str, table: Iterable[tuple[str, str]]) -> str:
    """A guard in the user's terms, as the first row of a table that fits says it."""
    head = user_terms(text.split("  # ")[0].strip())
    return next(found.expand(words) for pattern, words in table if (found := re.match(pattern, head)))


def causes_of(payload: str, known: set[tuple[int, int]]) -> tuple[str, ...]:
    """Causes of a recompile, one for each of the `known` compiles, the newest first.

    Other compiles had another backend. The event `recompile_reasons` holds one text, or a list of them as JSON.
    """
    try:
        texts = json.loads(payload)
    except ValueError:
        texts = payload
    own = []
    for text in [texts] if isinstance(texts, str) else texts:
        found = re.match(ID, text)
        if found and (int(found[1]), int(found[2])) in known:
            own.append(cause_of(text))
    return tuple(dict.fromkeys(own))


def guards_of(payload: str) -> tuple[str, ...]:
    """The conditions that a call is checked for, from the event `dynamo_cpp_guards_str`; those of arguments first.

    Example:
        >>> guards_of("| +- GuardManager: source=L['k']\\n| | +- EQUALS_MATCH: L['k'] == 1  # return x*k")
        ('k == 1',)
    """
    found = [match[2] for line in payload.split("\n") if (match := re.search(GUARD, line))]
    found.sort(key=lambda text: "L['" not in text or "_dynamo_" in text)
    return tuple([told(text, CONDITIONS) for text in found])


def user_line(stack: str) -> str:
    """Innermost line of a stack outside of torch and this library, its file relative to the working directory; else the
    innermost.
    """
    frames = re.findall(FRAME, stack)
    own = [frame for frame in frames if not frame[0].startswith(LIBRARIES)]
    if not frames:
        return ""
    file, line, function = (own or frames)[-1]
    short = os.path.relpath(file)
    return f"{file if short.startswith('..') else short}:{line} in {function}"


def break_of(payload: str) -> Break:
    """A graph break from the event `dynamo_graph_break_reason`."""
    said, _, stack = payload.partition("User code traceback:")
    stack = stack.partition("Traceback (most recent call last)")[0]
    reason = said.partition("Graph Break Reason:")[2] or said
    reason = re.sub(r"^\s*Encountered graph break when attempting to trace [^\n]*\n", "", reason)
    lines = [line.strip() for line in reason.strip().split("\n")]
    first = next((line for line in lines if line), "unknown")
    explanation = next((line.partition(": ")[2] for line in lines if line.startswith("Explanation:")), "")
    hint = next((line.partition(": ")[2] for line in lines if line.startswith("Hint:")), "")
    at = re.search(r"Graph [Bb]reak.* in user code at (.+):(\d+)", said)
    where = user_line(stack) or (f"{at[1]}:{at[2]}" if at else "")
    return Break(f"{first}: {explanation}" if explanation else first, where, hint)


# -- kernels


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
        """True if Inductor wrote it."""
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
    """Entries of a table for all calls of a kernel."""
    return [entry for key, found in table.items() if key.partition(":")[0] == name for entry in found]
