"""Augmentation: equal to a loop over rows, drawn uniformly, for bytes and floats alike."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from bayesify.lab.data import (
    AUGMENTATIONS,
    Blur,
    Cutout,
    DataError,
    Flip,
    Jpeg,
    PadCrop,
    augment,
    blur,
    cutout,
    flip,
    jpeg,
    pad_crop,
    step,
)

FILL = (10.0, 20.0, 30.0)


def batch(dtype: torch.dtype, rows: int = 16) -> Tensor:
    return torch.randint(1, 256, (rows, 3, 9, 7)).to(dtype)


def naive_pad_crop(x: Tensor, padding: int, fill: tuple[float, ...]) -> Tensor:
    top, left = torch.randint(2 * padding + 1, (2, len(x)))
    out = []
    for image, i, j in zip(x, top.tolist(), left.tolist(), strict=True):
        canvas = torch.stack([torch.full((9 + 2 * padding, 7 + 2 * padding), v) for v in fill]).to(x.dtype)
        canvas[:, padding : padding + 9, padding : padding + 7] = image
        out.append(canvas[:, i : i + 9, j : j + 7])
    return torch.stack(out)


def naive_flip(x: Tensor, p: float) -> Tensor:
    return torch.stack([row.flip(-1) if u < p else row for row, u in zip(x, torch.rand(len(x)), strict=True)])


def naive_cutout(x: Tensor, size: int, fill: tuple[float, ...]) -> Tensor:
    ys, xs = torch.randint(9, (len(x), 1)), torch.randint(7, (len(x), 1))
    out = x.clone()
    for i in range(len(x)):
        top, left = int(ys[i]) - size // 2, int(xs[i]) - size // 2
        for channel, value in enumerate(fill):
            out[i, channel, max(top, 0) : top + size, max(left, 0) : left + size] = value
    return out


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(
    "vectorised, naive",
    [
        (lambda x: pad_crop(x, 3, FILL), lambda x: naive_pad_crop(x, 3, FILL)),
        (lambda x: pad_crop(x, 0), lambda x: naive_pad_crop(x, 0, FILL)),
        (lambda x: flip(x, 0.3), lambda x: naive_flip(x, 0.3)),
        (lambda x: cutout(x, 4, FILL), lambda x: naive_cutout(x, 4, FILL)),
        (lambda x: cutout(x, 5), lambda x: naive_cutout(x, 5, (0.0, 0.0, 0.0))),
    ],
    ids=["pad_crop", "no padding", "flip", "cutout", "odd cutout"],
)
def test_vectorised_is_the_loop(vectorised, naive, dtype: torch.dtype) -> None:
    x = batch(dtype)
    before = x.clone()
    torch.manual_seed(5)
    fast = vectorised(x)
    torch.manual_seed(5)
    assert torch.equal(fast, naive(x))
    assert fast.dtype == dtype and torch.equal(x, before)


def test_crops_are_uniform_and_rows_independent() -> None:
    # One lit pixel in the middle: where it lands tells the crop.
    x = torch.zeros(20_000, 1, 5, 5)
    x[:, 0, 2, 2] = 1
    counts = pad_crop(x, padding=1).sum(0)[0, 1:4, 1:4]
    assert counts.sum() == 20_000
    assert ((counts - 20_000 / 9).abs() < 5 * (20_000 * (1 / 9) * (8 / 9)) ** 0.5).all()


def test_flips_are_as_frequent_as_said() -> None:
    x = torch.tensor([1.0, 2.0]).view(1, 1, 1, 2).expand(10_000, 1, 1, 2)
    flipped = (flip(x, 0.25)[:, 0, 0, 0] == 2).float().mean()
    assert abs(flipped - 0.25) < 5 * (0.25 * 0.75 / 10_000) ** 0.5
    assert torch.equal(flip(x, 0.0), x) and torch.equal(flip(x, 1.0), x.flip(-1))


def test_cutout_centres_are_uniform() -> None:
    holes = (cutout(torch.ones(30_000, 1, 3, 4), size=1) == 0).sum(0)[0]
    assert holes.sum() == 30_000
    assert ((holes - 2500).abs() < 5 * 2500**0.5).all()


@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.7])
def test_a_blur_is_scipys(sigma: float) -> None:
    x = batch(torch.float32) / 255
    expected = ndimage.gaussian_filter(x.numpy(), (0, 0, sigma, sigma), mode="reflect")
    np.testing.assert_allclose(blur(x, 1.0, (sigma, sigma)), expected, atol=1e-5)
    whole = blur((x * 255).byte(), 1.0, (sigma, sigma))
    assert whole.dtype == torch.uint8 and (whole - 255 * torch.from_numpy(expected)).abs().max() < 0.51


def test_images_are_blurred_as_often_and_as_much_as_said() -> None:
    x = torch.zeros(4000, 1, 13, 13)
    x[..., 6, 6] = 1
    blurred = blur(x, 0.3, (0.5, 2.0))
    is_changed = blurred[:, 0, 6, 6] < 1
    assert abs(is_changed.float().mean() - 0.3) < 5 * (0.3 * 0.7 / 4000) ** 0.5 and x[:, 0, 6, 6].eq(1).all()
    down = blurred[is_changed].sum((1, 3))
    variance = (down * (torch.arange(13) - 6).square()).sum(1)
    std = variance.sqrt()  # of a Gaussian in pixels, of which the border cuts little
    assert 0.45 < std.min() < 0.55 and 1.85 < std.max() < 2.05
    assert abs(std.mean() - 1.25) < 5 * (1.5 / 12**0.5) / 1200**0.5 + 0.03  # uniform, less what is cut off


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("quality", [30, 75, 100])
def test_jpeg_is_pillows(mode: str, quality: int) -> None:
    smooth = ndimage.gaussian_filter(np.random.default_rng(0).uniform(-900, 1200, (5, 3, 28, 36)), (0, 0, 3, 3))
    images = smooth.clip(0, 255).astype(np.uint8)[:, : len(mode) if mode == "RGB" else 1]
    ours = jpeg(torch.from_numpy(images), 1.0, (quality, quality)).numpy().astype(float)
    for image, found in zip(images, ours, strict=True):
        file = io.BytesIO()
        Image.fromarray(image.transpose(1, 2, 0).squeeze(), mode).save(file, "JPEG", quality=quality)
        theirs = np.asarray(Image.open(file)).reshape(28, 36, -1).transpose(2, 0, 1).astype(float)
        assert np.abs(found - theirs).mean() < 0.5


def test_each_image_has_a_quality_of_its_own() -> None:
    one = (255 * torch.rand(1, 1, 16, 16)).round().byte()
    each = [jpeg(one, 1.0, (q, q)) for q in range(20, 31)]
    found = jpeg(one.expand(3000, 1, 16, 16), 0.5, (20, 30))
    matches = torch.stack([(found == image).flatten(1).all(1) for image in [one, *each]]).float().mean(1)
    expected = torch.tensor([0.5, *[0.5 / 11] * 11])
    assert ((matches - expected).abs() < 5 * (expected * (1 - expected) / 3000).sqrt()).all()


def test_jpeg_needs_grey_or_colour() -> None:
    with pytest.raises(DataError, match=r"\(2, 4, 8, 8\) can't be JPEG images; expected 1 or 3 channels"):
        jpeg(torch.zeros(2, 4, 8, 8))


def test_the_seed_decides() -> None:
    x = batch(torch.uint8)
    torch.manual_seed(1)
    first = augment(x, ["pad_crop", "flip", "cutout"])
    torch.manual_seed(1)
    assert torch.equal(first, augment(x, [PadCrop(), Flip(), Cutout()]))


def test_an_empty_batch_stays_empty() -> None:
    assert augment(batch(torch.uint8, rows=0), list(AUGMENTATIONS)).shape == (0, 3, 9, 7)


def test_fractions_of_bytes_are_rounded() -> None:
    assert cutout(torch.ones(1, 1, 1, 1, dtype=torch.uint8), 1, fill=120.7).item() == 121


def test_steps_from_descriptions() -> None:
    assert step({"cutout": {"size": 8, "fill": [1.0, 2.0, 3.0]}}) == Cutout(8, (1.0, 2.0, 3.0))
    assert step({"flip": None}) == Flip()
    assert step({"blur": {"sigma": [1, 2]}}) == Blur(sigma=(1, 2)) and step("jpeg") == Jpeg(0.5, (30, 100))
    assert step(torch.neg) is torch.neg


@pytest.mark.parametrize(
    "description, words",
    [
        ("flipp", "did you mean 'flip'"),
        ({"flip": {"q": 1}}, r"expected the options \['p'\]"),
        ({"flip": 3}, "expected the options"),
        ({"flip": {"p": 2}}, r"Flip\(p=2\)"),
        ({"flip": {}, "cutout": {}}, "expected a name"),
        (7, "expected a name"),
        ({"pad_crop": {"padding": 0.5}}, r"PadCrop\(padding=0.5\)"),
        ({"cutout": {"size": 0}}, r"Cutout\(size=0\)"),
        ({"blur": {"sigma": 2}}, r"Blur\(sigma=2\): expected \(low, high\)"),
        ({"blur": {"sigma": [2, 1]}}, r"Blur\(sigma=\(2, 1\)\)"),
        ({"blur": {"sigma": [0, 1e9]}}, r"high <= 100"),
        ({"jpeg": {"quality": [0, 50]}}, r"Jpeg\(quality=\(0, 50\)\): expected \(low, high\), whole numbers"),
        ({"jpeg": {"quality": [30.5, 50]}}, "whole numbers"),
        ({"jpeg": {"p": -1}}, r"Jpeg\(p=-1\)"),
    ],
)
def test_wrong_descriptions_are_refused(description: object, words: str) -> None:
    with pytest.raises(DataError, match=words):
        step(description)


def test_only_images_are_augmented() -> None:
    with pytest.raises(DataError, match=r"\(3, 4\).*\(N, C, H, W\)"):
        flip(torch.zeros(3, 4))
    with pytest.raises(DataError, match="each of the 3 channels"):
        cutout(batch(torch.float32), fill=(1.0, 2.0))
