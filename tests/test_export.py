"""Exported files: what `predict` gives, for every task, any batch size, and without bayesify."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.methods import METHODS
from bayesify.prediction.likelihood import Likelihood

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporters
onnxruntime = pytest.importorskip("onnxruntime")
Outputs = dict[str, Tensor]
OUTPUTS = {
    "Categorical": ("log_probs", "entropy", "epistemic"),
    "Bernoulli": ("log_probs", "log_not_probs", "entropy", "epistemic"),
    "Gaussian": ("mean", "std", "epistemic_std", "aleatoric_std"),
}


def mlp(outputs: int, *drop: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), *drop, nn.Linear(16, outputs))


class Segmenter(nn.Sequential):
    """Logits (B, C, H, W)."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))


TASKS: dict[str, tuple[Callable[[], nn.Module], Likelihood, tuple[int, ...]]] = {
    "classification": (lambda: mlp(3), by.Categorical(), (4,)),
    "temperature": (lambda: mlp(3), by.Categorical(temperature=2.5), (4,)),
    "multi-label": (lambda: mlp(5), by.Bernoulli(), (4,)),
    "regression": (lambda: mlp(2), by.Gaussian(precision=4.0), (4,)),
    "learned precision": (lambda: mlp(2), by.Gaussian(precision="learned"), (4,)),
    "precision per input": (lambda: mlp(2), by.Gaussian(precision="input"), (4,)),
    "segmentation": (Segmenter, by.Categorical(class_dim=1), (2, 6, 5)),
}


def loaded(path: Path) -> Callable[..., Outputs]:
    """What a file computes, by the names of its outputs."""
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path)
        names = [each.name for each in session.get_outputs()]

        def run(*args: Tensor, **kwargs: Tensor) -> Outputs:
            inputs = dict(zip([each.name for each in session.get_inputs()], args, strict=False)) | kwargs
            values = session.run(None, {name: value.numpy() for name, value in inputs.items()})
            return {name: torch.tensor(value) for name, value in zip(names, values, strict=True)}

        return run
    about = {"bayesify.json": ""}
    module = torch.export.load(path, extra_files=about).module()
    outputs = json.loads(about["bayesify.json"])["outputs"]
    return lambda *args, **kwargs: dict(zip(outputs, module(*args, **kwargs), strict=True))


def assert_same(found: Outputs, expected: Any, names: tuple[str, ...]) -> None:
    assert tuple(found) == names
    for name in names:
        assert torch.allclose(found[name], getattr(expected, name), atol=1e-4), name


@pytest.mark.parametrize(
    ("task", "suffix"), [*((task, ".onnx") for task in TASKS), ("classification", ".pt2"), ("segmentation", ".pt2")]
)
def test_export_gives_what_predict_gives_for_every_task_and_batch_size(task: str, suffix: str, tmp_path: Path) -> None:
    make, likelihood, shape = TASKS[task]
    model = by.convert(make(), by.Rank1(2, mean_std=0.5))
    if isinstance(likelihood, by.Gaussian) and isinstance(likelihood.log_precision, nn.Parameter):
        likelihood.log_precision.data.fill_(1.3)
    by.export(model, tmp_path / f"m{suffix}", torch.randn(1, *shape), samples=3, seed=5, likelihood=likelihood)
    run = loaded(tmp_path / f"m{suffix}")
    for rows in (1, 2, 7):
        x = torch.randn(rows, *shape)
        expected = by.predict(model, x, 3, seed=5, likelihood=likelihood)
        assert_same(run(x), expected, OUTPUTS[type(likelihood).__name__])
    assert os.listdir(tmp_path) == [f"m{suffix}"]  # nothing else is left


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_export_with_keep_dropout_is_right_on_every_call(suffix: str, tmp_path: Path) -> None:
    """The masks are constants of the graph; with a live generator only the first call was right."""
    model = by.convert(mlp(3, nn.Dropout(0.5)), by.Rank1(2), keep_dropout=True)
    by.export(model, tmp_path / f"m{suffix}", torch.randn(2, 4), samples=3)
    run = loaded(tmp_path / f"m{suffix}")
    for rows in (3, 3, 1, 8, 3):
        x = torch.randn(rows, 4)
        assert_same(run(x), by.predict(model, x, 3), OUTPUTS["Categorical"])
        assert_same(run(x), by.predict(model, x, 3), OUTPUTS["Categorical"])


