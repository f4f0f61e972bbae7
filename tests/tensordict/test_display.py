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


def folded(x: Any) -> str:
    """A repr whose long first line is in two."""
    return repr(x).replace("]), ", "]),\n    ", 1)


class TestTensorDict(TestCase):
    def test_rfc_first_print(self):
        data = TensorDict(
            {
                "tensor": torch.zeros(3), "from_np": np.zeros((3,)), "from_int": 1, "from_list": [[1, 2, 3]],
                "from_dict": {"a": 1},
            },
            batch_size=[],
        )  # fmt: skip
        self.assertExpectedInline(repr(data), """\
TensorDict(
    fields={
        tensor: Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.float32, is_shared=False),
        from_np: Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.float64, is_shared=False),
        from_int: Tensor(shape=torch.Size([]), device=cpu, dtype=torch.int64, is_shared=False),
        from_list: Tensor(shape=torch.Size([1, 3]), device=cpu, dtype=torch.int64, is_shared=False),
        from_dict: TensorDict(
            fields={
                a: Tensor(shape=torch.Size([]), device=cpu, dtype=torch.int64, is_shared=False)},
            batch_size=torch.Size([]),
            device=None,
            is_shared=False)},
    batch_size=torch.Size([]),
    device=None,
    is_shared=False)""")  # fmt: skip

    def test_rfc_second_print(self):
        net = nn.Sequential(nn.Linear(3, 4))
        params = TensorDict(dict(net.named_parameters())).unflatten_keys(".")
        self.assertExpectedInline(repr(params), """\
TensorDict(
    fields={
        0: TensorDict(
            fields={
                weight: Parameter(shape=torch.Size([4, 3]), device=cpu, dtype=torch.float32, is_shared=False),
                bias: Parameter(shape=torch.Size([4]), device=cpu, dtype=torch.float32, is_shared=False)},
            batch_size=torch.Size([]),
            device=None,
            is_shared=False)},
    batch_size=torch.Size([]),
    device=None,
    is_shared=False)""")  # fmt: skip

    def test_ragged_leaves(self):
        x = tdc.pack([torch.zeros(3), torch.ones(4)])
        td = TensorDict({"nested_tensor": x, "masked": x.to_padded()}, batch_size=[2])
        self.assertExpectedInline(repr(td), """\
TensorDict(
    fields={
        nested_tensor: NestedTensor(shape=torch.Size([2, -1]), device=cpu, dtype=torch.float32, is_shared=False),
        masked: MaskedBatch(shape=torch.Size([2, 4]), device=cpu, dtype=torch.float32, is_shared=False)},
    batch_size=torch.Size([2]),
    device=None,
    is_shared=False)""")  # fmt: skip

    def test_empty(self):
        self.assertExpectedInline(repr(TensorDict(batch_size=[3, 2], device="cpu")), """\
TensorDict(
    fields={
    },
    batch_size=torch.Size([3, 2]),
    device=cpu,
    is_shared=False)""")  # fmt: skip

    def test_nested_and_empty_nodes(self):
        inner = TensorDict({"x": torch.zeros(2, 5, 3)}, [2, 5])
        self.assertExpectedInline(repr(TensorDict({"b": inner, "a": {"none": {}}}, [2])), """\
TensorDict(
    fields={
        b: TensorDict(
            fields={
                x: Tensor(shape=torch.Size([2, 5, 3]), device=cpu, dtype=torch.float32, is_shared=False)},
            batch_size=torch.Size([2, 5]),
            device=None,
            is_shared=False),
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
            is_shared=False)},
    batch_size=torch.Size([2]),
    device=None,
    is_shared=False)""")  # fmt: skip

    def test_shared_memory(self):
        td = TensorDict({"a": torch.zeros(2).share_memory_(), "b": {"c": torch.zeros(2)}}, [2])
        self.assertExpectedInline(repr(td), """\
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
    is_shared=False)""")  # fmt: skip

    def test_leaves_that_are_no_tensors(self):
        td = torch.utils._pytree.tree_map(lambda _: 0, TensorDict({"a": torch.zeros(2), "b": {"c": 1}}))
        self.assertExpectedInline(repr(td), """\
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
    is_shared=False)""")  # fmt: skip

    def test_objects_and_static_values(self):
        td = TensorDict({"who": tdc.ObjectArray(["ada", "bob"]), "split": Static("train" * 30)}, [2])
        self.assertExpectedInline(repr(td), """\
TensorDict(
    fields={
        who: ObjectArray(shape=torch.Size([2])),
        split: Static('traintraintraintraintraintraintraintraintraintraintraintraintraintraintraint...)},
    batch_size=torch.Size([2]),
    device=None,
    is_shared=False)""")  # fmt: skip

    def test_one_order(self):
        td = TensorDict({"z": torch.zeros(2), "b": {"y": torch.ones(2), "x": torch.ones(2)}, "a": torch.zeros(2)}, [2])
        written = re.findall(r"(\w+): T", repr(td))
        assert written == re.findall(r"<code>(\w)</code>", td._repr_html_())
        assert [key for key in written if key in td] == list(td.keys())

    def test_a_tensordict_shows_no_numbers(self):
        secret = torch.tensor([1234.5])
        assert "1234" not in repr(TensorDict({"a": secret, "b": tdc.pack([secret])}, [1]))

    def test_ipython_completes_keys(self):
        td: Any = TensorDict({"x": torch.zeros(2), "meta": {"id": torch.arange(2)}}, [2])
        assert td._ipython_key_completions_() == ["x", "meta", ("meta", "id")]

        class Point(tdc.TensorClass):
            xy: torch.Tensor

        point: Any = Point(torch.zeros(3))
        assert point._ipython_key_completions_() == ["xy"]


