"""The plain networks of `bayesify.lab.models`, against their papers' counts and real pretrained weights."""

import ast
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as by
from bayesify.lab.models import (
    CNN,
    LSTM,
    MLP,
    MODELS,
    VGG16,
    CifarResNet,
    LeNet,
    ModelError,
    PyramidNet,
    TabM,
    WideResNet,
    build,
    load_weights,
)
from bayesify.lab.models.mlp import ACTIVATIONS
from bayesify.lab.models.registry import options_of
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
    "lenet norms": (lambda: LeNet(7, width=0.5, norm="batch"), (1, 28, 28)),
    "mlp of the regressions": (lambda: MLP([64, 50, 7], norm="batch", input_norm=True, norm_weight=0.2), (64,)),
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
    "cnn": (lambda: CNN(7), (1, 8, 8)),
    "cnn of the least size": (lambda: CNN(7, in_channels=3, image_size=(4, 4)), (3, 4, 4)),
    "cnn odd": (lambda: CNN(7, image_size=(5, 11), channels=[8], pool="flatten"), (1, 5, 11)),
    "cnn deep": (lambda: CNN(7, image_size=(28, 28), channels=[8, 8, 8, 8, 8], pool="flatten"), (1, 28, 28)),
    "lstm": (lambda: LSTM(5, 7, hidden=8), (6, 5)),
    "lstm both ways": (lambda: LSTM(5, 7, hidden=8, layers=2, bidirectional=True, dropout=0.1), (6, 5)),
    "lstm mean": (lambda: LSTM(5, 7, hidden=8, bidirectional=True, pool="mean"), (6, 5)),
    "pyramidnet odd": (lambda: PyramidNet(14, 10, 7, in_channels=1), (1, 13, 13)),
}
BY_NAME: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "mlp": ({"in_features": 3 * 32 * 32, "classes": 7}, (3, 32, 32)),
    "tabm": ({"in_features": 5, "classes": 7}, (5,)),
    "cnn": ({"classes": 7}, (1, 8, 8)),
    "lenet": ({"classes": 7}, (1, 28, 28)),
    "lstm": ({"in_features": 5, "classes": 7}, (6, 5)),
    "unet": ({"in_channels": 3, "classes": 7}, (3, 32, 32)),
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


def test_the_network_of_the_regressions_has_norms_after_the_input_and_the_hidden_layer() -> None:
    """EMP, appendix D.7: one hidden layer of 50, norms after the input and after it, γ = 0.2; only they are patched."""
    network = build("mlp", shape=(13,), outputs=1, norm="batch", input_norm=True, norm_weight=0.2)
    assert [(type(m), getattr(m, "out_features", getattr(m, "num_features", None))) for m in network.layers] == [  # type: ignore[arg-type, union-attr]
        *[(nn.BatchNorm1d, 13), (nn.Linear, 50), (nn.BatchNorm1d, 50), (nn.ReLU, None), (nn.Linear, 1)]
    ]
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm1d)]
    assert all((norm.weight == 0.2).all() and not norm.bias.any() for norm in norms)
    added = parameter_count(by.convert(network, by.EMP(5, patches=("norm",)))) - parameter_count(
        build("mlp", shape=(13,), outputs=1, norm="batch", input_norm=True)
    )
    assert added == 4 * 2 * (13 + 50)


