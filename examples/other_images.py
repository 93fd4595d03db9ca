"""What the network of the demo was not trained on, as scikit-learn's digits are: 8x8 pixels from 0 to 1 by 1/16."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_sample_images
from torch import Tensor

LETTERS = "ACEFHJKLMNPRTUVWXY"
"""Without B, D, G, I, O, Q, S and Z, which may pass for digits."""
FONTS = ("DejaVuSans*.ttf", "DejaVuSerif*.ttf")
PIECES = 200

Images = tuple[Tensor, list[str]]
"""Images (N, 1, 8, 8), and what each of them is."""


def other_images(x: Tensor, y: Tensor) -> dict[str, Images]:
    """Images of four kinds: letters, the digits x on their side, pieces of photographs, and noise."""
    turned = y != 0  # a 0 on its side is still one
    return {
        "letters": letters(),
        "digits on their side": (x[turned].rot90(1, (2, 3)), [f"{digit} on its side" for digit in y[turned].tolist()]),
        "photographs": photographs(),
        "noise": (as_levels(torch.rand(PIECES, 1, 8, 8)), ["noise"] * PIECES),
    }


def letters() -> Images:
    """Letters in matplotlib's fonts, made as the digits were: drawn with 32x32 pixels, then the ink in 4x4 counted."""
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    files = [file for pattern in FONTS for file in sorted(folder.glob(pattern)) if "Display" not in file.name]
    images = [letter(char, ImageFont.truetype(str(file), 100)) for file in files for char in LETTERS]
    return as_levels(torch.stack(images)), [f"letter {char}" for _ in files for char in LETTERS]


def letter(char: str, font: ImageFont.FreeTypeFont) -> Tensor:
    """A letter as high as the image, and at most as wide as most digits are."""
    drawn = Image.new("L", (200, 200))
    ImageDraw.Draw(drawn).text((40, 40), char, 255, font)
    drawn = drawn.crop(drawn.getbbox())
    width = min(24, round(32 * drawn.width / drawn.height))
    page = Image.new("L", (32, 32))
    page.paste(drawn.resize((width, 32)), ((32 - width) // 2, 0))
    ink = torch.from_numpy(np.array(page)) > 127
    return ink.float().view(1, 8, 4, 8, 4).mean((2, 4))


def photographs() -> Images:
    """Square pieces of scikit-learn's two photographs in levels of grey, from black to white."""
    random, pieces = np.random.default_rng(0), []
    photos = [Image.fromarray(photo).convert("L") for photo in load_sample_images().images]
    for i in range(PIECES):
        photo, side = photos[i % len(photos)], int(random.integers(16, 97))
        left, top = (int(random.integers(0, size - side)) for size in photo.size)
        grey = photo.crop((left, top, left + side, top + side)).resize((8, 8), Image.Resampling.BOX)
        pieces.append(torch.from_numpy(np.array(grey)).float()[None])
    x = torch.stack(pieces)
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return as_levels((x - low) / (high - low).clamp_min(1)), ["photograph"] * PIECES


def as_levels(x: Tensor) -> Tensor:
    return (16 * x).round() / 16
