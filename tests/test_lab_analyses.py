"""The analyses against predictions, scikit-learn's PCA, networks put together by hand, and formulas of the priors."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy.special import logsumexp
from scipy.stats import norm
from sklearn.decomposition import PCA
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

import bayesify as by
from bayesify.conversion.convert import unconvert
from bayesify.lab import metrics
from bayesify.lab.analyses import (
    Analysis,
    AnalysisError,
    Bands,
    ablation,
    component_weights,
    extremes,
    fit_curve,
    kernel_moments,
    loss_line,
    loss_plane,
    panels,
    prior_functions,
    sample_sizes,
    sign_network,
    toy_curve,
)
from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.methods.base import Method

COMPONENTS: dict[str, Method] = {
    "Rank1": by.Rank1(5, mean_std=0.5, dropout_rate=0.05),
    "IBNN": by.IBNN(5, mean_std=0.5),
    "BatchEnsemble": by.BatchEnsemble(5, mean_std=0.5),
    "LowRankEnsemble": by.LowRankEnsemble(5),
    "Ensemble": by.Ensemble(5, jitter=0.5),
    "EMP": by.EMP(5, jitter=0.5),
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))


def converted(name: str) -> nn.Module:
    model = by.convert(network(), COMPONENTS[name])
    by.recalibrate(model, [torch.randn(64, 6)])
    return model.eval()


def rows(count: int = 60) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 6), torch.randint(4, (count,))


def flat(network: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in network.parameters()]).double().numpy()


def written(found: Analysis, folder: Path) -> list[dict[str, str]]:
    """What `to_csv` wrote, after the figure has been drawn and found to be a picture."""
    figure = found.figure()
    assert isinstance(figure, Figure)
    figure.savefig(folder / "figure.png")
    picture = matplotlib.image.imread(folder / "figure.png")
    assert min(picture.shape[:2]) > 200 and picture.std() > 0.01
    found.to_csv(folder / "table.csv")
    with (folder / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# Numbers of draws.


def test_the_first_draws_are_the_prediction_with_so_many(tmp_path: Path) -> None:
    model, (x, y) = converted("Rank1"), rows()
    found = sample_sizes(by.predict(model, x, 20, draws=True), y, sizes=[1, 3, 20], orders=4)
    for i, size in enumerate([1, 3, 20]):
        p = by.predict(model, x, size)
        expected = {"accuracy": metrics.accuracy(p.probs, y), "nll": metrics.nll(p.log_probs, y)}
        expected["ece"] = metrics.ece(p.probs, y)
        for name, value in expected.items():
            assert found.curves[name][0, i] == pytest.approx(float(value), abs=1e-6)
    assert found.curves["nll"].shape == (4, 3)
    assert np.allclose(found.curves["nll"][:, 2], found.curves["nll"][0, 2])
    assert all(np.isclose(found.single["nll"], value).any() for value in found.curves["nll"][:, 0])
    assert len(written(found, tmp_path)) == 12


def test_sizes_of_real_targets_are_the_mixture_of_gaussians(tmp_path: Path) -> None:
    model = by.convert(nn.Linear(6, 1), by.IBNN(4))
    x, y = torch.randn(50, 6), torch.randn(50, 1)
    p = by.predict(model, x, 12, likelihood=by.Gaussian(4.0))
    mean = by.Gaussian(4.0).predictive(by.draw(model, None)(x)[None])
    found = sample_sizes(p, y, sizes=[2, 12], orders=1, mean_network=mean)
    for i, size in enumerate([2, 12]):
        draws = p.draws[:size].double().numpy()
        densities = logsumexp(norm.logpdf(y.numpy(), draws, 0.5), axis=0) - np.log(size)
        assert found.curves["log_density"][0, i] == pytest.approx(densities.mean(), abs=1e-5)
        assert found.curves["rmse"][0, i] == pytest.approx(np.sqrt(np.mean((draws.mean(0) - y.numpy()) ** 2)), abs=1e-5)
    assert set(found.mean_network) == {"rmse", "log_density"}
    written(found, tmp_path)


def test_several_predictions_and_the_sizes_by_default() -> None:
    model, (x, y) = converted("IBNN"), rows()
    some = [by.predict(model, x, 30, seed=seed, draws=True) for seed in (0, 1)]
    found = sample_sizes(some, y, orders=3)
    assert found.curves["ece"].shape == (6, len(found.sizes)) and found.single["ece"].shape == (60,)
    assert found.sizes[0] == 1 and found.sizes[-1] == 30 and (np.diff(found.sizes) > 0).all()


def test_sizes_refuse_what_they_cannot_measure() -> None:
    model, (x, y) = converted("IBNN"), rows()
    p = by.predict(model, x, 5, draws=True)
    with pytest.raises(AnalysisError, match="draws=True"):
        sample_sizes(by.predict(model, x, 5), y)
    with pytest.raises(AnalysisError, match="from 1 to 5"):
        sample_sizes(p, y, sizes=[1, 6])
    with pytest.raises(AnalysisError, match=r"shape \(60,\); got \(59,\)"):
        sample_sizes(p, y[1:])
    with pytest.raises(AnalysisError, match="the same number"):
        sample_sizes([p, by.predict(model, x, 4, draws=True)], y)
    with pytest.raises(AnalysisError, match="orders=0"):
        sample_sizes(p, y, orders=0)
    with pytest.raises(AnalysisError, match="BinaryPrediction"):
        sample_sizes(by.predict(model, x, 5, likelihood=by.Bernoulli(), draws=True), y)


# Ablations.


TINY = {
    "data": {"name": "digits", "limit": 60, "batch_size": 30},
    "model": {"name": "mlp", "options": {"hidden": [16]}},
    "method": {"name": "Rank1"},
    "training": {"epochs": 1},
    "evaluation": {"samples": 4},
}


def test_an_ablation_trains_the_recipe_at_each_value(tmp_path: Path) -> None:
    found = ablation(TINY, "method.components", [1, 4], tmp_path / "runs", seeds=1, progress=False)
    runs = [row.runs[0] for row in found.comparison.rows]
    assert [run.recipe.method.to_method().components for run in runs] == [1, 4]
    assert {run.recipe.training.epochs for run in runs} == {1}
    table = written(found, tmp_path)
    assert [row["method.components"] for row in table] == ["1", "4"]
    assert [float(row["nll"]) for row in table] == [run.metrics["test"]["nll"] for run in runs]
    before = [run.model_file.stat().st_mtime_ns for run in runs]
    again = ablation(Recipe.of(TINY), "method.components", [1, 4], tmp_path / "runs", seeds=1, progress=False)
    assert [run.model_file.stat().st_mtime_ns for run in runs] == before
    assert again.comparison.rows[1].measured_values == found.comparison.rows[1].measured_values
    with pytest.raises(AnalysisError, match="expected some of accuracy"):
        found.figure(["rmse"])


def test_options_that_are_words_are_drawn_side_by_side(tmp_path: Path) -> None:
    recipe = {**TINY, "training": {"epochs": 1, "mixture": "replicate"}}
    found = ablation(recipe, "training.bound", ["average", "mixture"], tmp_path / "runs", seeds=1, progress=False)
    axes = found.figure(["nll"]).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["average", "mixture"]


def test_an_ablation_of_what_the_method_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"method\.components: no such key for MeanField"):
        ablation({**TINY, "method": "MeanField"}, "method.components", [1, 2], tmp_path, progress=False)
    with pytest.raises(AnalysisError, match="no duplicates"):
        ablation(TINY, "method.components", [2, 2], tmp_path, progress=False)
    with pytest.raises(AnalysisError, match="at least one"):
        ablation(TINY, "method.components", [], tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


# Weights of components.


@pytest.mark.parametrize("name", COMPONENTS)
def test_principal_axes_are_those_of_scikit_learn(name: str, tmp_path: Path) -> None:
    model = converted(name)
    found = component_weights(model, draws=2, seed=3)
    points = np.stack([flat(member) for member in by.members(model)])
    axes = PCA(4).fit(points)
    assert np.allclose(found.explained, axes.explained_variance_ratio_, atol=1e-5)
    expected = axes.transform(points)[:, :2]
    signs = np.sign((expected * found.components).sum(0))
    assert np.allclose(found.components, expected * signs, atol=1e-4)
    draws = np.stack([flat(by.draw(model, 3, index=i)) for i in range(10)])
    assert np.allclose(found.draws, axes.transform(draws)[:, :2] * signs, atol=1e-4)
    assert found.component.tolist() == ([-1] * 10 if name == "EMP" else [*range(5), *range(5)])
    shares = name not in ("Ensemble", "EMP")
    assert (found.shared is not None) == shares
    if found.shared is not None:
        base = flat(unconvert(model))  # in place: the base tensors as they are
        assert np.allclose(found.shared, axes.transform(base[None])[0, :2] * signs, atol=1e-4)
    assert len(written(found, tmp_path)) == 15 + shares


def test_two_components_have_one_axis() -> None:
    model = by.convert(network(), by.BatchEnsemble(2, mean_std=0.5))
    found = component_weights(model, draws=1)
    assert found.explained.tolist() == [1.0, 0.0] and not found.components[:, 1].any()
    first, second = (flat(member) for member in by.members(model))
    assert np.ptp(found.components[:, 0]) == pytest.approx(np.linalg.norm(first - second), rel=1e-5)


def test_weights_without_components_have_no_axes() -> None:
    with pytest.raises(AnalysisError, match=r"MeanField\(\): 1 component; expected at least 2"):
        component_weights(by.convert(network(), by.MeanField()))
    with pytest.raises(AnalysisError, match="same weights"):
        component_weights(by.convert(network(), by.BatchEnsemble(3, mean_std=0)))
    with pytest.raises(AnalysisError, match="draws=-1"):
        component_weights(converted("IBNN"), draws=-1)
    with pytest.raises(by.BayesifyError, match="no Bayesian layer"):
        component_weights(network())


# The loss between components.


def loss_of(network: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    return float(F.cross_entropy(network(data[0]), data[1]).detach())


@pytest.mark.parametrize("name", COMPONENTS)
def test_the_ends_of_a_line_are_the_members(name: str, tmp_path: Path) -> None:
    model, data = converted(name), rows()
    found = loss_line(model, data, 1, 3, steps=5, beyond=0.5)
    members = by.members(model)
    at = dict(zip(found.position.tolist(), found.loss, strict=True))
    assert at[0.0] == pytest.approx(loss_of(members[1], data), abs=1e-6)
    assert at[1.0] == pytest.approx(loss_of(members[3], data), abs=1e-6)
    assert found.accuracy is not None
    right = (members[1](data[0]).argmax(1) == data[1]).double().mean()
    assert found.accuracy[found.position == 0][0] == pytest.approx(float(right))
    assert found.statistics == ("blended" if name == "Ensemble" else "kept") and np.isfinite(found.loss).all()
    assert len(written(found, tmp_path)) == len(found.position) == 9


def test_the_middle_of_a_line_is_the_mean_of_weights() -> None:
    model, data = converted("Rank1"), rows()
    first, second = by.members(model)[:2]
    middle = network().eval()
    blend = {k: (v + second.state_dict()[k]) / 2 for k, v in first.state_dict().items() if v.is_floating_point()}
    middle.load_state_dict(blend, strict=False)
    found = loss_line(model, [(x, y) for x, y in zip(*(t.split(7) for t in data), strict=True)], steps=3, beyond=0)
    assert found.loss[1] == pytest.approx(loss_of(middle, data), abs=1e-5)
    assert found.barrier == pytest.approx(max(0.0, found.loss[1] - (found.loss[0] + found.loss[2]) / 2))
    batches = [torch.randn(32, 6) for _ in range(3)]
    update_bn(batches, middle.train())
    anew = loss_line(model, data, steps=3, recalibrate=iter(batches), beyond=0)
    assert anew.statistics == "estimated anew"
    assert anew.loss[1] == pytest.approx(loss_of(middle.eval(), data), abs=1e-5)


def test_lines_between_draws_and_of_real_targets() -> None:
    model = by.convert(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), by.IBNN(4))
    x, y = torch.randn(40, 6), torch.randn(40, 1)
    found = loss_line(model, (x, y), 0, 3, seed=5, likelihood=by.Gaussian(2.0), steps=2, beyond=0)
    for index, loss in zip((0, 3), found.loss, strict=True):
        mean = by.draw(model, 5, index=index)(x).numpy()
        assert loss == pytest.approx(-norm.logpdf(y.numpy(), mean, 0.5**0.5).mean(), abs=1e-5)
    assert found.accuracy is None and found.statistics == "none" and set(found.columns()) == {"position", "loss"}


@pytest.mark.parametrize("chosen", [[0, 2, 4], None])
def test_a_plane_is_that_of_the_principal_axes(chosen: list[int] | None, tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    model, data = by.convert(plain, by.Rank1(5, mean_std=0.5)), rows()
    found = loss_plane(model, data, chosen, steps=4)
    members = by.members(model)
    points = np.stack([flat(members[k]) for k in chosen or range(5)])
    axes = PCA(2).fit(points)
    signs = np.sign((axes.transform(points) * found.points).sum(0))
    assert np.allclose(found.points, axes.transform(points) * signs, atol=1e-4)
    assert found.explained == pytest.approx(axes.explained_variance_ratio_.sum(), abs=1e-5)
    for i, j in ((0, 0), (3, 1), (2, 3)):
        place = axes.mean_ + (np.array([found.x[j], found.y[i]]) * signs) @ axes.components_
        nn.utils.vector_to_parameters(torch.tensor(place, dtype=torch.float32), members[0].parameters())
        assert found.loss[i, j] == pytest.approx(loss_of(members[0], data), rel=1e-4)
    assert found.x.min() < found.points[:, 0].min() and found.y.max() > found.points[:, 1].max()
    assert len(written(found, tmp_path)) == 16
    assert {text.get_text() for text in found.figure().axes[0].texts} == {str(k) for k in chosen or range(5)}


def test_surfaces_refuse_what_makes_none() -> None:
    model, data = converted("IBNN"), rows()
    with pytest.raises(AnalysisError, match="from 0 to 4"):
        loss_line(model, data, 0, 5)
    with pytest.raises(AnalysisError, match="distinct numbers"):
        loss_line(model, data, 2, 2)
    with pytest.raises(AnalysisError, match="at least three"):
        loss_plane(model, data, [0, 1])
    with pytest.raises(AnalysisError, match="expected at least 3"):
        loss_plane(by.convert(network(), by.Rank1(2)), data)
    with pytest.raises(AnalysisError, match="steps=1"):
        loss_line(model, data, steps=1)
    with pytest.raises(AnalysisError, match="no row"):
        loss_line(model, [])


def test_a_surface_leaves_the_model_alone() -> None:
    model, data = converted("Ensemble"), rows()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    loss_line(model, data, steps=2, recalibrate=[data[0]])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items()) and not model.training


def test_kept_dropout_is_left_out_of_means() -> None:
    plain = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.5), nn.Linear(12, 4))
    model, data = by.convert(plain, by.IBNN(3, mean_std=0.5), keep_dropout=True).eval(), rows()
    found = loss_line(model, data, steps=2, beyond=0)
    assert found.loss[1] == pytest.approx(loss_of(by.members(model)[1], data), abs=1e-6)


# Most and least certain.


def test_extremes_are_those_of_each_class(tmp_path: Path) -> None:
    logits, y = 2 * torch.randn(6, 200, 5), torch.randint(5, (200,))
    p = by.Categorical().predictive(logits, keep=True)
    images = torch.randint(256, (200, 1, 8, 8), dtype=torch.uint8)
    found = extremes(p, images, y, count=3, names=list("abcde"))
    mean = logits.softmax(-1).mean(0).double().numpy()
    entropy = -(mean * np.log(mean)).sum(1)
    for c in range(3):
        own = np.flatnonzero(y.numpy() == c)
        assert found.row[:, c].tolist() == [own[entropy[own].argmin()], own[entropy[own].argmax()]]
    assert np.allclose(found.entropy, entropy[found.row], atol=1e-5) and np.allclose(found.probs, mean[found.row])
    assert np.allclose(found.pictures, images[:, 0].numpy()[found.row] / 255)
    assert found.spread is not None
    assert np.allclose(found.spread, logits.softmax(-1).numpy().std(0)[found.row], atol=1e-6)
    table = written(found, tmp_path)
    assert [row["truth"] for row in table] == list("abcabc")


def test_extremes_of_all_in_colours(tmp_path: Path) -> None:
    p = by.Categorical().predictive(torch.randn(1, 30, 3))
    images = torch.rand(30, 3, 8, 8)
    found = extremes(p, images, by="all", count=5, names=["aeroplane", "bird", "cat"])
    order = p.entropy.argsort().numpy()
    assert found.row.tolist() == [order[:5].tolist(), order[::-1][:5].tolist()]
    assert found.spread is None and found.truth is None
    assert np.array_equal(found.pictures, images.movedim(1, -1).numpy()[found.row])
    written(found, tmp_path)


def test_extremes_are_of_raw_pictures_and_classes() -> None:
    p, images = by.Categorical().predictive(torch.randn(1, 30, 3)), torch.rand(30, 1, 8, 8)
    for wrong in (torch.rand(30, 7), torch.rand(30, 2, 8, 8), torch.rand(29, 1, 8, 8)):
        with pytest.raises(AnalysisError, match="expected \\(30, 1 or 3 channels"):
            extremes(p, wrong)
    with pytest.raises(AnalysisError, match="before normalisation"):
        extremes(p, 4 * images - 2)
    with pytest.raises(AnalysisError, match="at most 15"):
        extremes(p, images, by="all", count=16)
    with pytest.raises(AnalysisError, match="2 names for 3 classes"):
        extremes(p, images, names=["a", "b"])
    with pytest.raises(AnalysisError, match="Regression"):
        extremes(by.Gaussian().predictive(torch.randn(2, 30, 1)), images)
    with pytest.raises(AnalysisError, match="by='row'"):
        extremes(p, images, by="row")  # type: ignore[arg-type]


# Curves.


@pytest.mark.parametrize(
    "method", [by.IBNN(4), by.MeanField(estimator="local"), by.ECMP(3), by.MCDropout(0.1)], ids=str
)
def test_bands_are_the_deviations_of_the_prediction(method: Method, tmp_path: Path) -> None:
    x, y = toy_curve(20)
    fitted = fit_curve(method, x, y, hidden=[16], steps=20)
    grid = torch.linspace(-6, 6, 50)[:, None]
    found = fitted.bands(grid, samples=30, seed=2)
    inputs = (grid - x.mean()) / x.std(correction=0)
    p = by.predict(fitted.model, inputs, 30, seed=2, likelihood=fitted.likelihood)
    scale = float(y.std(correction=0))
    assert np.allclose(found.mean, scale * p.mean.flatten().numpy() + float(y.mean()), atol=1e-3)
    assert np.allclose(found.epistemic_std, scale * p.epistemic_std.flatten().numpy(), atol=1e-3)
    assert np.allclose(found.std, scale * p.std.detach().flatten().numpy(), atol=1e-3)
    assert len(written(found, tmp_path)) == 50


def test_a_fit_is_close_where_data_is_and_unsure_where_none_is() -> None:
    x, y = toy_curve()
    state = torch.random.get_rng_state()
    found = fit_curve(by.IBNN(4, prior_std=0.3, mean_std=0.5), x, y, hidden=[64], steps=300).bands()
    assert torch.equal(torch.random.get_rng_state(), state)
    at_data = np.interp(x.flatten(), found.x, found.mean)
    assert np.mean((at_data - y.flatten().numpy()) ** 2) < 0.1 * float(y.var())
    assert found.epistemic_std[0] > 2 * np.interp(x.flatten(), found.x, found.epistemic_std).mean()


def test_the_toy_curve_has_its_gap_and_its_noise() -> None:
    x, y = toy_curve(5000, gap=(0.0, 2.0), noise=3.0)
    assert not ((x > 0) & (x < 2)).any() and x.min() >= -4 and x.max() <= 4
    assert float((y - x**3).std()) == pytest.approx(3.0, rel=0.05)
    assert float((x < 0).double().mean()) == pytest.approx(4 / 6, abs=0.03)
    with pytest.raises(AnalysisError, match="gap"):
        toy_curve(gap=(-4, 4))


def test_bands_are_of_one_target_over_one_input() -> None:
    p = by.Gaussian().predictive(torch.randn(3, 10, 2), keep=True)
    with pytest.raises(AnalysisError, match="one real target"):
        Bands.of(p, torch.randn(10, 1))
    with pytest.raises(AnalysisError, match=r"expected \(N, 1\)"):
        fit_curve(by.IBNN(2), torch.randn(10, 2), torch.randn(10, 1))
    with pytest.raises(AnalysisError, match="at least one"):
        panels({})


# Priors.


@pytest.mark.parametrize(
    ("method", "variance"),
    [
        (by.EMP(5), 20 + 100 * 5),
        (by.ECMP(5), 20 + 100 * 5),
        (by.Ensemble(3), 20 + 100 * 5),
        (by.MeanField(), 20 + 100 * 5),
        (by.DropConnect(0.5), 20 + 100 * 5 / 0.5),
        (by.IBNN(2, prior_std=0.5), 20 + 100 * 5 * 1.25),
        (by.Rank1(2, prior_std=0.5), 20 + 100 * 5 * 1.25**2),
    ],
    ids=str,
)
def test_functions_vary_as_the_prior_says(method: Method, variance: float, tmp_path: Path) -> None:
    """Var f(x) = Var B + Σ_h Var(W_h ± …): a sign is ±1 whatever the weights before it."""
    found = prior_functions(sign_network(), method, torch.linspace(-9, 9, 40)[:, None], functions=300)
    assert (found.values**2).mean() == pytest.approx(variance, rel=0.15)
    assert abs(found.values.mean()) < 4 * np.sqrt(variance / 300)
    if not isinstance(method, by.DropConnect):
        return
    assert len(written(prior_functions(sign_network(), method, torch.zeros(9, 1)), tmp_path)) == 9


def test_dropped_weights_make_rougher_functions() -> None:
    """Without its weight a unit never turns, so with DropConnect(0.5) a function has half as many steps (D.1)."""
    x = torch.linspace(-50, 50, 4001)[:, None]
    turns = {
        name: (np.diff(prior_functions(sign_network(), method, x, functions=40).values) != 0).sum(1).mean()
        for name, method in {"dropped": by.DropConnect(0.5), "patched": by.EMP(5)}.items()
    }
    assert turns["dropped"] < 0.75 * turns["patched"]


def test_priors_leave_network_and_random_state_alone() -> None:
    plain, x = sign_network(), torch.zeros(3, 1)
    before, state = flat(plain), torch.random.get_rng_state()
    found = prior_functions(plain, {"0": by.EMP(2), "2": by.Rank1(2, posterior="normal", prior="cauchy")}, x)
    assert np.array_equal(flat(plain), before) and torch.equal(torch.random.get_rng_state(), state)
    again = prior_functions(plain, {"0": by.EMP(2), "2": by.Rank1(2, posterior="normal", prior="cauchy")}, x)
    assert np.array_equal(found.values, again.values)
    with pytest.raises(AnalysisError, match=r"expected \(N, 1\)"):
        prior_functions(plain, by.EMP(2), torch.zeros(3))
    with pytest.raises(AnalysisError, match="functions=0"):
        prior_functions(plain, by.EMP(2), x, functions=0)


# Kernels.


def convolutions(method: Method) -> nn.Module:
    plain = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    return by.convert(plain, {"*": method})


@pytest.mark.parametrize(
    "method",
    [
        by.MeanField(init_log_std=(-3, -2)),
        by.Ensemble(4, jitter=0.3),
        by.BatchEnsemble(4, mean_std=0.5),
        by.ECMP(3, jitter=0.5),
    ],
    ids=str,
)
def test_moments_of_a_kernel_are_those_of_draws(method: Method, tmp_path: Path) -> None:
    model = convolutions(method)
    found = kernel_moments(model)
    draws = torch.stack([by.draw(model, 7, index=i)[0].weight for i in range(1200)]).double().numpy()  # type: ignore[index]
    error = np.sqrt(found.variance / 1200)
    assert (abs(draws.mean(0) - found.mean) < 5 * error * (1 + (found.draws > 0)) + 1e-6).all()
    assert draws.var(0).mean() == pytest.approx(found.variance.mean(), rel=0.05)
    assert (found.draws == 0) == (not isinstance(method, by.ECMP))
    assert len(written(found, tmp_path)) == 6 * 3 * 9


def test_moments_of_factors_are_their_formula(tmp_path: Path) -> None:
    model = convolutions(by.IBNN(2, mean_std=0.5))
    found = kernel_moments(model, "2", draws=4000)
    layer = model[2]  # type: ignore[index]
    loc, scale = (layer.posterior.in_loc, F.softplus(layer.posterior.in_rho))
    second = (loc**2 + scale**2).mean(0) - loc.mean(0) ** 2
    weight = layer.weight.detach()
    expected = (weight**2 * second.detach()[:, None, None]).numpy()
    assert np.allclose(found.variance, expected, rtol=0.15, atol=1e-7)
    assert np.allclose(found.mean, (weight * loc.mean(0).detach()[:, None, None]).numpy(), atol=0.02)
    found.figure(channel=5).savefig(tmp_path / "figure.png")
    with pytest.raises(AnalysisError, match="expected 0 to 5"):
        found.figure(channel=6)


def test_only_convolutions_have_pictures() -> None:
    model = convolutions(by.MeanField())
    with pytest.raises(
        AnalysisError, match=r"layer='4' is a Linear, which is not a two-dimensional convolution; .* there are 0, 2"
    ):
        kernel_moments(model, "4")
    with pytest.raises(AnalysisError, match="'nine' is no such layer"):
        kernel_moments(model, "nine")
    with pytest.raises(AnalysisError, match="there is none"):
        kernel_moments(by.convert(nn.Linear(3, 2), by.MeanField()))
    with pytest.raises(AnalysisError, match="draws=1"):
        kernel_moments(convolutions(by.Rank1(2)), draws=1)
