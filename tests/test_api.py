"""The public names: few, each with one path, and none without its room; their signatures are in docs/reference."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from typing import Any

import pytest

from tdc.core import errors
from tdc.core.rules import DISPATCH

ROOMS = ("compile", "data", "hf", "interop", "io", "nn", "ops", "optim", "testing")
SPACES = ("tdc", *[f"tdc.{room}" for room in ROOMS])
INTERNAL = {"migration"}  # imported for its effect alone


def facade(space: str) -> dict[str, Any]:
    """What a namespace offers: names written as `from x import name as name`, of `tdc` also the namespaces in it."""
    module = sys.modules[space]
    names = re.findall(r" as (\w+)$", inspect.getsource(module), re.MULTILINE)
    found = {name: getattr(module, name) for name in names if name not in INTERNAL}
    return {n: x for n, x in found.items() if space == "tdc" or not isinstance(x, types.ModuleType)}


def listing(space: str) -> str:
    lines = [one(name, x) for name, x in sorted(facade(space).items())]
    return "\n".join(textwrap.fill(line, 110, subsequent_indent="    ") for line in lines)


class TestNames(TestCase):
    def test_tdc(self):
        self.assertExpectedInline(
            listing("tdc"),
            """\
class CallError
class ChunkError
class DtypeError
class FormatError
class ImmutableError
class IndexingError
class KeyPathError
class MaskedBatch(data, lengths, *, ragged_dims=1)
class MethodError
class NestedTensor(values, offsets=None, *, ragged_dim=1, shapes=None, max_length=None)
class NonfiniteError
class ObjectArray(items, shape=None)
class ShapeError
class Static(value)
class StructureError
class Summary(rows, leaves, elements, nbytes)
class TdcError
class TensorClass(*, batch_size=(), device=None, **fields)
class TensorDict(source=None, batch_size=(), *, device=None, **entries)
class UnsupportedError
as_tensordict(obj, batch_size=None, *, batch_dims=None, device=None)
associative_scan(combine_fn, xs, dim, reverse=False, combine_mode='pointwise')
batch(fn=None, *, max_iters=None, lower='auto', source=None)
cat_keys(td, keys, out, dim=-1)
compile/
cond(pred, true_fn, false_fn, operands=())
copy_(dst, src, index=None)
data/
ensemble(module, params, in_dims=None, randomness='error', *, return_buffers=False, chunk_size=None)
from_list(rows, *, ragged_dim=1, dtype=None, device=None)
from_module(module, *, params=True, buffers=True, remove_duplicate=False)
from_numpy(arrays, *, ragged_dim=1, device=None)
from_padded(data, lengths=None, *, mask=None, side='right')
from_torch(x)
functional_call(module, params, args=(), kwargs=None, *, tie_weights=True, strict=False, return_buffers=False)
grad(fn, argnums=0, has_aux=False)
hessian(fn, argnums=0)
hf/
interop/
io/
jacfwd(fn, argnums=0, has_aux=False, *, randomness='error')
jacrev(fn, argnums=0, has_aux=False, *, chunk_size=None)
jvp(fn, primals, tangents, has_aux=False)
lanes(value)
map(fn, td, dim=0, *, chunksize=None, num_chunks=None, num_workers=0, executor=None, out=None, progress=False)
merge(*tds, on_conflict='error')
nbytes(td)
nested_like(data, like)
nn/
offsets_of(lengths)
ops/
optim/
pack(tensors, *others, ragged_dim=1)
param_count(td)
partition(td, where)
positions(x)
ravel(td, keep_batch=True, *, dtype=None)
scan(combine_fn, init, xs, *, dim=0, reverse=False)
scan_map(f, xs, *args)
stack_keys(td, keys, out, dim=-1)
stack_modules(modules, *, params=True, buffers=True)
tensorclass(cls=None, /, *, kw_only=False, **settings)
testing/
truncate(x, lengths)
unbatched(fn, in_dims=None, *, ragged_dims=1)
unravel_key(key)
validate(x)
value_and_grad(fn, argnums=0, has_aux=False)
vjp(fn, *primals, has_aux=False)
vmap(fn, in_dims=0, out_dims=0, randomness='error', *, chunk_size=None)
while_loop(cond_fn, body_fn, carried_inputs)""",
        )

    def test_compile(self):
        self.assertExpectedInline(
            listing("tdc.compile"),
            """\