def test_export_with_keep_dropout_of_channels_and_of_a_module_used_twice(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.channels, self.drop = nn.Conv2d(1, 6, 3), nn.Dropout2d(0.4), nn.Dropout(0.4)
            self.middle, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.channels(self.conv(x).relu()).mean((2, 3))
            return self.head(self.drop(self.middle(self.drop(h)).relu()))

    model, x = by.convert(Net(), by.MeanField(), keep_dropout=True), torch.randn(5, 1, 6, 6)
    by.export(model, tmp_path / "m.pt2", x[:2], samples=4)
    run = loaded(tmp_path / "m.pt2")
    for _ in range(2):
        assert_same(run(x), by.predict(model, x, 4), OUTPUTS["Categorical"])


def test_export_with_keep_dropout_and_batch_dim_1(tmp_path: Path) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.drop, self.head = nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.drop(self.drop(self.first(x)).relu().mean(0)))

    model = by.convert(Pooled(), by.Rank1(2), batch_dim=1, keep_dropout=True)
    by.export(model, tmp_path / "m.pt2", torch.randn(5, 2, 4), samples=3)
    run = loaded(tmp_path / "m.pt2")
    for rows in (1, 4, 7):
        x = torch.randn(5, rows, 4)
        assert_same(run(x), by.predict(model, x, 3), OUTPUTS["Categorical"])


def test_a_mask_that_depends_on_the_batch_is_refused(tmp_path: Path) -> None:
    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.drop = nn.Linear(4, 3), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.first(x).T).T

    model = by.convert(Columns(), by.Rank1(2), keep_dropout=True)
    with pytest.raises(by.BayesifyError, match=r"'drop': its mask of shape .* depends on a size that is not fixed"):
        by.export(model, tmp_path / "m.pt2", torch.randn(2, 4), samples=2)
    assert not list(tmp_path.iterdir())


# Inputs.


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, first: Tensor, second: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.left(first) + self.right(second)
        return {"logits": logits if scale is None else logits * scale}


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_export_of_dicts_and_of_several_inputs(suffix: str, tmp_path: Path) -> None:
    model = by.convert(TwoInputs(), by.IBNN(2))
    first, second = torch.randn(6, 4), torch.randn(6, 2)
    expected = by.predict(model, {"first": first, "second": second}, 3)
    by.export(model, tmp_path / f"dict{suffix}", {"second": second[:3], "first": first[:3]}, samples=3)
    found = loaded(tmp_path / f"dict{suffix}")(first=first, second=second)
    assert_same(found, expected, OUTPUTS["Categorical"])
    by.export(model, tmp_path / f"tuple{suffix}", (first[:3], second[:3]), samples=3)
    assert_same(loaded(tmp_path / f"tuple{suffix}")(first, second), expected, OUTPUTS["Categorical"])
    if suffix == ".onnx":
        session = onnxruntime.InferenceSession(tmp_path / "tuple.onnx")
        assert [each.name for each in session.get_inputs()] == ["first", "second"]


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_an_input_for_all_rows_keeps_its_size(suffix: str, tmp_path: Path) -> None:
    """As many classes as rows in the example: the size does not tell that `scale` has no rows."""
    model = by.convert(TwoInputs(), by.IBNN(2))
    batch = {"first": torch.randn(3, 4), "second": torch.randn(3, 2), "scale": torch.rand(3) + 1}
    by.export(model, tmp_path / f"m{suffix}", batch, samples=2)
    for rows in (1, 3, 5):
        batch |= {"first": torch.randn(rows, 4), "second": torch.randn(rows, 2)}
        found = loaded(tmp_path / f"m{suffix}")(**batch)
        assert_same(found, by.predict(model, batch, 2), OUTPUTS["Categorical"])


