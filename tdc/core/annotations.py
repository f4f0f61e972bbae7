"""Annotations of a class and parameters of a function, read alike on all versions of Python.

From Python 3.14 on annotations are a function that computes them; `from __future__ import annotations` makes them
texts.

Invariant: an annotation with a name that is not defined is its text, and hides no other.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import GenericAlias, UnionType
from typing import Any, ForwardRef, Union, get_args, get_origin, get_type_hints

if sys.version_info >= (3, 14):
    from annotationlib import Format, call_annotate_function, get_annotate_from_class_namespace

UNREADABLE = (NameError, TypeError, AttributeError, SyntaxError)


def annotations_in(body: Mapping[str, Any]) -> dict[str, Any]:
    """Annotations of the body of a class as they stand there."""
    if sys.version_info >= (3, 14) and "__annotations__" not in body:
        lazy = get_annotate_from_class_namespace(dict(body))
        if lazy is not None:
            found, texts = [call_annotate_function(lazy, form) for form in (Format.FORWARDREF, Format.STRING)]
            return {name: texts[name] if is_open(note) else note for name, note in found.items()}
    return dict(body.get("__annotations__", {}))


def is_open(note: Any) -> bool:
    """Tell that an annotation, or a part of it, stands for what is not defined yet."""
    return isinstance(note, ForwardRef) or any([is_open(part) for part in get_args(note)])


def evaluated(cls: Any, notes: Mapping[str, Any]) -> dict[str, Any]:
    """Annotations from the body of a class as types; in texts the name of the class is known, too."""
    inner: dict[str, Any] = getattr(sys.modules.get(cls.__module__), "__dict__", {}).copy()
    inner |= {p.__name__: p for p in getattr(cls, "__type_params__", ())}  # of `class A[T]`, in Python 3.12 and later
    around = cls.__qualname__.rpartition(".")[0]
    if not around or around.endswith("<locals>"):  # else Python, too, finds it only through the class around it
        inner[cls.__name__] = cls
    return {name: evaluated_one(note, name, dict(cls.__dict__), inner) for name, note in notes.items()}


def evaluated_one(note: Any, name: str, outer: dict[str, Any], inner: dict[str, Any]) -> Any:
    """One annotation as `get_type_hints` gives it, which looks into the module before the body of the class."""
    alone = type("Alone", (), {"__annotations__": {name: note}})
    try:
        return get_type_hints(alone, outer, inner)[name]
    except UNREADABLE:
        return note


def hints(cls: Any) -> dict[str, Any]:
    """Annotations of a class and of those that it inherits from, as types."""
    classes: list[Any] = list(reversed(cls.__mro__))
    return {n: note for c in classes for n, note in evaluated(c, annotations_in(c.__dict__)).items()}


def meant(note: Any) -> Any:
    """An annotation with what the aliases of `type` statements in it, and in the parts of a union, stand for."""
    args, origin = get_args(note), get_origin(note)
    if origin in (Union, UnionType):
        return Union[tuple([meant(part) for part in args])]  # noqa: UP007  # of parts known at run time
    alias: Any = note if origin is None else origin
    try:
        return meant(filled(alias.__value__, dict(zip(alias.__type_params__, args, strict=False))))
    except (AttributeError, NameError):  # no alias, or one of what is not defined yet
        return note


def filled(note: Any, given: dict[Any, Any]) -> Any:
    """An annotation with others in place of type parameters."""
    whole: Any = GenericAlias(tuple, (note,))  # which finds them in any annotation
    found = whole.__parameters__
    return get_args(whole[tuple([given.get(p, p) for p in found])])[0] if found and given else note


def python_signature(fn: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function, whether or not the names in its annotations are defined."""
    if sys.version_info >= (3, 14):
        return inspect.signature(fn, annotation_format=Format.FORWARDREF)
    return inspect.signature(fn)
