"""tdc.compile.report and tdc.testing.assert_one_graph: what is counted, what is named, and what people read."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from texts import said
from torch import nn

import tdc
from tdc.compile import Report, report
from tdc.compile.report.reasons import CONDITIONS, break_of, cause_of, causes_of, read, told, user_terms
from tdc.testing import assert_one_graph

HERE = Path(__file__).name


def batch(*lengths: int) -> tdc.TensorDict:
    """Rows of some lengths, and a plain tensor beside them."""
    x = tdc.pack([torch.arange(float(n * 2)).view(n, 2) for n in lengths])
    return tdc.TensorDict({"x": x, "y": torch.ones(len(lengths), 3)}, [len(lengths)])


def plain(n: int) -> tdc.TensorDict:
    return tdc.TensorDict({"y": torch.ones(n, 3)}, [n])


def whole(td):
    return torch.relu(td["x"]).sum(1) * td["y"].sum()


def broken(td, k):
    y = torch.relu(td["y"])
    torch._dynamo.graph_break()
    return y.sum(0) * k


def jumps(y):
    if y.sum() > 0:
        y = y + 1
    return y * 2


def line_of(fn, text: str) -> int:
    """The line of this file that a piece of a function stands in."""
    lines = Path(__file__).read_text(encoding="utf-8").split("\n")
    start = fn.__code__.co_firstlineno - 1
    return next(n for n in range(start, len(lines)) if text in lines[n]) + 1


def masked(text: str) -> str:
    """A report without what differs from run to run and from torch to torch."""
    text = re.sub(r"-?\d+\.\d µs", "N us", text)  # a call may take less than its graph alone, by noise
    text = re.sub(r"(peak memory +).*", r"\1N", text)
    text = re.sub(r"(guards +)\d+", r"\1N", text)
    text = re.sub(r"\nguards of a call\n[\s\S]*", "", text)
    text = re.sub(r"^(  \d+ +\d+ +\d+) +\d+ +(\d+) +\d+\.\d ", r"\1  N  \2  N ", text, flags=re.M)
    return re.sub(r"at \S*" + HERE + r":\d+", "at here", text)


def test_one_graph_of_all_lengths():
    r = report(whole, batch(3, 2), batch(4, 1, 5), batch(2, 2, 2, 9), backend="eager", repeats=0)
    assert (r.graphs, r.breaks, len(r.compiles), r.recompiles, r.examples) == (1, (), 1, (), 3)
    assert r.compiles[0].ops > 2
    assert "type of td is tdc.tensordict.tensordict.TensorDict" in r.guards
    assert (r.kernels, r.externs, r.bytes_moved, r.call_us, r.raw_us, r.overhead_us, r.peak_bytes) == (
        *((), ()),
        *(None,) * 5,
    )


def test_breaks_have_a_reason_and_the_line():
    r = report(broken, (plain(2), 1), backend="eager", repeats=0)
    assert (r.graphs, len(r.breaks), len(r.compiles)) == (2, 1, 2)
    assert r.breaks[0].where.endswith(f"{HERE}:{line_of(broken, 'graph_break()')} in broken")
    assert "graph_break()" in r.breaks[0].reason


def test_branches_on_data_are_breaks():
    r = report(jumps, torch.ones(3), backend="aot_eager", repeats=0)
    assert r.breaks[0].reason.startswith("Data-dependent branching")
    assert r.breaks[0].where.endswith(f"{HERE}:{line_of(jumps, 'if y.sum()')} in jumps")
    assert r.breaks[0].hint


def test_a_break_counts_once_however_often_it_is_compiled():
    r = report(broken, (plain(2), 1), (plain(3), 1), backend="eager", repeats=0)
    assert len(r.breaks) == 1
    assert len(r.compiles) == 4


def test_loops_that_break_fall_back_to_eager():
    def loop(x):
        for _ in range(2):
            x = x + 1
            torch._dynamo.graph_break()
        return x

    r = report(loop, torch.ones(3), backend="eager", repeats=0)
    assert r.breaks
    assert r.breaks[0].where.endswith("in loop")


def test_causes_are_in_the_words_of_the_function():
    def fn(td, k):
        return td["y"] * k

    r = report(fn, (plain(2), 2), (plain(3), 2), (plain(4), 5), backend="eager", repeats=0)
    assert [c.causes for c in r.recompiles] == [
        ("td['y']: size of dim 0 was 2, now 3",),
        ("not k == 2 any more", "td['y']: size of dim 0 was 2, now 4"),
    ]


def test_one_row_is_compiled_apart():
    r = report(lambda td: torch.relu(td["x"]), batch(3, 2), batch(1), backend="eager", repeats=0)
    assert r.recompiles[0].causes == ("not 2 <= td['x'].values.size(0) any more (torch compiles sizes 0 and 1 apart)",)


def test_dtypes_and_keys():
    r = report(lambda x: x + 1, torch.ones(2), torch.ones(2).double(), backend="eager", repeats=0)
    assert r.recompiles[0].causes[0].startswith("x: dtype was Float, now Double")
    td = tdc.TensorDict({"y": torch.ones(2), "z": torch.ones(2)}, [2])
    r = report(lambda td: td + 1, td, td.delete("z"), backend="eager", repeats=0)
    assert r.recompiles[0].causes == ("len(td.keys()) is not 2 any more",)


def test_compiles_for_other_backends_are_no_causes():
    def fn(x):
        return x * 2

    torch.compile(fn, backend="aot_eager")(torch.ones(3))
    r = report(fn, torch.ones(3), backend="eager", repeats=0)
    assert (len(r.compiles), r.recompiles) == (1, ())


def test_parameters_go_by_their_names():
    net = nn.Sequential(nn.Linear(2, 3))

    def fn(x):
        return net(x)

    r = report(fn, torch.ones(4, 2), backend="eager", repeats=0)
    assert any(guard.startswith("net[0].weight is a Parameter of float32") for guard in r.guards)


def test_static_shapes():
    r = report(lambda x: x * 2, *[torch.ones(n) for n in (2, 3, 4)], backend="eager", dynamic=False, repeats=0)
    assert len(r.compiles) == 3


@pytest.mark.slow
def test_calls_beyond_the_limit_of_recompiles_are_told():
    sizes = range(2, 4 + torch._dynamo.config.recompile_limit)
    r = report(lambda x: x * 2, *[torch.ones(n) for n in sizes], backend="eager", dynamic=False, repeats=0)
    assert len(r.compiles) == torch._dynamo.config.recompile_limit
    assert [b.reason for b in r.breaks] == ["torch compiles a function only so often: some calls ran without compiling"]
    assert "at \n" not in str(r)


def test_functions_that_are_compiled_already():
    def fn(x):
        return x * 3

    for compiled in (torch.compile(fn, backend="eager"), tdc.compile.counted(fn, backend="eager")):
        compiled(torch.ones(2))
        r = report(compiled, torch.ones(3), backend="eager", repeats=0)
        assert (r.name, r.graphs, r.breaks, r.recompiles) == ("fn", 1, (), ())


def test_modules():
    r = report(nn.Linear(2, 3), torch.ones(4, 2), torch.ones(5, 2), backend="eager", repeats=0)
    assert (r.name, r.graphs, r.recompiles[0].causes) == ("Linear", 1, ("args[0]: size of dim 0 was 4, now 5",))


def test_time_and_memory():
    r = report(whole, batch(3, 2), backend="aot_eager", repeats=5)
    assert r.call_us > r.raw_us > 0
    assert r.overhead_us == r.call_us - r.raw_us
    assert r.peak_bytes >= 4 * 2 * 5  # relu of five rows of two


def test_a_function_is_called_once_for_each_example_if_nothing_is_measured():
    seen = []

    def fn(x):
        torch._dynamo.graph_break()
        seen.append(x.shape[0])
        return x + 1

    report(fn, torch.ones(2), torch.ones(3), backend="eager", repeats=0)
    assert seen == [2, 3]


def test_errors_of_the_function_are_its_own():
    def fn(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        report(fn, torch.ones(2), backend="eager")
    assert torch._inductor.config.fx_graph_cache


@pytest.fixture(scope="module")
def full() -> Report:
    """A function with kernels that fuse, a library call and a backward pass."""
    net = nn.Linear(2, 64)

    def step(td, weight):
        hidden = torch.relu(net(td["x"])).mean(1)
        return torch.func.grad(lambda w: F.mse_loss(hidden @ w, td["y"]))(weight)

    torch.manual_seed(0)
    weight = torch.randn(64, 3)
    return report(step, (batch(3, 2), weight), (batch(4, 1, 5), weight), repeats=3)


@pytest.mark.slow
def test_kernels_and_what_they_fuse(full: Report):
    assert (full.graphs, full.breaks) == (1, ())
    assert full.kernels
    assert all(k.language == "C++" and k.ops and k.where for k in full.kernels)
    assert any({"relu"} <= set(k.ops) and len(k.ops) > 1 for k in full.kernels + full.externs)
    assert all(HERE in line for k in full.kernels for line in k.where)
    assert any(k.name == "extern_kernels.mm" or "mm" in k.ops for k in full.kernels + full.externs)
    assert full.bytes_moved > 0
    assert full.backend == "tdc.compile.backend"


@pytest.mark.slow
def test_one_kernel_and_one_library_call():
    x = torch.ones(8, 8)
    r = report(lambda x: (torch.softmax(x @ x.T, -1), x.sum(0)), x, repeats=0)
    assert [k.name for k in r.externs] == ["extern_kernels.mm"]
    assert [(k.language, k.calls) for k in r.kernels] == [("C++", 1)]
    assert {"amax", "exp", "sum", "div"} <= set(r.kernels[0].ops)
    assert r.bytes_moved >= 3 * 8 * 8 * 4


class TestTexts(TestCase):
    maxDiff = None

    def test_broken(self):
        text = masked(str(report(broken, (plain(2), 1), (plain(3), 1), backend="eager", repeats=2)))
        text = re.sub(r"  Call to[^\n]*\n", "  (reason)\n", text)
        text = re.sub(r"  hint: [^\n]*\n", "  hint: (hint)\n", text)
        self.assertExpectedInline(text, """\