class Counts(name, graphs, breaks, compiles, kernels, seconds)
class Exported(signature, program=None, package=None, separate=None)
class Report(name, backend, examples, breaks, compiles, call_us=None, raw_us=None, peak_bytes=None)
class Signature(name, positional, keywords, inputs, outputs, dims, read, in_spec, out_spec)
class TrainStep(update, _step, _donate, _how)
backend(graph, inputs, *, mode=None, options=None)
buckets(low, high, *, growth=2.0)
checkpoint(fn, *, policy=None, offload=False)
checkpoint_blocks(module, kind, *, policy=None, offload=False)
class counted(fn, *, name='', backend=backend, fullgraph=True, dynamic=None, mode=None, options=None)
dynamic(x, dims='batch', *, min=None, max=None)
dynamic_shapes(tree, *, batch_dim=0)
export(fn, example_args=(), example_kwargs=None, *, dynamic=None)
load(path, *, weights=None)
peak_bytes(fn, *args, **kwargs)
report(fn, *examples, backend=backend, dynamic=None, mode=None, options=None, repeats=20)
scan_blocks(module, kind, *, ignore=())
to_bucket(x, *, rows=None, totals=None, lengths=None)
train_step(net, loss, optimizer=None, *, buffers=False, accumulate=1, dtype=None, metrics=('loss',),
    skip_nonfinite=False, error_if_nonfinite=False, average=None, process_group=None, donate=False,
    compile=True, backend=backend, mode=None, options=None, dynamic=None)
unbucket(x, valid)
unscan_blocks(module)""",
        )

    def test_data(self):
        self.assertExpectedInline(
            listing("tdc.data"),
            """\
class BucketSampler(lengths, batch_size, *, window=100, shuffle=True, seed=0, drop_last=False, rank=0,
    world_size=1)
class Dataset(source, keys=None)
class Loader(td, sampler, prefetch, pin_memory, device, progress=False)
class TokenBudgetSampler(lengths, max_tokens, *, shuffle=True, consecutive=False, seed=0, drop_last=False,
    rank=0, world_size=1)
collate(samples, *, ragged_keys=(), pad_keys=(), value=0)
from_arrow(table, *, columns=None, copy=False)
from_parquet(path, *, columns=None)
group_by(td, key)
loader(source, batch_size=None, *, max_tokens=None, key=None, batch_sampler=None, shuffle=False,
    consecutive=False, seed=0, drop_last=False, prefetch=0, pin_memory=False, device=None, rank=0,
    world_size=1, progress=False)
map_iter(fn, td, dim=0, *, chunksize=None, num_chunks=None, executor=None, shuffle=False, seed=None,
    prefetch=8)
pad_sequence(tds, dim=0, value=0, side='right', *, keys=None, mask_key=None)
ragged_stack(tds, dim=0, *, keys=None, strict=True)
to_arrow(td)
to_dataset(td)
to_parquet(td, path, *, overwrite=False)
unpad_sequence(td, *, batch_dims=None)
windows(td, tokens, key)""",
        )

    def test_einops(self):  # which `import tdc` leaves out
        importlib.import_module("tdc.einops")
        self.assertExpectedInline(listing("tdc.einops"), """register()""")

    def test_hf(self):
        self.assertExpectedInline(
            listing("tdc.hf"),
            """\
attend(model, *, check=True)
generate(model, prompts, **options)""",
        )

    def test_interop(self):
        self.assertExpectedInline(
            listing("tdc.interop"),
            """\
class LeafSpec(kind, dtype, shape, device=None)
class LoadReport(loaded, missing, unexpected, mismatched)
class PytreeSpec(paths, treespec)
class Spec(batch_size, leaves, nodes)
check(td, schema)
from_dlpack(arrays, batch_size=(), *, copy=None)
from_hf(encoding, *, keys=())
from_pytree(tree, batch_size=())
from_state_dict(state_dict, batch_size=())
from_struct_array(array, *, copy=None)
infer_batch_size(tree, max_dims=None)
load_into(params, state_dict, *, strict=False, prefix='')
register_leaf(cls, *, shape, index, stack=None, cat=None, to=None, ops=None)
spec(td, batch_size=None)
to_dataclass(td, cls)
to_dlpack(td, into)
to_hf(batch, *, side='right', pad=0, length=None)
to_namedtuple(td, cls=None)
to_pytree(td, spec)
to_state_dict(td)
to_struct_array(td)
zeros(schema, batch_size=None, *, device=None)""",
        )

    def test_nn(self):
        self.assertExpectedInline(
            listing("tdc.nn"),
            """\
class KVCache(key, value, length, *, batch_size=(), device=None)
class TensorDictParams(td, *, buffers=())
expose_tensors(module)
lora_init(params, rank=8, *, alpha=None, select='*weight', seed=0)
lora_merge(params, adapters)
lora_unmerge(params, adapters)""",
        )

    def test_ops(self):
        self.assertExpectedInline(
            listing("tdc.ops"),
            """\
RULES
class Rule(op, kind, family, impl, ref, identity=None, modes=('eager', 'compile', 'vmap', 'grad', 'export'),
    reason='', syncs='', dims=None, broadcasts=False)
implements(op, kinds=('nested',), *, ref=None, identity=None, modes=('eager', 'compile', 'vmap', 'grad',
    'export'), override=False)
varlen_attention(q, k, v, q_rows, k_rows, *, causal=False, scale=None, dropout=0.0, mask=None, score_mod=None,
    window=None)""",
        )

    def test_optim(self):
        self.assertExpectedInline(
            listing("tdc.optim"),
            """\
