"""What torch's loop operators get wrong, each beside ours that gets it right; see `tdc/compile/upstream.py`.

A test of torch fails on the day torch is mended, and says what may then be removed. Random programs look for more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import Tensor
from versions import before

import tdc
from tdc.compile._torch.tracing import scan_copies_gradients

Fn = Callable[..., Any]
internals: Any = torch
RAW = internals._higher_order_ops
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


def unrolled(cond_fn: Fn, body_fn: Fn, carry: Sequence[Any]) -> Any:
    """What a while_loop is."""
    while cond_fn(*carry):
        carry = body_fn(*carry)
    return carry


def gradients(fn: Fn, loop: Fn, *args: Tensor, backend: Any = None) -> list[Tensor]:
    """Of `fn(loop, *args)`; compiled where a backend is given."""
    call = lambda *args: fn(loop, *args)  # noqa: E731
    run = torch.compile(call, fullgraph=True, backend=backend) if backend is not None else call
    with (  # kernels of another test are no answer
        resolve_name("torch._functorch.config").patch(enable_autograd_cache=False),
        resolve_name("torch._inductor.config").patch(fx_graph_cache=False),
    ):
        return list(torch.autograd.grad(run(*args), args))


def right(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    return all([torch.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in zip(got, want, strict=True)])


def inputs(*sizes: Sequence[int]) -> list[Tensor]:
    return [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in sizes]


def count() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def recurrent(loop: Fn, w: Tensor) -> Tensor:
    """A carry that begins without gradient."""
    h = torch.zeros(3, 4, dtype=torch.float64)
    return loop(lambda n, h: n < 4, lambda n, h: (n + 1, torch.tanh(h @ w + 1)), (count(), h))[1].sum()


def not_run(loop: Fn, x: Tensor) -> Tensor:
    """A loop whose condition is False from the start."""
    return loop(lambda n, h: n < 0, lambda n, h: (n + 1, h * 1.5), (count(), x * 1.0))[1].sum()


def reused(loop: Fn, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """In the backward pass the start of one carry is needed once more behind the loop."""
    body = lambda n, h, k: (n + 1, h.sin() * 1.1, k.sin() * 1.3)  # noqa: E731
    _, p, q = loop(lambda n, h, k: n < 3, body, (count(), x.exp(), y.cos()))
    return ((q.clone() + y * x) @ w.detach()).sin().sum() + p.clone().sin().sum() + w.sum()


def unchanged(loop: Fn, x: Tensor) -> tuple[Tensor, Tensor]:
    """A round adds nothing to one carry, whose memory a product behind the loop would take."""
    start = (count(), x.cos(), x.sin())
    _, y, z = loop(lambda i, y, z: i < 3, lambda i, y, z: (i + 1, y * 0.5, z + torch.zeros_like(z)), start)
    return z, y @ y


def written_over(loop: Fn, x: Tensor) -> tuple[Tensor, Tensor]:
    """The same, where what reads the start of the carry last would write over it."""
    s = x.sin()
    start = (count(), x.cos(), s)
    _, y, z = loop(lambda i, y, z: i < 3, lambda i, y, z: (i + 1, y * 0.5, z + torch.zeros_like(z)), start)
    return z, s.exp() @ y


def chained(loop: Fn, x: Tensor) -> Tensor:
    """One loop closes over what another gives."""
    _, h = loop(lambda n, h: n < 3, lambda n, h: (n + 1, h.sin()), (count(), x * 1.0))
    return loop(lambda n, k: n < 2, lambda n, k: (n + 1, k * h), (count(), x.cos()))[1].sum()


def turned(loop: Fn, x: Tensor) -> Tensor:
    """A complex carry, beside one that begins without gradient, and a conjugate that one round hands to the next."""
    start = count(), torch.complex(x, x + 1), torch.zeros(3, dtype=torch.complex128)
    return loop(lambda n, h, k: n < 3, lambda n, h, k: (n + 1, h * h * 0.5, (k + h).conj()), start)[2].abs().sum()


def added(scan: Fn, w: Tensor) -> Tensor:
    """The sum of two carries, whose gradients are one tensor."""
    start = w.cos(), w.sin()
    (h, k), _ = scan(lambda c, x: ((torch.tanh(w * c[0] + c[1]), w * x), c[0] + 0), start, X)
    return (h + k).sum()


X, N = torch.randn(5, 4, dtype=torch.float64), torch.arange(20).view(5, 4) + 2**40
STEPS: list[Fn] = [
    lambda w: lambda h, x: (w * h + x[0], x[1] + 1),
    lambda w: lambda h, x: (w * h + x[1] % 3, x[0] + h),
    lambda w: lambda h, x: (w[x[1] % 4] * h, x[0].sum()),
    lambda w: lambda h, x: (h, w * x[0]),
]


class TestWhileLoop:
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_start_without_gradient(self, backend: str):
        args = inputs((4, 4))
        want = gradients(recurrent, unrolled, *args)
        assert right(gradients(recurrent, tdc.while_loop, *args, backend=backend), want)

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_torch_loses_the_gradient(self):
        args = inputs((4, 4))
        got, want = (
            gradients(recurrent, RAW.while_loop, *args, backend="aot_eager"),
            gradients(recurrent, unrolled, *args),
        )
        assert not right(got, want), "torch mended it: remove Anchor in tdc/compile/upstream.py"

    @pytest.mark.cases(slow=0)
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_loop_that_does_not_run(self, backend: str):
        args = inputs((3,))
        assert right(gradients(not_run, tdc.while_loop, *args, backend=backend), [torch.ones(3, dtype=torch.float64)])

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_torch_differentiates_a_loop_that_did_not_run(self):
        args = inputs((3,))
        (got,) = gradients(not_run, RAW.while_loop, *args, backend="aot_eager")
        assert not right([got], [torch.ones_like(got)]), "torch mended it: remove `ran` in tdc/compile/upstream.py"

    @pytest.mark.slow
    def test_complex_numbers(self):
        args = inputs((3,))
        want = gradients(turned, unrolled, *args)
        assert right(gradients(turned, tdc.while_loop, *args, backend="aot_eager"), want)

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_torch_fails_with_complex_numbers(self):
        """Where it does not raise, torch mended it: remove Planes in tdc/compile/upstream.py."""
        with pytest.raises(Exception, match="outs_to_grad"):
            gradients(turned, RAW.while_loop, *inputs((3,)), backend="aot_eager")

    @pytest.mark.cases(0, 1)
    @pytest.mark.parametrize("backend", ["inductor", tdc.compile.backend])
    def test_memory_of_the_caller(self, backend: Any):
        args = inputs((7, 5), (7, 5), (5, 5))
        want = gradients(reused, unrolled, *args)
        assert right(gradients(reused, tdc.while_loop, *args, backend=backend), want)

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_torch_overwrites_memory_of_the_caller(self):
        """Mended in torch 2.15: `undonated` in tdc/compile/_torch/tracing.py may go when 2.14 leaves the range."""
        args = inputs((7, 5), (7, 5), (5, 5))
        got, want = gradients(reused, RAW.while_loop, *args, backend="inductor"), gradients(reused, unrolled, *args)
        assert right(got, want) is not before(2, 15)

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_donation_is_the_cause(self):
        args = inputs((7, 5), (7, 5), (5, 5))
        with resolve_name("torch._functorch.config").patch(donated_buffer=False):
            got = gradients(reused, RAW.while_loop, *args, backend="inductor")
        assert right(got, gradients(reused, unrolled, *args))

    @pytest.mark.cases(0, 1)
    @pytest.mark.parametrize("backend", ["inductor", tdc.compile.backend])
    @pytest.mark.parametrize("fn", [unchanged, written_over])
    def test_memory_of_what_a_body_returns_as_it_came_in(self, fn: Fn, backend: Any):
        x = inputs((5, 5))[0].detach()
        got = torch.compile(partial(fn, tdc.while_loop), backend=backend, fullgraph=True)(x)
        assert right(got, fn(unrolled, x))

    @pytest.mark.sweep
    @pytest.mark.slow
    @pytest.mark.parametrize("fn", [unchanged, written_over])
    def test_torch_overwrites_what_a_body_returns(self, fn: Fn):
        x = inputs((5, 5))[0].detach()
        got = torch.compile(partial(fn, RAW.while_loop), fullgraph=True)(x)
        assert not right(got, fn(unrolled, x)), "torch mended it: remove tdc/compile/_torch/bodies.py"

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_memory_of_what_a_region_returns_as_it_came_in(self):
        """torch's own regions by our backend; by Inductor alone the first two results are wrong."""
        region = internals.compiler.nested_compile_region(lambda x, y: (x @ x * 0.5, y + torch.zeros_like(y)))

        def fn(x: Tensor) -> tuple[Tensor, ...]:
            x, first = region(x.cos(), x.sin())
            z = x @ x
            x, second = region(z.cos(), z.sin())
            return first, second, x @ x @ x

        x = inputs((5, 5))[0].detach()
        want = fn(x)
        assert right(torch.compile(fn, backend=tdc.compile.backend, fullgraph=True)(x), want)
        assert not right(torch.compile(fn, fullgraph=True)(x), want), "torch mended it: tdc/compile/_torch/bodies.py"

    def test_the_settings_end_with_the_compile(self):
        seen: list[tuple[bool, str]] = []

        def spy(graph: Any, inputs: Any) -> Any:
            seen.append((internals._functorch.config.donated_buffer, internals.compiler.config.cache_key_tag))
            return graph

        torch.compile(lambda x: tdc.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), backend=spy)(torch.rand(3))
        torch.compile(torch.sin, backend=spy)(torch.rand(3))
        assert seen == [(False, "undonated"), (True, "")]

    @pytest.mark.cases(slow=1)
    @pytest.mark.slow
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_one_loop_behind_another(self, backend: str):
        args = inputs((3,))
        assert right(gradients(chained, tdc.while_loop, *args, backend=backend), gradients(chained, unrolled, *args))