broken: 2 examples, backend eager
  graphs             2
  graph breaks       1
  compiles           4
  recompiles         2
  guards             N
  generated kernels  not told by this backend
  library calls      not told by this backend
  bytes moved        not told by this backend
  peak memory        N
  warm call          N us, the graphs alone N us: overhead N us

graph breaks
  (reason)
    at here in broken
    hint: (hint)

compiles
  compile  graph  ops  guards  kernels  seconds  cause
  1        0      1  N  0  N      first
  2        1      2  N  0  N      first
  3        0      1  N  0  N      td['y']: size of dim 0 was 2, now 3
  4        1      2  N  0  N      y: size of dim 0 was 2, now 3
""")  # fmt: skip

    def test_assertion(self):
        def fn(td, k):
            return td["y"] * k

        with pytest.raises(AssertionError) as caught:
            assert_one_graph(fn, (plain(2), 2), (plain(3), 2), (plain(4), 5), backend="eager")
        self.assertExpectedInline(str(caught.value), """\
tdc.testing.assert_one_graph: expected 1 graph, 0 breaks, at most 1 compile of fn, got 1 graphs, 0 breaks, 3 compiles
at graph 0: compiled again: td['y']: size of dim 0 was 2, now 3
at graph 0: compiled again: not k == 2 any more
hint: tdc.compile.report(fn, *examples) shows all of it""")  # fmt: skip

    def test_assertion_names_the_break(self):
        with pytest.raises(AssertionError) as caught:
            assert_one_graph(jumps, torch.ones(3), backend="eager")
        text = re.sub(r"Detected .*", "...", str(caught.value))
        self.assertExpectedInline(re.sub(r"at \S*" + HERE + r":\d+", "at here", text), """\
