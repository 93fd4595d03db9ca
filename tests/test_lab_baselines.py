"""Post-hoc baselines against closed forms, scipy and laplace-torch; then as runs: saved, resumed, compared, refused."""

from __future__ import annotations

import csv
import importlib.util
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, update_bn

import bayesify as by
from bayesify.cli import main
from bayesify.lab.baselines import BaselineError, Swag, best_temperature, laplace
from bayesify.lab.baselines.prepared_batches import PreparedBatches
from bayesify.lab.baselines.swag import is_snapshot_due
from bayesify.lab.comparison.compare_recipes import compare
from bayesify.lab.data import Arrays, TensorExamples
from bayesify.lab.data.errors import DataError
from bayesify.lab.evaluation import predictive
from bayesify.lab.models import MLP, ModelError, PyramidNet, build
from bayesify.lab.models.norm_dropout import with_dropout_before_norms
from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.recipes.methods import LaplacePart, SwagPart
from bayesify.lab.runs import Run
from bayesify.lab.training import train, train_recipe
from bayesify.layers import bayesian_layers

needs_laplace = pytest.mark.skipif(
    importlib.util.find_spec("laplace") is None,
    reason="laplace-torch is not installed: pip install 'bayesify[laplace]'",
)

# Temperature


def classes(rows: int = 4000, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits, `scale` times those that the labels were drawn from."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(rows, 5, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    return scale * logits, labels


@pytest.mark.parametrize("scale", [0.4, 1.0, 3.0])
def test_the_temperature_is_the_one_that_the_logits_were_scaled_by(scale: float) -> None:
    assert best_temperature(*classes(rows=40_000, scale=scale)) == pytest.approx(scale, rel=0.03)


def test_the_temperature_is_scipys_minimum_and_has_no_slope() -> None:
    logits, labels = classes(300, scale=2.5)

    def nll(log_t: float) -> float:
        return float(nn.functional.cross_entropy(logits.double() / math.exp(log_t), labels))

    found = best_temperature(logits, labels)
    theirs = minimize_scalar(nll, bounds=(-3, 3), method="bounded", options={"xatol": 1e-10})
    assert found == pytest.approx(math.exp(theirs.x), rel=1e-6)
    log_t = torch.tensor(math.log(found), dtype=torch.float64, requires_grad=True)
    nn.functional.cross_entropy(logits.double() / log_t.exp(), labels).backward()
    assert abs(float(log_t.grad)) < 1e-12


def test_the_temperature_of_rows_that_are_all_right_is_one() -> None:
    with pytest.warns(UserWarning, match="data.validation"):
        assert best_temperature(torch.eye(3), torch.arange(3)) == 1.0
    with pytest.raises(BaselineError, match=r"set data\.validation"):
        best_temperature(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))


def test_a_likelihood_divides_its_logits_by_the_temperature() -> None:
    logits, labels = classes(20)
    likelihood = by.Categorical(temperature=2.5)
    expected = (logits / 2.5).log_softmax(1)
    assert torch.equal(likelihood.log_prob(logits, labels), expected.gather(1, labels[:, None]).squeeze(1))
    assert torch.allclose(likelihood.predictive(logits[None]).log_probs, expected, atol=1e-6)
    with pytest.raises(by.BayesifyError, match="temperature=0"):
        by.Categorical(temperature=0.0)


# SWAG


