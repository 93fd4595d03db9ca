"""Noise, data sets under shift, and errors relative to a reference model's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bayesify.lab.data import Arrays, Classes, Columns, Examples, Images, TensorExamples, load, loader
from bayesify.lab.evaluation.robustness import imagenet_c_errors
from bayesify.lab.shift import (
    ALEXNET,
    CORRUPTIONS,
    KINDS,
    ShiftError,
    alexnet_errors,
    corrupt,
    corrupted_means,
    corruption_error,
    mean_corruption_error,
    mixing,
    relative_corruption_error,
    relative_mean_corruption_error,
    salt_and_pepper,
    shifted,
)
from bayesify.lab.shift.random_numbers import Draws

EMP_CE = (98.4, 98.2, 98.5, 97.9, 98.8, 96.9, 98.3, 99.6, 101.1, 99.8, 97.9, 100, 95.4, 91.3, 94.2)
"""EMP (BN+O) in table 7 of EMP, whose mCE is 97.8."""
EMP_RCE = (98.8, 98.4, 98.8, 97.9, 99.4, 96.1, 98.6, 101, 104, 102, 97.7, 102, 92.2, 84.8, 89.5)
"""The same in table 8, whose rmCE is 97.4."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(rows: int = 12) -> TensorExamples:
    x = torch.randint(256, (rows, 3, 32, 32), dtype=torch.uint8, generator=generator())
    return TensorExamples(x, torch.arange(rows) % 3)


# Noise.


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
def test_mixing_has_the_moments_of_its_equation(gamma: float) -> None:
    mixed = mixing(torch.full((4, 3, 100, 100), 0.5), gamma, generator())
    assert abs(mixed.mean() - (1 - gamma) * 0.5) < 0.01 and abs(mixed.std() - gamma) < 0.01


def test_mixing_raw_inputs_is_mixing_normalised_ones() -> None:
    inputs = Images((3, 8, 8), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    x = torch.rand(2, 3, 8, 8)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (inputs.mean, inputs.std))
    raw = mixing(x, 0.4, generator(), mean=mean, std=std)
    torch.testing.assert_close(inputs.normalise(raw), mixing(inputs.normalise(x), 0.4, generator()))


def test_mixing_takes_tables() -> None:
    assert mixing(torch.zeros(5, 4), 0.5, generator()).shape == (5, 4)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_salt_and_pepper_hits_a_share_of_the_elements(p: float) -> None:
    noisy = salt_and_pepper(torch.full((4, 3, 100, 100), 0.5), p, generator())
    for value, share in ((0.0, p / 2), (1.0, p / 2), (0.5, 1 - p)):
        assert abs((noisy == value).float().mean() - share) < 0.01


def test_intensities_are_shares() -> None:
    with pytest.raises(ShiftError, match=r"gamma=1\.5: expected a number from 0 to 1"):
        mixing(torch.zeros(1, 2), 1.5, generator())
    with pytest.raises(ShiftError, match="p='much'"):
        salt_and_pepper(torch.zeros(1, 1, 8, 8), "much", generator())  # type: ignore[arg-type]
    with pytest.raises(ShiftError, match="expected floats"):
        mixing(torch.zeros(1, 2, dtype=torch.uint8), 0.5, generator())