tdc.testing.assert_one_graph: expected 1 graph, 0 breaks, at most 1 compile of jumps, got 2 graphs, 1 breaks, 2 compiles
at here in jumps: graph break: Data-dependent branching: ...
hint: tdc.compile.report(fn, *examples) shows all of it""")  # fmt: skip


def test_assert_one_graph_allows_what_it_is_told():
    r = assert_one_graph(lambda td: td["y"] + 1, plain(2), plain(3), plain(4), compiles=2, backend="eager")
    assert len(r.compiles) == 2
    with pytest.raises(AssertionError, match="got 0 graphs"):
        assert_one_graph(lambda: 3, (), backend="eager")


@pytest.mark.slow
def test_testing_needs_no_test_framework():
    code = "import sys, tdc.testing; sys.exit('pytest' in sys.modules or 'torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Tags(HTMLParser):
    """Checks that tags close in order, and keeps them and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.words = ""

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def test_html(tmp_path: Path):
    def bold(x):
        return x * 2

    bold.__name__ = "<b>bold</b>"
    r = report(bold, torch.ones(2), torch.ones(3), backend="eager", repeats=0)
    tags = Tags()
    tags.feed(r.html())
    assert tags.open == []
    assert "b" not in tags.seen
    assert "script" not in tags.seen
    assert {"table", "caption", "th", "details", "summary", "title", "h1"} <= set(tags.seen)
    assert "<b>bold</b>" in tags.words
    assert "x: size of dim 0 was 2, now 3" in tags.words
    assert "not told by this backend" in tags.words
    r.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == r.html()
    fragment = Tags()
    fragment.feed(r._repr_html_())
    assert "html" not in fragment.seen
    assert "table" in fragment.seen