def test_wider_lenets_grow_as_in_the_ibnn_paper() -> None:
    """Figure 4: 42K, 165K, 657K and 2619K parameters, with more hidden units and as many layers."""
    counts = [parameter_count(on_meta(partial(LeNet, width=width))) for width in (1, 2, 4, 8)]
    for ours, theirs in zip(counts, (42, 165, 657, 2619), strict=True):
        assert ours / counts[0] == pytest.approx(theirs / 42, rel=0.02)
    near = on_meta(partial(LeNet, width=0.82))
    assert parameter_count(near) == pytest.approx(42_000, rel=0.02)
    assert {len(list(on_meta(partial(LeNet, width=width)).children())) for width in (0.1, 1, 8)} == {9}


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
    pixels = shape[1:] if name == "unet" else ()
    assert model(torch.empty(2, *shape, device="meta")).shape == (2, 7, *pixels)
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
        (lambda: LeNet(width=0), "width must be a number above 0"),
        (lambda: LeNet(norm="layer"), "norm must be one of 'batch'"),  # type: ignore[arg-type]
        (lambda: MLP([3, 2], input_norm=True), "need norm='batch' or norm='layer'"),
        (lambda: TabM(3, hidden=[8]), "at least two widths"),
        (lambda: TabM(3, bins=1), "bins=1: expected at least 2"),
        (lambda: CNN(image_size=(8, 3)), "at least 4 pixels"),
        (lambda: CNN(channels=[]), "at least one"),
        (lambda: CNN(channels=[8, 0]), "channels must be an integer of at least 1, not 0"),
        (lambda: CNN(pool="averge"), "did you mean 'average'"),  # type: ignore[arg-type]
        (lambda: LSTM(3, pool="first"), "'last', 'mean', not 'first'"),  # type: ignore[arg-type]
        (lambda: LSTM(3, hidden=2.5), "hidden must be an integer"),  # type: ignore[arg-type]
        (lambda: LSTM(3, dropout=0.1), "acts between layers"),
        (lambda: WideResNet(28, 0), "width must be"),
        (lambda: PyramidNet(20, -4), "alpha"),
    ],
)
def test_impossible_sizes_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# What only the small ones do.


def test_the_last_state_of_both_directions_has_seen_the_whole_series() -> None:
    model, x = LSTM(1, 2, hidden=3, bidirectional=True).eval(), torch.rand(1, 5, 1)
    for moment in range(5):
        changed = x.clone()
        changed[0, moment] += 1
        outputs, _ = model.lstm(changed)
        seen = torch.cat([outputs[:, -1, :3], outputs[:, 0, 3:]], dim=1)
        assert torch.allclose(model(changed), model.fc(seen))
        assert not torch.allclose(model(changed), model(x))


def test_the_mean_of_an_lstm_is_over_time() -> None:
    model, x = LSTM(2, 3, hidden=4, pool="mean").eval(), torch.rand(2, 5, 2)
    assert torch.allclose(model(x), model.fc(model.lstm(x)[0].mean(1)))


def test_a_cnn_halves_only_maps_of_four_pixels_or_more() -> None:
    halvings = {
        size: sum(isinstance(layer, nn.MaxPool2d) for layer in CNN(image_size=size).features)
        for size in [(4, 4), (7, 7), (8, 8), (8, 4), (28, 28)]
    }
    assert halvings == {(4, 4): 1, (7, 7): 1, (8, 8): 2, (8, 4): 1, (28, 28): 2}


def test_an_mlp_takes_its_activation_by_name_or_as_a_class() -> None:
    by_name = build("mlp", shape=(4,), outputs=1, activation="tanh", hidden=[3, 2], bias=False, norm="layer")
    as_class = build("mlp", shape=(4,), outputs=1, activation=nn.Tanh, hidden=(3, 2), bias=False, norm="layer")
    assert str(by_name) == str(as_class)
    assert [type(layer) for layer in by_name.layers][:3] == [nn.Linear, nn.LayerNorm, nn.Tanh]  # type: ignore[arg-type, union-attr]
    for activation in ACTIVATIONS:
        assert build("mlp", shape=(4,), outputs=2, activation=activation)(torch.rand(3, 4)).shape == (3, 2)


def test_an_mlp_may_have_one_hidden_layer_or_none() -> None:
    assert str(build("mlp", shape=(4,), outputs=1, hidden=50)) == str(build("mlp", shape=(4,), outputs=1))
    assert parameter_count(build("mlp", shape=(4,), outputs=1, hidden=[])) == 5