class TestNestedTensor(TestCase):
    def test_one_ragged_dim(self):
        self.assertExpectedInline(
            repr(tdc.pack([torch.tensor([0.0, 1.5]), torch.tensor([]), torch.tensor([2.0, -3.25, 4.0])])),
            """\
NestedTensor(shape=torch.Size([3, -1]), lengths=[2, 0, 3], dtype=torch.float32, device=cpu, rows=[
    [ 0.0000,  1.5000],
    [],
    [ 2.0000, -3.2500,  4.0000]])""",
        )

    def test_features(self):
        rows = [torch.arange(8).view(2, 4), torch.arange(80).view(8, 10)[:, :4]]
        self.assertExpectedInline(repr(tdc.pack(rows)), """\
NestedTensor(shape=torch.Size([2, -1, 4]), lengths=[2, 8], dtype=torch.int64, device=cpu, rows=[
    [[ 0,  1,  2,  3],
     [ 4,  5,  6,  7]],
    [[ 0,  1,  2,  3],
     [10, 11, 12, 13],
     [20, 21, 22, 23],
     ...,
     [50, 51, 52, 53],
     [60, 61, 62, 63],
     [70, 71, 72, 73]]])""")  # fmt: skip

    def test_several_ragged_dims(self):
        x = tdc.pack([torch.zeros(3, 2, 4).char(), torch.zeros(3, 1, 1).char()], ragged_dim=(2, 3))
        self.assertExpectedInline(repr(x), """\
NestedTensor(shape=torch.Size([2, 3, -1, -1]), sizes=[[2, 4], [1, 1]], dtype=torch.int8, device=cpu, rows=[
    [[[0, 0, 0, 0],
      [0, 0, 0, 0]],
     [[0, 0, 0, 0],
      [0, 0, 0, 0]],
     [[0, 0, 0, 0],
      [0, 0, 0, 0]]],
    [[[0]],
     [[0]],
     [[0]]]])""")  # fmt: skip

    def test_many_rows(self):
        x = tdc.pack([torch.full((n % 3, 9), n * 1e-3) for n in range(20)])
        self.assertExpectedInline(repr(x), """\
NestedTensor(shape=torch.Size([20, -1, 9]), lengths=[0, 1, 2, ..., 2, 0, 1], dtype=torch.float32, device=cpu, rows=[
    [],
    [[0.0010, 0.0010, 0.0010, ..., 0.0010, 0.0010, 0.0010]],
    [[0.0020, 0.0020, 0.0020, ..., 0.0020, 0.0020, 0.0020],
     [0.0020, 0.0020, 0.0020, ..., 0.0020, 0.0020, 0.0020]],
    ...,
    [[0.0170, 0.0170, 0.0170, ..., 0.0170, 0.0170, 0.0170],
     [0.0170, 0.0170, 0.0170, ..., 0.0170, 0.0170, 0.0170]],
    [],
    [[0.0190, 0.0190, 0.0190, ..., 0.0190, 0.0190, 0.0190]]])""")  # fmt: skip

    def test_no_rows(self):
        x = NestedTensor(torch.zeros(0, 4), torch.zeros(1, dtype=torch.int64))
        self.assertExpectedInline(
            repr(x),
            """NestedTensor(shape=torch.Size([0, -1, 4]), lengths=[], dtype=torch.float32, device=cpu, rows=[])""",
        )

    def test_gradients(self):
        x = tdc.pack([torch.ones(1), torch.ones(2)]).requires_grad_()
        assert "requires_grad=True" in repr(x)
        assert "grad_fn=<MulBackward0>" in repr(x * 2)

    def test_the_batch_behind(self):
        x = tdc.pack([torch.arange(3), torch.arange(2)])
        self.assertExpectedInline(repr(x.transpose(0, 1)), """\
NestedTensor(shape=torch.Size([-1, 2]), lengths=[3, 2], dtype=torch.int64, device=cpu, rows=[
    [0, 1, 2],
    [0, 1]])""")  # fmt: skip

    def test_numbers_as_torch_is_set(self):
        x = tdc.pack([torch.tensor([1.23456, 2.0])])
        torch.set_printoptions(precision=2)
        try:
            assert "[1.23, 2.00]" in repr(x)
            torch.set_printoptions(threshold=1)
            assert "1.2345" in repr(tdc.pack([torch.linspace(1.23456, 2.0, 9)] * 2))  # it shows fewer than we do
        finally:
            torch.set_printoptions(profile="default")

    def test_dtypes(self):
        for row in (
            torch.tensor([True]), torch.tensor([1 + 2j]), torch.tensor([0.5]).bfloat16(), torch.tensor([1e10, 1e-10])
        ):  # fmt: skip
            numbers = repr(row).partition("[")[2].partition("]")[0]
            assert f"[{numbers}]" in repr(tdc.pack([row]))