def test_preparation_and_units_are_inside_the_file(tmp_path: Path) -> None:
    model = by.convert(mlp(1), by.MeanField())
    raw = torch.randint(255, (5, 4), dtype=torch.uint8)
    by.export(
        model,
        tmp_path / "m.onnx",
        raw[:2],
        samples=3,
        likelihood=by.Gaussian(),
        prepare=lambda x: x.float() / 255,
        finish=lambda named: {"price": 100 + 10 * named["mean"], "std": 10 * named["std"]},
    )
    expected = by.predict(model, raw.float() / 255, 3, likelihood=by.Gaussian())
    found = loaded(tmp_path / "m.onnx")(raw)
    assert list(found) == ["price", "std"]
    assert torch.allclose(found["price"], 100 + 10 * expected.mean, atol=1e-3)
    assert torch.allclose(found["std"], 10 * expected.std, atol=1e-3)


def test_values_in_a_network_may_have_the_names_of_outputs(tmp_path: Path) -> None:
    """A graph names its values after operations, and two values of one name are no valid ONNX file."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, mean: Tensor) -> Tensor:
            return self.linear(mean - mean.mean(-1, keepdim=True) / mean.std(-1, keepdim=True))

    model, x = by.convert(Mean(), by.MeanField()), torch.randn(5, 4)
    by.export(model, tmp_path / "m.onnx", x, samples=2, likelihood=by.Gaussian())
    expected = by.predict(model, x, 2, likelihood=by.Gaussian())
    assert_same(loaded(tmp_path / "m.onnx")(x), expected, OUTPUTS["Gaussian"])
    with pytest.raises(by.BayesifyError, match=r"the input 'mean' has the name of an output"):
        by.export(model, tmp_path / "m.onnx", {"mean": x}, samples=2, likelihood=by.Gaussian())


def test_an_operation_that_onnx_lacks_is_named(tmp_path: Path) -> None:
    class Running(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.cummax(1).values)

    model = by.convert(nn.Sequential(Running(4, 3), nn.Linear(3, 3)), {"1": by.Rank1(2)})
    with pytest.raises(by.BayesifyError, match=r"(?s)can't convert the network to ONNX; use a .pt2 file.*cummax"):
        by.export(model, tmp_path / "m.onnx", torch.randn(2, 4), samples=2)
    assert not list(tmp_path.iterdir())
    by.export(model, tmp_path / "m.pt2", torch.randn(2, 4), samples=2)


# Draws inside.


@pytest.mark.parametrize(
    ("method", "suffix"),
    [
        (by.Rank1(2, mean_std=0.5), ".onnx"),
        (by.Rank1(2, mean_std=0.5), ".pt2"),
        (by.MeanField(init_log_std=(-1.5, -1.5)), ".onnx"),
    ],
    ids=str,
)
def test_draws_inside_have_the_distribution_of_predict(method: by.methods.Method, suffix: str, tmp_path: Path) -> None:
    model = by.convert(mlp(2, nn.Dropout(0.2)), method, keep_dropout=True)
    by.export(model, tmp_path / f"m{suffix}", torch.randn(2, 4), samples=4, likelihood=by.Gaussian(), draws="inside")
    run, x = loaded(tmp_path / f"m{suffix}"), torch.randn(3, 4)
    found = [run(x) for _ in range(800)]
    means = torch.stack([each["mean"] for each in found])
    assert not torch.equal(means[0], means[1])
    expected = by.predict(model, x, 2000, likelihood=by.Gaussian())
    spread = means.std(0) / len(means) ** 0.5  # the standard error of their mean
    assert ((means.mean(0) - expected.mean).abs() < 5 * spread + 4 * expected.epistemic_std / 2000**0.5).all()
    variance = (
        torch.stack([each["epistemic_std"] for each in found]).square().mean(0)
    )  # of four draws around their mean
    between = means.var(0)
    assert torch.allclose(variance + between, expected.epistemic_std.square(), rtol=0.15)


def test_draws_inside_need_noise(tmp_path: Path) -> None:
    model = by.convert(mlp(3), by.BatchEnsemble(4))
    with pytest.raises(by.BayesifyError, match=r"draws='inside': .* components, without noise.* use draws='frozen'"):
        by.export(model, tmp_path / "m.pt2", torch.randn(2, 4), draws="inside")


def test_a_file_with_draws_inside_has_one_copy_of_the_network(tmp_path: Path) -> None:
    model = by.convert(nn.Sequential(nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 3)), by.Rank1(2))
    by.export(model, tmp_path / "m.onnx", torch.randn(2, 200), samples=5, draws="inside")
    assert (tmp_path / "m.onnx").stat().st_size < 3 * 4 * 200 * 200


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_what_no_draw_changes_is_written_once(suffix: str, tmp_path: Path) -> None:
    model = by.convert(nn.Sequential(nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 3)), {"2": by.Rank1(2)})
    by.export(model, tmp_path / f"m{suffix}", torch.randn(2, 200), samples=5)
    assert (tmp_path / f"m{suffix}").stat().st_size < 2 * 4 * 200 * 200


DAILY = ("Rank1", "MeanField", "BatchEnsemble")
"""The methods that are not left to `make test-slow`: one with factors, one with weights, one without noise."""


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method(), id=name, marks=() if name in DAILY else pytest.mark.slow)
        for name, method in METHODS.items()
    ],
)
def test_every_method_is_exported_frozen_and_inside_or_says_why_not(method: Any, tmp_path: Path) -> None:
    model = by.convert(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)), method)
    x = torch.randn(3, 4)
    by.export(model, tmp_path / "m.pt2", x, samples=2)
    assert_same(loaded(tmp_path / "m.pt2")(x), by.predict(model, x, 2), OUTPUTS["Categorical"])
    try:
        by.export(model, tmp_path / "inside.pt2", x, samples=2, draws="inside")
    except by.BayesifyError as error:
        assert not method.noisy and "without noise" in str(error)
    else:
        run = loaded(tmp_path / "inside.pt2")
        assert not torch.equal(run(x)["log_probs"], run(x)["log_probs"])


# The files.


def test_an_exported_file_needs_no_bayesify(tmp_path: Path) -> None:
    model = by.convert(mlp(3, nn.Dropout(0.5)), by.Rank1(2), keep_dropout=True)
    by.export(model, tmp_path / "m.pt2", torch.randn(2, 4), samples=2)
    code = (
        "import sys; sys.modules['bayesify'] = None; import torch\n"
        f"print(*(tuple(y.shape) for y in torch.export.load({str(tmp_path / 'm.pt2')!r}).module()(torch.randn(5, 4))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "(5, 3) (5,) (5,)", done.stderr


def test_a_failed_export_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = by.convert(mlp(3), by.Rank1(2))
    by.export(model, tmp_path / "m.pt2", torch.randn(2, 4), samples=2)
    before = (tmp_path / "m.pt2").read_bytes()

    def broken(*args: Any, **kwargs: Any) -> None:
        Path(args[1]).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch.export, "save", broken)
    with pytest.raises(OSError, match="no space"):
        by.export(model, tmp_path / "m.pt2", torch.randn(2, 4), samples=2)
    assert (tmp_path / "m.pt2").read_bytes() == before and os.listdir(tmp_path) == ["m.pt2"]


def test_a_graph_that_differs_from_predict_is_not_written(tmp_path: Path) -> None:
    class ReadsValues(nn.Module):
        """It decides by a number that tracing would fix."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.sign = nn.Linear(4, 3), 1.0

        def forward(self, x: Tensor) -> Tensor:
            self.sign = -self.sign if torch.compiler.is_exporting() else self.sign
            return self.sign * self.linear(x)

    model = by.convert(ReadsValues(), by.Rank1(2))
    with pytest.raises(by.BayesifyError, match=r"not written, as its log_probs .* is not that of predict"):
        by.export(model, tmp_path / "m.pt2", torch.randn(2, 4), samples=1)
    assert not list(tmp_path.iterdir())


