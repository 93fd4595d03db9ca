"""Compiled, exported, on its way out of Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import ARCHITECTURES
from torch import nn
from torch.nn import functional as F

import bayesify as by


@pytest.mark.slow
@pytest.mark.parametrize("method", [by.Rank1(4), by.ECMP(5)], ids=str)
def test_a_residual_net_compiles_whole_for_training_and_evaluation(method: by.methods.Method) -> None:
    """Inductor, fullgraph, with fresh noise on each call and gradients for all."""
    case = ARCHITECTURES["residual"]
    model = by.convert(case.make(), method)
    compiled = torch.compile(model, fullgraph=True)
    x = case.batch(8)
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first, second)
    F.cross_entropy(second, torch.zeros(8).long()).backward()
    assert all(p.grad is not None for p in model.parameters())
    model.eval()
    with torch.no_grad():
        outputs = torch.stack([compiled(x) for _ in range(8)])
    assert outputs.unique(dim=0).shape[0] > 1


def test_compiled_training_has_the_distribution_of_eager_training() -> None:
    model = by.convert(nn.Linear(3, 2), by.MeanField(estimator="exemplar", init_log_std=(-1.0, -1.0)))
    x = torch.randn(1, 3).expand(4000, 3)
    with torch.no_grad():
        eager, compiled = model(x), torch.compile(model, fullgraph=True)(x)
    assert torch.allclose(eager.mean(0), compiled.mean(0), atol=0.05)
    assert torch.allclose(eager.std(0), compiled.std(0), rtol=0.05)


def test_a_compiled_model_predicts_and_saves_as_itself(tmp_path: Path) -> None:
    model = by.convert(nn.Sequential(nn.Linear(4, 3)), by.Rank1(2))
    compiled, x = torch.compile(model, backend="eager"), torch.randn(5, 4)
    assert torch.equal(by.predict(compiled, x).log_probs, by.predict(model, x).log_probs)
    by.save(compiled, tmp_path / "model.safetensors")
    other = by.load(nn.Sequential(nn.Linear(4, 3)), tmp_path / "model.safetensors")
    assert torch.equal(by.predict(other, x).log_probs, by.predict(model, x).log_probs)


@pytest.mark.filterwarnings("ignore")  # torch's own about single-process groups
@pytest.mark.parametrize("method", [by.Rank1(3), by.Ensemble(3)], ids=str)
def test_distributed_training_sees_every_parameter(method: by.methods.Method, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        case = ARCHITECTURES["residual"]
        model = by.convert(case.make(), method)
        parallel = nn.parallel.DistributedDataParallel(model)
        for rows in (6, 4):
            x = case.batch(rows)
            (F.cross_entropy(parallel(x), torch.zeros(rows).long()) + by.kl(parallel) / 100).backward()
        assert all(p.grad is not None for p in model.parameters())
        assert torch.equal(by.predict(parallel, x).log_probs, by.predict(model, x).log_probs)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("method", [by.ECMP(3), by.Ensemble(2)], ids=str)
def test_exported_programs_say_what_predict_says(method: by.methods.Method, tmp_path: Path) -> None:
    case = ARCHITECTURES["residual"]
    model = by.convert(case.make(), method)
    by.export(model, tmp_path / "model.pt2", case.batch(1), samples=4, seed=3)
    program = torch.export.load(tmp_path / "model.pt2").module()
    for rows in (2, 5):
        x = case.batch(rows)
        expected = by.predict(model, x, samples=4, seed=3)
        log_probs, entropy, epistemic = program(x)
        assert torch.allclose(log_probs, expected.log_probs, atol=1e-5)
        assert torch.allclose(entropy, expected.entropy, atol=1e-5)
        assert torch.allclose(epistemic, expected.epistemic, atol=1e-5)


def test_onnx_says_what_predict_says(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    case = ARCHITECTURES["residual"]
    model = by.convert(case.make(), by.Rank1(2))
    by.export(model, tmp_path / "model.onnx", case.batch(2), samples=2)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for rows in (1, 4):
        x = case.batch(rows)
        log_probs, _, epistemic = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        expected = by.predict(model, x, samples=2)
        assert torch.allclose(torch.tensor(log_probs), expected.log_probs, atol=1e-4)
        assert torch.allclose(torch.tensor(epistemic), expected.epistemic, atol=1e-4)


def test_a_wrong_export_is_named(tmp_path: Path) -> None:
    model = by.convert(nn.Linear(4, 3), by.Rank1(2))
    with pytest.raises(by.BayesifyError, match=r"expected a name that ends in .pt2 or .onnx"):
        by.export(model, tmp_path / "model.tflite", torch.randn(2, 4))
    with pytest.raises(by.BayesifyError, match="does not exist"):
        by.export(model, tmp_path / "nowhere" / "model.pt2", torch.randn(2, 4))
