"""What people read when they print a container. `EXPECTTEST_ACCEPT=1` writes the texts anew."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from expecttest import TestCase
from torch import nn

import tdc
from tdc import MaskedBatch, NestedTensor, Static, TensorDict


def lines(x: Any) -> str:
    """A one-line repr, one part a line."""
    return re.sub(", (?=[a-z])", ",\n    ", repr(x))


class TestTensorDict(TestCase):
    def test_rfc_first_print(self):
        data = TensorDict(
            {
                "tensor": torch.zeros(3),
                "from_np": np.zeros((3,)),
                "from_int": 1,
                "from_list": [[1, 2, 3]],
                "from_dict": {"a": 1},
            },
            batch_size=[],
        )
        self.assertExpectedInline(
            repr(data),
            """\
TensorDict(
    fields={
        from_dict: TensorDict(
            fields={
                a: Tensor(shape=torch.Size([]), device=cpu, dtype=torch.int64, is_shared=False)},
            batch_size=torch.Size([]),
            device=None,
            is_shared=False),
        from_int: Tensor(shape=torch.Size([]), device=cpu, dtype=torch.int64, is_shared=False),
        from_list: Tensor(shape=torch.Size([1, 3]), device=cpu, dtype=torch.int64, is_shared=False),
        from_np: Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.float64, is_shared=False),
        tensor: Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.float32, is_shared=False)},
    batch_size=torch.Size([]),
    device=None,
    is_shared=False)""",
        )

    def test_rfc_second_print(self):
        net = nn.Sequential(nn.Linear(3, 4))
        params = TensorDict(dict(net.named_parameters())).unflatten_keys(".")
        self.assertExpectedInline(
            repr(params),
            """\
TensorDict(
    fields={
        0: TensorDict(
            fields={
                bias: Parameter(shape=torch.Size([4]), device=cpu, dtype=torch.float32, is_shared=False),
                weight: Parameter(shape=torch.Size([4, 3]), device=cpu, dtype=torch.float32, is_shared=False)},
            batch_size=torch.Size([]),
            device=None,
            is_shared=False)},
    batch_size=torch.Size([]),
    device=None,
    is_shared=False)""",
        )

    def test_ragged_leaves(self):
        x = tdc.pack([torch.zeros(3), torch.ones(4)])
        td = TensorDict({"nested_tensor": x, "masked": x.to_padded()}, batch_size=[2])
        self.assertExpectedInline(
            repr(td),
            """\
TensorDict(
    fields={
        masked: MaskedBatch(shape=torch.Size([2, 4]), device=cpu, dtype=torch.float32, is_shared=False),
        nested_tensor: NestedTensor(shape=torch.Size([2, -1]), device=cpu, dtype=torch.float32, is_shared=False)},
    batch_size=torch.Size([2]),
    device=None,
    is_shared=False)""",
        )

    def test_empty(self):
        self.assertExpectedInline(
            repr(TensorDict(batch_size=[3, 2], device="cpu")),
            """\
TensorDict(
    fields={
    },
    batch_size=torch.Size([3, 2]),
    device=cpu,
    is_shared=False)""",
        )

    def test_nested_and_empty_nodes(self):
        inner = TensorDict({"x": torch.zeros(2, 5, 3)}, [2, 5])
        self.assertExpectedInline(
            repr(TensorDict({"b": inner, "a": {"none": {}}}, [2])),
            """\
TensorDict(
    fields={
        a: TensorDict(
            fields={
                none: TensorDict(
                    fields={
                    },
                    batch_size=torch.Size([2]),
                    device=None,
                    is_shared=False)},
            batch_size=torch.Size([2]),
            device=None,
            is_shared=False),
        b: TensorDict(
            fields={
                x: Tensor(shape=torch.Size([2, 5, 3]), device=cpu, dtype=torch.float32, is_shared=False)},
            batch_size=torch.Size([2, 5]),
            device=None,
            is_shared=False)},
    batch_size=torch.Size([2]),
    device=None,
    is_shared=False)""",
        )

    def test_shared_memory(self):
        td = TensorDict({"a": torch.zeros(2).share_memory_(), "b": {"c": torch.zeros(2)}}, [2])
        self.assertExpectedInline(
            repr(td),
            """\
TensorDict(
    fields={
        a: Tensor(shape=torch.Size([2]), device=cpu, dtype=torch.float32, is_shared=True),
        b: TensorDict(
            fields={
                c: Tensor(shape=torch.Size([2]), device=cpu, dtype=torch.float32, is_shared=False)},
            batch_size=torch.Size([2]),
            device=None,
            is_shared=False)},
    batch_size=torch.Size([2]),
    device=None,
    is_shared=False)""",
        )

    def test_leaves_that_are_no_tensors(self):
        td = torch.utils._pytree.tree_map(lambda _: 0, TensorDict({"a": torch.zeros(2), "b": {"c": 1}}))
        self.assertExpectedInline(
            repr(td),
            """\
TensorDict(
    fields={
        a: int,
        b: TensorDict(
            fields={
                c: int},
            batch_size=unknown,
            device=None,
            is_shared=False)},
    batch_size=unknown,
    device=None,
    is_shared=False)""",
        )

    def test_objects_and_static_values(self):
        td = TensorDict({"who": tdc.ObjectArray(["ada", "bob"]), "split": Static("train" * 30)}, [2])
        self.assertExpectedInline(
            repr(td),
            """\
