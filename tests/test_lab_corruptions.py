"""The corruptions of ImageNet-C, against the libraries that the published sets were made with."""

from __future__ import annotations

import io
import runpy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from bayesify.lab.pixels import axes
from bayesify.lab.pixels.jpeg import compressed
from bayesify.lab.shift import CONSTANTS, CORRUPTIONS, SIZES, ShiftError, corrupt, nearest_set
from bayesify.lab.shift.corruptions.blurs import scatter_sources, smear
from bayesify.lab.shift.corruptions.digital import affine, displace

HERE = Path(__file__).parent
SCRIPT = runpy.run_path(str(HERE / "references" / "make_corruptions.py"))
EXACT, RANDOM, SETS = SCRIPT["EXACT"], SCRIPT["RANDOM"], SCRIPT["SETS"]


@cache
def references() -> dict[str, np.ndarray]:
    with np.load(HERE / "references" / "corruptions.npz") as file:
        return dict(file)


def unit(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images.copy()).permute(0, 3, 1, 2) / 255


def levels(x: Tensor) -> np.ndarray:
    return (x * 255).round().permute(0, 2, 3, 1).numpy()


def photos(size: int, copies: int = 1) -> Tensor:
    return unit(np.repeat(references()[f"images{size}"], copies, 0))


# Against outside implementations.


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(("published", "size"), SETS[:2])
def test_what_is_not_random_agrees_pixel_by_pixel(published: str, size: int, name: str) -> None:
    expected = references()[f"{published}/{name}"]
    x = photos(size)[: expected.shape[1]]
    for severity, theirs in zip((1, 2, 3, 4, 5) if size == 32 else (1, 5), expected, strict=True):
        assert_near(levels(corrupt(x, name, severity, like=published)), theirs, name)


@pytest.mark.parametrize("name", SCRIPT["IMAGECORRUPTIONS"])
def test_the_package_imagecorruptions_agrees_with_its_own_constants(name: str) -> None:
    for severity in (1, 2, 3, 4, 5):
        ours = levels(corrupt(photos(32)[:1], name, severity, like="ImageNet-C"))[0]
        assert_near(ours, references()[f"imagecorruptions/{name}"][severity - 1], name)


def assert_near(ours: np.ndarray, theirs: np.ndarray, name: str) -> None:
    """Equal but for values that are cut off to bytes close to an integer; JPEG but for a few rounded cosines."""
    difference = np.abs(ours - theirs)
    if name == "jpeg_compression":
        assert difference.mean() < 0.1 and difference.max() <= 8
    else:
        assert difference.max() <= 1 and difference.mean() < 0.1


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize(("published", "size"), SETS)
def test_what_is_random_agrees_in_distribution(published: str, size: int, name: str) -> None:
    """Mean, mean size, deviation and spectrum of the change over many draws; frost, drawn by us, more loosely."""
    x = photos(size, copies=SCRIPT["DRAWS"])
    share, bands = (0.15, 0.4) if name == "frost" else (0.08, 0.1)
    for severity in (1, 2, 3, 4, 5) if size == 32 else (1, 3, 5):
        theirs = references()[f"{published}/{name}"][severity - 1]
        ours = SCRIPT["statistics"](levels(x), levels(corrupt(x, name, severity, seed=1, like=published)))
        assert abs(ours[0] - theirs[0]) < 5  # levels of 255
        np.testing.assert_allclose(ours[1:3], theirs[1:3], rtol=share, atol=0.1)
        np.testing.assert_allclose(ours[3:], theirs[3:], atol=bands)


@pytest.mark.parametrize("name", RANDOM)
def test_a_higher_severity_changes_more_where_the_published_one_does(name: str) -> None:
    x = photos(32, copies=60)
    ours = [(corrupt(x, name, severity) - x).abs().mean() for severity in (1, 2, 3, 4, 5)]
    theirs = references()[f"CIFAR-10-C/{name}"][:, 1]
    for before in range(4):
        if theirs[before + 1] > 1.05 * theirs[before]:
            assert ours[before + 1] > ours[before]