def test_wrong_exports_are_named(tmp_path: Path) -> None:
    model, x = by.convert(mlp(3), by.Rank1(2)), torch.randn(2, 4)
    for options, message in (
        ({"draws": "both"}, r"draws='both'\): expected 'frozen' or 'inside'"),
        ({"likelihood": "gaussian"}, r"likelihood='gaussian': expected what a call of"),
        ({"samples": 0}, r"samples=0: expected an integer >= 1"),
    ):
        with pytest.raises(by.BayesifyError, match=message):
            by.export(model, tmp_path / "m.pt2", x, **options)
    with pytest.raises(by.BayesifyError, match="without rows"):
        by.export(model, tmp_path / "m.pt2", torch.randn(0, 4))
    fixed = by.convert(nn.Sequential(nn.Linear(4, 3), nn.Unflatten(0, (2, 1)), nn.Flatten(0, 1)), by.Rank1(2))
    with pytest.raises((by.BayesifyError, RuntimeError), match=r"can't trace|size|shape"):
        by.export(fixed, tmp_path / "m.pt2", x)
    assert not list(tmp_path.iterdir())


def test_a_branch_on_values_is_refused_with_what_torch_says(tmp_path: Path) -> None:
    class Branches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    model = by.convert(nn.Sequential(Branches(4, 3), nn.Linear(3, 3)), {"1": by.Rank1(2)})
    with pytest.raises(by.BayesifyError, match=r"(?s)can't trace the network .* Its error: "):
        by.export(model, tmp_path / "m.pt2", torch.randn(2, 4), samples=2)


