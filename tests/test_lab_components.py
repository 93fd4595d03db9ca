"""Priors that factors induce, against closed forms; components beside their mixture, over epochs and their number."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import k0
from scipy.stats import t as student

import bayesify as by
from bayesify.lab import analyses
from bayesify.lab.analyses import AnalysisError, component_metrics, induced_priors, student_factor
from bayesify.lab.recipes import Recipe
from bayesify.lab.runs import Run, RunError
from bayesify.lab.training import train
from bayesify.prediction.results import Classification

GRID = torch.cat([torch.linspace(-6, -0.1, 30), torch.linspace(0.1, 6, 30)])

# Induced priors.


def test_normal_factors_around_zero_induce_the_product_of_two_normals() -> None:
    """Its density is K₀(|w|) / π."""
    found = induced_priors({"r": torch.distributions.Normal(torch.zeros(1), torch.ones(1))}, grid=GRID)
    assert found.densities["r"] == pytest.approx(k0(np.abs(found.grid)) / np.pi, rel=1e-3)
    assert found.normal == pytest.approx(torch.distributions.Normal(0.0, 1.0).log_prob(GRID.double()).exp().numpy())


@pytest.mark.parametrize("freedom", [3.0, 8.0])
def test_inverse_gamma_variances_induce_students_t(freedom: float) -> None:
    """Figure 1: "Inverse-Gamma r² induces a Student-T weight prior"."""
    found = induced_priors({"t": student_factor(freedom)}, grid=GRID, weight_std=1.0)
    assert found.densities["t"] == pytest.approx(student.pdf(found.grid, freedom), rel=0.05)


def test_cauchy_has_less_mass_around_zero_and_heavier_tails() -> None:
    """Figure 1, for the priors of `Rank1`; both factors are heavier still."""
    priors = {"normal": by.Rank1(prior_std=0.5), "cauchy": by.Rank1(posterior="cauchy", prior_std=0.5)}
    one, both = (induced_priors(priors, grid=torch.tensor([0.3, 1.0, 6.0]), both=both) for both in (False, True))
    assert one.densities["cauchy"][2] > 10 * one.densities["normal"][2] > 10 * one.normal[2]
    assert one.densities["cauchy"][1] < one.densities["normal"][1]
    assert both.densities["normal"][2] > one.densities["normal"][2]
    generator = torch.Generator().manual_seed(0)
    r, s, w = (torch.randn(400_000, generator=generator) for _ in range(3))
    drawn = w * (1 + 0.5 * r) * (1 + 0.5 * s)
    share = ((drawn - 1.0).abs() < 0.05).double().mean() / 0.1
    assert both.densities["normal"][1] == pytest.approx(float(share), rel=0.05)


def test_what_has_no_prior_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AnalysisError, match=r"r: Rank1\(4\) has no prior_std; give it"):
        induced_priors({"r": by.Rank1()})
    with pytest.raises(AnalysisError, match="0 priors: expected a number > 0, and at least one"):
        induced_priors({})
    with pytest.raises(AnalysisError, match=r"freedom=0: expected a number > 0"):
        student_factor(0)
    found = induced_priors({"r": by.Rank1(prior_std=1.0)}, grid=GRID)
    found.to_csv(tmp_path / "p.csv")
    found.figure().savefig(tmp_path / "p.png")
    assert (tmp_path / "p.csv").read_text().splitlines()[0] == "weight,r,no factors"


# Components.


def test_components_are_measured_by_themselves_and_disagree_as_in_rank1() -> None:
    """Section 3.5: the share of inputs on which two members differ, averaged over pairs, divided by 1 - accuracy."""
    logits, y = torch.randn(6, 50, 4), torch.randint(4, (50,))
    p = by.Categorical().predictive(logits, keep=True)
    assert isinstance(p, Classification)
    mixture, components, disagreement = component_metrics(p, y, 3)
    members = [torch.stack([logits[k], logits[k + 3]]).softmax(-1).mean(0) for k in range(3)]
    for k, probs in enumerate(members):
        assert components["accuracy"][k] == pytest.approx(float((probs.argmax(1) == y).double().mean()))
        assert components["nll"][k] == pytest.approx(-float(probs[torch.arange(50), y].log().mean()), rel=1e-5)
    assert mixture["nll"] == pytest.approx(
        -float(torch.stack(members).mean(0)[torch.arange(50), y].log().mean()), rel=1e-5
    )
    pairs = [float((a.argmax(1) != b.argmax(1)).double().mean()) for a, b in itertools.combinations(members, 2)]
    assert disagreement == pytest.approx(np.mean(pairs) / (1 - float(components["accuracy"].mean())))
    assert mixture["nll"] < float(components["nll"].mean())  # Jensen
    assert np.isnan(component_metrics(p, y, 1)[2])
    with pytest.raises(AnalysisError, match="6 draws were kept; expected a multiple of 4"):
        component_metrics(p, y, 4)


def recipe(*overrides: str) -> Recipe:
    small = {"data": {"limit": 120, "batch_size": 40}, "model": {"options": {"channels": [8]}}}
    return Recipe.of(
        {**small, "method": {"name": "BatchEnsemble", "components": 2}, "training": {"epochs": 3}}, overrides
    )


def test_the_last_epochs_are_kept_and_compared(tmp_path: Path) -> None:
    run = train(recipe("training.keep_epochs=2"), tmp_path / "run", progress=False)
    assert run.kept_epochs == [2, 3]
    last, final = run.load_epoch(3), run.load()
    for one, other in zip(last.model.state_dict().values(), final.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    earlier = run.load_epoch(2).model.state_dict()
    assert not all(
        torch.equal(one, other) for one, other in zip(earlier.values(), last.model.state_dict().values(), strict=True)
    )
    with pytest.raises(RunError, match=r"epoch 1 was not kept; there are \[2, 3\]"):
        run.load_epoch(1)
    found = analyses.checkpoint_curves(run)
    assert found.x.tolist() == [2, 3] and found.over == "epoch"
    assert found.mixture["accuracy"][1] == pytest.approx(run.metrics["test"]["accuracy"])
    assert found.mixture["nll"][1] == pytest.approx(run.metrics["test"]["nll"], rel=1e-5)
    assert found.disagreement[1] == pytest.approx(run.metrics["test"]["normalised_disagreement"], rel=1e-5)
    found.to_csv(tmp_path / "c.csv")
    found.figure().savefig(tmp_path / "c.png")
    assert "nll_component_max" in (tmp_path / "c.csv").read_text()


def test_runs_with_other_numbers_of_components_are_compared(tmp_path: Path) -> None:
    runs = []
    for count in (3, 1):
        small = recipe(f"method.components={count}", "training.epochs=1")
        runs.append(train(small, tmp_path / str(count), progress=False, evaluated=False))
    found = analyses.component_curves(runs)
    assert found.x.tolist() == [1, 3] and found.over == "components"
    assert [len(each) for each in found.components["nll"]] == [1, 3] and np.isnan(found.disagreement[0])
    assert found.mixture["nll"][0] == pytest.approx(float(found.components["nll"][0][0]), rel=1e-5)
    with pytest.raises(AnalysisError, match=r"kept no epochs; train with training.keep_epochs=10"):
        analyses.checkpoint_curves(Run(tmp_path / "1"))
    plain = train(recipe("method=none", "training.epochs=1"), tmp_path / "plain", progress=False, evaluated=False)
    with pytest.raises(AnalysisError, match="the model has no components that rows keep"):
        analyses.component_curves([plain])
    with pytest.raises(AnalysisError, match="no runs"):
        analyses.component_curves([])
