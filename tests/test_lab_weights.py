"""Weights from files: every wrapper that scripts put around them, and every file that must not be loaded."""

import argparse
import json
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import bayesify as by
from bayesify.lab.models import CifarResNet, ModelError, load_weights

State = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.fc = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.features(x).mean((2, 3)))
        return logits


def state(seed: int = 1, classes: int = 3) -> State:
    torch.manual_seed(seed)
    model = Net(classes)
    model(torch.rand(5, 1, 6, 6))  # so that the running statistics are not those of any fresh network
    return model.state_dict()


def prefixed(prefix: str) -> State:
    return {prefix + name: tensor for name, tensor in state().items()}


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def same(model: nn.Module, tensors: State) -> bool:
    found = model.state_dict()
    return found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


def refused(model: nn.Module, path: Path, message: str, **options: Any) -> str:
    """Loading raises, and the network is the one it was."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=message) as error:
        load_weights(model, path, **options)
    assert same(model, before)
    return str(error.value)


# Files that fit.


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda: state(), id="bare"),
        pytest.param(lambda: {"state_dict": state()}, id="state_dict"),
        pytest.param(lambda: {"epoch": 3, "model_state_dict": state(), "optimizer": {"state": {}}}, id="tutorial"),
        pytest.param(lambda: {"net": state(), "acc": 91.2, "epoch": 3}, id="net"),
        pytest.param(lambda: {"model": {"state_dict": state()}}, id="nested"),
        pytest.param(lambda: {"model": {"name": "net"}, "weights": state()}, id="a wrapper's name for something else"),
        pytest.param(lambda: {"module": prefixed("module.")}, id="both"),
        pytest.param(lambda: prefixed("module."), id="module."),
        pytest.param(lambda: prefixed("model."), id="model."),
        pytest.param(lambda: prefixed("_orig_mod."), id="_orig_mod."),
        pytest.param(lambda: prefixed("network."), id="network."),
        pytest.param(lambda: prefixed("module._orig_mod.model."), id="nested prefixes"),
        pytest.param(lambda: prefixed("module.module."), id="twice the same"),
        pytest.param(
            lambda: {name.replace("features.", "features.module."): t for name, t in state().items()},
            id="only the features were parallel",
        ),
        pytest.param(
            lambda: {name: t for name, t in state().items() if not name.endswith("tracked")} | {"epoch": 3},
            id="before counters of batches",
        ),
        pytest.param(
            lambda: {name: nn.Parameter(t, requires_grad=False) for name, t in state().items()}, id="parameters"
        ),
    ],
)
def test_what_scripts_save_is_loaded(wrap: Callable[[], Any], tmp_path: Path) -> None:
    model, wanted = Net(), state()
    load_weights(model, saved(tmp_path / "weights.pt", wrap()))
    found = model.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted if not name.endswith("tracked"))


@pytest.mark.parametrize("prefix", ["", "module.", "model._orig_mod."])
def test_safetensors_are_known_by_their_content(prefix: str, tmp_path: Path) -> None:
    save_file(prefixed(prefix), tmp_path / "weights.bin", metadata={"format": "pt"})
    model = Net()
    load_weights(model, str(tmp_path / "weights.bin"))
    assert same(model, state())


def test_the_old_format_of_torch_is_read(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "weights.th", _use_new_zipfile_serialization=False)
    model = Net()
    load_weights(model, tmp_path / "weights.th")
    assert same(model, state())


def test_a_prefix_of_the_network_itself_stays(tmp_path: Path) -> None:
    model, other = nn.ModuleDict({"model": Net(), "module": nn.Linear(2, 2)}), nn.ModuleDict()
    other.update({"model": Net(), "module": nn.Linear(2, 2)})
    load_weights(model, saved(tmp_path / "weights.pt", other.state_dict()))
    assert same(model, other.state_dict())
    wrapped = {f"module.{name}": tensor for name, tensor in other.state_dict().items()}
    load_weights(model, saved(tmp_path / "weights.pt", wrapped))
    assert same(model, other.state_dict())


def test_a_wrapped_network_takes_the_names_of_the_one_inside(tmp_path: Path) -> None:
    path, inner = saved(tmp_path / "weights.pt", state()), Net()
    load_weights(nn.DataParallel(inner), path)
    assert same(inner, state())
    compiled = torch.compile(Net())
    load_weights(compiled, path)
    assert same(compiled._orig_mod, state())


def test_tensors_take_the_type_of_the_network(tmp_path: Path) -> None:
    halves = {name: t.half() if t.is_floating_point() else t for name, t in state().items()}
    model = Net()
    load_weights(model, saved(tmp_path / "weights.pt", halves))
    assert model.fc.weight.dtype == torch.float32 and torch.equal(model.fc.weight, halves["fc.weight"].float())


def test_tied_tensors_need_be_there_once(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    tensors = {"a.weight": torch.ones(2, 2), "a.bias": torch.ones(2), "b.bias": torch.ones(2)}
    load_weights(model, saved(tmp_path / "weights.pt", tensors))
    assert model["b"].weight is model["a"].weight and bool((model["b"].weight == 1).all())


def test_parameters_stay_the_same_objects_for_their_optimizer(tmp_path: Path) -> None:
    model = Net()
    before = list(map(id, model.parameters()))
    load_weights(model, saved(tmp_path / "weights.pt", state()))
    assert list(map(id, model.parameters())) == before and all(p.requires_grad for p in model.parameters())


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    saved(tmp_path / "weights.pt", state())
    model = Net()
    load_weights(model, "~/weights.pt")
    assert same(model, state())


# Heads of other classes, and parts.


def test_a_head_of_other_classes_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = saved(tmp_path / "weights.pt", prefixed("module."))
    message = refused(Net(classes=7), path, r"'fc.weight' has shape \(3, 4\) in the file and \(7, 4\) in the network")
    assert "'fc.bias' has shape (3,) in the file and (7,)" in message and "ignore=['fc.*']" in message
    refused(Net(classes=7), path, "'fc.weight' has shape", strict=False)


def test_an_ignored_head_keeps_its_own_start_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Net(classes=7)
    own = model.fc.weight.detach().clone()
    with caplog.at_level(logging.WARNING):
        load_weights(model, saved(tmp_path / "weights.pt", state()), ignore=["fc.*"])
    assert torch.equal(model.fc.weight, own)
    assert torch.equal(model.features[0].weight, state()["features.0.weight"])
    assert "2 of 9 tensors keep the network's own values: 'fc.weight', 'fc.bias'" in caplog.text


def test_ignore_also_leaves_out_what_only_the_file_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path / "weights.pt", {**prefixed("model."), "criterion.weight": torch.ones(3)})
    refused(Net(), path, "it has 1 tensor that the network lacks: 'criterion.weight'")
    model = Net()
    load_weights(model, path, ignore=["criterion.*"])
    assert same(model, state()) and not caplog.text


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        (["head.*"], "ignore='head.*' matches no tensor"),
        (["fc.weigth"], "did you mean 'fc.weight'"),
        ("fc.*", "must be a list of patterns"),
        (["*"], "no tensor name matches"),
    ],
)
def test_what_cannot_be_ignored_is_said(ignore: Any, message: str, tmp_path: Path) -> None:
    refused(Net(), saved(tmp_path / "weights.pt", state()), message, ignore=ignore)


def test_strict_can_be_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = {name: tensor for name, tensor in state().items() if name != "fc.bias"} | {"other": torch.ones(1)}
    path, model = saved(tmp_path / "weights.pt", tensors), Net()
    own = model.fc.bias.detach().clone()
    refused(model, path, "strict=False loads what fits")
    load_weights(model, path, strict=False)
    assert same(model, {**state(), "fc.bias": own}) and "1 of 9 tensors keep" in caplog.text


# Files that do not fit.


def test_every_misfit_is_in_one_message(tmp_path: Path) -> None:
    tensors = state()
    tensors["head.weight"] = tensors.pop("fc.weight")
    tensors["features.0.weight"] = torch.zeros(4, 2, 3, 3)
    message = refused(Net(), saved(tmp_path / "weights.pt", tensors), "weights.pt does not fit")
    assert "lacks 1 of the network's 9 tensors: 'fc.weight' (the file has 'head.weight')" in message
    assert "has 1 tensor that the network lacks: 'head.weight' (the network has 'fc.weight')" in message
    assert "'features.0.weight' has shape (4, 2, 3, 3) in the file and (4, 1, 3, 3) in the network" in message


def test_another_architecture_is_told_in_few_words(tmp_path: Path) -> None:
    path = saved(tmp_path / "weights.pt", state())
    message = refused(nn.Linear(2, 2), path, "no tensor name matches this network")
    assert "the file has 'features.0.weight', 'features.0.bias', 'features.1.weight' and 6 more" in message
    refused(nn.Linear(2, 2), path, "no tensor name matches", strict=False)
    path = saved(tmp_path / "weights.pt", CifarResNet(32).state_dict())
    assert len(refused(CifarResNet(20), path, "it has .* that the network lacks: 'layer1.3.*more")) < 700


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_values_are_refused(value: float, tmp_path: Path) -> None:
    tensors = state()
    tensors["fc.bias"] = torch.tensor([0.0, value, 0.0])
    refused(Net(), saved(tmp_path / "weights.pt", tensors), "'fc.bias' holds values that are NaN, infinite")


def test_values_too_large_for_the_network_are_refused(tmp_path: Path) -> None:
    tensors = {**state(), "fc.bias": torch.full((3,), 1e6)}
    refused(Net().half(), saved(tmp_path / "weights.pt", tensors), "too large for torch.float16")


def test_bayesian_files_are_sent_to_load(tmp_path: Path) -> None:
    model = by.convert(Net(), by.Rank1(4))
    by.save(model, tmp_path / "model.safetensors")
    refused(
        Net(),
        tmp_path / "model.safetensors",
        r"saved with by.save \(Rank1\); expected plain weights.*--resume.*by.load\(model, path\)",
    )
    refused(Net(), saved(tmp_path / "model.pt", model.state_dict()), "the file is from a Bayesian network: .*by.load")
    save_file(state(), tmp_path / "odd.safetensors", metadata={"bayesify": "{"})
    refused(Net(), tmp_path / "odd.safetensors", "saved with by.save; expected plain")


def test_a_bayesian_network_is_filled_before_it_is_one(tmp_path: Path) -> None:
    model = by.convert(Net(), by.Rank1(4))
    refused(model, saved(tmp_path / "plain.pt", state()), "already Bayesian: load the weights before by.convert")
    other = by.convert(Net(), by.Rank1(4))
    load_weights(other, saved(tmp_path / "model.pt", {"state_dict": model.state_dict()}))
    assert same(other, model.state_dict())


# Files that are none.


class Trap:
    def __reduce__(self) -> Any:
        return os.system, ("touch trapped",)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_is_never_run(zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": state(), "x": Trap()}, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    refused(Net(), tmp_path / "w.pt", r"contains \w+.system, not only tensors; .*could run code .*weights_only=False")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(Trap()))
    refused(Net(), tmp_path / "plain.pkl", "plain.pkl: ")
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: Net(), r"contains .*Net, not only tensors"),
        (lambda: nn.Linear(1, 1), r"torch.nn.modules.linear.Linear.*torch.save\(saved.state_dict\(\)"),
        (
            lambda: {"state_dict": state(), "args": argparse.Namespace(lr=1)},
            r"argparse.Namespace.*saved\[\"state_dict\"\]",
        ),
        (lambda: {"state_dict": state(), "acc": np.float64(91.2)}, "numpy"),
        (lambda: torch.ones(3), "holds a Tensor, not a state dict"),
        (lambda: [state()], "holds a list, not a state dict"),
        (lambda: {}, "pt: empty"),
        (lambda: {"epoch": 3, "args": {"lr": 0.1}}, "no named tensors under its keys 'epoch', 'args'"),
        (lambda: {0: torch.ones(3)}, "no named tensors under its keys '0'"),
    ],
)
def test_files_of_torch_without_weights(content: Callable[[], Any], message: str, tmp_path: Path) -> None:
    refused(Net(), saved(tmp_path / "weights.pt", content()), message)


def whole(tmp_path: Path) -> bytes:
    return saved(tmp_path / "whole.pt", state()).read_bytes()


def safetensors(tmp_path: Path) -> bytes:
    save_file(state(), tmp_path / "whole.safetensors")
    return (tmp_path / "whole.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda _: b"", "is empty"),
        (lambda _: b"hello, this is a text", "not a safetensors or torch.save file"),
        (lambda _: b"<html>", "not a safetensors or torch.save file"),
        (lambda _: b"\x80", "not a safetensors or torch.save file"),
        (lambda _: bytes(100), "not a safetensors or torch.save file"),
        (lambda _: json.dumps({"weight_map": {}}).encode(), "not a safetensors or torch.save file"),
        (lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (lambda folder: whole(folder)[:-200], "or truncated"),
        (lambda folder: safetensors(folder)[:-50], "not a complete safetensors file"),
        (lambda folder: safetensors(folder)[:30], "not a complete safetensors file"),
    ],
)
def test_files_that_are_no_weights(content: Callable[[Path], bytes], message: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(content(tmp_path))
    refused(Net(), path, message)


def test_other_archives_are_no_weights(tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", a=np.ones(3))
    refused(Net(), tmp_path / "weights.npz", "not a safetensors or torch.save file")
    save_file({}, tmp_path / "empty.safetensors")
    refused(Net(), tmp_path / "empty.safetensors", "without tensors")


def test_a_missing_file_is_looked_for(tmp_path: Path) -> None:
    saved(tmp_path / "weights.pt", state())
    refused(Net(), tmp_path / "wieghts.pt", "no such file; did you mean 'weights.pt'")
    refused(Net(), tmp_path / "runs" / "weights.pt", "no such file, and no folder")
    refused(Net(), tmp_path, "a folder; expected one of its files: 'weights.pt'")
    (tmp_path / "empty").mkdir()
    refused(Net(), tmp_path / "empty", "a folder; .*it has none")