def collected(rank: int, snapshots: int = 8) -> tuple[nn.Module, Swag, Tensor]:
    """A network, its SWAG, and the snapshots that were taken of it."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    swag, taken = Swag(network, rank), []
    for _ in range(snapshots):
        for p in network.parameters():
            p.data += 0.3 * torch.randn_like(p)
        swag.collect(network)
        taken.append(parameters_to_vector(network.parameters()).detach().clone())
    return network, swag, torch.stack(taken)


def test_swags_moments_are_those_of_the_snapshots() -> None:
    network, swag, taken = collected(rank=3)
    assert swag.count == 8 and torch.allclose(swag.mean, taken.mean(0), atol=1e-6)
    assert torch.allclose(swag.variance, taken.square().mean(0) - taken.mean(0).square(), atol=1e-5)
    running = torch.stack([taken[: i + 1].mean(0) for i in range(8)])
    assert torch.allclose(torch.stack(swag.deviations), (taken - running)[-3:], atol=1e-6)
    average = AveragedModel(network)
    for weights in taken:
        nn.utils.vector_to_parameters(weights, network.parameters())
        average.update_parameters(network)
    assert torch.equal(swag.mean, parameters_to_vector(average.module.parameters()))


@pytest.mark.parametrize(("rank", "scale"), [(3, 1.0), (3, 0.25), (0, 1.0)])
def test_swags_draws_have_the_papers_covariance(rank: int, scale: float) -> None:
    _, swag, taken = collected(rank)
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([swag.draw(generator, scale) for _ in range(20_000)])
    diagonal = torch.diag(taken.var(0, correction=0))
    expected = scale * diagonal
    if rank:
        running = torch.stack([taken[: i + 1].mean(0) for i in range(8)])
        d = (taken - running)[-rank:].T
        expected = scale * 0.5 * (diagonal + d @ d.T / (rank - 1))
    spread = expected.diagonal().sqrt()
    tolerance = 5 * torch.outer(spread, spread) / math.sqrt(len(draws)) * math.sqrt(2)
    assert (torch.cov(draws.T) - expected).abs().le(tolerance).all()
    assert (draws.mean(0) - taken.mean(0)).abs().le(5 * spread / math.sqrt(len(draws)) + 1e-5).all()


def test_every_draw_of_swag_has_its_own_batch_statistics_as_torch_estimates_them() -> None:
    network, swag, _ = collected(rank=3)
    batches = [torch.randn(16, 3) for _ in range(5)]
    drawn = swag.networks(network, 2, batches, seed=3)
    assert not torch.equal(drawn[0][1].running_mean, drawn[1][1].running_mean)
    for each in drawn:
        ours = {name: buffer.clone() for name, buffer in each.named_buffers() if "running" in name}
        update_bn(batches, each)
        for name, buffer in ours.items():
            assert torch.allclose(each.get_buffer(name), buffer, atol=1e-6)


def test_snapshots_are_even_and_only_at_the_end() -> None:
    part = SwagPart(snapshots=4, start=0.5)
    steps = [step for step in range(1, 121) if is_snapshot_due(step, 120, 6, part)]
    assert steps == list(range(65, 121, 5))
    assert sum(is_snapshot_due(step, 6, 3, SwagPart(snapshots=50, start=0.0)) for step in range(1, 7)) == 6


# Laplace


def linear_case(real: bool = False) -> tuple[nn.Module, Tensor, Tensor, PreparedBatches]:
    torch.manual_seed(0)
    x = torch.randn(60, 4)
    y = x @ torch.randn(4, 1) + 0.5 * torch.randn(60, 1) if real else torch.randint(3, (60,))
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 1 if real else 3))  # laplace-torch wants two modules
    inputs = Arrays((4,), (0.0,) * 4, (1.0,) * 4)
    return network, x, y, PreparedBatches(network, inputs, TensorExamples(x, y), 16)


def log_stds(model: nn.Module) -> Tensor:
    return torch.cat(
        [t.flatten() for layer in bayesian_layers(model).values() for t in layer.posterior.tensors().values()]
    )


@needs_laplace
@pytest.mark.parametrize(
    ("posterior", "fisher"), [("last_diagonal", "exact"), ("all_diagonal", "exact"), ("all_diagonal", "empirical")]
)
def test_the_diagonal_posterior_is_the_fisher_information_and_the_prior(posterior: str, fisher: str) -> None:
    network, x, y, train_rows = linear_case()
    part = LaplacePart(posterior=posterior, fisher=fisher, prior_precision=2.0)
    model, precision = laplace(part, network, by.Categorical(), train_rows)
    probs = network(x).softmax(1).detach()
    errors = probs * (1 - probs) if fisher == "exact" else (probs - nn.functional.one_hot(y, 3)).square()
    fisher_information = torch.cat([(errors.T @ x.square()).flatten(), errors.sum(0)])
    assert precision == 2.0
    assert torch.allclose(log_stds(model).exp(), (fisher_information + 2.0) ** -0.5, rtol=1e-4)


@needs_laplace
def test_the_posterior_over_all_layers_is_laplace_torchs() -> None:
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    network(torch.randn(30, 4))
    x, y = torch.randn(40, 4), torch.randint(3, (40,))
    theirs = Laplace(network.eval(), "classification", "all", "diag", prior_precision=3.0)
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=10))
    rows = PreparedBatches(network, Arrays((4,), (0.0,) * 4, (1.0,) * 4), TensorExamples(x, y), 16)
    model, _ = laplace(LaplacePart(posterior="all_diagonal", prior_precision=3.0), network, by.Categorical(), rows)
    assert torch.allclose(log_stds(model).exp(), theirs.posterior_scale, rtol=1e-4)
    assert torch.equal(by.draw(model, None)(x), network(x))


class LastStep(nn.Module):
    def forward(self, x: tuple[Tensor, object]) -> Tensor:
        return x[0][:, -1]


@needs_laplace
def test_the_posterior_over_a_recurrent_network_is_the_sum_of_squared_gradients() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.LSTM(4, 5, batch_first=True), LastStep(), nn.Linear(5, 3))
    x, y = torch.randn(20, 6, 4), torch.randint(3, (20,))
    rows = PreparedBatches(network, Arrays((6, 4), (0.0,) * 4, (1.0,) * 4), TensorExamples(x, y), 10)
    part = LaplacePart(posterior="all_diagonal", fisher="empirical", prior_precision=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no batched LSTM, which is slow, not wrong
        model, _ = laplace(part, network, by.Categorical(), rows)
    squares = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    for i in range(20):
        loss = nn.functional.cross_entropy(network(x[i : i + 1]), y[i : i + 1])
        for name, gradient in zip(squares, torch.autograd.grad(loss, list(network.parameters())), strict=True):
            squares[name] += gradient.square()
    posterior = {name: layer.posterior.tensors() for name, layer in bayesian_layers(model).items()}
    for name, key in (("0.weight_ih_l0", "weight_log_std_ih_l0"), ("0.bias_hh_l0", "bias_log_std_hh_l0")):
        expected = -0.5 * (squares[name] + 2.0).log()
        torch.testing.assert_close(posterior["0"][key], expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(posterior["2"]["weight_log_std"], -0.5 * (squares["2.weight"] + 2.0).log())


@needs_laplace
def test_kronecker_draws_of_a_linear_regression_are_bayes_rule() -> None:
    network, x, _, train_rows = linear_case(real=True)
    likelihood = by.Gaussian(precision=4.0)
    model, _ = laplace(LaplacePart(prior_precision=1.5, draws=4000), network, likelihood, train_rows)
    drawn = torch.stack([member[1].weight.flatten() for member in by.members(model)])
    expected = torch.linalg.inv(4.0 * x.T @ x + 1.5 * torch.eye(4))
    spread = expected.diagonal().sqrt()
    assert (torch.cov(drawn.T) - expected).abs().le(0.15 * torch.outer(spread, spread)).all()
    assert (drawn.mean(0) - network[1].weight.flatten()).abs().le(0.1 * spread).all()


@needs_laplace
def test_the_validation_rows_choose_the_prior_precision_of_the_least_loss() -> None:
    from bayesify.lab.baselines.laplace import PRECISIONS

    network, x, y, rows = linear_case()
    part = LaplacePart(posterior="last_diagonal")
    model, precision = laplace(part, network, by.Categorical(), rows, rows)
    losses = {}
    for each in PRECISIONS:
        other, _ = laplace(part.model_copy(update={"prior_precision": each}), network, by.Categorical(), rows)
        losses[each] = float(nn.functional.nll_loss(by.predict(other, x, 20).log_probs, y))
    assert precision == min(losses, key=losses.__getitem__)
    assert torch.equal(by.predict(model, x, 5).probs, by.predict(model, x, 5).probs)
    with pytest.raises(BaselineError, match="'marginal'"):
        laplace(part, network, by.Categorical(), rows)


def test_without_laplace_torch_the_way_to_get_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "laplace", None)
    with pytest.raises(DataError, match=r"pip install 'bayesify\[laplace\]'"):
        train(small("method=laplace"), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


# Runs

SMALL = {"data": {"limit": 160, "batch_size": 32}, "model": {"options": {"channels": [8, 8]}}}
METHODS = {
    "temperature": [],
    "swag": ["method.draws=4", "method.rank=3", "method.start=0.4"],
    "laplace": ["method.draws=4"],
    "laplace diagonal": ["method.posterior=all_diagonal"],
    "deep_ensemble": ["method.members=2"],
    "MCDropout": [],
}
CASES = [pytest.param(name, marks=needs_laplace if "laplace" in name else ()) for name in METHODS]


def small(*overrides: str, epochs: int = 2) -> Recipe:
    return Recipe.of({**SMALL, "training": {"epochs": epochs}}, overrides)


def recipe_of(case: str, *overrides: str) -> Recipe:
    return small(f"method.name={case.split()[0]}", *METHODS[case], *overrides)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(small("method=none", epochs=3), tmp_path_factory.mktemp("base") / "run", progress=False)


@pytest.mark.filterwarnings("ignore:every validation row")
@pytest.mark.parametrize("case", CASES)
def test_training_evaluation_and_prediction_from_the_command_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe_of(case).write(tmp_path / "recipe.yaml")
    np.savez("new.npz", x=np.random.default_rng(0).random((5, 1, 8, 8), dtype=np.float32))
    assert main(["train", "recipe.yaml", "--out", "run", "--quiet"]) == 0
    assert main(["evaluate", "run", "--split", "test"]) == 0
    assert main(["predict", "run", "new.npz", "--out", "p.csv"]) == 0
    with open("p.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 and all(0 < float(row["probability"]) <= 1 for row in rows)
    several = case != "temperature"
    assert (max(float(row["epistemic"]) for row in rows) > 1e-6) == several


@pytest.mark.filterwarnings("ignore:every validation row")
@pytest.mark.parametrize("case", CASES)
def test_a_loaded_run_predicts_to_the_bit_what_the_trained_one_did(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {}
    save = Run.save
    monkeypatch.setattr(
        Run, "save", lambda run, model, *rest: (kept.update({run.name: (model, rest[0])}), save(run, model, *rest))
    )
    run = train(recipe_of(case), tmp_path / "run", progress=False)
    model, likelihood = kept["run"]
    trained, data = run.load(), run.data()
    x = data.inputs.prepare(data.test.raw(torch.arange(30)))
    found = predictive(trained, data.test.take(torch.arange(30))).log_probs
    if bayesian_layers(model):
        assert torch.equal(found, by.predict(model, x, likelihood=likelihood).log_probs)
    else:
        with torch.no_grad():
            assert torch.equal(found, likelihood.predictive(model.eval()(x)[None]).log_probs)


def test_from_trained_weights_the_network_stays_and_only_its_confidence_changes(base: Run, tmp_path: Path) -> None:
    recipe = small("method=temperature", f"model.weights={base.model_file}", "data.validation=0.4")
    run = train(recipe, tmp_path / "run", progress=False)
    before, after = base.load(), run.load()
    for one, other in zip(before.model.state_dict().values(), after.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert after.likelihood.temperature == run.facts["temperature"] != 1.0
    assert not run.log_file.exists()
    rows = run.data().validation
    logits = torch.cat([after.model(after.inputs.prepare(x)) for x, _ in [rows.__getitems__(list(range(len(rows))))]])
    losses = [nn.functional.cross_entropy(logits / t, rows.targets) for t in (run.facts["temperature"], 1.0)]
    assert losses[0] < losses[1]


def test_it_can_be_asked_to_train_trained_weights_further(base: Run, tmp_path: Path) -> None:
    changes = ["method.finetune=true", f"model.weights={base.model_file}", "data.validation=0.4"]
    run = train(small("method.name=temperature", *changes, epochs=1), tmp_path / "run", progress=False)
    assert run.log_file.exists()


@pytest.mark.filterwarnings("ignore:every validation row")
@pytest.mark.parametrize("case", [case for case in CASES if case.values[0] in ("temperature", "swag", "laplace")])
def test_a_run_cut_off_after_training_resumes_without_training_again(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(case)
    whole = train(recipe, tmp_path / "whole", progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(train_recipe, "apply_post_hoc", _cut_off)
        with pytest.raises(KeyError):
            train(recipe, tmp_path / "cut", progress=False)
    monkeypatch.setattr(train_recipe.BayesianModule, "training_step", _cut_off)
    resumed = train(recipe, tmp_path / "cut", resume=True, progress=False)
    assert resumed.model_file.read_bytes() == whole.model_file.read_bytes()
    assert resumed.metrics == whole.metrics


def test_swag_resumes_in_the_midst_of_its_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of("swag", "training.checkpoint_steps=2", "training.epochs=3")
    whole = train(recipe, tmp_path / "whole", progress=False)
    with monkeypatch.context() as patch:
        collect = Swag.collect
        patch.setattr(Swag, "collect", lambda self, net: _cut_off() if self.count == 4 else collect(self, net))
        with pytest.raises(KeyError):
            train(recipe, tmp_path / "cut", progress=False)
    resumed = train(recipe, tmp_path / "cut", resume=True, progress=False)
    assert resumed.facts["snapshots"] == whole.facts["snapshots"] > 4
    assert resumed.model_file.read_bytes() == whole.model_file.read_bytes()


def _cut_off(*_: object, **__: object) -> None:
    raise KeyError


@needs_laplace
@pytest.mark.parametrize("posterior", ["last_kron", "last_diagonal", "all_diagonal"])
def test_laplace_of_a_regression_from_trained_weights_learns_the_noise(posterior: str, tmp_path: Path) -> None:
    rows = ["a,b,y", *(f"{i / 50},{(i * 7) % 11},{3 * i / 50 + (i % 5) / 5}" for i in range(200))]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    table = {"name": "table", "path": str(tmp_path / "table.csv"), "options": {"target": "y"}, "batch_size": 20}
    shared = {"data": table, "model": {"name": "mlp", "options": {"hidden": [20]}}}
    plain = train(
        Recipe.of({**shared, "method": "none", "training": {"epochs": 20, "lr": 0.02}}), tmp_path / "a", progress=False
    )
    model = {**shared["model"], "weights": str(plain.model_file)}
    run = train(
        Recipe.of(
            {
                **shared,
                "model": model,
                "method": {"name": "laplace", "posterior": posterior},
                "likelihood": {"calibrate": False},
            }
        ),
        tmp_path / "b",
        progress=False,
    )
    trained, data = run.load(), run.data()
    x = data.inputs.prepare(data.train.raw(torch.arange(len(data.train))))
    residuals = plain.load().model(x).detach() - data.train.targets
    assert float(trained.likelihood.log_precision.exp()) == pytest.approx(
        float(1 / residuals.square().mean()), rel=1e-3
    )
    assert run.metrics["test"]["rmse"] < 1.5 * plain.metrics["test"]["rmse"]
    assert float(predictive(trained, data.test).epistemic_std.max()) > 0


@needs_laplace
@pytest.mark.filterwarnings("ignore:every validation row")
def test_every_baseline_has_a_row_beside_the_methods(tmp_path: Path) -> None:
    names = ("temperature", "swag", "laplace", "MCDropout", "deep_ensemble", "Rank1")
    extra = {"swag": {"draws": 3, "rank": 2}, "laplace": {"draws": 3}, "deep_ensemble": {"members": 2}}
    short = {"epochs": 1}
    recipes = {name: {"method": {"name": name, **extra.get(name, {})}, "training": short} for name in names}
    found = compare(recipes, tmp_path / "all", seeds=1, base={**SMALL, "training": {"epochs": 2}}, progress=False)
    plain = Run.open(tmp_path / "all" / "base" / "seed-0")
    rows = {name: Run.open(tmp_path / "all" / name / "seed-0") for name in names}
    assert found is not None and all(run.metrics["test"]["nll"] > 0 for run in rows.values())
    assert rows["temperature"].metrics["test"]["accuracy"] == plain.metrics["test"]["accuracy"]
    assert rows["deep_ensemble"].recipe.model.weights is None


def test_mc_dropout_of_a_network_without_dropout_drops_the_inputs_of_all_layers_but_the_first(base: Run) -> None:
    network = base.load().model
    layers = [name for name, module in network.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    assert not any(isinstance(module, nn.Dropout) for module in network.modules())
    model = by.convert(network, by.MCDropout(0.2))
    assert list(bayesian_layers(model)) == layers[1:]
    p = by.predict(model, torch.rand(6, 1, 8, 8), 20)
    assert float(p.epistemic.max()) > 1e-4


@pytest.mark.parametrize(
    ("network", "norms"),
    [
        (PyramidNet(depth=20, alpha=12, classes=10), 9 * 3 + 2),  # three in each block, the stem's and the tail's
        (build("resnet8", shape=(3, 32, 32), outputs=10), 7),
        (build("mlp", shape=(13,), outputs=1, norm="batch", input_norm=True, norm_weight=0.2), 2),  # EMP, D.7
    ],
)
def test_emps_baseline_has_a_dropout_layer_before_every_norm_layer(network: nn.Module, norms: int) -> None:
    parameters = sum(p.numel() for p in network.parameters())
    x = torch.randn(3, *((13,) if isinstance(network, MLP) else (3, 32, 32)))
    plain = network.eval()(x)
    calls: list[str] = []
    model = with_dropout_before_norms(network, 0.005)
    for layer in model.modules():
        if not list(layer.children()):
            layer.register_forward_hook(lambda layer, *_: calls.append(type(layer).__name__))
    assert torch.equal(model(x), plain) and sum(p.numel() for p in model.parameters()) == parameters
    found = [i for i, name in enumerate(calls) if name.startswith("BatchNorm")]
    assert len(found) == calls.count("Dropout") == norms and all(calls[i - 1] == "Dropout" for i in found)
    assert {layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)} == {0.005}


def test_a_networks_own_dropout_starts_from_trained_weights_and_needs_norms_to_add_to(
    base: Run, tmp_path: Path
) -> None:
    changes = ["method.name=own_dropout", "method.before_norms=0.3", f"model.weights={base.model_file}"]
    recipe = small(*changes, "training.lr=1e-12")
    run = train(recipe, tmp_path / "run", progress=False)
    before, after = base.load().model, run.load().model
    assert torch.allclose(before.fc.weight, after.fc.weight)
    assert run.metrics["overhead"] == 0 and run.metrics["test"]["epistemic"] > 1e-3
    with pytest.raises(ModelError, match="no norm layer to put dropout before; leave before_norms out"):
        train(small("method.name=own_dropout", "method.before_norms=0.3", "model={name: mlp}"), tmp_path / "mlp")
    with pytest.raises(by.BayesifyError, match="keep_dropout=True alone needs a dropout module"):
        train(small("method.name=own_dropout"), tmp_path / "none")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method=temperature", "data.validation=0"], "set data.validation"),
        (["method=laplace", "data.validation=0"], "or 'marginal'|bayesify\\[laplace\\]"),
        (["method=swag", "training.patience=2"], "training.patience may skip"),
        (["method.name=swag", "method.snapshots=1", "training.epochs=1"], "raise method.snapshots"),
        (["method=swag", "training.freeze_base=true"], "don't apply"),
        (["method=temperature", "training.regulariser.alpha=1.0"], "don't apply"),
    ],
)
def test_what_can_not_be_is_refused_before_there_is_a_folder(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises((RecipeError, DataError), match=message):
        train(small(*overrides), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"name": "temperature"}, "real numbers"),
        pytest.param({"name": "laplace", "fisher": "empirical"}, "fisher='exact'", marks=needs_laplace),
    ],
)
def test_what_is_for_classes_is_refused_for_real_targets(method: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n" + "\n".join(f"{i},{i / 7}" for i in range(50)))
    table = {"name": "table", "path": str(tmp_path / "t.csv"), "options": {"target": "y"}}
    recipe = Recipe.of({"data": table, "model": {"name": "mlp"}, "method": method})
    with pytest.raises(RecipeError, match=message):
        train(recipe, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_fisher_information_that_laplace_torch_finds_zero_is_refused() -> None:
    with pytest.raises(RecipeError, match="needs fisher='exact'"):
        Recipe.of({"method": {"name": "laplace", "posterior": "last_diagonal", "fisher": "empirical"}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("method.rank=1", "expected 0 for a diagonal covariance, or at least 2"),
        ("method.start=1", "less than 1"),
        ("method.draw=3", "did you mean 'draws'"),
    ],
)
def test_options_out_of_range_are_told(change: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.of({"method": "swag"}, [change])
