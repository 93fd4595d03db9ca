"""The plain networks of `bayesify.lab.models`, against their papers' counts and real pretrained weights."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.lab.models import MLP, MODELS, VGG16, CifarResNet, LeNet, PyramidNet, WideResNet
from bayesify.lab.models.resnet import ZeroPadShortcut

DATA = Path(os.environ.get("BAYESIFY_DATA", Path(__file__).parents[2] / "shared" / "data"))
IMAGENET_MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
IMAGENET_STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: MLP([64, 32, 32, 7]), (64,)),
    "mlp of images": (lambda: MLP([64, 32, 7], norm="layer"), (1, 8, 8)),
    "mlp batch norm": (lambda: MLP([64, 32, 7], bias=False, norm="batch", activation=nn.Tanh), (64,)),
    "linear": (lambda: MLP([64, 7]), (64,)),
    "lenet 28": (lambda: LeNet(7), (1, 28, 28)),
    "lenet 32": (lambda: LeNet(7, in_channels=3, image_size=32), (3, 32, 32)),
    "resnet20": (lambda: CifarResNet(20, 7), (3, 16, 16)),
    "resnet20 odd": (lambda: CifarResNet(20, 7, in_channels=1), (1, 13, 13)),
    "vgg16": (lambda: VGG16(7), (3, 32, 32)),
    "vgg16 no norm": (
        lambda: VGG16(7, in_channels=1, batch_norm=False, hidden=(16,), map_size=2),
        (1, 32, 32),
    ),
    "wide resnet": (lambda: WideResNet(16, 2, 7), (3, 16, 16)),
    "wide resnet dropout": (lambda: WideResNet(10, 1, 7, in_channels=1, dropout=0.3), (1, 13, 13)),
    "pyramidnet": (lambda: PyramidNet(20, 24, 7), (3, 16, 16)),
    "pyramidnet odd": (lambda: PyramidNet(14, 10, 7, in_channels=1), (1, 13, 13)),
}
BY_NAME: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "mlp": ({"sizes": [3 * 32 * 32, 50, 7]}, (3, 32, 32)),
    "lenet": ({"classes": 7}, (1, 28, 28)),
}


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def node_count(model: nn.Module) -> int:
    """The input features and input channels of every Linear and Conv: the nodes of the iBNN paper."""
    linears = sum(m.in_features for m in model.modules() if isinstance(m, nn.Linear))
    return linears + sum(m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d))


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        pytest.param(lambda: PyramidNet(110, 270, 100), 28_511_307, id="pyramidnet: EMP table 1"),
        pytest.param(lambda: MLP([1] + [100] * 100, bias=False, norm="batch"), 1_009_900, id="mlp: EMP table 2"),
        pytest.param(lambda: CifarResNet(20), 269_722, id="resnet20"),
        pytest.param(lambda: WideResNet(28, 10), 36_479_194, id="wide resnet 28-10: 36.5M in its paper"),
        pytest.param(LeNet, 61_706, id="lenet"),
    ],
)
def test_parameter_counts(make: Callable[[], nn.Module], parameters: int) -> None:
    assert parameter_count(on_meta(make)) == parameters


@pytest.mark.parametrize(
    ("make", "nodes"),
    [
        pytest.param(VGG16, 5_251, id="vgg16-small"),
        pytest.param(lambda: VGG16(hidden=(4096, 4096), map_size=7), 36_995, id="vgg16-large"),
        pytest.param(lambda: WideResNet(28, 10), 9_475, id="wide resnet 28-10"),
    ],
)
def test_nodes_of_the_ibnn_paper(make: Callable[[], nn.Module], nodes: int) -> None:
    assert node_count(on_meta(make)) == nodes


def test_the_deep_mlp_has_a_norm_after_every_linear_but_the_last() -> None:
    model = on_meta(lambda: MLP([1] + [100] * 100, bias=False, norm="batch"))
    kinds = [type(m) for m in model.modules() if isinstance(m, (nn.Linear, nn.BatchNorm1d))]
    assert kinds == [nn.Linear, nn.BatchNorm1d] * 99 + [nn.Linear]


def test_pyramidnet_widens_by_five_in_every_block() -> None:
    convolutions = [m for m in on_meta(PyramidNet).modules() if isinstance(m, nn.Conv2d)]
    assert [conv.out_channels for conv in convolutions[::2]] == list(range(16, 287, 5))


@pytest.mark.parametrize("name", SMALL)
def test_forward_and_backward(name: str) -> None:
    make, shape = SMALL[name]
    model = make()
    logits = model(torch.rand(3, *shape))
    assert logits.shape == (3, 7)
    loss = F.cross_entropy(logits, torch.tensor([0, 1, 2]))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", SMALL)
def test_a_pickled_copy_is_the_same_function(name: str) -> None:
    make, shape = SMALL[name]
    model, x = make().eval(), torch.rand(2, *shape)
    copy = pickle.loads(pickle.dumps(model))
    assert torch.equal(copy(x), model(x))


@pytest.mark.parametrize("name", MODELS)
def test_every_named_model_gives_logits_and_pickles(name: str) -> None:
    options, shape = BY_NAME.get(name, ({"classes": 7}, (3, 32, 32)))
    model = on_meta(lambda: MODELS[name](**options))
    assert model(torch.empty(2, *shape, device="meta")).shape == (2, 7)
    assert pickle.loads(pickle.dumps(model)).state_dict().keys() == model.state_dict().keys()


def test_the_shortcut_of_option_a_pads_channels_on_both_sides() -> None:
    x = torch.rand(2, 4, 5, 5)
    out = ZeroPadShortcut(new_channels=4)(x)
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2])
    assert not out[:, [0, 1, 6, 7]].any()


def test_dropout_is_absent_unless_asked_for() -> None:
    assert not any(isinstance(m, nn.Dropout) for m in WideResNet(10, 1).modules())
    assert sum(isinstance(m, nn.Dropout) for m in WideResNet(10, 1, dropout=0.3).modules()) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CifarResNet(21), r"6n \+ 2"),
        (lambda: CifarResNet(2), r"6n \+ 2"),
        (lambda: WideResNet(20, 2), r"6n \+ 4"),
        (lambda: MLP([3]), "input and an output"),
        (lambda: MLP([3, 2], norm="group"), "norm must be one of"),  # type: ignore[arg-type]
        (lambda: LeNet(image_size=30), "28 or 32"),  # type: ignore[arg-type]
    ],
)
def test_impossible_shapes_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.fixture(scope="module")
def pretrained_resnet20() -> nn.Module:
    path = DATA / "weights" / "resnet20-12fca82f.th"
    if not path.is_file():
        pytest.skip(f"no pretrained weights at {path}; set BAYESIFY_DATA")
    saved = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    model = CifarResNet(20)
    model.load_state_dict({name.removeprefix("module."): tensor for name, tensor in saved.items()}, strict=True)
    return model.eval()


def cifar10_test_images(n: int) -> tuple[Tensor, Tensor]:
    path = DATA / "cifar-10-batches-py" / "test_batch"
    if not path.is_file():
        pytest.skip(f"no CIFAR-10 at {path}; set BAYESIFY_DATA to the folder that unpack.py has filled")
    batch = pickle.loads(path.read_bytes(), encoding="bytes")
    images = torch.from_numpy(np.asarray(batch[b"data"][:n])).view(n, 3, 32, 32) / 255
    return (images - IMAGENET_MEAN) / IMAGENET_STD, torch.tensor(batch[b"labels"][:n])


def test_pretrained_weights_load_strictly(pretrained_resnet20: nn.Module) -> None:
    assert all(p.isfinite().all() for p in pretrained_resnet20.parameters())


def test_the_pretrained_net_recognises_real_images(pretrained_resnet20: nn.Module) -> None:
    images, labels = cifar10_test_images(500)
    with torch.no_grad():
        correct = (pretrained_resnet20(images).argmax(1) == labels).sum()
    assert correct >= 450  # 455 here; 112 with all zero channels on one side
