"""The attributes and methods of the containers, so that none changes unseen. `EXPECTTEST_ACCEPT=1` writes them anew."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from expecttest import TestCase
from test_api import signature
from versions import of_the_pinned_torch

import tdc
from tdc.core.container import Absent, Container
from tdc.tensordict.mapping import Keyed


def own(cls: type) -> str:
    """Public attributes written in a class or its bases, or given to it by conversions."""
    lines = []
    written = {**vars(Container), **(vars(Keyed) if issubclass(cls, Keyed) else {}), **vars(cls)}
    for name, x in sorted((n, x) for n, x in written.items() if not isinstance(x, Absent)):
        if name.startswith("_") or is_operation(name, x):
            continue
        lines.append(f"{name}{signature(x)}" if inspect.isfunction(x) else name)
    return "\n".join(lines)


def is_operation(name: str, x: Any) -> bool:
    """Whether a method is one line that runs a rule: it takes what torch's function of the same name takes."""
    return inspect.isfunction(x) and signature(x) == "(self, *args, **kwargs)" and hasattr(torch.Tensor, name)


def operations(cls: type) -> str:
    """Methods that run a rule."""
    return " ".join(sorted(n for n, x in vars(cls).items() if not n.startswith("_") and is_operation(n, x)))


def wrapped(text: str, width: int = 100) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