TensorDict(
    fields={
        split: Static('traintraintraintraintraintraintraintraintraintraintraintraintraintraintraint...),
        who: ObjectArray(shape=torch.Size([2]))},
    batch_size=torch.Size([2]),
    device=None,
    is_shared=False)""",
        )

    def test_no_values(self):
        secret = torch.tensor([1234.5])
        for x in (TensorDict({"a": secret}), tdc.pack([secret]), MaskedBatch(secret[None], torch.tensor([1]))):
            assert "1234" not in repr(x)


class TestNestedTensor(TestCase):
    def test_one_ragged_dim(self):
        self.assertExpectedInline(
            lines(tdc.pack([torch.zeros(2, 4), torch.zeros(3, 4)])),
            """\
NestedTensor(shape=torch.Size([2, -1, 4]),
    packed=(5, 4),
    dtype=torch.float32,
    device=cpu)""",
        )

    def test_several_ragged_dims(self):
        x = tdc.pack([torch.zeros(3, 2, 4).char(), torch.zeros(3, 1, 1).char()], ragged_dim=(2, 3))
        self.assertExpectedInline(
            lines(x),
            """\
NestedTensor(shape=torch.Size([2, 3, -1, -1]),
    packed=(3, 9),
    dtype=torch.int8,
    device=cpu)""",
        )

    def test_no_rows(self):
        self.assertExpectedInline(
            lines(NestedTensor(torch.zeros(0, 4), torch.zeros(1, dtype=torch.int64))),
            """\
NestedTensor(shape=torch.Size([0, -1, 4]),
    packed=(0, 4),
    dtype=torch.float32,
    device=cpu)""",
        )


class TestMaskedBatch(TestCase):
    def test_one_ragged_dim(self):
        self.assertExpectedInline(
            lines(MaskedBatch(torch.zeros(2, 3, 4), torch.tensor([3, 1]))),
            """\
MaskedBatch(shape=torch.Size([2, 3, 4]),
    ragged_dims=(1,),
    dtype=torch.float32,
    device=cpu)""",
        )

    def test_several_ragged_dims(self):
        lengths = torch.ones(1, 2, dtype=torch.int64, device="meta")
        x = MaskedBatch(torch.zeros(1, 2, 3, 4, device="meta"), lengths, ragged_dims=(2, 3))
        self.assertExpectedInline(
            lines(x),
            """\
MaskedBatch(shape=torch.Size([1, 2, 3, 4]),
    ragged_dims=(2, 3),
    dtype=torch.float32,
    device=meta)""",
        )


class TestHtml(TestCase):
    def test_tree(self):
        x = tdc.pack([torch.zeros(1, 4), torch.zeros(2, 4)])
        td = TensorDict({"x": x, "meta": {"id": torch.arange(2)}}, [2])
        html = re.sub("(?<=>) ?(?=<)|(?<=})(?=.tdc)", "\n", td._repr_html_())
        self.assertExpectedInline(
            html,
            """\
<div class="tdc">
<style>.tdc ul{list-style:none;margin:0;padding-left:1.5em}
.tdc summary{cursor:pointer}
.tdc span{margin-left:.75em}
.tdc span[title=device],.tdc span[title=bytes]{opacity:.7}</style>
<details open>
<summary>
<code>TensorDict</code>
<span title="shape">batch_size=[2]</span>
<span title="bytes">88 B</span>
</summary>
<ul>
<li>
<code>x</code>
<span title="kind">NestedTensor</span>
<span title="shape">[2, -1, 4]</span>
<span title="dtype">float32</span>
<span title="device">cpu</span>
<span title="bytes">72 B</span>
</li>
<li>
<details open>
<summary>
<code>meta</code>
<span title="kind">TensorDict</span>
<span title="shape">batch_size=[2]</span>
<span title="bytes">16 B</span>
</summary>
<ul>
<li>
<code>id</code>
<span title="kind">Tensor</span>
<span title="shape">[2]</span>
<span title="dtype">int64</span>
<span title="device">cpu</span>
<span title="bytes">16 B</span>
</li>
</ul>
</details>
</li>
</ul>
</details>
</div>""",
        )

    def test_objects_and_static_values(self):
        entries = {"who": tdc.ObjectArray(["ada", "bob"]), "split": Static("<b>" * 30), "": {"x": torch.zeros(2)}}
        html = TensorDict(entries, [2])._repr_html_()
        assert '<code>who</code> <span title="kind">ObjectArray</span> <span title="shape">[2]</span></li>' in html
        assert "<b>" not in html
        assert "&lt;b&gt;&lt;...</span>" in html
        assert html.count("<style>") == 1  # a node without a name is no whole tree

    def test_large_nodes_are_closed(self):
        td = TensorDict({"few": {"x": 1}, "many": {str(i): i for i in range(30)}})
        html = td._repr_html_()
        assert "<details open><summary><code>few</code>" in html
        assert "<details><summary><code>many</code>" in html

    def test_leaves_that_are_no_tensors(self):
        td = TensorDict({"a": torch.zeros(2), "n": tdc.pack([torch.ones(1), torch.ones(2)])}, [2])
        html = torch.utils._pytree.tree_map(lambda _: 0, td)._repr_html_()
        assert '<code>a</code> <span title="kind">int</span></li>' in html
        assert '<code>n</code> <span title="kind">NestedTensor</span></li>' in html
        assert "batch_size=unknown" in html

    def test_a_keyboard_is_enough(self):
        html = TensorDict({"a": {"b": 1}})._repr_html_()
        assert html.count("<summary>") == html.count("<details") == 2
        assert "<script" not in html
        assert "onclick" not in html

    def test_escapes_keys(self):
        html = TensorDict({"<script>alert(1)</script>": 1, "a&b": {'"quoted"': 2, "<b>": {"c": 3}}})._repr_html_()
        assert "<script>" not in html
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
        assert "a&amp;b" in html
        assert "&quot;quoted&quot;" in html
        assert "<b>" not in html
