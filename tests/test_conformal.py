"""`by.conformal`: sets and intervals against the papers' formulas in plain Python, and coverage over random splits."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta, kstest
from torch import Tensor, nn

import bayesify as by
from bayesify.errors import BayesifyError
from bayesify.prediction.conformal import quantile
from bayesify.prediction.results import BinaryPrediction, Classification, Prediction, Regression

SCORES = ("lac", "aps", "raps")


def classes(rows: int = 400, count: int = 6, scale: float = 2.0, seed: int = 0) -> tuple[Classification, Tensor]:
    """Predictions that are too sure of themselves, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, count, generator=generator)
    y = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    p = by.Categorical().interpret(1.5 * logits)
    assert isinstance(p, Classification)
    return p, y


def reals(rows: int = 400, targets: int = 1, draws: int = 5, seed: int = 0) -> tuple[Regression, Tensor]:
    """Predictions whose noise differs by input and is too small, and skewed targets."""
    generator = torch.Generator().manual_seed(seed)
    mean, log_std = (torch.randn(rows, targets, generator=generator) for _ in range(2))
    noise = torch.rand(rows, targets, generator=generator).log().neg() - 1
    outputs = torch.cat([mean, 1 - 2 * log_std], 1).expand(draws, rows, 2 * targets).clone()
    outputs[..., :targets] += 0.2 * torch.randn(draws, rows, targets, generator=generator)
    p = by.Gaussian("input").predictive(outputs, keep=draws > 1)
    assert isinstance(p, Regression)
    return p, mean + log_std.exp() * noise


def split(p: Prediction, y: Tensor, rows: int) -> tuple[Any, Tensor, Any, Tensor]:
    """The first rows, and the others."""
    return p.rows(torch.arange(rows)), y[:rows], p.rows(torch.arange(rows, len(y))), y[rows:]


def quantile_in_words(scores: list[float], coverage: float) -> float:
    """The smallest score that is at least as high as the asked share of all scores and an infinite one."""
    known = sorted(scores)
    for place, score in enumerate(known, 1):
        if place >= coverage * (len(known) + 1) - 1e-9:
            return score
    return math.inf


def score_in_words(name: str, probs: list[float], y: int, penalty: float, k_reg: int) -> float:
    """LAC (Sadinle et al. 2019, section 3), and E of APS (Romano et al. 2020, eqs. 4 and 7) and RAPS (Angelopoulos et
    al. 2021, eq. 3 and section 2.2) without randomisation: the lowest level whose set has y.
    """
    if name == "lac":
        return 1 - probs[y]
    above = [other for k, other in enumerate(probs) if other > probs[y] or (other == probs[y] and k < y)]
    rank = len(above) + 1
    return sum(above) + (penalty * max(rank - k_reg, 0) if name == "raps" else 0.0)


# Against the formulas.


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("score", SCORES)
def test_sets_are_those_of_the_papers(score: str, coverage: float) -> None:
    options = {"penalty": 0.05, "k_reg": 2} if score == "raps" else {}
    seen, y, new, _ = split(*classes(), 100)
    rule = by.conformal(seen, y, coverage, score=score, **options)

    def in_words(p: Classification, row: int, k: int) -> float:
        return score_in_words(score, p.probs[row].double().tolist(), k, 0.05, 2)

    level = quantile_in_words([in_words(seen, row, int(k)) for row, k in enumerate(y)], coverage)
    expected = [[in_words(new, row, k) <= level + 1e-6 for k in range(6)] for row in range(len(new.log_probs))]
    assert rule(new).set.tolist() == expected
    assert rule(new).size.tolist() == [sum(row) for row in expected]


@pytest.mark.parametrize("score", SCORES)
def test_class_conditional_thresholds_are_those_of_the_rows_of_each_class(score: str) -> None:
    seen, y, new, _ = split(*classes(600, 3), 300)
    found = by.conformal(seen, y, 0.8, score=score, class_conditional=True)(new).set
    for k in range(3):
        alone = by.conformal(seen.rows((y == k).nonzero().flatten()), y[y == k], 0.8, score=score)
        assert torch.equal(found[:, k], alone(new).set[:, k])


