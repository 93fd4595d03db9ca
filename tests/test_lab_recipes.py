"""Recipes: what they say is what is run, and what is wrong with them is said in words."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

import bayesify as by
from bayesify.lab.recipes import Recipe, RecipeError, default_training
from bayesify.lab.recipes.defaults import default_noise
from bayesify.lab.recipes.methods import METHOD_PARTS
from bayesify.lab.runs import load_data
from bayesify.lab.training import BayesianModule
from bayesify.lab.training.train_recipe import bayesian_network
from bayesify.layers import bayesian_layers
from bayesify.methods import METHODS

WRONG = {
    "method.name: no method is called Rankk1; did you mean 'Rank1'?": {"method": {"name": "Rankk1"}},
    "trainin: no such key; did you mean 'training'?": {"trainin": {}},
    "training.optimiser: no such key; did you mean 'optimizer'?": {"training": {"optimiser": "sgd"}},
    "method.componets: no such key for Rank1; did you mean 'components'?": {"method": {"componets": 3}},
    "method.layers.a.fctors: no such key for Rank1; did you mean 'factors'?": {
        "method": {"name": "mixed", "layers": {"a": {"name": "Rank1", "fctors": 1}}}
    },
    "training.regulariser.alph: no such key; did you mean 'alpha'?": {"training": {"regulariser": {"alph": 1}}},
    "training.epochs: must be greater than or equal to 1; got 0": {"training": {"epochs": 0}},
    "training.momentum: must be less than 1; got 1.5": {"training": {"momentum": 1.5}},
    "method.factors: must be 'both', 'input' or 'output'; got 'left'": {"method": {"factors": "left"}},
    "training.lr: must be a valid number, unable to parse string as a number; got 'fast'": {"training": {"lr": "fast"}},
    "seed: must be greater than or equal to 0; got -1": {"seed": -1},
    "evaluation.samples: must be less than or equal to 1000000; got 2000000": {"evaluation": {"samples": 2_000_000}},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_recipe_is_told_in_words(message: str) -> None:
    with pytest.raises(RecipeError) as found:
        Recipe.of(WRONG[message])
    assert message in str(found.value).splitlines()


def test_every_wrong_key_is_named_at_once() -> None:
    with pytest.raises(RecipeError) as found:
        Recipe.of({"sed": 1, "training": {"epoch": 1}, "model": {"nam": "cnn"}})
    assert [line.partition(":")[0] for line in str(found.value).splitlines()] == ["model.nam", "sed", "training.epoch"]


def test_a_methods_own_checks_count() -> None:
    with pytest.raises(by.BayesifyError, match=r"Rank1\(components=0\): expected"):
        Recipe.of({"method": {"components": 0}})


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_options_are_its_dataclass(name: str) -> None:
    part = Recipe.of({"method": name}).method
    assert part.for_convert() == METHODS[name]()
    assert set(type(part).model_fields) == {
        *(option.name for option in fields(METHODS[name])),
        *("name", "layers", "last_blocks"),
    }


def test_a_method_may_be_limited_to_some_layers_or_mixed() -> None:
    some = Recipe.of({"method": {"name": "IBNN", "layers": ["fc*"]}}).method
    assert some.for_convert() == {"fc*": by.IBNN()}
    network = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    last = Recipe.of({"method": {"name": "IBNN", "last_blocks": 1}}).method
    assert last.for_convert(network) == {"2": by.IBNN(), "3": by.IBNN()} and last.for_convert() == by.IBNN()
    with pytest.raises(RecipeError, match="layers and last_blocks both choose layers"):
        Recipe.of({"method": {"name": "IBNN", "last_blocks": 1, "layers": ["fc*"]}})
    layers = {"*bn*": {"name": "ECMP", "components": 3}, "head": {"name": "none"}}
    mixed = Recipe.of({"method": {"name": "mixed", "layers": layers}}).method
    assert mixed.for_convert() == {"*bn*": by.ECMP(3), "head": None}


def test_overrides_are_yaml_and_reach_every_depth() -> None:
    words = ["method=IBNN", "method.components=8", "training.lr=1e-3", "data.augment=[flip]", "model.options.a.b=x"]
    recipe = Recipe.of({"method": {"name": "Rank1"}}, words)
    assert recipe.method.for_convert() == by.IBNN(8)
    assert recipe.training.lr == 1e-3 and recipe.data.augment == ["flip"]
    assert recipe.model.options == {"a": {"b": "x"}}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("training.epochs", "expected key=value"),
        ("=3", "expected key=value"),
        ("seed.a=3", "seed is 0, which has no keys"),
        ("data.path=[", "not YAML"),
    ],
)
def test_a_wrong_override_is_told(word: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.of({"seed": 0}, [word])


def test_a_recipe_file_reads_back_as_written(tmp_path: Path) -> None:
    recipe = Recipe.of({"method": {"name": "ECMP", "components": 3}, "training": {"lr": 1e-7, "regulariser": {}}})
    recipe.write(tmp_path / "recipe.yaml")
    assert Recipe.read(tmp_path / "recipe.yaml") == recipe


@pytest.mark.parametrize(
    ("text", "message"), [(None, "no such file"), ("- 1", "expected keys"), ("a: [", "not a YAML file")]
)
def test_a_file_that_is_no_recipe_is_told(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError, match=message):
        Recipe.read(tmp_path / "recipe.yaml")


def test_what_is_not_said_of_training_is_the_methods() -> None:
    scratch, tuned = Recipe.of({"method": "IBNN"}), Recipe.of({"method": "IBNN", "model": {"weights": "a.pt"}})
    assert scratch.training.posterior_lr == default_training("IBNN", trained=False)["posterior_lr"]
    assert tuned.training.schedule == default_training("IBNN", trained=True)["schedule"]
    said = Recipe.of({"method": "IBNN", "training": {"posterior_lr": 7.0}})
    assert said.training.posterior_lr == 7.0 and said.training.lr == scratch.training.lr


@pytest.mark.parametrize("trained", [False, True])
def test_the_defaults_of_every_method_are_a_valid_training(trained: bool) -> None:
    model = {"weights": "a.pt"} if trained else {}
    for name in METHOD_PARTS:
        extra = {"layers": {"*": {"name": "none"}}} if name == "mixed" else {}
        training = Recipe.of({"method": {"name": name, **extra}, "model": model}).training
        for key, value in default_training(name, trained).items():
            assert getattr(training, key) == value


def test_the_papers_numbers_are_the_defaults() -> None:
    """iBNN, algorithm 1 and table 2; BayesAdapter, section 4; EMP's Adam with its defaults; Rank-1's annealing."""
    ibnn = Recipe.of({"method": "IBNN"}).training
    assert (ibnn.schedule, ibnn.final, ibnn.posterior_schedule, ibnn.anneal_by) == (
        "late_linear",
        0.01,
        "constant",
        "epoch",
    )
    assert ibnn.anneal == pytest.approx(2 / 3, abs=1e-4)
    assert Recipe.of({"method": "Rank1"}).training.anneal == pytest.approx(2 / 3, abs=1e-4)
    emp = Recipe.of({"method": "ECMP"}).training
    assert (emp.optimizer, emp.lr, emp.schedule) == ("adam", 1e-3, "constant")


def test_the_papers_settings_are_reachable_by_name() -> None:
    """Rank-1 v1, table 5; iBNN, table 2 and table 7; EMP, C.1; BayesAdapter, section 4.1, for CIFAR-10."""

    def papers(method: str, weights: str | None = None, **given: object) -> Recipe:
        return Recipe.of({"defaults": "papers", "method": {"name": method, **given}, "model": {"weights": weights}})

    rank1 = papers("Rank1")
    assert rank1.method.to_method() == by.Rank1(4, mean_std=0.5, prior_std=0.1, dropout_rate=0.001, noise=0.35)
    assert papers("Rank1", posterior="cauchy").method.dropout_rate == 1e-6
    steps = [250 * step for step in rank1.training.schedule.steps]
    assert (steps, rank1.training.schedule.factor) == (pytest.approx([80, 160, 180]), 0.2)
    assert (rank1.training.lr, rank1.training.anneal * 250, rank1.training.mixture) == (0.1, 200, "replicate")
    assert rank1.training.weight_decay == 2 * 0.0001 and rank1.training.epochs == 250  # l2 · Σw²
    ibnn = papers("IBNN")
    assert (ibnn.method.mean_std, ibnn.method.prior_std, ibnn.training.samples) == (0.75, 0.3, 2)
    assert (ibnn.training.lr, ibnn.training.posterior_lr, ibnn.training.weight_decay) == (0.05, 1.2, 0.0005)
    tuned = papers("IBNN", "a.pt").training
    assert [[round(15 * time), 0.2 * factor] for time, factor in tuned.posterior_schedule.points] == [
        [6, 0.2],
        [10, 0.05],
    ]
    mfg = papers("MeanField", "a.pt")
    assert mfg.method.prior_std**2 == pytest.approx(1 / (2e-4 * 50_000))
    assert (mfg.training.epochs, mfg.training.lr) == (12, 1e-4)


@pytest.mark.parametrize("batch_size", [100, 256])
def test_emps_decay_is_that_of_every_tensor_and_copy_and_of_the_batch(batch_size: int) -> None:
    """C.1: the loss has 0.001 / batch size · ‖t‖² for every shared tensor and every copy of a patch."""
    given = {"defaults": "papers", "method": "EMP", "data": {"batch_size": batch_size}}
    training = Recipe.of(given).training
    network = by.convert(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), by.EMP(5))
    groups = BayesianModule(network, n=500, training=training).parameter_groups()
    assert sum(len(group["params"]) for group in groups) == len(list(network.parameters()))
    for group in groups:
        for p in group["params"]:
            penalty = 0.001 / batch_size * p.square().sum()
            assert torch.allclose(torch.autograd.grad(penalty, p)[0], group["weight_decay"] * p)
    with pytest.raises(
        RecipeError, match="decay='all' is the prior on every tensor, and kl='gradient' too; use kl='none'"
    ):
        Recipe.of({**given, "training": {"kl": "gradient"}})


@pytest.mark.parametrize("method", ["EMP", "ECMP"])
def test_the_papers_copies_start_at_random(method: str) -> None:
    recipe = Recipe.of({"defaults": "papers", "method": method})
    layer = nn.Linear(50, 40)
    model = recipe.method.convert(nn.Sequential(nn.Linear(50, 50), nn.ReLU(), layer), 0.2)
    copies = torch.cat([layer.weight[None], model[2].posterior.weight])
    correlation = torch.corrcoef(copies.flatten(1).detach())
    assert (correlation - torch.eye(5)).abs().max() < 0.1 and copies.std((1, 2)).std() < 0.01


@pytest.mark.parametrize("weights", [None, "a.pt"])
@pytest.mark.parametrize("name", [name for name in METHOD_PARTS if name != "mixed"])
def test_what_the_papers_fill_in_is_left_to_another_method(name: str, weights: str | None) -> None:
    recipe = Recipe.of({"defaults": "papers", "method": name, "model": {"weights": weights}})
    assert recipe.without_defaults()["training"] == {} and set(recipe.without_defaults()["method"]) == {"name"}
    assert Recipe.of(recipe.plain()) == recipe == Recipe.of(recipe.without_defaults())


def test_the_schema_knows_every_method_and_accepts_what_it_describes() -> None:
    schema = Recipe.model_json_schema()
    text = json.dumps(schema)
    assert all(f'"{name}"' in text for name in METHOD_PARTS)
    assert TypeAdapter(Recipe).validate_python(json.loads(json.dumps(Recipe.of({}).plain()))) == Recipe.of({})


def test_noise_that_is_left_out_depends_on_the_start_and_the_targets() -> None:
    noises = [default_noise(trained, real) for trained in (True, False) for real in (False, True)]
    assert noises == [0.35, 0.1, 0.2, 0.1]
    part = Recipe.of({"method": "Rank1"}).method
    assert part.for_convert(noise=0.1) == by.Rank1(4, noise=0.1) and part.for_convert() == by.Rank1(4)
    assert Recipe.of({"method": {"name": "Rank1", "noise": 0.5}}).method.for_convert(noise=0.1).noise == 0.5


@pytest.mark.parametrize(("target", "noise"), [("price", 0.1), ("kind", 0.2)])
def test_training_uses_the_noise_of_its_targets(target: str, noise: float, tmp_path: Path) -> None:
    rows = "".join(f"{i % 7},{i / 3},{'ab'[i % 2]}\n" for i in range(60))
    (tmp_path / "data.csv").write_text(f"x,price,kind\n{rows}")
    data = {"name": "table", "path": str(tmp_path / "data.csv"), "options": {"target": target}}
    recipe = Recipe.of({"data": data, "model": {"name": "mlp"}, "method": "Rank1"})
    network = bayesian_network(recipe, load_data(recipe))
    assert {layer.method.noise for layer in bayesian_layers(network).values()} == {noise}


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[1].glob("recipes/**/*.yaml")), ids=lambda path: path.stem
)
def test_the_recipes_that_come_with_the_project_are_valid(path: Path) -> None:
    assert Recipe.read(path).data.name == path.parent.name