class TestContainers(TestCase):
    def test_tensordict(self):
        self.assertExpectedInline(
            own(tdc.TensorDict),
            """\
apply(self, fn, *others, batch_size=None, device=None, is_leaf=None, default=...)
apply_with_path(self, fn, *others, batch_size=None, device=None, is_leaf=None, default=...)
at
batch_dims
batch_size
delete(self, *keys)
depth
device
dim(self)
dtype
empty(self)
exclude(self, *keys)
filter(self, fn)
flatten_keys(self, separator='.')
get(self, key, default=...)
grad
imag
is_cpu
is_cuda
is_empty(td)
is_meta
items(self, include_nested=False, leaves_only=False, is_leaf=None, *, sort=False)
keys(self, include_nested=False, leaves_only=False, is_leaf=None, *, sort=False)
map(td, fn, dim=0, **kwargs)
map_iter(td, fn, dim=0, **kwargs)
memmap(td, path, *, mode='r', overwrite=False, sync=True, progress=False)
mutate(self)
ndim
ndimension(self)
numel(self)
pin_memory(td)
pop(self, key, default=...)
real
rename_keys(self, names, *, strict=True)
replace(self, **entries)
requires_grad
select(self, *keys, strict=True)
set(self, key, value)
setdefault(self, key, value)
shape
share_memory(td)
size(self, dim=None)
split_keys(self, *sets)
summary(td)
to(self, *args, where=None, **kwargs)
to_dict(self)
to_numpy(self)
unflatten_keys(self, separator='.')
update(self, other, *, keys=None)
values(self, include_nested=False, leaves_only=False, is_leaf=None, *, sort=False)
with_batch_size(self, batch_size)
with_device(self, device)""",
        )

    def test_tensordict_operations(self):
        self.assertExpectedInline(
            wrapped(operations(tdc.TensorDict)),
            """\
abs absolute acos acosh add addcdiv addcmul all allclose amax amin aminmax angle any arccos arccosh
arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort argwhere asin asinh atan atan2 atanh
bernoulli bfloat16 bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
bitwise_xor bool broadcast_to byte cdouble ceil cfloat chalf char chunk clamp clamp_max clamp_min
clip clone conj conj_physical contiguous copysign cos cosh count_nonzero cpu cuda cummax cummin
cumprod cumsum deg2rad detach diagonal diff digamma div divide double dsplit eq equal erf erfc
erfinv exp exp2 expand expand_as expm1 fix flatten flip fliplr flipud float float_power floor
floor_divide fmax fmin fmod frac frexp gather gcd ge greater greater_equal gt half hardshrink
heaviside hsplit hypot i0 igamma igammac index_add index_copy index_fill index_select int is_complex
is_floating_point is_same_size is_signed isclose isfinite isinf isnan isneginf isposinf isreal
kthvalue lcm ldexp le lerp less less_equal lgamma log log10 log1p log2 log_softmax logaddexp
logaddexp2 logcumsumexp logical_and logical_not logical_or logical_xor logit logsumexp long lt
masked_fill masked_select max maximum mean median min minimum mode moveaxis movedim msort mul
multiply mvlgamma nan_to_num nanmean nanmedian nanquantile nansum narrow narrow_copy ne neg negative
new_empty new_full new_ones new_zeros nextafter nonzero norm not_equal permute polygamma positive
pow prod quantile rad2deg ravel reciprocal relu remainder repeat repeat_interleave reshape
reshape_as resolve_conj resolve_neg roll rot90 round rsqrt scatter scatter_add scatter_reduce sgn
short sigmoid sign signbit sin sinc sinh softmax sort split split_with_sizes sqrt square squeeze std
sub subtract sum swapaxes swapdims t take_along_dim tan tanh tensor_split tile topk transpose
true_divide trunc type_as unbind unflatten unfold unique unique_consecutive unsafe_chunk
unsafe_split unsafe_split_with_sizes unsqueeze var view view_as vsplit where xlogy""",
        )

    def test_nested(self):
        self.assertExpectedInline(
            own(tdc.NestedTensor),
            """\
batch_size
cu_seqlens
device
dim(self)
dtype
element_size(x)
get_device(x)
grad
grad_fn
imag
is_contiguous(x, memory_format=torch.contiguous_format)
is_cpu
is_cuda
is_leaf
is_nested
is_pinned(x)
itemsize
lengths
mH
mT
max_length
max_seqlen
nbytes
ndim
ndimension(self)
nelement(x)
numel(self)
occupancy
offsets
pin_memory(x)
ragged_dims
real
requires_grad
requires_grad_(x, requires_grad=True)
retain_grad(x)
row_ids
shape
size(self, dim=None)
sizes
structure
to_padded(x, fill=0.0, *, length=None)
to_torch(x)
tolist(x)
unbind(self, dim=0)
values
with_values(self, values)""",
        )

    @of_the_pinned_torch
    def test_ragged_operations(self):
        nested, masked = [set(operations(cls).split()) for cls in (tdc.NestedTensor, tdc.MaskedBatch)]
        assert nested - masked == set()
        assert masked - nested == {"numel"}
        self.assertExpectedInline(
            wrapped(" ".join(sorted(nested & masked))),
            """\
abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr all allclose amax amin aminmax
angle any arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort argwhere asin
asinh atan atan2 atanh baddbmm bernoulli bfloat16 bitwise_and bitwise_left_shift bitwise_not
bitwise_or bitwise_right_shift bitwise_xor bmm bool broadcast_to byte cdouble ceil cfloat chalf char
cholesky cholesky_inverse cholesky_solve chunk clamp clamp_max clamp_min clip clone conj
conj_physical contiguous copysign corrcoef cos cosh count_nonzero cov cpu cross cuda cummax cummin
cumprod cumsum deg2rad det detach diag diag_embed diagflat diagonal diff digamma dist div divide dot
double dsplit eq equal erf erfc erfinv exp exp2 expand expand_as expm1 fix flatten flip fliplr
flipud float float_power floor floor_divide fmax fmin fmod frac frexp gather gcd ge geqrf ger
greater greater_equal gt half hardshrink hash_tensor heaviside histc hsplit hypot i0 igamma igammac
index_add index_copy index_fill index_put index_reduce index_select inner int inverse is_complex
is_floating_point is_same_size is_signed isclose isfinite isinf isnan isneginf isposinf isreal kron
kthvalue lcm ldexp le lerp less less_equal lgamma log log10 log1p log2 log_softmax logaddexp
logaddexp2 logcumsumexp logdet logical_and logical_not logical_or logical_xor logit logsumexp long
lt lu lu_solve masked_fill masked_scatter masked_select matmul matrix_exp matrix_power max maximum
mean median min minimum mm mode moveaxis movedim msort mul multiply mv mvlgamma nan_to_num nanmean
nanmedian nanquantile nansum narrow narrow_copy ne neg negative new_empty new_empty_strided new_full
new_ones new_tensor new_zeros nextafter nonzero norm not_equal orgqr ormqr outer permute pinverse
polygamma positive pow prelu prod qr quantile rad2deg ravel reciprocal relu remainder repeat
repeat_interleave reshape reshape_as resolve_conj resolve_neg roll rot90 round rsqrt scatter
scatter_add scatter_reduce select sgn short sigmoid sign signbit sin sinc sinh slogdet softmax sort
split split_with_sizes sqrt square squeeze std sub subtract sum svd swapaxes swapdims t take
take_along_dim tan tanh tensor_split tile to topk trace transpose tril triu true_divide trunc
type_as unflatten unfold unique unique_consecutive unsafe_chunk unsafe_split unsafe_split_with_sizes
unsqueeze var vdot view view_as vsplit where xlogy""",
        )

    def test_masked(self):
        self.assertExpectedInline(
            own(tdc.MaskedBatch),
            """\
batch_dim
batch_size
data
device
dim(self)
dtype
element_size(x)
filled(self, value)
get_device(x)
grad
grad_fn
imag
is_contiguous(x, memory_format=torch.contiguous_format)
is_cpu
is_cuda
is_leaf
is_nested
is_pinned(x)
itemsize
lengths
mH
mT
mask
nbytes
ndim
ndimension(self)
nelement(x)
occupancy
pin_memory(x)
ragged_dims
real
requires_grad
requires_grad_(x, requires_grad=True)
retain_grad(x)
shape
size(self, dim=None)
to_packed(x, *, total=None)
tolist(x)
unbind(self, dim=0)
with_data(self, data)""",
        )
