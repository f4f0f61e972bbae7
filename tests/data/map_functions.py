"""Functions that workers import, and executors that keep count."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import torch

import tdc
from tdc import TensorDict

SIX = 6.0  # is in the third example, x[3] = [6, 7]


def data(n: int = 10) -> TensorDict:
    """Dense and ragged leaves, an inner node and a Static value."""
    x = torch.arange(2.0 * n).view(n, 2)
    text = tdc.pack([torch.full((i % 3,), float(i)) for i in range(n)])
    return TensorDict({"x": x, "text": text, "in": {"id": torch.arange(n)}, "split": tdc.Static("train")}, [n])


def doubled(part: TensorDict) -> TensorDict:
    return part.set("y", part["x"] * 2)


def only_y(part: TensorDict) -> TensorDict:
    return doubled(part).select("y")


def first_column(part: TensorDict) -> torch.Tensor:
    return part["x"][:, 0]


def texts(part: TensorDict) -> tdc.NestedTensor:
    return part["text"] + 1


def nothing(part: TensorDict) -> None:
    return None


def in_place(part: TensorDict) -> TensorDict:
    array = part["x"].numpy()
    array *= 2
    return part


def slow_first(part: TensorDict) -> TensorDict:
    """The sooner a part comes, the longer it takes."""
    time.sleep(0.02 if part["x"][0, 0] == 0 else 0)
    return doubled(part)


def fails(part: TensorDict) -> TensorDict:
    if SIX in part["x"]:
        raise ZeroDivisionError("six")
    return part


class Two(Exception):
    """Made of two things and pickled with one text, as errors of many libraries are."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(f"{a} and {b}")


def fails_with_two(part: TensorDict) -> TensorDict:
    if part["x"][0, 0] > 0:
        raise Two("a", "b")
    return part


def fails_with_a_lambda(part: TensorDict) -> TensorDict:
    try:
        return fails_with_two(part)
    except Two as error:
        error.args = (*error.args, lambda: 0)
        raise


def another_dtype(part: TensorDict) -> TensorDict:
    return part.set("y", part["x"].double() if SIX in part["x"] else part["x"])


def another_key(part: TensorDict) -> TensorDict:
    return part.rename_keys({"x": "z"}) if SIX in part["x"] else part


def another_shape(part: TensorDict) -> TensorDict:
    return part.set("x", part["x"][:, :1]) if SIX in part["x"] else part


def no_dims(part: TensorDict) -> TensorDict:
    return TensorDict({"sum": part["x"].sum()}) if SIX in part["x"] else TensorDict({"sum": torch.zeros(1)}, [1])


def some(part: TensorDict) -> Any:
    return None if SIX in part["x"] else part


def a_number(part: TensorDict) -> float:
    return float(part["x"].sum())


def killed(part: TensorDict) -> TensorDict:
    """Ends its process, as the system does when memory runs out."""
    if SIX in part["x"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return only_y(part)


def killed_once(flag: str, part: TensorDict) -> TensorDict:
    if SIX in part["x"] and not os.path.exists(flag):
        open(flag, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return only_y(part)


class Manual(Executor):
    """Runs nothing before it is told to, and counts what is submitted and not done."""

    def __init__(self) -> None:
        self.calls: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.most = self.submitted = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.submitted += 1
        self.calls.append((future, lambda: fn(*args, **kwargs)))
        self.most = max(self.most, len(self.calls))
        return future

    def run_last(self) -> None:
        """Run what was submitted last, and what has been cancelled not at all."""
        future, call = self.calls.pop()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)


@tdc.tensorclass
class Point:
    """A tensorclass of a user."""

    xy: torch.Tensor
    name: str = "here"


def moved(part: Any) -> Any:
    return part.replace(xy=part.xy + 1)


def in_a_dict(part: TensorDict) -> Any:
    return {"x": part["x"], "pair": (part["x"][0], part), "text": [part["text"], part["text"] * 2], "name": "a"}


def same(part: Any) -> Any:
    return part


def plus_one(part: TensorDict) -> TensorDict:
    return part + 1


def with_graph(part: TensorDict) -> TensorDict:
    return part * torch.ones((), requires_grad=True)


def with_lambdas(part: TensorDict) -> TensorDict:
    return part.set("f", tdc.ObjectArray([lambda: None] * len(part)))