# By name.


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("mlp", (13,), {}),
        ("mlp", (2, 5, 5), {"hidden": [20, 10], "norm": "batch"}),
        ("cnn", (1, 8, 8), {"channels": [4, 4]}),
        ("cnn", (3, 4, 9), {"pool": "flatten"}),
        ("lenet", (3, 28, 28), {}),
        ("lenet", (1, 32, 32), {}),
        ("resnet20", (1, 28, 28), {}),
        ("resnet110", (3, 32, 32), {}),
        ("vgg16", (1, 32, 40), {"hidden": [64], "batch_norm": False}),
        ("wide_resnet", (3, 32, 32), {"depth": 16, "width": 2, "dropout": 0.3}),
        ("wide_resnet_16_2", (3, 8, 8), {}),
        ("pyramidnet", (1, 8, 8), {"depth": 20, "alpha": 24}),
        ("pyramidnet20_24", (3, 8, 8), {}),
        ("lstm", (48, 37), {"hidden": 8, "layers": 2, "bidirectional": True, "pool": "mean"}),
    ],
)
def test_a_built_network_fits_its_data(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = build(name, shape=shape, outputs=7, **options)
        assert model(torch.empty(2, *shape)).shape == (2, 7)
    assert model.training


@pytest.mark.parametrize("name", ["mlp", "cnn", "lenet", "resnet20"])
def test_a_built_network_becomes_bayesian(name: str) -> None:
    shape = (1, 28, 28)
    model = by.convert(build(name, shape=shape, outputs=3), by.Rank1(2))
    assert by.predict(model, torch.rand(2, *shape), samples=2).probs.shape == (2, 3)


def test_names_that_say_their_sizes_are_the_same_networks() -> None:
    said = on_meta(lambda: build("wide_resnet_28_10", shape=(3, 32, 32), outputs=10))
    given = on_meta(lambda: build("wide_resnet", shape=(3, 32, 32), outputs=10, depth=28, width=10))
    assert str(said) == str(given)
    assert parameter_count(on_meta(lambda: build("pyramidnet110_84", shape=(3, 32, 32), outputs=10))) == 3_904_446


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet22"}, "unknown network 'resnet22'; did you mean .*'resnet20'"),
        ({"name": "ResNet20"}, "did you mean 'resnet20'"),
        ({"name": "transformer"}, r"unknown network 'transformer'\. Expected one of mlp, tabm, cnn.*timm:NAME"),
        ({"name": "tim:resnet18"}, "unknown source 'tim'; did you mean 'timm'"),
        ({"name": "lenet", "shape": (13,)}, r"lenet needs images \(C, 28, 28\) or \(C, 32, 32\), got \(13,\)"),
        ({"name": "lenet", "shape": (1, 28, 32)}, r"got \(1, 28, 32\)"),
        ({"name": "resnet20", "shape": (13,)}, r"resnet20 needs images \(C, H, W\), got \(13,\)"),
        ({"name": "vgg16", "shape": (3, 28, 28)}, "vgg16 needs images .* of at least 32x32"),
        ({"name": "cnn", "shape": (1, 8, 3)}, "cnn needs images .* of at least 4x4"),
        ({"name": "lstm", "shape": (13,)}, r"lstm needs series \(time, features\), got \(13,\)"),
        ({"name": "wide_resnet", "depht": 16}, "no option 'depht'; did you mean 'depth'. .*depth, width, dropout"),
        ({"name": "resnet20", "depth": 16}, r"resnet20 has no option 'depth'\. It has none"),
        ({"name": "wide_resnet_28_10", "depth": 16}, "has no option 'depth'"),
        ({"name": "resnet20", "classes": 5}, "classes is not an option: it follows from the data"),
        ({"name": "wide_resnet", "depth": 17}, r"wide_resnet: depth must be 6n \+ 4"),
        ({"name": "wide_resnet", "depth": "deep"}, "wide_resnet: "),
        ({"name": "wide_resnet", "dropout": 1.5}, "wide_resnet: dropout probability"),
        ({"name": "mlp", "activation": "relo"}, "activation must be one of .* did you mean 'relu'"),
        ({"name": "mlp", "hidden": "50"}, "mlp: hidden must be an integer of at least 1, not '50'"),
        ({"name": "resnet20", "pretrained": True}, "has no pretrained weights; load your own with load_weights"),
        ({"name": "resnet22", "pretrained": True}, "unknown network"),
        ({"name": "mlp", "outputs": 0}, "outputs must be an integer of at least 1, not 0"),
        ({"name": "mlp", "shape": ()}, "expected the shape of one input"),
        ({"name": "mlp", "shape": (3, 0)}, r"each size in shape=\(3, 0\) must be"),
        ({"name": "mlp", "shape": (3, 2.5)}, "must be an integer"),
    ],
)
def test_what_cannot_be_built_is_said(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(**{"shape": (3, 32, 32), "outputs": 10, **arguments})


def test_the_error_is_one_of_ours() -> None:
    assert issubclass(ModelError, by.BayesifyError)


@pytest.mark.parametrize("name", MODELS)
def test_the_page_lists_every_network_and_its_options(name: str) -> None:
    text = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("|") and f"`{name}`" in line.split("|")[1])
    listed = re.findall(r"`(\w+)=([^`]*)`", row.split("|")[3])
    in_code = {option: parameter.default for option, parameter in options_of(MODELS[name]).items()}
    assert {option: ast.literal_eval(value) for option, value in listed} == in_code


