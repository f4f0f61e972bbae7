"""Methods that the rule table attaches, as users call them; `tensorclasses.py` says how to read it."""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor

import tdc


def of_nested(nt: tdc.NestedTensor, td: tdc.TensorDict, x: Tensor) -> None:
    assert_type(nt.relu(), tdc.NestedTensor)
    assert_type(nt.softmax(1).exp() + 1, tdc.NestedTensor)
    assert_type(2 * nt - x, tdc.NestedTensor)
    assert_type(-nt == nt, tdc.NestedTensor)
    assert_type(nt.transpose(1, 2), tdc.NestedTensor)
    assert_type(nt.chunk(2, 2), tuple[tdc.NestedTensor, ...])
    assert_type(nt.float().add(x, alpha=2), tdc.NestedTensor)
    assert_type(nt.sort(1).indices, tdc.NestedTensor)
    assert_type(nt.sum(), Tensor)
    assert_type(nt.sum(1), Any)
    assert_type(nt.max(1).values, Any)
    assert_type(nt.max(nt), tdc.NestedTensor)
    assert_type(nt.equal(nt), bool)
    assert_type(nt.shape, torch.Size)
    assert_type(nt.nbytes, int)
    assert_type(nt.to_padded(), tdc.MaskedBatch)
    assert_type(nt.to_padded().relu(), tdc.MaskedBatch)
    assert_type(nt.to_padded().tolist(), list[Any])
    assert_type(nt + td, tdc.TensorDict)
    assert_type(hash(nt), int)

    nt.rleu()  # expect: reportAttributeAccessIssue attr-defined
    nt.relu_()  # expect: reportAttributeAccessIssue attr-defined
    nt.add("1")  # expect: reportArgumentType arg-type
    nt.add(nt.to_padded())  # expect: reportArgumentType arg-type
    print(nt + nt.to_padded())  # expect: reportOperatorIssue operator
    nt.transpose(1)  # expect: reportCallIssue call-arg


def of_dicts(td: tdc.TensorDict, nt: tdc.NestedTensor) -> None:
    assert_type(td.sum(), tdc.TensorDict)
    assert_type(td.sum(0), tdc.TensorDict)
    assert_type(td.max(0).values, tdc.TensorDict)
    assert_type(td.relu() * 2 + nt, tdc.TensorDict)
    assert_type(td.unbind(0), tuple[tdc.TensorDict, ...])
    assert_type(td.dtype, torch.dtype | None)
    assert_type(td.is_empty(), bool)

    td.smu()  # expect: reportAttributeAccessIssue attr-defined
    td.addmm(td, td)  # expect: reportAttributeAccessIssue attr-defined
    print(td.T)  # expect: reportAttributeAccessIssue attr-defined


class Point(tdc.TensorClass):
    xy: Tensor


def of_tensorclasses(p: Point) -> None:
    assert_type(p.abs(), Point)
    assert_type(p + 1, Point)
    print(p.yx)  # expect: reportAttributeAccessIssue attr-defined