# Data sets.


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_same_in_batches_of_any_size(kind: str) -> None:
    examples = shifted(images(), kind, KINDS[kind][2], seed=5)
    whole = examples.raw(torch.arange(12))
    for size in (1, 5, 12):
        assert torch.cat([x for x, _ in loader(examples, batch_size=size)]).equal(whole)
    order = torch.tensor([7, 0, 11])
    assert examples.raw(order).equal(whole[order]) and examples.take(order).raw(torch.arange(3)).equal(whole[order])
    assert not shifted(images(), kind, KINDS[kind][2], seed=6).raw(torch.arange(12)).equal(whole) or kind in (
        *("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_stay_bytes_and_floats_floats(kind: str) -> None:
    base = images(2)
    intensity = KINDS[kind][0]
    raw = shifted(base, kind, intensity).raw(torch.arange(2))
    assert raw.dtype == (torch.float32 if kind == "mixing" else torch.uint8)
    floats = shifted(TensorExamples(base.x / 255, base.targets), kind, intensity).raw(torch.arange(2))
    inputs = Images((3, 32, 32), (0.5,) * 3, (0.2,) * 3)
    torch.testing.assert_close(inputs.prepare(raw), inputs.prepare(floats))


def test_targets_stay() -> None:
    examples = shifted(images(), "fog", 2)
    assert examples.targets.equal(images().targets) and len(examples) == 12
    other = examples.with_targets(torch.zeros(12))
    assert other.targets.equal(torch.zeros(12)) and other.raw(torch.arange(3)).equal(examples.raw(torch.arange(3)))
    x, y = examples[3]
    assert x.equal(examples.raw(torch.tensor([3]))[0]) and y == 0


def test_a_corrupted_row_is_what_corrupt_makes_of_it() -> None:
    raw = shifted(images(), "contrast", 4).raw(torch.arange(2))
    assert raw.equal((corrupt(images().x[:2] / 255, "contrast", 4) * 255).round().to(torch.uint8))


def test_intensities_of_a_kind_share_their_noise() -> None:
    base = TensorExamples(torch.full((1, 1, 32, 32), 0.5), torch.zeros(1))
    weak, strong = (shifted(base, "mixing", gamma).raw(torch.tensor([0])) for gamma in (0.25, 0.5))
    torch.testing.assert_close(2 * (weak - 0.75 * 0.5), strong - 0.5 * 0.5)


def test_mixing_with_inputs_is_of_what_the_network_sees() -> None:
    inputs = Images((3, 32, 32), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    seen = inputs.prepare(shifted(images(), "mixing", 1.0, inputs=inputs).raw(torch.arange(12)))
    assert abs(seen.mean()) < 0.02 and abs(seen.std() - 1) < 0.02


def test_mixing_spares_the_categories_of_a_table() -> None:
    columns = Columns(("a", "b"), (0.0, 0.0), (1.0, 1.0), ("c",), (("x", "y"),))
    table = TensorExamples(torch.tensor([[0.5, -1.0, 1.0], [2.0, 0.0, 0.0]]), torch.zeros(2))
    mixed = shifted(table, "mixing", 0.5, inputs=columns).raw(torch.arange(2))
    assert mixed[:, 2].equal(table.x[:, 2]) and not mixed[:, :2].allclose(table.x[:, :2])
    assert columns.prepare(mixed).shape == (2, 4)


def test_mixing_arrays_is_in_their_own_units() -> None:
    arrays = TensorExamples(torch.full((500, 2), 10.0), torch.zeros(500))
    inputs = Arrays((2,), (10.0, -3.0), (5.0, 0.1))
    noise = inputs.prepare(shifted(arrays, "mixing", 1.0, inputs=inputs).raw(torch.arange(500)))
    assert (noise.mean(0).abs() < 0.2).all() and ((noise.std(0) - 1).abs() < 0.2).all()


def test_digits_under_shift() -> None:
    data = load("digits", size=28)
    foggy = shifted(data.test, "fog", 5)
    assert data.inputs.prepare(foggy.raw(torch.arange(4))).shape == (4, 1, 28, 28)


@pytest.mark.parametrize(
    ("examples", "kind", "intensity", "words"),
    [
        (images(), "frog", 1, "did you mean 'fog'"),
        (images(), "fog", 6, "severity=6"),
        (images(), "fog", 1.5, "severity=1.5"),
        (images(), "mixing", 2, "mixing=2: expected a number from 0 to 1"),
        (TensorExamples(torch.zeros(3, 4), torch.zeros(3)), "fog", 1, r"shape \(1, 4\) can't be corrupted"),
        (TensorExamples(torch.zeros(3, 4), torch.zeros(3)), "salt_and_pepper", 0.1, r"shape \(1, 4\)"),
    ],
)
def test_what_cannot_be_shifted_is_refused_at_once(examples: Examples, kind: str, intensity: float, words: str) -> None:
    with pytest.raises(ShiftError, match=words):
        shifted(examples, kind, intensity)


def test_no_rows_are_no_trouble() -> None:
    assert len(shifted(TensorExamples(torch.zeros(0, 3, 32, 32), torch.zeros(0)), "snow", 1)) == 0


def test_draws_are_those_of_their_distributions() -> None:
    draws = Draws(range(200))
    assert abs(draws.normal(500).std() - 1) < 0.01
    assert abs(draws.uniform(-1, 3, 500).mean() - 1) < 0.02
    assert draws.integers(-2, 2, 500).unique().tolist() == [-2, -1, 0, 1]
    rate = torch.full((200, 500), 7.0)
    counts = draws.poisson(rate)
    assert abs(counts.mean() - 7) < 0.05 and abs(counts.var() - 7) < 0.15


# Errors.


def shift_of(errors: Tensor) -> dict[str, dict[str, dict[str, float]]]:
    """Metrics with a given top-1 error for each corruption, a little less at low severities and more at high ones."""
    return {
        name: {
            str(severity): {"accuracy": 1 - error * (0.7 + 0.1 * severity), "nll": 2 * error, "ece": error / 4}
            for severity in range(1, 6)
        }
        for name, error in zip(CORRUPTIONS, errors.tolist(), strict=True)
    }


def test_the_mean_corruption_error_of_emp() -> None:
    vanilla = torch.linspace(0.4, 0.8, 15)
    ours = shift_of(vanilla * torch.tensor(EMP_CE) / 100)
    each = corruption_error(ours, shift_of(vanilla))
    assert list(each) == list(CORRUPTIONS) and list(each.values()) == pytest.approx([ce / 100 for ce in EMP_CE])
    assert round(100 * mean_corruption_error(ours, shift_of(vanilla)), 1) == 97.8
    assert mean_corruption_error(ours, ours) == pytest.approx(1)


def test_the_relative_mean_corruption_error_of_emp() -> None:
    vanilla, clean, vanilla_clean = torch.linspace(0.4, 0.8, 15), 0.25, 0.3
    errors = clean + (vanilla - vanilla_clean) * torch.tensor(EMP_RCE) / 100
    ours, theirs = shift_of(errors), shift_of(vanilla)
    each = relative_corruption_error(ours, 1 - clean, theirs, 1 - vanilla_clean)
    assert list(each.values()) == pytest.approx([rce / 100 for rce in EMP_RCE], rel=1e-5)
    assert round(100 * relative_mean_corruption_error(ours, 1 - clean, theirs, 1 - vanilla_clean), 1) == 97.4


@pytest.mark.parametrize(
    ("accuracy", "mce"), [(40.5, 75.34), (41.4, 74.14), (42.9, 72.12), (42.5, 72.66), (42.1, 73.25)]
)
def test_mean_corruption_errors_relative_to_alexnet_are_those_of_rank1_table_1(accuracy: float, mce: float) -> None:
    """Its cA and mCE, for a network whose errors are spread over corruptions like AlexNet's (± 0.3)."""
    alexnet = 1 - torch.tensor([corrupted_means(ALEXNET, ["accuracy"])["accuracy"]])
    errors = torch.tensor([1 - ALEXNET[name]["1"]["accuracy"] for name in CORRUPTIONS]) * (1 - accuracy / 100) / alexnet
    shift = shift_of(errors)
    assert 100 * corrupted_means(shift)["accuracy"] == pytest.approx(accuracy)
    assert 100 * mean_corruption_error(shift, ALEXNET) == pytest.approx(mce, abs=0.3)
    found = alexnet_errors(shift, 0.761)
    assert found["mce_alexnet"] == mean_corruption_error(shift, ALEXNET)
    rise = [(e - 0.239) / (1 - ALEXNET[c]["1"]["accuracy"] - 0.435) for c, e in zip(CORRUPTIONS, errors, strict=True)]
    assert found["rmce_alexnet"] == pytest.approx(float(sum(rise)) / 15, rel=1e-5)


def test_alexnets_errors_are_for_images_and_classes_like_imagenets() -> None:
    shift = shift_of(torch.full((15,), 0.5))
    split = {"shift": {name: {"0": {"accuracy": 0.7}, **each} for name, each in shift.items()}, "corrupted": {}}
    large, small = (Images((3, side, side), (0.5,) * 3, (0.2,) * 3) for side in (224, 32))
    thousand, ten = (Classes(tuple(map(str, range(count)))) for count in (1000, 10))
    assert set(imagenet_c_errors(split, large, thousand)) == {"mce_alexnet", "rmce_alexnet"}
    assert not imagenet_c_errors(split, small, thousand) and not imagenet_c_errors(split, large, ten)
    assert not imagenet_c_errors({"shift": {}}, large, thousand)


def test_means_over_all_corruptions_and_severities() -> None:
    errors = torch.linspace(0.2, 0.6, 15)
    means = corrupted_means(shift_of(errors))
    assert means == pytest.approx({"accuracy": 0.6, "nll": 0.8, "ece": 0.1})


def test_other_kinds_of_shift_do_not_count() -> None:
    shift = shift_of(torch.full((15,), 0.5))
    noisy = shift | {"mixing": {"0.1": {"accuracy": 0.0, "nll": 9.0, "ece": 1.0}}}
    assert corrupted_means(noisy) == corrupted_means(shift) and mean_corruption_error(noisy, noisy) == 1


def test_errors_that_cannot_be_told() -> None:
    shift = shift_of(torch.full((15,), 0.5))
    without = {name: shift[name] for name in shift if name != "frost"}
    with pytest.raises(ShiftError, match="frost are missing"):
        mean_corruption_error(shift, without)
    with pytest.raises(ShiftError, match="frost are missing"):
        corrupted_means(without)
    assert "frost" not in corruption_error(shift, without)
    with pytest.raises(ShiftError, match="fog has no severity 5"):
        corruption_error(shift | {"fog": dict(list(shift["fog"].items())[:4])}, shift)
    with pytest.raises(ShiftError, match="adds no errors to the reference"):
        corruption_error(shift, shift_of(torch.zeros(15)))