class TestScanAndCond:
    @pytest.mark.sweep
    @pytest.mark.slow
    def test_torch_has_no_gradient_beside_an_integer_carry(self):
        def fn(scan: Fn, w: Tensor) -> Tensor:
            return scan(lambda c, x: ((c[0] + 1, c[1] * x.cos()), c[1] + 0), (count(), w.sum()), w)[0][1]

        args = inputs((3,))
        want = gradients(fn, tdc.scan, *args)
        assert right(gradients(fn, tdc.scan, *args, backend="aot_eager"), want)
        with pytest.raises(Exception, match="outs_to_grad"):  # if this fails torch mended it: `Code` may go from scan
            gradients(fn, RAW.scan, *args, backend="aot_eager")

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_torch_has_no_gradient_beside_an_integer_result(self):
        def fn(cond: Fn, x: Tensor) -> Tensor:
            n, y = cond(x.sum() > 0, lambda x: (count() + 1, x.sin()), lambda x: (count() - 1, x.cos()), (x,))
            return (n * y).sum()

        args = inputs((3,))
        assert right(gradients(fn, tdc.cond, *args, backend="aot_eager"), gradients(fn, tdc.cond, *args))
        with pytest.raises(Exception, match="outs_to_grad"):  # if this fails torch mended it: `Code` may go from cond
            gradients(fn, torch.cond, *args, backend="aot_eager")

    @pytest.mark.sweep
    @pytest.mark.cases(slow=1)
    @pytest.mark.slow
    @pytest.mark.parametrize("step", STEPS)
    def test_slices_that_the_gradient_does_not_reach(self, step: Fn):
        def fn(scan: Fn, w: Tensor) -> Any:
            return sum([y.sum() for y in scan(step(w), torch.ones(4, dtype=torch.float64), (X, N))], 0)

        args = inputs((4,))
        assert right(gradients(fn, tdc.scan, *args, backend="aot_eager"), gradients(fn, tdc.scan, *args))

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_torch_returns_zeros_as_they_came_in(self):
        def fn(scan: Fn, w: Tensor) -> Tensor:
            return scan(lambda h, x: (w * h + x, h + 0), torch.ones(4, dtype=torch.float64), X)[0].sum()

        with nullcontext() if scan_copies_gradients() else pytest.raises(Exception, match="might be aliasing"):
            gradients(fn, RAW.scan, *inputs((4,)), backend="aot_eager")

    @pytest.mark.cases(slow=1)
    @pytest.mark.slow
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_two_ends_with_one_gradient(self, backend: str):
        args = inputs((4,))
        assert right(gradients(added, tdc.scan, *args, backend=backend), gradients(added, tdc.scan, *args))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_two_results_with_one_gradient(self, backend: str):
        def fn(cond: Fn, x: Tensor) -> Tensor:
            return sum(cond(x.sum() < 99, lambda x: (x.sin(), x.cos()), lambda x: (x * 2, x * 3), (x,)), 0 * x).sum()

        args = inputs((4,))
        assert right(gradients(fn, tdc.cond, *args, backend=backend), gradients(fn, tdc.cond, *args))

    @pytest.mark.cases(0, 1)
    @pytest.mark.parametrize(
        ("cond", "backend"),
        [(tdc.cond, "inductor"), (tdc.cond, tdc.compile.backend), (torch.cond, tdc.compile.backend)],
        ids=["inductor", "ours", "torch.cond"],
    )
    @pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
    def test_branches_read_operands_in_the_order_that_they_were_traced_in(self, cond: Fn, backend: Any, dynamic: bool):
        """A clone in order of a transposed tensor, a transposed tensor, a part of one, and expanded ones."""

        def fn(cond: Fn, x: Tensor, take: Tensor) -> Tensor:
            own = (x * 0.5).clone(memory_format=torch.contiguous_format)
            operands = (own, x + 1, x[1:, ::2] * 2, x[:1].expand(5, 3) + 0, x[0].expand(4, 3))

            def one(*xs: Tensor) -> Any:
                return sum([x[0, 1] * (i + 1) for i, x in enumerate(xs)])

            def other(*xs: Tensor) -> Any:
                return sum([x.sum(0)[0] * (i + 2) for i, x in enumerate(xs)])

            return cond(take, one, other, operands)

        run = torch.compile(lambda x, take: fn(cond, x, take), backend=backend, fullgraph=True, dynamic=dynamic)
        for rows, take in ((7, True), (7, False), (9, True)):
            x = torch.arange(3.0 * rows).view(3, rows).t()
            torch.testing.assert_close(run(x, torch.tensor(take)), fn(torch.cond, x, torch.tensor(take)))

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_torch_gives_branches_operands_in_another_order(self):
        def fn(x: Tensor, take: Tensor) -> Tensor:
            own = (x * 0.5).clone(memory_format=torch.contiguous_format)
            return torch.cond(take, lambda x: x.sum(0), lambda x: x[0] * 1, (own,))

        with pytest.raises(AssertionError, match="stride"):  # if this fails torch mended it: remove `in_order`
            torch.compile(fn, fullgraph=True)(torch.arange(21.0).view(3, 7).t(), torch.tensor(True))

    def test_torch_takes_no_two_ends_with_one_gradient(self):
        with pytest.raises(
            Exception, match="might be aliasing"
        ):  # if this fails torch mended it: remove `own_gradients`
            gradients(added, RAW.scan, *inputs((4,)), backend="aot_eager")

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_torch_has_no_gradient_of_a_scan_in_a_scan(self):
        def fn(scan: Fn, w: Tensor) -> Tensor:
            inner = lambda c, x: scan(lambda c, x: (torch.tanh(c * w[0] + x), c + 0), c, x)  # noqa: E731
            xs = torch.ones(5, 3, 4, dtype=torch.float64)
            return scan(lambda c, x: (inner(c, x)[0] + 0, c + 0), xs[0, 0], xs)[0].sum()

        text = "detach_copy" if before(2, 14) else "might be aliasing"
        with pytest.raises(Exception, match=text):  # if this fails torch mended it: remove `nested`
            gradients(fn, RAW.scan, *inputs((4, 4)), backend="aot_eager")

    @pytest.mark.parametrize("op", ["cond", "scan"])
    def test_torch_takes_no_gradient_inside_a_compiled_function(self, op: str):
        fn = {
            "cond": lambda w: torch.cond(w.sum() > 0, torch.sin, torch.cos, (w,)).sum(),
            "scan": lambda w: RAW.scan(lambda c, x: (c * x, c + 0), w.sum(), w)[0],
        }[op]
        with pytest.raises(Exception, match="FakeTensor"):  # if this fails torch mended it: remove `refuse_transform`
            torch.compile(torch.func.grad(fn), fullgraph=True, backend="eager")(torch.rand(3))


