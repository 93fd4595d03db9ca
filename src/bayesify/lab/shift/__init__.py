"""Distribution shift: noise of any intensity, the corruptions of ImageNet-C, and corruption errors."""

from bayesify.lab.shift.checks import ShiftError
from bayesify.lab.shift.corruption_error import (
    ALEXNET,
    ALEXNET_ACCURACY,
    alexnet_errors,
    corrupted_means,
    corruption_error,
    mean_corruption_error,
    relative_corruption_error,
    relative_mean_corruption_error,
)
from bayesify.lab.shift.corruptions import CONSTANTS, CORRUPTIONS, SIZES, Corruption, corrupt, nearest_set
from bayesify.lab.shift.noise import mixing, salt_and_pepper
from bayesify.lab.shift.random_numbers import Draws
from bayesify.lab.shift.shifted_examples import KINDS, ShiftedExamples, shifted

__all__ = [
    "ALEXNET",
    "ALEXNET_ACCURACY",
    "CONSTANTS",
    "CORRUPTIONS",
    "KINDS",
    "SIZES",
    "Corruption",
    "Draws",
    "ShiftError",
    "ShiftedExamples",
    "alexnet_errors",
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
