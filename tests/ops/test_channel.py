"""Stock normalisation modules on ragged batches: statistics are those of real positions, running ones too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tdc
from tdc import ShapeError

LENGTHS = (3, 5, 2)
functions: Any = nn.functional


def rows(*shape: int, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(4, n, *shape) * 3 + 1 for n in LENGTHS]


def batches(parts: list[torch.Tensor]) -> list[Any]:
    packed = tdc.pack(parts, ragged_dim=2)
    return [packed, packed.to_padded(fill=float("nan"))]


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_module(kind: int, momentum: float | None):
    ours, theirs = [nn.BatchNorm1d(4, momentum=momentum) for _ in range(2)]
    for seed in range(3):
        parts = rows(seed=seed)
        out = ours(batches(parts)[kind])
        want = theirs(torch.cat(parts, 1).unsqueeze(0))[0].split(LENGTHS, 1)
        torch.testing.assert_close(list(out.unbind()), list(want))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    parts = rows(seed=9)
    out, want = ours.eval()(batches(parts)[kind]), theirs.eval()(torch.cat(parts, 1).unsqueeze(0))[0].split(LENGTHS, 1)
    torch.testing.assert_close(list(out.unbind()), list(want))


@pytest.mark.parametrize("kind", [0, 1])
def test_instance_norm_module_with_running_statistics(kind: int):
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    parts = rows()
    out = norm(batches(parts)[kind])
    alone = nn.InstanceNorm1d(4, affine=True)
    torch.testing.assert_close(list(out.unbind()), [alone(row[None])[0] for row in parts])
    means, variances = torch.stack([row.mean(1) for row in parts]), torch.stack([row.var(1) for row in parts])
    torch.testing.assert_close(norm.running_mean, 0.1 * means.mean(0))
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * variances.mean(0))


def test_channels_are_static():
    with pytest.raises(ShapeError, match=r"tdc.batch_norm: expected the batch as dim 0 and channels as dim 1"):
        nn.BatchNorm1d(6)(tdc.pack([torch.randn(n, 6) for n in LENGTHS]))
    with pytest.raises(ShapeError, match=r"tdc.group_norm: expected channels that groups divide"):
        torch.nn.functional.group_norm(batches(rows())[0], 3)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("drop", [nn.Dropout1d(0.25), nn.Dropout2d(0.25)])
def test_dropout_of_channels(kind: int, drop: nn.Module):
    torch.manual_seed(0)
    ones = [torch.ones(400, n) for n in LENGTHS]
    out = drop(batches(ones)[kind]).unbind()
    for row in out:
        assert set(row.unique().tolist()) == {0.0, row.max().item()}
        assert (row == row[:, :1]).all()
        torch.testing.assert_close(row.max(), torch.tensor(1 / 0.75))
        assert abs(row.mean().item() - 1) < 0.1
    assert not torch.equal(out[0][:, 0], out[1][:, 0])


def test_feature_alpha_dropout_keeps_mean_and_variance():
    torch.manual_seed(0)
    x = tdc.pack([torch.randn(3000, n) for n in LENGTHS], ragged_dim=2)
    values = nn.FeatureAlphaDropout(0.3)(x).values
    assert abs(values.mean().item()) < 0.05
    assert abs(values.var().item() - 1) < 0.1


@pytest.mark.parametrize("kind", [0, 1])
def test_running_statistics_of_one_position(kind: int):
    """An example of one position has no variance, one without positions no mean: the others count."""
    torch.manual_seed(0)
    parts = [torch.randn(4, n) for n in (1, 0, 5)]
    norm = nn.InstanceNorm1d(4, track_running_stats=True)
    norm(batches(parts)[kind])
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * parts[2].var(1))
    torch.testing.assert_close(norm.running_mean, 0.1 * (parts[0][:, 0] + parts[2].mean(1)) / 2)
    if kind:  # torch refuses one value for each channel; here a size that only the device knows
        batch = nn.BatchNorm1d(4)
        batch(batches(parts[:2])[kind])
        torch.testing.assert_close(batch.running_var, torch.ones(4))


def test_embedding_of_padded_batches_counts_no_padding():
    """scale_grad_by_freq, max_norm and sparse gradients know the indices that are there."""
    ids = [torch.tensor([0, 2, 2]), torch.tensor([1])]
    for options in ({"scale_grad_by_freq": True}, {"max_norm": 0.5}, {"sparse": True}):
        tables = [torch.arange(1.0, 9).view(4, 2).requires_grad_() for _ in range(2)]
        out: Any = functions.embedding(tdc.pack(ids).to_padded(length=5), tables[0], **options)
        want = functions.embedding(torch.cat(ids), tables[1], **options)
        torch.testing.assert_close(torch.cat(list(out.unbind())), want)
        assert out.data.shape == (2, 5, 2)
        out.data.sum().backward()
        want.sum().backward()
        grads = [t.grad.coalesce() if options.get("sparse") else t.grad for t in tables if t.grad is not None]
        torch.testing.assert_close(*grads)
        assert torch.equal(*[t.detach() for t in tables])


def test_embedding_bag_of_both_kinds():
    ids, weights, table = tdc.pack([torch.tensor([0, 2, 2]), torch.tensor([1])]), torch.rand(2, 3), torch.rand(4, 2)
    bag = functions.embedding_bag
    for mode in ("mean", "sum", "max"):
        want = torch.cat([bag(row[None], table, mode=mode) for row in ids.unbind()])
        torch.testing.assert_close(bag(ids, table, mode=mode), want)
        torch.testing.assert_close(bag(ids.to_padded(), table, mode=mode), want)
    want = torch.stack(
        [(table[row] * w[: len(row), None]).sum(0) for row, w in zip(ids.unbind(), weights, strict=True)]
    )
    for x in (ids, ids.to_padded()):
        torch.testing.assert_close(bag(x, table, per_sample_weights=weights, mode="sum"), want)
        with pytest.raises(ShapeError, match="one of mean, sum, max"):
            bag(x, table, mode="avg")


def test_ragged_weights_are_refused():
    x: Any = tdc.pack([torch.rand(4, 3), torch.rand(4, 2)], ragged_dim=2)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    for call in (
        lambda: functions.prelu(torch.rand(2, 4, 3), x),
        lambda: functions.embedding(ids, x),
        lambda: functions.group_norm(x, 2, x),
        lambda: functions.linear(torch.rand(2, 3), x),
    ):
        with pytest.raises(tdc.DtypeError, match="a ragged input and dense weights"):
            call()


def test_norms_without_eps_get_no_gradient_from_padding():
    x: Any = tdc.pack([torch.randn(3, 4), torch.randn(1, 4)])
    for fn in (functions.layer_norm, functions.rms_norm):
        found = []
        for y in (x, x.to_padded()):
            weight = torch.ones(4, requires_grad=True)
            out = fn(y, (4,), weight, eps=0.0)
            (out.values if isinstance(out, tdc.NestedTensor) else out.data).square().sum().backward()
            found.append(weight.grad)
        torch.testing.assert_close(*found)


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_of_bands_in_front_of_a_kernel_in_a_graph(training: bool):
    """What a graph expects of torch's own lies otherwise in memory than what comes, and no view of it is one (2.13)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.MaxPool2d((2, 1))).train(training)
    alone = copy.deepcopy(net)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    for lengths in (LENGTHS, (1, 4)):
        x: Any = tdc.pack([torch.randn(1, 8, n) for n in lengths], ragged_dim=3).requires_grad_()
        y = x.detach().requires_grad_()
        out, want = run(x).values, alone(y).values
        torch.testing.assert_close(out, want)
        out.pow(3).sum().backward()
        want.pow(3).sum().backward()
        torch.testing.assert_close(x.grad.values, y.grad.values)
    torch.testing.assert_close(net.state_dict(), alone.state_dict())


MODULES: dict[str, Any] = {
    "group norm": lambda: nn.GroupNorm(2, 8),
    "instance norm": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_by_themselves(name: str, dtype: torch.dtype):
    sizes = ((40, 50), (60, 30))
    model, x = MODULES[name]().to(dtype), tdc.pack([torch.randn(8, *n).to(dtype) for n in sizes], ragged_dim=(2, 3))
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    for got, image in zip(model(x), x.unbind(), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, MODULES[name]().to(dtype)(image[None])[0], **close)


def test_group_norm_of_no_images_of_any_size():
    images = tdc.pack([torch.randn(8, 0, 4), torch.randn(8, 0, 2)], ragged_dim=(2, 3))
    for x in (images, tdc.pack([torch.randn(8, 0)], ragged_dim=2)):
        assert functions.group_norm(x, 2).values.shape == (8, 0)