def program(seed: int) -> Fn:
    """A random loop: one to three carries, each a chain of pointwise functions and products, some read again behind."""
    r = random.Random(seed)
    acts = [torch.tanh, torch.sin, torch.sigmoid, torch.cos, lambda x: x * 0.9]
    width, length = r.randint(1, 3), r.randint(0, 4)
    plan = [
        [(r.choice(acts), r.randrange(width), r.random() < 0.5) for _ in range(r.randint(1, 3))] for _ in range(width)
    ]
    starts = [r.choice(["zero", "x", "deep"]) for _ in range(width)]
    again = r.random() < 0.6

    def body(w: Tensor, carry: Sequence[Tensor]) -> list[Tensor]:
        out = []
        for i, chain in enumerate(plan):
            h = carry[i]
            for act, j, product in chain:
                h = act(h) * 0.7 + carry[j] * 0.2
                h = h @ w if product else h
            out.append(torch.where(h > 0, h * 0.5, h.sin()))
        return out

    def fn(loop: Fn, x: Tensor, w: Tensor) -> Tensor:
        kinds = {
            "zero": lambda k: torch.zeros_like(x).detach(),
            "x": lambda k: x * k,
            "deep": lambda k: (x * k).exp().sin(),
        }
        carry = [kinds[s](k + 1) for k, s in enumerate(starts)]
        ends = loop(lambda c: body(w, c), carry, length)
        total = sum([(c.cos() * (k + 1)).sum() for k, c in enumerate(ends)], w.sum() + x.sum())
        return total + (sum([(a * b).sum() for a, b in zip(carry, ends, strict=True)]) if again else 0)

    return fn


def by_python(body: Fn, carry: Sequence[Tensor], length: int) -> Sequence[Tensor]:
    for _ in range(length):
        carry = body(carry)
    return carry


def by_while(body: Fn, carry: Sequence[Tensor], length: int) -> Sequence[Tensor]:
    return tdc.while_loop(lambda n, *c: n < length, lambda n, *c: (n + 1, *body(c)), (count(), *carry))[1:]


def by_scan(body: Fn, carry: Sequence[Tensor], length: int) -> Sequence[Tensor]:
    steps = torch.zeros(length + 1)[1:]
    return tdc.scan(lambda c, x: (body(c), c[0]), list(carry), steps)[0] if length else carry


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("loop", [by_while, by_scan])
@pytest.mark.parametrize(("backend", "seeds"), [("aot_eager", range(12)), ("inductor", range(2))])
def test_random_programs(loop: Fn, backend: str, seeds: range):
    for seed in seeds:
        torch._dynamo.reset()
        args = inputs((3, 4), (4, 4))
        want = gradients(program(seed), by_python, *args)
        assert right(gradients(program(seed), loop, *args, backend=backend), want), f"program {seed}"
