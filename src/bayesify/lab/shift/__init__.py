"""Shift: noise of any intensity, ImageNet-C's corruptions, data sets under them, errors relative to a reference's."""

from bayesify.lab.shift.checks import ShiftError
from bayesify.lab.shift.corruptions import CONSTANTS, CORRUPTIONS, SIZES, Corruption, corrupt, nearest_set
from bayesify.lab.shift.draws import Draws
from bayesify.lab.shift.errors import (
    corrupted_means,
    corruption_error,
    mean_corruption_error,
    relative_corruption_error,
    relative_mean_corruption_error,
)
from bayesify.lab.shift.examples import KINDS, ShiftedExamples, shifted
from bayesify.lab.shift.noise import mixing, salt_and_pepper

__all__ = [
    "CONSTANTS",
    "CORRUPTIONS",
    "KINDS",
    "SIZES",
    "Corruption",
    "Draws",
    "ShiftError",
    "ShiftedExamples",
    "corrupt",
    "corrupted_means",
    "corruption_error",
    "mean_corruption_error",
    "mixing",
    "nearest_set",
    "relative_corruption_error",
    "relative_mean_corruption_error",
    "salt_and_pepper",
    "shifted",
]
