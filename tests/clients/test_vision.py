"""Models of torchvision 0.28.0 and timm 1.0.31 on images of different sizes: each output is that of the image alone.

Weights are random. Running statistics are those of a batch, so that activations neither vanish nor explode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Counter
from torch import Tensor, nn
from torch.testing import assert_close

import tdc

UNUSABLE: Any = (ImportError, RuntimeError)  # the latter where torchvision was built for another torch
torchvision: Any = pytest.importorskip("torchvision", exc_type=UNUSABLE)
timm: Any = pytest.importorskip("timm")
pytestmark = [
    pytest.mark.clients,
    # timm/models/_registry.py and others warn of names that moved (timm 1.0.31).
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]
SIZES = ((64, 96), (96, 64), (70, 65))
EVEN = ((64, 96), (96, 64), (32, 32))
KINDS = ("packed", "padded")


def convnext() -> Any:
    """Blocks of every kind, as few as there may be."""
    of = torchvision.models.convnext
    return of.ConvNeXt([of.CNBlockConfig(16, 32, 1), of.CNBlockConfig(32, None, 1)], num_classes=10)


MODELS: dict[str, Callable[[], Any]] = {
    "torchvision googlenet": lambda: torchvision.models.googlenet(num_classes=10, init_weights=True, aux_logits=False),
    "torchvision convnext": convnext,
    **{
        f"torchvision {name}": lambda name=name: getattr(torchvision.models, name)(num_classes=10)
        for name in (
            "alexnet", "densenet121", "efficientnet_b0", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small",
            "regnet_y_400mf", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1", "vgg11_bn",
        )
    },
    **{
        f"timm {name}": lambda name=name: timm.create_model(name, num_classes=10)
        for name in (
            "convmixer_768_32", "convnext_atto", "convnextv2_atto", "cspresnet50", "dla34", "eca_resnet33ts",
            "efficientnet_lite0", "fastvit_t8", "focalnet_tiny_srf", "ghostnet_050", "hrnet_w18_small",
            "mobilenetv3_small_050", "mobilenetv4_conv_small", "poolformer_s12", "regnetx_002", "regnety_002",
            "repvgg_a0", "res2net50_14w_8s", "resnest14d", "resnet10t", "rexnet_100", "selecsls42b", "skresnet18",
            "test_mambaout", "test_nfnet", "xception41",
        )
    },
}  # fmt: skip
AMPLIFY = ("timm convmixer_768_32", "timm repvgg_a0", "timm selecsls42b")  # small differences
DIVISIBLE = ("timm dla34", "timm hrnet_w18_small")  # whose maps meet only where 32 divides height and width


def images(sizes: Any = SIZES, dtype: Any = torch.float32) -> list[Tensor]:
    return [torch.randn(3, *n, dtype=dtype) for n in sizes]


def batch(rows: list[Tensor], kind: str) -> Any:
    x = tdc.pack(rows, ragged_dim=(2, 3))
    return x if kind == "packed" else x.to_padded(float("nan"))


def build(make: Callable[[], Any], dtype: Any = torch.float32) -> Any:
    """A model in evaluation, whose running statistics are those of noise."""
    torch.manual_seed(0)
    net = make().to(dtype)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 1.0
    with torch.no_grad():
        net.train()(torch.randn(4, 3, 96, 96, dtype=dtype))
    return net.eval()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_each_image_alone(name: str, dtype: torch.dtype, tolerance: float):
    net, rows = build(MODELS[name], dtype), images(EVEN if name in DIVISIBLE else SIZES, dtype)
    tolerance *= 100 if name in AMPLIFY else 1
    with torch.no_grad():
        alone = torch.cat([net(row[None]) for row in rows])
        for kind in KINDS:
            out = net(batch(rows, kind))
            assert type(out) is Tensor
            assert_close(out / alone.abs().max(), alone / alone.abs().max(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["torchvision resnet18", "torchvision convnext", "timm regnetx_002"])
def test_gradients_are_those_of_each_image_alone(name: str, kind: str):
    net = build(MODELS[name], torch.float64)
    rows = [row.requires_grad_() for row in images(((64, 96), (70, 61)), torch.float64)]
    leaves = [*rows, *net.parameters()]
    want = torch.autograd.grad(torch.cat([net(row[None]) for row in rows]).square().sum(), leaves)
    got = torch.autograd.grad(net(batch(rows, kind)).square().sum(), leaves)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, rtol=1e-7, atol=1e-7 * float(b.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_for_all_sizes(kind: str):
    torch._dynamo.reset()
    net, counter = build(lambda: timm.create_model("test_resnet", num_classes=10)), Counter()
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    for sizes in (SIZES, ((33, 80), (64, 64)), ((50, 50), (41, 97), (96, 32), (64, 72))):
        rows = images(sizes)
        with torch.no_grad():
            assert_close(compiled(batch(rows, kind)), torch.cat([net(row[None]) for row in rows]), rtol=1e-4, atol=1e-5)
    assert counter.graphs == 1


def test_training_is_as_of_any_batch():
    torch.manual_seed(0)
    net = torchvision.models.resnet18(num_classes=10).double()
    rows = images(((64, 96), (70, 61)), torch.float64)
    grads = []
    for kind in KINDS:
        net.zero_grad()
        F.cross_entropy(net(batch(rows, kind)), torch.tensor([1, 2])).backward()
        grads.append([p.grad for p in net.parameters()])
    for a, b in zip(*grads, strict=True):  # statistics of batch norm are over real positions
        assert_close(a, b, rtol=1e-6, atol=1e-6 * float(b.abs().max()))


def encode(net: Any, x: Any, rows: int) -> Tensor:
    """The vision transformer of torchvision with position embeddings of the grid of each image."""
    place, grid = net.encoder.pos_embedding, net.conv_proj(x)
    side = int((place.shape[1] - 1) ** 0.5)
    table = place[0, 1:].T.unflatten(1, (side, side))
    if isinstance(x, Tensor):
        positions = F.interpolate(table[None], size=grid.shape[2:], mode="bicubic")
    else:
        positions = F.interpolate(tdc.pack([table] * rows, ragged_dim=(2, 3)), size=grid, mode="bicubic")
    tokens = (grid + positions).flatten(2).transpose(1, 2)
    token = (net.class_token + place[:, :1]).expand(rows, -1, -1)
    return net.heads(net.encoder.ln(net.encoder.layers(torch.cat([token, tokens], 1)))[:, 0])


def test_a_vision_transformer_whose_positions_are_of_each_grid():
    torch.manual_seed(0)
    net = torchvision.models.VisionTransformer(64, 16, 2, 2, 32, 64, num_classes=10).eval()
    nn.init.normal_(net.heads.head.weight)
    rows = images(((64, 96), (96, 64), (48, 48)))
    alone = torch.cat([encode(net, row[None], 1) for row in rows])
    assert_close(encode(net, batch(rows, "packed"), 3), alone, rtol=1e-5, atol=1e-5)
    want = torch.autograd.grad(alone.square().sum(), list(net.parameters()))
    got = torch.autograd.grad(encode(net, batch(rows, "packed"), 3).square().sum(), list(net.parameters()))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_segmentation_resized_to_each_image(kind: str):
    whole = fcn()
    net = build(lambda: nn.Sequential(whole.backbone, Out(), whole.classifier), torch.float64)
    rows = images(((64, 96), (70, 61)), torch.float64)
    x = batch(rows, kind)
    with torch.no_grad():
        out = F.interpolate(net(x), size=x, mode="bilinear")
        for y, row in zip(out.unbind(), rows, strict=True):
            want = F.interpolate(net(row[None]), size=row.shape[1:], mode="bilinear")[0]
            assert_close(y, want, rtol=1e-7, atol=1e-7 * float(want.abs().max()))


class Out(nn.Module):
    """The feature maps of a backbone."""

    def forward(self, x: Any) -> Any:
        return x["out"]


def fcn() -> Any:
    return torchvision.models.segmentation.fcn_resnet50(num_classes=5, weights=None, weights_backbone=None)


def dynamic_vit() -> Any:
    return timm.create_model("test_vit", num_classes=10, dynamic_img_size=True)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {  # they compute with the numbers of x.shape
    "torchvision swin_t": (lambda: torchvision.models.swin_t(num_classes=10), "one size"),
    "torchvision fcn_resnet50": (fcn, "size=y"),
    "timm test_vit": (dynamic_vit, "one size"),
    "timm vgg11": (lambda: timm.create_model("vgg11", num_classes=10), "one size"),
    "timm tf_efficientnet_b0": (lambda: timm.create_model("tf_efficientnet_b0", num_classes=10), "one size"),
    "timm efficientvit_b0": (lambda: timm.create_model("efficientvit_b0", num_classes=10), "one size"),
    "timm edgenext_xx_small": (lambda: timm.create_model("edgenext_xx_small", num_classes=10), "one size"),
    "timm gcresnet33ts": (lambda: timm.create_model("gcresnet33ts", num_classes=10), "one size"),
    "timm mobilevit_xxs": (lambda: timm.create_model("mobilevit_xxs", num_classes=10), "one size"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_compute_with_sizes_are_refused(name: str):
    make, text = REFUSED[name]
    with pytest.raises(tdc.ShapeError, match=text):
        make().eval()(batch(images(((64, 96), (96, 64))), "packed"))


@pytest.mark.parametrize("name", ["torchvision swin_t", "timm test_vit", "timm mobilevit_xxs"])
def test_padded_images_as_tokens_are_refused(name: str):
    with pytest.raises(tdc.ShapeError, match="put real positions first"):
        REFUSED[name][0]().eval()(batch(images(((64, 96), (96, 64))), "padded"))


def test_one_size_is_asked_for_by_name():
    net = torchvision.models.VisionTransformer(64, 16, 2, 2, 32, 64, num_classes=10)
    with pytest.raises(AssertionError, match="Wrong image height"):
        net(batch(images(((64, 64), (64, 64))), "packed"))
