"""What is written is read back, and every file that can't be is refused with its own words."""

from __future__ import annotations

import copy
import json
import pickle
import pickletools
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bayesify as by
from bayesify.errors import CheckpointError
from bayesify.layers import bayesian_layers
from bayesify.methods.base import Method

VERSION_0_1 = Path(__file__).parent / "fixtures" / "version-0.1"


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(2, width, 3), nn.BatchNorm1d(width), nn.ReLU())
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.body(x).mean(2)))


class TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(ids)).mean(1))


MIXED: dict[Any, Method | None] = {"body.1": by.ECMP(3, patches=["norm"]), "head": by.MeanField(), "*": by.Rank1(2)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A good file of a small mixed model."""
    path = tmp_path / "model.safetensors"
    by.save(by.convert(Net(), MIXED), path)
    return path


def assert_same(a: nn.Module, b: nn.Module, x: Tensor) -> None:
    """The same tensors, methods, structure and predictions."""
    assert list(a.state_dict()) == list(b.state_dict())
    assert all(torch.equal(t, b.state_dict()[name]) for name, t in a.state_dict().items())
    assert {n: v.method for n, v in bayesian_layers(a).items()} == {n: v.method for n, v in bayesian_layers(b).items()}
    assert [type(m) for m in a.modules()] == [type(m) for m in b.modules()]
    assert torch.equal(by.predict(a, x, 4).log_probs, by.predict(b, x, 4).log_probs)


def rewritten(path: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], Any]) -> Path:
    """The file with its tensors and its header changed."""
    with safe_open(path, framework="pt") as opened:
        header = json.loads(opened.metadata()["bayesify"])
    tensors = load_file(path)
    change(tensors, header)
    save_file(tensors, path, metadata={"bayesify": json.dumps(header)})
    return path


def fingerprint(model: nn.Module) -> Any:
    modules = [(name, type(m), sorted(m.__dict__), len(m._forward_pre_hooks)) for name, m in model.named_modules()]
    return modules, {name: t.tolist() for name, t in model.state_dict().items()}


@contextmanager
def refused(model: nn.Module, *parts: str) -> Iterator[None]:
    """The error says all the parts, and the network is as it was."""
    before = fingerprint(model)
    with pytest.raises(CheckpointError) as caught:
        yield
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"
    assert fingerprint(model) == before


# Files of versions before.


def test_a_file_of_version_0_1_is_read_and_says_what_it_said() -> None:
    net = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1)),
        *(nn.Linear(144, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
    )
    model, kept = by.load(net, VERSION_0_1 / "model.safetensors"), load_file(VERSION_0_1 / "mean.safetensors")
    methods = {name: str(layer.method) for name, layer in bayesian_layers(model).items()}
    assert methods == {
        "0": "Rank1(4, posterior='cauchy', prior_std=0.1, mean_std=0.1, bias='component')",
        "1": "Ensemble(2)",
        "4": "MCDropout(0.1)",
        "5": "MeanField(init_log_std=(-6.0, -5.0))",
        "6": "ECMP(3, jitter=0.05)",
        "7": "LowRankEnsemble(3, rank=2, std=0.2)",
    }
    assert torch.allclose(by.draw(model, None)(kept["x"]), kept["mean"], atol=1e-5)
    assert by.predict(model, kept["x"], samples=3).probs.isfinite().all()


# Round trips.


def test_mixed_methods_come_back(tmp_path: Path) -> None:
    model, x = by.convert(Net(), MIXED), torch.randn(5, 2, 8)
    model(x)  # statistics move
    by.save(model, tmp_path / "m")
    torch.manual_seed(1)
    other = by.load(Net(), tmp_path / "m")
    assert_same(model, other, x)
    assert other(x).shape == (5, 3)


@pytest.mark.parametrize("method", [by.BatchEnsemble(3, mean_std=1.0), by.Rank1(2, dropout_rate=0.2)], ids=str)
def test_parts_that_were_converted_apart_stay_apart(tmp_path: Path, method: Any) -> None:
    def network() -> nn.Sequential:
        block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
        return nn.Sequential(block, copy.deepcopy(block), nn.Linear(4, 3))

    model = network()
    for part, keeps in ((model[0], True), (model[1], False), (model[2], False)):
        by.convert(part, method, keep_dropout=keeps)
    by.save(model, tmp_path / "model")
    other, x = by.load(network(), tmp_path / "model"), torch.randn(9, 4)
    assert type(other[1][1]) is nn.Dropout and other[0][1].scope is not other[1][0].scope
    assert torch.equal(by.predict(other.eval(), x, 12).probs, by.predict(model.eval(), x, 12).probs)
    by.save(model[0][0], tmp_path / "layer")  # a part of a part
    assert by.load(nn.Linear(4, 4), tmp_path / "layer").method == method.sized(1)


def test_what_was_left_plain_stays_plain(tmp_path: Path) -> None:
    by.save(by.convert(Net(), {"head": by.Rank1(2)}), tmp_path / "m")
    assert list(bayesian_layers(by.load(Net(), tmp_path / "m"))) == ["head"]


def adapter(frozen_head: bool = False) -> nn.Module:
    """A network whose body is frozen, as that under an adapter."""
    torch.manual_seed(7)
    net = Net()
    net.body[0].requires_grad_(False)
    net.head.requires_grad_(not frozen_head)
    return net


def test_without_the_frozen_parameters_the_network_must_bring_them(tmp_path: Path) -> None:
    model, x = by.convert(adapter(), {"head": by.MeanField()}), torch.randn(5, 2, 8)
    model(x)  # statistics move, though nothing trains them
    nn.init.normal_(model.head.weight)
    by.save(model, tmp_path / "m", frozen=False)
    assert not {"body.0.weight", "body.0.bias"} & set(load_file(tmp_path / "m"))
    assert_same(model, by.load(adapter(), tmp_path / "m"), x)
    other = by.load(Net(), tmp_path / "m")
    assert not torch.equal(other.body[0].weight, model.body[0].weight)  # type: ignore[union-attr, index, arg-type]
    with refused(wrong := Net(width=5), "wrong architecture", "body.0.weight"):
        by.load(wrong, tmp_path / "m")


def test_a_frozen_posterior_is_written_all_the_same(tmp_path: Path) -> None:
    model, x = by.convert(adapter(frozen_head=True), {"head": by.MeanField()}), torch.randn(5, 2, 8)
    model.requires_grad_(False)
    by.save(model, tmp_path / "m", frozen=False)
    written = {name for name in load_file(tmp_path / "m") if not name.startswith("body.1.")}
    assert written == {"head.posterior.weight_log_std", "head.posterior.bias_log_std"}
    other = adapter()
    other.load_state_dict(model.state_dict(), strict=False)
    assert_same(model, by.load(other, tmp_path / "m"), x)


@pytest.mark.parametrize("keep", [True, False])
def test_kept_dropout_comes_back(tmp_path: Path, keep: bool) -> None:
    model, x = by.convert(Net(), by.Rank1(2), keep_dropout=keep), torch.randn(5, 2, 8)
    by.save(model, tmp_path / "m")
    other = by.load(Net(), tmp_path / "m")
    assert_same(model, other, x)
    assert ("drop" in bayesian_layers(other)) == keep


def test_the_batch_dim_comes_back(tmp_path: Path) -> None:
    model = by.convert(nn.Linear(3, 2), by.BatchEnsemble(2), batch_dim=1)
    by.save(model, tmp_path / "m")
    other = by.load(nn.Linear(3, 2), tmp_path / "m")
    x = torch.randn(1, 3).expand(5, 4, 3)
    y = other(x)
    assert torch.equal(y, y[:1].expand_as(y)) and not torch.equal(y[:, 0], y[:, 1])  # components go along dimension 1


def test_every_option_of_a_method_comes_back(tmp_path: Path) -> None:
    method = by.Rank1(3, posterior="cauchy", clip=float("inf"), bias="component", prior_std=0.3, divergence="sum")
    by.save(by.convert(nn.Linear(3, 2), method), tmp_path / "m")
    assert by.load(nn.Linear(3, 2), tmp_path / "m").method == method.sized(1)


def test_a_module_in_two_places_is_read_back_as_one(tmp_path: Path) -> None:
    def make() -> nn.Module:
        shared = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        return nn.Sequential(shared, nn.Sequential(shared, nn.Linear(3, 2)))

    model, x = by.convert(make(), by.Rank1(2)), torch.randn(4, 3)
    by.save(model, tmp_path / "model.safetensors")
    again = by.load(make(), tmp_path / "model.safetensors")
    assert again[0][0] is again[1][0][0]
    assert torch.equal(by.predict(model, x).probs, by.predict(again, x).probs)


def test_tied_tensors_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    model = by.convert(TiedNet(), {"*": by.Rank1(2)})
    by.save(model, tmp_path / "m")
    assert "table.weight" in load_file(tmp_path / "m") and "out.weight" not in load_file(tmp_path / "m")
    other = by.load(TiedNet(), tmp_path / "m")
    assert other.out.weight is other.table.weight
    assert_same(model, other, torch.randint(9, (4, 5)))


def test_a_compiled_model_is_saved_under_its_own_names(tmp_path: Path) -> None:
    model, x = by.convert(nn.Sequential(nn.Linear(3, 2)), by.Rank1(2)), torch.randn(4, 3)
    by.save(torch.compile(model, backend="eager"), tmp_path / "m")
    assert_same(model, by.load(nn.Sequential(nn.Linear(3, 2)), tmp_path / "m"), x)


def test_a_part_that_the_user_named_posterior_comes_back(tmp_path: Path) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.posterior = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.posterior(x)

    model = by.convert(nn.Sequential(Encoder()), by.Rank1(2))
    by.save(model, tmp_path / "m")
    assert_same(model, by.load(nn.Sequential(Encoder()), tmp_path / "m"), torch.randn(4, 3))


def test_training_goes_on_after_loading(file: Path) -> None:
    model = by.load(Net(), file)
    loss = by.elbo(model, torch.randn(4, 2, 8), torch.arange(4) % 3, n=10).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


# The file.


def test_the_file_is_safetensors_with_a_json_header(file: Path) -> None:
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    outer = json.loads(raw[8 : 8 + length])
    header = json.loads(outer.pop("__metadata__")["bayesify"])
    assert set(outer) == set(load_file(file)) == set(by.load(Net(), file).state_dict())
    assert header["families"]["head"]["name"] == "MeanField" and header["layers"]["body.1"] == "BatchNorm1d"
    end = max(entry["data_offsets"][1] for entry in outer.values())
    assert len(raw) == 8 + length + end  # header and tensors, and nothing behind them


def test_no_pickle_is_written_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **options: Any) -> None:
        raise AssertionError("pickle was used")

    for module, name in ((pickle, "dump"), (pickle, "dumps"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(module, name, forbidden)
    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, forbidden)
    by.save(by.convert(Net(), MIXED), tmp_path / "m")
    by.load(Net(), tmp_path / "m")
    with pytest.raises(ValueError):
        list(pickletools.genops((tmp_path / "m").read_bytes()))


# Files that can't be loaded.


def test_a_missing_file(tmp_path: Path) -> None:
    model = Net()
    with refused(model, str(tmp_path / "none"), "no such file"):
        by.load(model, tmp_path / "none")


@pytest.mark.parametrize("left", [0, 4, 100, -1])
def test_a_truncated_file(file: Path, left: int) -> None:
    file.write_bytes(file.read_bytes()[:left])
    model = Net()
    with refused(model, str(file), "not a complete safetensors file", "truncated"):
        by.load(model, file)


def test_a_foreign_safetensors_file(file: Path) -> None:
    save_file(Net().state_dict(), file)
    model = Net()
    with refused(model, str(file), "a safetensors file that by.save did not write"):
        by.load(model, file)


def test_a_file_of_torch_save(file: Path) -> None:
    torch.save(Net().state_dict(), file)
    model = Net()
    with refused(model, str(file), "not a complete safetensors file", "torch.save"):
        by.load(model, file)


def test_a_newer_format(file: Path) -> None:
    model = Net()
    with refused(model, str(file), "format 2", "reads 1"):
        by.load(model, rewritten(file, lambda tensors, header: header.update(format=2)))


def test_an_unknown_method(file: Path) -> None:
    model = Net()
    with refused(model, str(file), "unknown method 'Rank9'", "Rank1, IBNN"):
        by.load(model, rewritten(file, lambda tensors, header: header["families"]["head"].update(name="Rank9")))


def test_an_option_that_is_not_known(file: Path) -> None:
    model = Net()

    def change(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        header["families"]["head"]["options"]["colour"] = "red"

    with refused(model, str(file), "MeanField", "can't be created", "colour"):
        by.load(model, rewritten(file, change))


def test_a_missing_tensor(file: Path) -> None:
    model = Net()
    with refused(model, str(file), "missing 1 tensor: 'head.bias'", "this network has"):
        by.load(model, rewritten(file, lambda tensors, header: tensors.pop("head.bias")))


def test_an_extra_tensor(file: Path) -> None:
    model = Net()
    with refused(model, str(file), "extra 1 tensor: 'head.scale'", "does not have"):
        by.load(model, rewritten(file, lambda tensors, header: tensors.update({"head.scale": torch.ones(1)})))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda tensors: tensors.pop("head.posterior.bias_log_std"), "missing 1 tensor: 'head.posterior.bias_log_std'"),
        (lambda tensors: tensors.update({"head.posterior.z": torch.ones(1)}), "extra 1 tensor: 'head.posterior.z'"),
        (
            lambda tensors: tensors.update({"body.0.posterior.in_loc": torch.ones(1)}),
            "'body.0.posterior.in_loc' has shape",
        ),
    ],
    ids=["missing", "extra", "shape"],
)
def test_a_posterior_that_does_not_fit(file: Path, change: Callable[[dict[str, Tensor]], Any], part: str) -> None:
    model = Net()
    with refused(model, str(file), part):
        by.load(model, rewritten(file, lambda tensors, header: change(tensors)))


@pytest.mark.parametrize("key", ["families", "layers", "batch_dim", "keep_dropout", "aliases"])
def test_a_header_with_a_part_missing(file: Path, key: str) -> None:
    model = Net()
    with refused(model, str(file)):
        by.load(model, rewritten(file, lambda tensors, header: header.pop(key)))


def test_another_layer_type(file: Path) -> None:
    model = Net()
    model.body[1] = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
    with refused(model, "wrong architecture", "'body.1' is a BatchNorm1d in the file and a InstanceNorm1d"):
        by.load(model, file)


def test_another_shape(file: Path) -> None:
    model = Net(width=7)
    with refused(model, "wrong architecture", "'body.0.weight' has shape (6, 2, 3) in the file and (7, 2, 3)"):
        by.load(model, file)


def test_a_network_without_one_of_the_layers(file: Path) -> None:
    model = Net()
    del model.head
    with refused(model, "wrong architecture", "the file has a layer 'head', this network has none"):
        by.load(model, file)


def test_a_network_with_one_layer_more(file: Path) -> None:
    model = Net()
    model.second = nn.Linear(2, 2)
    with refused(model, "missing 2 tensors: 'second.bias', 'second.weight'"):
        by.load(model, file)


def test_a_network_that_is_bayesian_already(file: Path) -> None:
    model = by.convert(Net(), MIXED)
    with refused(model, "load into a plain network", "by.revert"):
        by.load(model, file)


# What can't be saved.


def test_a_plain_model_is_not_saved(tmp_path: Path) -> None:
    model = Net()
    with refused(model, "no Bayesian layer", "safetensors or torch.save"):
        by.save(model, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    model = by.convert(Net(), MIXED)
    with refused(model, f"the folder '{tmp_path / 'none'}' does not exist"):
        by.save(model, tmp_path / "none" / "m")


def test_extra_state_that_is_not_a_tensor(tmp_path: Path) -> None:
    class Counting(Net):
        def get_extra_state(self) -> Any:
            return {"calls": 3}

    model = by.convert(Counting(), MIXED)
    with pytest.raises(CheckpointError, match="'_extra_state' is extra state that is not a tensor"):
        by.save(model, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["disk", "interrupt"])
def test_a_failed_save_leaves_the_old_file_and_no_part(
    file: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before, model = file.read_bytes(), by.convert(Net(), by.Rank1(2))

    def fail(tensors: dict[str, Tensor], path: str, metadata: dict[str, str]) -> None:
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr("bayesify.tensor_files.save_file", fail)
    with pytest.raises(type(error)):
        by.save(model, file)
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def test_a_save_over_an_old_file_replaces_it(file: Path) -> None:
    model = by.convert(Net(), by.Rank1(2))
    by.save(model, file)
    assert_same(model, by.load(Net(), file), torch.randn(3, 2, 8))
    assert list(file.parent.iterdir()) == [file]


def test_saving_changes_nothing(tmp_path: Path) -> None:
    model = by.convert(Net(), MIXED)
    before = copy.deepcopy(model)
    by.save(model, tmp_path / "m")
    assert fingerprint(model) == fingerprint(before)