class LossScale(init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)
class Optimizer(init, update, takes='gradients', gives='parameters', rates=no_rates, elementwise=False,
    process_group=None, name='')
Rate
Schedule
class Transform(init, update, takes='gradients', gives='gradients', rates=no_rates, elementwise=False,
    process_group=None, name='')
adadelta(lr=1.0, rho=0.9, eps=1e-06, weight_decay=0.0)
adafactor(lr=0.01, beta2_decay=-0.8, eps=(None, 0.001), d=1.0, weight_decay=0.0)
adagrad(lr=0.01, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10)
adam(lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, amsgrad=False)
adamax(lr=0.002, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0)
adamw(lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, amsgrad=False)
averaged(state)
chain(*parts)
clip_by_global_norm(max_norm)
clip_by_norm(max_norm)
clip_by_value(limit)
constant(lr)
cosine(lr, steps, warmup=0, floor=0.0)
debias(beta, step)
decay(weight)
ema(decay)
exponential(lr, gamma, every=1, end=0.0)
from_torch_optim(optimizer, module)
global_norm(td)
inject(make, **settings)
inverse_sqrt(lr, warmup)
join(schedules, boundaries)
lamb(lr=0.001, betas=(0.9, 0.999), eps=1e-06, weight_decay=0.0)
linear(lr, end, steps)
lion(lr=0.0001, betas=(0.9, 0.99), weight_decay=0.0)
lookahead(k=5, alpha=0.5)
masked(transform, select)
master_weights(optimizer)
multi_steps(optimizer, k)
muon(lr=0.001, weight_decay=0.1, momentum=0.95, nesterov=True, ns_coefficients=(3.4445, -4.775, 2.0315),
    eps=1e-07, ns_steps=5, adjust_lr_fn=None)
nadam(lr=0.002, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, momentum_decay=0.004,
    decoupled_weight_decay=False)
noise(eta, gamma=0.55, seed=0)
one_cycle(max_lr, total_steps, pct_start=0.3, anneal_strategy='cos', div_factor=25.0,
    final_div_factor=10000.0, three_phase=False)
partition(parts)
piecewise(lr, milestones, gamma=0.1)
polynomial(lr, steps, power=1.0, end=0.0)
radam(lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, decoupled_weight_decay=False)
rmsprop(lr=0.01, alpha=0.99, eps=1e-08, weight_decay=0.0, momentum=0.0, centered=False)
schedule_free_adamw(lr=0.0025, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, warmup=0)
schedule_free_sgd(lr=1.0, momentum=0.9, weight_decay=0.0, warmup=0)
sgd(lr=0.001, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False)
sharded(optimizer, process_group)
skip_nonfinite(optimizer)
to_torch_state_dict(state, optimizer, module)
wsd(lr, steps, warmup, decay, floor=0.0)""",
        )

    def test_testing(self):
        self.assertExpectedInline(
            listing("tdc.testing"),
            """\
assert_batched_equal(fn, examples, *, in_dims=0, grads=True, lowers=None, max_iters=None, backends=('eager',
    'aot_eager'), rtol=None, atol=None)
assert_close(actual, expected, *, rtol=None, atol=None, equal_nan=False, check_dtype=True, check_device=True)
assert_one_graph(fn, *examples, compiles=1, backend=backend, dynamic=None)
check_rule(op, make_args, *, kinds=None, modes=None, ref=None, lengths=((3, 0, 5, 1), (2, 6, 1, 0, 4), (7, 2,
    3)), backend='aot_eager')
forbid(*, padding=True, loops=True, syncs=False)""",
        )


def test_there_are_few_names():
    assert len(facade("tdc")) <= 71


def test_every_object_has_one_path():
    paths: dict[int, list[str]] = {}
    for space in SPACES:
        for name, x in facade(space).items():
            if not isinstance(x, types.ModuleType):
                paths.setdefault(id(x), []).append(f"{space}.{name}")
    assert [found for found in paths.values() if len(found) > 1] == []


def test_every_namespace_is_listed():
    assert {f"tdc.{n}" for n, x in facade("tdc").items() if isinstance(x, types.ModuleType)} == {*SPACES} - {"tdc"}


@pytest.mark.parametrize("space", SPACES)
def test_every_object_is_where_it_says(space: str):
    """So that `pickle` finds it, and help shows a path that can be imported."""
    for name, x in facade(space).items():
        if inspect.isclass(x) or inspect.isfunction(x):
            assert getattr(importlib.import_module(x.__module__), x.__qualname__) is x, name


def test_errors_and_their_classes_can_be_imported():
    raised = {n for n, x in vars(errors).items() if inspect.isclass(x) and issubclass(x, Exception)}
    assert raised <= set(facade("tdc"))


def test_packed_and_padded_batches_have_the_same_operations():
    nested, masked = DISPATCH["nested"], DISPATCH["masked"]
    assert nested.keys() == masked.keys()