def test_normalised_intervals_are_the_mean_and_standard_deviations() -> None:
    seen, y, new, _ = split(*reals(), 99)
    low, high = by.conformal(seen, y, 0.9)(new).interval
    level = sorted((abs(y - seen.mean) / seen.std).flatten().tolist())[89]  # 0.9 · 100 = 90
    assert torch.allclose(low, new.mean - level * new.std) and torch.allclose(high, new.mean + level * new.std)


@pytest.mark.parametrize("wider", [0.5, 2.0, 8.0])
def test_cqr_moves_both_bounds_by_the_quantile_of_how_far_targets_are_outside(wider: float) -> None:
    p, y = reals()
    seen, y, new, _ = split(p, wider * (y - p.mean) + p.mean, 99)  # from targets that are mostly inside, to few
    low, high = (bound.flatten().tolist() for bound in seen.interval(0.9))
    truth = y.flatten().tolist()
    level = sorted(max(a - t, t - b) for a, b, t in zip(low, high, truth, strict=True))[89]
    low, high = new.interval(0.9)
    found = by.conformal(seen, y, 0.9, score="cqr")(new).interval
    is_right_way_round = low - level <= high + level
    assert is_right_way_round.any() and (level < 0) == (wider == 0.5)
    for bound, expected in zip(found, (low - level, high + level), strict=True):
        assert torch.allclose(bound[is_right_way_round], expected[is_right_way_round], atol=1e-5)
    assert bool((found[0] <= found[1]).all())


def test_each_of_several_real_targets_has_a_threshold_of_its_own() -> None:
    seen, y, new, _ = split(*reals(400, 3), 200)
    both = by.conformal(seen, y * torch.tensor([1.0, 2.0, 4.0]), 0.8)
    assert both.shape == (3,) and len(set(both.threshold.tolist())) == 3
    for k in range(3):
        level = quantile_in_words(((2.0**k * y - seen.mean).abs() / seen.std)[:, k].tolist(), 0.8)
        assert both(new).size[:, k].tolist() == pytest.approx((2 * level * new.std[:, k]).tolist(), rel=1e-5)


@pytest.mark.parametrize("coverage", [0.55, 0.7, 0.9, 0.99])
def test_the_quantile_is_the_smallest_with_enough_scores_and_an_infinite_one(coverage: float) -> None:
    for n in (1, 2, 3, 8, 9, 19, 20, 98, 99, 100, 101):
        scores = torch.randperm(n).double()
        expected = quantile_in_words(scores.tolist(), coverage)
        if expected == math.inf:
            with pytest.raises(BayesifyError, match="infinite"):
                quantile(scores, coverage)
        else:
            assert float(quantile(scores, coverage)) == expected
    assert np.quantile(np.arange(99), 0.9 * 100 / 99, method="inverted_cdf") == quantile(torch.arange(99), 0.9)


def test_randomised_scores_add_a_uniform_share_of_the_class_that_is_the_same_for_a_row() -> None:
    p, y = classes(3000)
    plain, mixed = (by.conformal(p, y, score="aps", seed=seed) for seed in (None, 3))
    share = (mixed._class_scores(p.log_probs, "x") - plain._class_scores(p.log_probs, "x")) / p.probs
    top = share.gather(1, p.label.unsqueeze(1)).flatten()
    assert kstest(top.numpy(), "uniform").pvalue > 0.01
    likely = p.probs > 0.05  # where the difference is not all rounding
    assert torch.allclose(share[likely], top.unsqueeze(1).expand_as(share)[likely], atol=1e-4)
    assert torch.equal(mixed(p).set, mixed(p).set) and not torch.equal(mixed(p).set, plain(p).set)
    again, other = (by.conformal(p, y, score="aps", seed=seed)(p).set for seed in (3, 4))
    assert torch.equal(again, mixed(p).set) and not torch.equal(other, again)


# Coverage.

SPLITS, SEEN, NEW = 200, 300, 1000