@pytest.mark.parametrize("like", CONSTANTS)
@pytest.mark.parametrize("name", EXACT)
def test_a_higher_severity_changes_more(name: str, like: str) -> None:
    x = photos(32)
    change = torch.stack([(corrupt(x, name, severity, like=like) - x).abs().mean() for severity in (1, 2, 3, 4, 5)])
    assert (change.diff() > 0).all()


def test_motion_is_that_of_imagemagick() -> None:
    ours = smear(photos(32)[:1].expand(3, -1, -1, -1), 9, 2.5, torch.tensor(SCRIPT["ANGLES"]))
    np.testing.assert_array_equal(levels(ours), references()["motion"])


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("size", [(28, 28), (32, 32), (33, 41), (64, 64)])
def test_jpeg_is_that_of_pillow(size: tuple[int, int], mode: str) -> None:
    whole = Image.fromarray(references()["images64"][0]).crop((0, 0, *size)).convert(mode)
    x = np.asarray(whole).reshape(1, *size[::-1], -1)
    for quality in (7, 25, 50, 80, 95):
        file = io.BytesIO()
        whole.save(file, "JPEG", quality=quality)
        theirs = np.asarray(Image.open(file)).reshape(x.shape).astype(float)
        difference = np.abs(levels(compressed(unit(x), quality)) - theirs)
        assert difference.mean() < 0.2 and (difference > 2).mean() < 0.01


@pytest.mark.parametrize("reach", [1, 2, 4])
def test_glass_by_fronts_is_glass_one_by_one(reach: int) -> None:
    height, width = 20, 17
    steps = torch.randint(-reach, reach, (3, height, width, 2))
    expected = torch.arange(height * width).view(height, width).repeat(3, 1, 1)
    for image in range(3):
        for row in range(height - reach, reach, -1):
            for column in range(width - reach, reach, -1):
                across, down = steps[image, row, column].tolist()
                expected[image, row, column] = expected[image, row + down, column + across].clone()
    assert scatter_sources(steps, reach).view(3, height, width).equal(expected)


@pytest.mark.parametrize(("sigma", "mirrored", "truncate"), [(0.4, False, 4.0), (1.5, False, 4.0), (25.0, True, 3.0)])
def test_the_gaussian_is_scipys(sigma: float, mirrored: bool, truncate: float) -> None:
    x = torch.randn(31).double()
    ours = axes.gaussian(31, sigma, mirrored=mirrored, truncate=truncate) @ x
    mode = "reflect" if mirrored else "nearest"
    np.testing.assert_allclose(ours, ndimage.gaussian_filter1d(x, sigma, mode=mode, truncate=truncate), atol=1e-12)


def test_displacement_is_scipys() -> None:
    x, moves = torch.rand(1, 1, 12, 15).double(), 9 * torch.randn(1, 2, 12, 15).double()
    where = np.mgrid[:12, :15] + moves[0].flip(0).numpy()
    theirs = ndimage.map_coordinates(x[0, 0], where, order=1, mode="reflect")
    np.testing.assert_allclose(displace(x, moves)[0, 0], theirs, atol=1e-9)


def test_tilting_by_the_same_for_all_corners_is_a_shift() -> None:
    x = torch.rand(1, 3, 16, 16).double()
    moved = affine(x, torch.tensor([2.0, 1.0]).expand(1, 3, 2))
    torch.testing.assert_close(moved[..., 1:, 2:], x[..., :-1, :-2])
    torch.testing.assert_close(moved[..., 0, 2:], x[..., 1, :-2])  # mirrored at the first row