# Of the user's own.


OWN = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=3, *, depth=1):
        super().__init__()
        self.fc = nn.Linear(4, width)

def make(width, pretrained=False):
    net = Net(width)
    net.pretrained = pretrained
    return net

def broken(width=1):
    return nn.Linear("four", width)

def wrong():
    return 3

SIZE = 3
"""


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "nets_of_mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def build_own(name: str, trust: str | None = None, **options: Any) -> nn.Module:
    file = name.rpartition(":")[0].removeprefix("python:")
    return build(name, shape=(4,), outputs=5, trust=trust or file, **options)


@pytest.mark.parametrize("where", ["nets_of_mine.py", "./nets_of_mine.py", "python:nets_of_mine.py"])
def test_a_network_of_ones_own(own_folder: Path, where: str) -> None:
    assert build_own(f"{where}:make", width=5).fc.out_features == 5  # type: ignore[union-attr]
    assert build_own(f"{where}:Net").fc.out_features == 3  # type: ignore[union-attr]
    assert build_own(f"{where}:make", width=5, pretrained=True).pretrained is True


def test_the_same_file_gives_the_same_class_and_a_changed_one_another(own_folder: Path) -> None:
    first, second = build_own("nets_of_mine.py:Net"), build_own(str(own_folder / "nets_of_mine.py") + ":Net")
    assert type(first) is type(second)
    assert type(pickle.loads(pickle.dumps(first))) is type(first)
    (own_folder / "nets_of_mine.py").write_text(OWN.replace("width=3", "width=8"))
    assert build_own("nets_of_mine.py:Net").fc.out_features == 8  # type: ignore[union-attr]


def test_a_file_imports_its_neighbours_but_never_instead_of_what_is_installed(own_folder: Path) -> None:
    (own_folder / "parts").mkdir()
    (own_folder / "parts" / "a_neighbour_of_it.py").write_text("WIDTH = 6")
    (own_folder / "parts" / "torch.py").write_text("raise AssertionError('this is not torch')")
    (own_folder / "parts" / "net.py").write_text(
        "from a_neighbour_of_it import WIDTH\nfrom torch import nn\ndef make(): return nn.Linear(4, WIDTH)"
    )
    assert build_own("parts/net.py:make").out_features == 6


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nets_of_mine.py", {}, "is not a function; expected path/to/file.py:function"),
        ("python:nets_of_mine", {}, "networks are not imported by the name of a module"),
        ("nets_of_mine.py:", {}, "is not a function"),
        ("other.py:make", {}, "trust='other.py': no such file"),
        ("python:nets_of_mine:make", {}, "networks are not imported by the name of a module"),
        ("nets_of_mine.py:make", {"trust": "nets_of_yours.py"}, "trust='nets_of_yours.py': no such file"),
        ("nets_of_mine.py:mkae", {}, "has no function 'mkae'; did you mean 'make'"),
        ("nets_of_mine.py:SIZE", {}, "has no function 'SIZE'"),
        ("nets_of_mine.py:Net", {"dpth": 2}, "no option 'dpth'; did you mean 'depth' .*Its options are width, depth"),
        ("nets_of_mine.py:Net", {"pretrained": True}, "has no option 'pretrained'"),
        ("nets_of_mine.py:make", {}, "needs the option width"),
        ("nets_of_mine.py:wrong", {}, "must return a torch.nn.Module, not int"),
    ],
)
def test_what_is_wrong_with_ones_own_is_said(
    own_folder: Path, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        build_own(name, **options)


def test_errors_inside_ones_own_keep_their_words(own_folder: Path) -> None:
    with pytest.raises(TypeError) as error:
        build_own("nets_of_mine.py:broken")
    assert not isinstance(error.value, ModelError)
    (own_folder / "needy.py").write_text("import no_such_package")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        build_own("needy.py:make")


# Of other packages, which small fakes stand for here; zoo/test_models.py has the real ones.


class Backbone(nn.Module):
    """A classifier with torchvision's habits: three channels, 1000 classes, an auxiliary head in training."""

    def __init__(self, num_classes: int = 1000, width: int = 4, init_weights: bool | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3)
        self.aux1, self.aux2 = nn.Linear(width, num_classes), nn.Linear(width, num_classes)
        self.fc = nn.Linear(width, num_classes)
        self.aux_logits = self.transform_input = True
        self.init_weights = init_weights

    def forward(self, x: Tensor) -> Any:
        features = self.conv1(x).mean((2, 3))
        return (self.fc(features), self.aux1(features)) if self.training and self.aux_logits else self.fc(features)