@pytest.mark.parametrize(
    ("score", "options"),
    [
        ("lac", {}),
        ("aps", {}),
        ("raps", {"k_reg": 1}),
        ("aps", {"seed": 0}),
        ("raps", {"seed": 0}),
        ("normalised", {}),
        ("cqr", {}),
    ],
)
def test_coverage_over_200_splits_is_within_one_percent_of_the_asked_one(score: str, options: dict[str, Any]) -> None:
    """Where scores have no ties, the coverage of a split has a beta distribution (Vovk 2012)."""
    is_classes = score in SCORES
    p, y = classes(20_000, 10, 1.5) if is_classes else reals(20_000, draws=1)
    generator, found = torch.Generator().manual_seed(1), []
    for number in range(SPLITS):
        rows = torch.randperm(len(y), generator=generator)[: SEEN + NEW]
        seen, new = rows[:SEEN], rows[SEEN:]
        own = {**options, "seed": number} if "seed" in options else options
        rule = by.conformal(p.rows(seen), y[seen], 0.9, score=score, **own)
        found.append(float(rule(p.rows(new)).covers(y[new]).double().mean()))
    assert abs(np.mean(found) - 0.9) < 0.01
    k = math.ceil(0.9 * (SEEN + 1))
    expected = beta(k, SEEN + 1 - k)
    spread = math.sqrt(expected.var() + expected.mean() * (1 - expected.mean()) / NEW)
    assert np.mean(found) == pytest.approx(expected.mean(), abs=4 * spread / math.sqrt(SPLITS))
    assert np.std(found) == pytest.approx(spread, rel=0.25)


def test_every_class_is_covered_if_asked_for_and_hard_ones_are_not_otherwise() -> None:
    """Class 2 is rare, and looks like class 0."""
    generator = torch.Generator().manual_seed(0)
    y = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), 20_000, replacement=True, generator=generator)
    centres = torch.tensor([[3.0, 0.0, 1.0], [0.0, 4.0, 0.0], [2.0, 0.0, 1.0]])
    p: Any = by.Categorical().interpret(centres[y] + torch.randn(20_000, 3, generator=generator))
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    for _ in range(200):
        rows = torch.randperm(len(y), generator=generator)[:2500]
        seen, new = rows[:500], rows[500:]
        for each in found:
            rule = by.conformal(p.rows(seen), y[seen], 0.9, class_conditional=each)
            hit = rule(p.rows(new)).covers(y[new]).double()
            found[each].append([float(hit[y[new] == k].mean()) for k in range(3)])
    conditional, marginal = (np.mean(found[each], 0) for each in (True, False))
    assert conditional.min() >= 0.895 and conditional.max() <= 0.93  # more than 0.9 by rounding up, with few rows
    assert marginal.min() < 0.8


def test_sets_that_are_not_randomised_are_never_empty() -> None:
    p, y = classes(3000, scale=6.0)
    for score in ("aps", "raps"):
        sets = by.conformal(p, y, 0.5, score=score)(p)
        assert int(sets.size.min()) == 1 and bool(sets.set.gather(1, p.label.unsqueeze(1)).all())
        assert int(by.conformal(p, y, 0.5, score=score, seed=0)(p).size.min()) == 0


def test_sets_of_hard_inputs_are_larger_by_aps_and_those_of_raps_are_shorter() -> None:
    p, y = classes(3000, 100)
    sizes = {score: by.conformal(p, y, score=score)(p).size.double() for score in SCORES}
    certain = p.confidence > p.confidence.median()
    assert all(size[certain].mean() < size[~certain].mean() for size in sizes.values())
    assert sizes["lac"].mean() <= sizes["aps"].mean()
    assert sizes["raps"].max() < sizes["aps"].max()


# What it takes.


def test_it_works_on_predictions_of_a_bayesian_network() -> None:
    model = by.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), by.Rank1(4))
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    rule = by.conformal(by.predict(model, x), y)
    p = by.predict(model, x)
    assert rule(p).set.shape == (60, 3) and rule.rows == 60
    assert int(rule(p).covers(y).sum()) == 55  # of the rows that it was calibrated on, ⌈61 · 0.9⌉
    one_by_one = [rule(p.rows(torch.tensor([row]))).set for row in range(60)]
    assert torch.equal(torch.cat(one_by_one), rule(p).set)


def test_targets_may_be_lists_arrays_or_a_column() -> None:
    p, y = classes()
    expected = by.conformal(p, y).threshold
    for targets in (y.tolist(), y.numpy(), y.unsqueeze(1), y.float(), y.int()):
        assert torch.equal(by.conformal(p, targets).threshold, expected)
    q, z = reals()
    assert torch.equal(by.conformal(q, z.numpy()).threshold, by.conformal(q, z).threshold)