def test_triton_code_is_read():
    """As Inductor writes it for a GPU: the kernel's own definition and a comment are no calls."""
    code = """
# AOT ID: ['0_backward']
triton_poi_fused_relu_0 = async_compile.triton('triton_poi_fused_relu_0', '''
@triton.jit
def triton_poi_fused_relu_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    tl.store(out_ptr0 + (x0), tmp2, xmask)
''', device_str='cuda')
def call(self, args):
        # triton_poi_fused_relu_0.run(arg0_1)
        extern_kernels.mm(arg0_1, arg1_1, out=buf0)
        triton_poi_fused_relu_0.run(buf0, buf1, 64, stream=stream0)
        triton_poi_fused_relu_0.run(buf1, buf2, 64, stream=stream0)
        buf4 = torch.ops.aten._scaled_dot_product_efficient_attention.default(buf1, buf2, buf3, None, False)
        assert_size_stride(buf4, (1, ), (1, ), 'torch.ops.aten._scaled_dot_product_efficient_attention.default')
"""
    nodes = {"triton_poi_fused_relu_0:2": ["relu_1", "add_12"], "triton_poi_fused_relu_0:3": ["relu"]}
    mm, relu, attention = read(code, nodes, {"extern_kernels.mm:1": ['File "a.py", line 3, in f']})
    assert (relu.language, relu.ops, relu.calls, relu.stage) == ("Triton", ("relu", "add"), 2, "backward")
    assert (mm.name, mm.where, mm.generated, relu.generated) == ("extern_kernels.mm", ("a.py:3 in f",), False, True)
    assert attention.name == "torch.ops.aten._scaled_dot_product_efficient_attention.default"


@pytest.mark.parametrize(
    ("torchs", "ours"),
    [
        ("L['td']._leaves[('a', 'b')]._structure.offsets.size()[0]", "td['a', 'b'].offsets.size(0)"),
        ("L['x']._structure.extent.size()[0]", "x.max_length[0]"),
        ("G['net']._modules['0']._parameters['weight']", "net[0].weight"),
        ("G['net']._modules['head']._buffers['mean']", "net.head.mean"),
        ("L['m']._data.stride()[1]", "m.data.stride(1)"),
    ],
)
def test_names(torchs: str, ours: str):
    assert user_terms(torchs) == ours


@pytest.mark.parametrize(
    ("torchs", "ours"),
    [
        ("0/0: tensor 'x' rank mismatch. expected 2, actual 3", "x: rank was 2, now 3"),
        ("0/1: ___check_type_id(L['k'], 94), type=<class 'int'>  # k", "type of k is not int any more"),
        ("0/0: ___check_obj_id(L['k'], 94)", "k is another object"),
        ("0/0: BACKEND_MATCH failure: ...", "compiled before with another backend"),
        ("0/0: L['x'].size()[0] <= 9  # x", "not x.size(0) <= 9 any more"),
    ],
)
def test_causes(torchs: str, ours: str):
    assert cause_of(torchs) == ours


def test_causes_of_other_compiles_are_left_out():
    assert causes_of('["1/1: a == 1", "1/0: a == 2"]', {(1, 1)}) == ("not a == 1 any more",)
    assert causes_of("1/0: a == 2", {(1, 1)}) == ()


def test_guards_without_addresses():
    assert told("___check_obj_id(L['f'], 139), type=<class 'x'>  # f(x)", CONDITIONS) == "f is the same object"
    text = "check_tensor(L['x'], Tensor, DispatchKeySet(CPU, AutogradCPU), torch.float32, size=[2])  # x"
    assert told(text, CONDITIONS) == "x is a Tensor of float32, size=[2]"


def test_what_torch_says_of_no_place_is_kept():
    found = break_of("torch.* op returned non-Tensor")
    assert (found.reason, found.where, str(found)) == ("torch.* op returned non-Tensor", "", found.reason)


# Wrong inputs


def test_no_examples():
    assert said(tdc.StructureError, lambda: report(whole)) == (
        "tdc.compile.report: expected at least one example, got none\n"
        "hint: report(fn, (a, b)) for fn(a, b); give several examples of different sizes"
    )


def test_no_function():
    assert said(tdc.DtypeError, lambda: report(batch(2, 3), whole)) == (
        "tdc.compile.report: expected a function first, got TensorDict [2]\nhint: report(fn, *examples)"
    )


def test_unknown_backend():
    assert said(tdc.UnsupportedError, lambda: report(whole, batch(2, 3), backend="inducto")).startswith(
        "tdc.compile.report: expected a function or the name of a backend of torch.compile"
    )


def test_unknown_mode():
    assert said(tdc.UnsupportedError, lambda: report(whole, batch(2, 3), mode="fastest")).startswith(
        "tdc.compile.report: expected a mode of default, reduce-overhead"
    )