def fake_torchvision(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    trained = Backbone()

    def get_model(name: str, weights: str | None = None, **options: Any) -> nn.Module:
        if name == "boxes":
            raise AssertionError("never built")
        if weights == "DEFAULT" and "num_classes" in options:
            raise ValueError("expected value 1000")
        model = Backbone(**options)
        if weights == "DEFAULT":
            model.load_state_dict(trained.state_dict())
        return model

    models = SimpleNamespace(get_model=get_model)
    models.list_models = lambda module=None: ["resnet18", "googlenet"] + ([] if module is models else ["boxes"])
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=models))  # type: ignore[arg-type]
    return trained


def test_torchvision_gets_the_classes_and_the_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torchvision(monkeypatch)
    model = build("torchvision:resnet18", shape=(1, 8, 8), outputs=7, width=6)
    assert model.training and model.conv1.weight.shape == (6, 1, 3, 3)  # type: ignore[union-attr]
    assert model.eval()(torch.rand(2, 1, 8, 8)).shape == (2, 7)


def test_pretrained_torchvision_keeps_all_but_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = fake_torchvision(monkeypatch)
    model = build("torchvision:googlenet", shape=(3, 8, 8), outputs=7, pretrained=True)
    assert torch.equal(model.conv1.weight, trained.conv1.weight)  # type: ignore[union-attr, arg-type]
    assert model.fc.weight.shape == (7, 4)  # type: ignore[union-attr]
    assert model.train()(torch.rand(2, 3, 8, 8)).shape == (2, 7)  # no auxiliary logits
    assert list(model.state_dict()) == ["conv1.weight", "conv1.bias", "fc.weight", "fc.bias"]
    same = build("torchvision:resnet18", shape=(3, 8, 8), outputs=1000, pretrained=True)
    assert torch.equal(same.fc.weight, trained.fc.weight)  # type: ignore[union-attr, arg-type]


def test_a_grey_image_is_to_pretrained_torchvision_what_its_coloured_copy_was(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, x = fake_torchvision(monkeypatch).eval(), torch.rand(2, 1, 8, 8)
    model = build("torchvision:resnet18", shape=(1, 8, 8), outputs=1000, pretrained=True).eval()
    assert torch.allclose(model(x), trained(x.expand(2, 3, 8, 8)), atol=1e-6)
    assert model.transform_input is False


class FakeTimm(SimpleNamespace):
    """A timm of two networks that keeps the arguments of the last call."""

    arguments: dict[str, Any]

    def create_model(self, name: str, **arguments: Any) -> nn.Module:
        self.arguments = {"name": name, **arguments}
        if arguments["pretrained"]:
            raise OSError("no route to host")
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(arguments["num_classes"] + arguments.get("more", 0)))


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> FakeTimm:
    recorded = {
        "resnet18": SimpleNamespace(input_size=(3, 224, 224), fixed_input_size=False),
        "vit_tiny": SimpleNamespace(input_size=(3, 224, 224), fixed_input_size=True),
    }
    fake = FakeTimm(
        is_model=recorded.__contains__,
        list_models=lambda: [*recorded],
        models=SimpleNamespace(get_pretrained_cfg=recorded.get),
    )
    monkeypatch.setitem(sys.modules, "timm", fake)  # type: ignore[arg-type]
    return fake


