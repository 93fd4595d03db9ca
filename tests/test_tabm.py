"""TabM: members against a computation by hand, embeddings against their formula, the recipe against the function."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesify as by
from bayesify import lab
from bayesify.lab.models import TabM, tabm_methods
from bayesify.lab.models.tabm import NumberEmbedding
from bayesify.lab.recipes import Recipe

RECIPE = Path(__file__).parents[1] / "recipes" / "table" / "tabm.yaml"
MEMBERS = 3


@pytest.fixture
def model() -> nn.Module:
    made = by.convert(TabM(4, 2, hidden=[6, 5], embedding=3, bins=4), tabm_methods(MEMBERS))
    for p in made.parameters():  # so that no two members share a value by chance
        p.data += 0.3 * torch.randn_like(p)
    return made.eval()


def by_hand(model: nn.Module, x: Tensor, member: int) -> Tensor:
    """One member, from the tensors that the model saves: shared weights between own scales, own biases, own head."""
    own = model.state_dict()
    h = model.embedding(x)
    for name in ("body.0", "body.3"):
        s, r = own[f"{name}.posterior.in_loc"][member], own[f"{name}.posterior.out_loc"][member]
        bias = own[f"{name}.posterior.bias"][member - 1] if member else own[f"{name}.bias"]
        h = (((h * s) @ own[f"{name}.weight"].T) * r + bias).relu()
    where = "head.posterior" if member else "head"
    weight, bias = (
        own[f"{where}.{name}"][member - 1] if member else own[f"{where}.{name}"] for name in ("weight", "bias")
    )
    return h @ weight.T + bias


def test_members_share_weights_and_have_their_own_scales_biases_and_head(model: nn.Module) -> None:
    x = torch.randn(7, 4)
    for member, network in enumerate(by.members(model)):
        torch.testing.assert_close(network(x), by_hand(model, x, member))
    expected = torch.stack([by_hand(model, x, member).softmax(-1) for member in range(MEMBERS)]).mean(0)
    torch.testing.assert_close(by.predict(model, x).probs, expected)


def test_training_sends_every_row_through_every_member(model: nn.Module) -> None:
    x, y = torch.randn(7, 4), torch.randn(7, 2)
    found = by.elbo(model, x, y, n=7, likelihood=by.Gaussian(), mixture="replicate").log_likelihood
    each = [-(0.5 * (by_hand(model, x, member) - y).square().sum(1) + np.log(2 * np.pi)) for member in range(MEMBERS)]
    torch.testing.assert_close(found, torch.stack(each).mean())


def test_members_differ_at_the_start_by_signs_in_the_first_layer_and_by_their_heads() -> None:
    model = by.convert(TabM(4, 2, hidden=[64, 64]), tabm_methods(MEMBERS))
    first, second = model.body[0].posterior.in_loc, model.body[3].posterior.in_loc
    assert set(first.flatten().tolist()) == {-1.0, 1.0} and len(first.unique(dim=0)) == MEMBERS
    assert torch.equal(second, torch.ones(MEMBERS, 64))
    assert not torch.allclose(model.head.weight, model.head.posterior.weight[0], atol=0.01)


def test_a_number_is_encoded_by_how_much_of_each_bin_is_below_it() -> None:
    embedding = NumberEmbedding(1, bins=5, size=2)
    bounds, x = embedding.bounds.numpy(), np.linspace(-4, 4, 101)
    found = embedding.encoded(torch.from_numpy(x).float()[:, None])[:, 0].numpy()
    part = (x[:, None] - bounds[:-1]) / np.diff(bounds)
    low, high = np.where(np.arange(5) == 0, -np.inf, 0), np.where(np.arange(5) == 4, np.inf, 1)
    np.testing.assert_allclose(found, np.clip(part, low, high), atol=1e-5)
    inside = (bounds[0] < x) & (x < bounds[-1])  # where the parts add up to the number, in its order
    np.testing.assert_allclose((found * np.diff(bounds)).sum(1)[inside] + bounds[0], x[inside], atol=1e-5)
    normal = torch.distributions.Normal(0.0, 1.0)
    np.testing.assert_allclose(normal.cdf(embedding.bounds).diff(), 1 / 6, atol=1e-6)


def test_features_have_functions_of_their_own() -> None:
    embedding = NumberEmbedding(3, bins=4, size=2)
    x = torch.randn(1, 3)
    changed = x.clone()
    changed[0, 1] += 1
    before, after = (embedding(each).reshape(3, 2) for each in (x, changed))
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert TabM(3, 1, embedding=0).body[0].in_features == 3


def test_the_recipe_has_the_methods_of_the_function() -> None:
    recipe = Recipe.read(RECIPE)
    assert recipe.method.for_convert() == tabm_methods()
    assert recipe.training.mixture == "replicate" and recipe.model.name == "tabm"


def test_the_recipe_trains_on_a_table(tmp_path: Path) -> None:
    x = torch.linspace(-2, 2, 80)
    rows = "".join(f"{a:.3f},{'ab'[i % 2]},{a.abs() + i % 2:.3f}\n" for i, a in enumerate(x))
    (tmp_path / "flats.csv").write_text(f"size,kind,price\n{rows}")
    data = {"name": "table", "path": str(tmp_path / "flats.csv"), "options": {"target": "price"}, "batch_size": 32}
    plain = Recipe.read(RECIPE).plain()
    training = plain["training"] | {"epochs": 20, "patience": None, "lr": 0.02}
    options = {"hidden": [16, 16], "dropout": 0.0}
    recipe = Recipe.of(plain | {"data": data, "training": training, "model": {"name": "tabm", "options": options}})
    run = lab.train(recipe, tmp_path / "run", progress=False, evaluated=False)
    trained, test = run.load(), run.data().test
    p = trained.predict(test)
    assert p.samples == 16
    assert float((p.mean - test.targets).square().mean()) < 0.4  # of the standardised targets' variance