@pytest.mark.parametrize("shape", [(500,), (500, 1)])
def test_yes_or_no_has_two_classes(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(shape, generator=generator)
    y = torch.bernoulli(logits.sigmoid(), generator=generator)
    p = by.Bernoulli().interpret(logits)
    assert isinstance(p, BinaryPrediction)
    both = torch.stack([torch.zeros(500), logits.flatten()], 1)
    expected = by.conformal(by.Categorical().interpret(both), y.flatten().long())(by.Categorical().interpret(both))
    assert torch.equal(by.conformal(p, y)(p).set, expected.set)


def test_a_class_without_probability_is_only_in_a_set_of_all() -> None:
    p: Any = by.Categorical().interpret(torch.tensor([[0.0, 0.0, -math.inf]]).repeat(20, 1))
    assert by.conformal(p, torch.arange(20) % 2)(p).set.sum(0).tolist() == [20, 20, 0]
    rule = by.conformal(p, torch.full((20,), 2))
    assert bool(rule(p).set.all()) and bool(rule.threshold.isfinite())


@pytest.mark.parametrize("score", ["lac", "raps", "normalised", "cqr"])
def test_a_rule_survives_json(score: str) -> None:
    p, y = classes() if score in SCORES else reals()
    options: dict[str, Any] = {"penalty": 0.1, "k_reg": 1, "seed": 3} if score == "raps" else {}
    rule = by.conformal(p, y, 0.8, score=score, class_conditional=score == "lac", **options)
    again = by.Conformal.from_dict(json.loads(json.dumps(rule.to_dict())))
    assert again.to_dict() == rule.to_dict() and repr(again) == repr(rule)
    assert torch.equal(again.threshold, rule.threshold)
    assert torch.equal(again(p).covers(y), rule(p).covers(y))


@pytest.mark.parametrize(
    "change",
    [
        {"coverage": 1.5},
        {"coverage": "0.9"},
        {"coverage": True},
        {"score": "top"},
        {"score": ["lac"]},
        {"rows": -1},
        {"rows": "many"},
        {"shape": 6},
        {"shape": [5]},
        {"threshold": "x"},
        {"threshold": [[0.1]]},
        {"threshold": float("nan")},
        {"threshold": None},
        {"penalty": -1.0},
        {"penalty": 0.5},
        {"k_reg": 1.5},
        {"seed": 0},
        {"more": 1},
    ],
    ids=str,
)
def test_a_description_of_something_else_is_refused(change: dict[str, Any]) -> None:
    p, y = classes()
    good = by.conformal(p, y, class_conditional=True).to_dict()
    with pytest.raises(BayesifyError, match=r"[cC]onformal"):
        by.Conformal.from_dict({**good, **change})
    with pytest.raises(BayesifyError, match="Conformal"):
        by.Conformal.from_dict([good])  # type: ignore[arg-type]


# Errors.


@pytest.mark.parametrize(("coverage", "least"), [(0.9, 9), (0.95, 19), (0.99, 99), (0.5, 1), (0.999, 999)])
def test_too_few_rows_name_how_many_are_needed(coverage: float, least: int) -> None:
    p, y = classes(1000)
    by.conformal(p.rows(torch.arange(least)), y[:least], coverage)
    with pytest.raises(BayesifyError, match=rf"{least - 1} rows.*infinite; give at least {least}"):
        by.conformal(p.rows(torch.arange(least - 1)), y[: least - 1], coverage)


def test_the_coverage_that_an_error_offers_is_possible() -> None:
    p, y = classes(1000)
    for n in (1, 8, 95, 999):
        with pytest.raises(BayesifyError) as error:
            by.conformal(p.rows(torch.arange(n)), y[:n], 0.9999)
        by.conformal(p.rows(torch.arange(n)), y[:n], float(str(error.value).rsplit(" ", 1)[1]))


def test_a_class_with_too_few_rows_is_named() -> None:
    p, y = classes(400, 3)
    y[y == 2] = 0
    y[:8] = 2
    with pytest.raises(BayesifyError, match=r"8 rows of class 2.*at least 9"):
        by.conformal(p, y, class_conditional=True)


def misuse() -> dict[str, tuple[str, Any]]:
    """What an error must name, and the call that raises it."""
    (p, y), (q, z), rows = classes(), reals(), torch.arange(400)
    maps: Any = by.Categorical(class_dim=1).interpret(torch.randn(5, 3, 4, 4))
    labels: Any = by.Bernoulli().interpret(torch.randn(50, 3))
    broken: Any = by.Categorical().interpret(torch.where(rows < 7, torch.nan, 0.0).unsqueeze(1).expand(400, 6))
    flat: Any = by.Gaussian().interpret(torch.where(rows < 7, torch.inf, 0.0).unsqueeze(1))
    return {
        "a tensor": ("got Tensor", lambda: by.conformal(p.probs, y)),  # type: ignore[arg-type]
        "maps": (r"\(5, 4, 4, 3\)", lambda: by.conformal(maps, torch.zeros(5, 4, 4).long())),
        "labels": (r"\(50, 3\)", lambda: by.conformal(labels, torch.zeros(50, 3))),
        "NaN": ("7 rows", lambda: by.conformal(broken, y)),
        "infinite mean": ("7 rows", lambda: by.conformal(flat, z)),
        "coverage 1": ("coverage=1.0", lambda: by.conformal(p, y, 1.0)),
        "coverage 0": ("coverage=0", lambda: by.conformal(p, y, 0)),
        "coverage 90": ("coverage=90", lambda: by.conformal(q, z, 90)),
        "coverage NaN": ("coverage=nan", lambda: by.conformal(p, y, math.nan)),
        "coverage text": ("coverage='0.9'", lambda: by.conformal(p, y, "0.9")),  # type: ignore[arg-type]
        "score": ("score='topk'.*lac, aps, raps", lambda: by.conformal(p, y, score="topk")),
        "score of reals": ("score='cqr' for classes", lambda: by.conformal(p, y, score="cqr")),
        "score of classes": ("score='aps' for real", lambda: by.conformal(q, z, score="aps")),
        "reals by class": ("class_conditional", lambda: by.conformal(q, z, class_conditional=True)),
        "seed": ("seed=0", lambda: by.conformal(p, y, seed=0)),
        "seed of text": ("seed='a'", lambda: by.conformal(p, y, score="aps", seed="a")),  # type: ignore[arg-type]
        "penalty": ("penalty=-1", lambda: by.conformal(p, y, score="raps", penalty=-1)),
        "penalty of aps": ("score='raps'", lambda: by.conformal(p, y, score="aps", penalty=0.5)),
        "k_reg": ("k_reg=-2", lambda: by.conformal(p, y, score="raps", k_reg=-2)),
        "fewer targets": (r"\(399,\); expected 400", lambda: by.conformal(p, y[:-1])),
        "class 6": ("target 6 .* 0 to 5", lambda: by.conformal(p, torch.where(rows == 3, 6, y))),
        "class -1": ("target -1 ", lambda: by.conformal(p, torch.where(rows == 3, -1, y))),
        "half a class": ("target 0.5 ", lambda: by.conformal(p, torch.where(rows == 3, 0.5, y.float()))),
        "class NaN": ("target nan ", lambda: by.conformal(p, torch.where(rows == 3, torch.nan, y.float()))),
        "targets in a row": (r"\(400,\); expected \(400, 1\)", lambda: by.conformal(q, z.flatten())),
        "target NaN": ("1 targets are NaN", lambda: by.conformal(q, torch.where(rows.unsqueeze(1) == 3, torch.nan, z))),
        "other classes": (r"\(400, 4\); expected \(400, 6\)", lambda: by.conformal(p, y)(classes(400, 4)[0])),
        "other targets": (r"\(400, 2\); expected \(400, 1\)", lambda: by.conformal(q, z)(reals(400, 2)[0])),
        "other kind": ("for real targets", lambda: by.conformal(p, y)(q)),
        "other kind of reals": ("for classes", lambda: by.conformal(q, z)(p)),
        "new NaN": ("7 rows", lambda: by.conformal(p, y)(broken)),
    }


@pytest.mark.parametrize("name", misuse())
def test_misuse_is_named(name: str) -> None:
    words, call = misuse()[name]
    with pytest.raises(BayesifyError, match=words):
        call()