def test_export_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = by.convert(mlp(3, nn.Dropout(0.3)), by.Rank1(2), keep_dropout=True).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    by.export(model, tmp_path / "m.pt2", torch.randn(2, 4, generator=torch.Generator().manual_seed(0)), samples=2)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
@pytest.mark.slow
def test_compiled_code_gives_what_predict_gives(tmp_path: Path) -> None:
    model = by.convert(mlp(3, nn.Dropout(0.5)), by.Rank1(2), keep_dropout=True)
    by.export(model, tmp_path / "m.aoti.pt2", torch.randn(2, 4), samples=2)
    run = torch._inductor.aoti_load_package(str(tmp_path / "m.aoti.pt2"))
    for rows in (5, 1, 5):
        x = torch.randn(rows, 4)
        expected = by.predict(model, x, 2)
        for value, name in zip(run(x), OUTPUTS["Categorical"], strict=True):
            assert torch.allclose(value, getattr(expected, name), atol=1e-4)


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def missing(*args: Any, **kwargs: Any) -> None:
        raise InvalidCxxCompiler

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", missing)
    with pytest.raises(by.BayesifyError, match=r"no compiler: install g\+\+ or clang"):
        by.export(by.convert(mlp(3), by.Rank1(2)), tmp_path / "m.aoti.pt2", torch.randn(2, 4), samples=1)


# Members.


def test_members_are_the_draws_of_predict(tmp_path: Path) -> None:
    model, x = by.convert(mlp(3, nn.Dropout(0.3)), by.Rank1(2), keep_dropout=True), torch.randn(5, 4)
    networks = by.members(model, n=4, seed=7)
    draws = by.predict(model, x, 4, seed=7, draws=True).draws
    assert len(networks) == 4
    for network, expected in zip(networks, draws, strict=True):
        assert torch.allclose(network(x), expected, atol=1e-6)
    pointers = [p.data_ptr() for network in (*networks, model) for p in network.parameters()]
    assert len(set(pointers)) == len(pointers)  # they share nothing
    assert len(by.members(model)) == 2  # without n, the components' means
    for n in (0, -1, 2.5, True):
        with pytest.raises(by.BayesifyError, match=rf"members\(n={n!r}\): expected an integer >= 1"):
            by.members(model, n=n)