@pytest.mark.parametrize(
    ("name", "shape", "options", "arguments"),
    [
        ("resnet18", (1, 8, 8), {}, {"in_chans": 1}),
        ("resnet18", (3, 8, 8), {"drop_rate": 0.1}, {"in_chans": 3, "drop_rate": 0.1}),
        ("vit_tiny", (3, 8, 16), {}, {"in_chans": 3, "img_size": (8, 16)}),
        ("vit_tiny", (3, 224, 224), {}, {"in_chans": 3}),
        ("hf-hub:someone/net", (3, 8, 8), {}, {"in_chans": 3}),
    ],
)
def test_timm_is_asked_for_what_fits(
    timm: FakeTimm, name: str, shape: tuple[int, ...], options: dict[str, Any], arguments: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that lazy layers are new
        build(f"timm:{name}", shape=shape, outputs=7, **options)
    assert timm.arguments == {"name": name, "pretrained": False, "num_classes": 7, **arguments}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "timm:resnet"}, "timm has no network 'resnet'; did you mean 'resnet18'"),
        ({"name": "timm:resnet18", "shape": (13,)}, r"timm:resnet18 needs images \(C, H, W\), got \(13,\)"),
        ({"name": "timm:resnet18", "num_classes": 3}, "num_classes is not an option: it follows from"),
        (
            {"name": "timm:resnet18", "more": 2},
            r"not a classifier: a batch of 2 gave \(2, 9\), not logits of shape \(2, 7\)",
        ),
        (
            {"name": "timm:resnet18", "pretrained": True},
            "with its pretrained weights can't be built: OSError: no route",
        ),
        ({"name": "torchvision:boxes"}, "torchvision:boxes is not an image classifier"),
        ({"name": "torchvision:resnet19"}, "torchvision has no network 'resnet19'; did you mean 'resnet18'"),
        ({"name": "torchvision:resnet18", "widht": 3}, "can't be built: TypeError: .*widht"),
        ({"name": "torchvision:resnet18", "shape": (3, 2, 2)}, r"does not take inputs of shape \(3, 2, 2\)"),
        ({"name": "torchvision:resnet18", "aux_logits": True}, "aux_logits is not an option"),
    ],
)
def test_what_a_zoo_cannot_do_is_said(
    timm: FakeTimm, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    fake_torchvision(monkeypatch)
    with pytest.raises(ModelError, match=message):
        build(**{"shape": (3, 8, 8), "outputs": 7, **arguments})


@pytest.mark.parametrize(
    ("name", "package"),
    [("timm:resnet18", "timm"), ("torchvision:resnet18", "torchvision"), ("hf:some/net", "transformers")],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelError, match=f"pip install {package}"):
        build(name, shape=(3, 8, 8), outputs=7)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_part", "timm can't be imported: .*pip install no_such_part"),
        ("raise RuntimeError('operator does not exist')", "operator does not exist; install the version that fits"),
    ],
)
def test_a_broken_package_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    (tmp_path / "timm.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(ModelError, match=message):
        build("timm:resnet18", shape=(3, 8, 8), outputs=7)


class FakeTransformer(nn.Module):
    """A network of transformers: built from a configuration, called with the inputs first, answering with a record."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.fc = config, nn.Linear(1, config.num_labels)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:
        self.mask = attention_mask
        return SimpleNamespace(logits=self.fc(x.flatten(1).float().mean(1, keepdim=True)))


def fake_transformers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    class Config(SimpleNamespace):
        def to_dict(self) -> dict[str, Any]:
            return vars(self)

        @staticmethod
        def from_pretrained(name: str, **options: Any) -> "Config":
            config = Config(num_labels=2, num_channels=3, image_size=224, pad_token_id=0, hidden_size=8)
            vars(config).update((option, value) for option, value in options.items() if hasattr(config, option))
            return config

    class Auto:
        @staticmethod
        def from_config(config: Any) -> nn.Module:
            return FakeTransformer(config)

        @staticmethod
        def from_pretrained(name: str, config: Any, **options: Any) -> nn.Module:
            calls.append({"name": name, **options})
            return FakeTransformer(config).eval()

    fake = SimpleNamespace(
        AutoConfig=Config, AutoModelForImageClassification=Auto, AutoModelForSequenceClassification=Auto
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)  # type: ignore[arg-type]
    return calls


def test_transformers_gives_logits_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_transformers(monkeypatch)
    model = build("hf:some/net", shape=(1, 8, 8), outputs=7, hidden_size=4)
    config: Any = model.network.config  # type: ignore[union-attr]
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 7) and not calls
    assert (config.num_channels, config.image_size, config.hidden_size) == (1, 8, 4)
    model = build("hf:some/net", shape=(3, 8, 8), outputs=7, pretrained=True, revision="v2")
    assert model.training
    assert calls == [
        {"name": "some/net", "ignore_mismatched_sizes": True, "revision": "v2", "trust_remote_code": False}
    ]


def test_transformers_masks_the_padding_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_transformers(monkeypatch)
    model = build("hf:some/net", shape=(4,), outputs=2)
    assert model(torch.tensor([[5, 6, 0, 0]])).shape == (1, 2)
    assert model.network.mask.tolist() == [[1, 1, 0, 0]]  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hiden_size": 3}, "hf:some/net has no option 'hiden_size'; did you mean 'hidden_size'"),
        ({"num_labels": 3}, "num_labels is not an option"),
        ({"shape": (1, 8, 8), "pretrained": True}, "was trained on images of 3 channels"),
        ({"shape": (5, 4)}, r"needs images \(C, H, W\) or texts \(T,\) of token ids, got \(5, 4\)"),
    ],
)
def test_what_transformers_cannot_do_is_said(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    fake_transformers(monkeypatch)
    with pytest.raises(ModelError, match=message):
        build("hf:some/net", **{"shape": (3, 8, 8), "outputs": 7, **arguments})


def test_weights_of_a_transformer_need_no_prefix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_transformers(monkeypatch)
    model = build("hf:some/net", shape=(3, 8, 8), outputs=7)
    for number, prefix in enumerate(["", "network.", "model.network."]):
        torch.save(
            {f"{prefix}fc.weight": torch.full((7, 1), float(number)), f"{prefix}fc.bias": torch.zeros(7)},
            tmp_path / "w.pt",
        )
        load_weights(model, tmp_path / "w.pt")
        assert model.network.fc.weight[0].item() == number  # type: ignore[union-attr, index]


def test_nothing_else_is_imported_with_the_package() -> None:
    code = "import sys, bayesify.lab.models; print({'torchvision', 'timm', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# Real weights.


@pytest.fixture(scope="module")
def pretrained_resnet20() -> nn.Module:
    path = DATA / "weights" / "resnet20-12fca82f.th"
    if not path.is_file():
        pytest.skip(f"no pretrained weights at {path}; set BAYESIFY_DATA")
    model = build("resnet20", shape=(3, 32, 32), outputs=10)
    load_weights(model, path)
    return model.eval()


def cifar10_test_images(n: int) -> tuple[Tensor, Tensor]:
    path = DATA / "cifar-10-batches-py" / "test_batch"
    if not path.is_file():
        pytest.skip(f"no CIFAR-10 at {path}; set BAYESIFY_DATA to the folder that unpack.py has filled")
    batch = pickle.loads(path.read_bytes(), encoding="bytes")
    images = torch.from_numpy(np.asarray(batch[b"data"][:n])).view(n, 3, 32, 32) / 255
    return (images - IMAGENET_MEAN) / IMAGENET_STD, torch.tensor(batch[b"labels"][:n])


def test_pretrained_weights_load_strictly(pretrained_resnet20: nn.Module) -> None:
    saved = torch.load(DATA / "weights" / "resnet20-12fca82f.th", map_location="cpu", weights_only=True)["state_dict"]
    loaded = pretrained_resnet20.state_dict()
    counters = {name for name in loaded if name.endswith("num_batches_tracked")}  # younger than the file
    assert saved.keys() == {f"module.{name}" for name in loaded.keys() - counters}
    assert all(torch.equal(loaded[name.removeprefix("module.")], tensor) for name, tensor in saved.items())


def test_the_pretrained_net_recognises_real_images(pretrained_resnet20: nn.Module) -> None:
    images, labels = cifar10_test_images(500)
    with torch.no_grad():
        correct = (pretrained_resnet20(images).argmax(1) == labels).sum()
    assert correct >= 450  # 455 here; 112 with all zero channels on one side