class TestMaskedBatch(TestCase):
    def test_one_ragged_dim(self):
        data = torch.tensor([[[1, 2], [3, 4], [5, 6]], [[7, 8], [float("nan")] * 2, [9, 9]]])
        self.assertExpectedInline(repr(MaskedBatch(data, torch.tensor([3, 1]))), """\
MaskedBatch(shape=torch.Size([2, 3, 2]), ragged_dims=(1,), lengths=[3, 1], dtype=torch.float32, device=cpu, rows=[
    [[1., 2.],
     [3., 4.],
     [5., 6.]],
    [[7., 8.]]])""")  # fmt: skip

    def test_several_ragged_dims(self):
        x = tdc.pack([torch.zeros(2, 3), torch.ones(1, 1)], ragged_dim=(1, 2)).to_padded()
        self.assertExpectedInline(folded(x), """\
MaskedBatch(shape=torch.Size([2, 2, 3]),
    ragged_dims=(1, 2), lengths=[[2, 3], [1, 1]], dtype=torch.float32, device=cpu, rows=[
    [[0., 0., 0.],
     [0., 0., 0.]],
    [[1.]]])""")  # fmt: skip

    def test_no_numbers_to_read(self):
        lengths = torch.ones(1, 2, dtype=torch.int64, device="meta")
        x = MaskedBatch(torch.zeros(1, 2, 3, 4, device="meta"), lengths, ragged_dims=(2, 3))
        self.assertExpectedInline(
            repr(x),
            """MaskedBatch(shape=torch.Size([1, 2, 3, 4]), ragged_dims=(2, 3), dtype=torch.float32, device=meta)""",
        )


class TestTwoLevels(TestCase):
    def test_documents(self):
        x = tdc.pack([tdc.from_list([[1, 2, 3], [4]]), tdc.from_list([[5, 6]])])
        self.assertExpectedInline(folded(x), """\
TwoLevelTensor(shape=torch.Size([2, -1, -1]),
    lengths=[2, 1], inner_lengths=[3, 1, 2], dtype=torch.int64, device=cpu, rows=[
    [[1, 2, 3],
     [4]],
    [[5, 6]]])""")  # fmt: skip

    def test_many_inner_examples(self):
        x = tdc.pack([tdc.from_list([[n] for n in range(9)]), tdc.from_list([[5, 6]])[:0]])
        self.assertExpectedInline(folded(x), """\
TwoLevelTensor(shape=torch.Size([2, -1, -1]),
    lengths=[9, 0], inner_lengths=[1, 1, 1, ..., 1, 1, 1], dtype=torch.int64, device=cpu, rows=[
    [[0],
     [1],
     [2],
     ...,
     [6],
     [7],
     [8]],
    []])""")  # fmt: skip


def test_under_a_transform_only_sizes_are_shown():
    texts: list[str] = []

    def seen(x: Any) -> Any:
        texts.append(repr(x))
        return x * 2

    x = tdc.pack([torch.ones(1), torch.ones(2)])
    tdc.vmap(seen)(TensorDict({"x": torch.ones(2)}, [2]))
    tdc.grad(lambda x: seen(x).sum())(x)
    torch.compile(seen, backend="eager")(x)
    assert texts[1] == "NestedTensor(shape=torch.Size([2, -1]), dtype=torch.float32, device=cpu)"


class TestHtml(TestCase):
    def test_tree(self):
        x = tdc.pack([torch.zeros(1, 4), torch.zeros(2, 4)])
        td = TensorDict({"x": x, "meta": {"id": torch.arange(2)}}, [2])
        html = re.sub("(?<=>) ?(?=<)|(?<=})(?=.tdc)", "\n", td._repr_html_())
        self.assertExpectedInline(html, """\
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
</div>""")  # fmt: skip

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