# What all of them promise.


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_row_comes_out_the_same_in_any_batch(name: str) -> None:
    x = photos(32, copies=3)
    together = corrupt(x, name, 4, seed=3)
    generator = torch.Generator().manual_seed(3)
    assert torch.cat([corrupt(part, name, 4, generator=generator) for part in x.split([1, 2, 6])]).equal(together)
    assert corrupt(x[:2], name, 4, seed=3).equal(together[:2])


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 64, 64), (3, 40, 24), (1, 8, 8), (3, 224, 224)])
def test_any_size_grey_or_coloured(name: str, shape: tuple[int, ...]) -> None:
    x = torch.rand(2, *shape)
    before = x.clone()
    corrupted = corrupt(x, name, 5)
    assert corrupted.shape == x.shape and corrupted.dtype == x.dtype and x.equal(before)
    assert corrupted.min() >= 0 and corrupted.max() <= 1 and not corrupted.allclose(x, atol=0.01)
    torch.testing.assert_close(corrupted * 255, (corrupted * 255).round(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if "noise" not in name and name != "frost"])
def test_grey_is_a_picture_with_equal_channels(name: str) -> None:
    grey = photos(32)[:, :1]
    three = corrupt(grey.expand(-1, 3, -1, -1), name, 3)
    assert (three - corrupt(grey, name, 3)).abs().max() < 1.5 / 255


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_extreme_pictures_stay_finite(name: str) -> None:
    x = torch.stack([torch.zeros(3, 32, 32), torch.ones(3, 32, 32)])
    assert corrupt(x, name, 5).isfinite().all()
    assert corrupt(x[:0], name, 5).shape == (0, 3, 32, 32)
    assert corrupt(x.half(), name, 5).dtype == torch.float16


def test_rows_differ_and_seeds_decide() -> None:
    x = torch.full((2, 3, 32, 32), 0.5)
    for name in RANDOM[:1] + RANDOM[5:8]:
        one, two = corrupt(x, name, 3, seed=1), corrupt(x, name, 3, seed=2)
        assert one.equal(corrupt(x, name, 3, seed=1)) and not one.equal(two) and not one[0].equal(one[1])


def test_without_quantising_pixels_lie_between() -> None:
    x = photos(32)
    fine, coarse = (corrupt(x, "contrast", 2, quantise=quantise) for quantise in (False, True))
    assert 0 < (fine - coarse).max() < 1 / 255 and (fine - coarse).min() > -1e-5


def test_every_published_set_has_every_corruption_at_five_severities() -> None:
    assert set(CONSTANTS) == set(SIZES)
    for name, size in SIZES.items():
        assert nearest_set(size, size) == name
        assert list(CONSTANTS[name]) == list(CORRUPTIONS)
        assert {len(severities) for severities in CONSTANTS[name].values()} == {5}


@pytest.mark.parametrize(
    ("x", "name", "severity", "options", "words"),
    [
        (torch.zeros(1, 3, 32, 32), "gausian_noise", 1, {}, "did you mean 'gaussian_noise'"),
        (torch.zeros(1, 3, 32, 32), "fog", 0, {}, "severity=0: expected 1, 2, 3, 4 or 5"),
        (torch.zeros(1, 3, 32, 32), "fog", True, {}, "severity=True"),
        (torch.zeros(1, 3, 32, 32), "fog", 1, {"like": "CIFAR-C"}, "did you mean 'CIFAR-10-C'"),
        (torch.zeros(3, 32, 32), "fog", 1, {}, r"shape \(3, 32, 32\)"),
        (torch.zeros(1, 4, 32, 32), "fog", 1, {}, "1 or 3"),
        (torch.zeros(1, 3, 7, 32), "fog", 1, {}, "at least 8 × 8"),
        (torch.full((1, 3, 32, 32), 255.0), "fog", 1, {}, "from 255 to 255"),
        (torch.full((1, 3, 32, 32), float("nan")), "fog", 1, {}, "expected pixels from 0 to 1"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "fog", 1, {}, "pass x / 255"),
    ],
)
def test_errors_name_what_was_given(x: Tensor, name: str, severity: int, options: dict[str, str], words: str) -> None:
    with pytest.raises(ShiftError, match=words):
        corrupt(x, name, severity, **options)


def test_nothing_leaves_the_device_through_numpy() -> None:
    package = HERE.parents[0] / "src/bayesify/lab/shift"
    assert not [path for path in package.rglob("*.py") if "import numpy" in path.read_text()]
    assert not [path for path in package.rglob("*.py") if ".numpy()" in path.read_text()]
