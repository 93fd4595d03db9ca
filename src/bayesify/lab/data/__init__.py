"""Data sets for training and evaluation: built in, from files in common formats, or from Hugging Face."""

from bayesify.lab.data.arrays import Arrays
from bayesify.lab.data.augment import (
    AUGMENTATIONS,
    Blur,
    Cutout,
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
from bayesify.lab.data.columns import Columns
from bayesify.lab.data.dataset import Data, inputs_from_dict
from bayesify.lab.data.errors import DataError
from bayesify.lab.data.examples import Examples, FolderExamples, TensorExamples, loader, whole
from bayesify.lab.data.images import IMAGENET_MEAN, IMAGENET_STD, Images
from bayesify.lab.data.inputs import Inputs
from bayesify.lab.data.loading import DATASETS, load, options_of
from bayesify.lab.data.series import Series
from bayesify.lab.data.targets import Classes, Labels, Masks, Reals, Targets, targets_from_dict

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Arrays",
    "Blur",
    "Classes",
    "Columns",
    "Cutout",
    "Data",
    "DataError",
    "Examples",
    "Flip",
    "FolderExamples",
    "Images",
    "Inputs",
    "Jpeg",
    "Labels",
    "Masks",
    "PadCrop",
    "Reals",
    "Series",
    "Targets",
    "TensorExamples",
    "augment",
    "blur",
    "cutout",
    "flip",
    "inputs_from_dict",
    "jpeg",
    "load",
    "loader",
    "options_of",
    "pad_crop",
    "step",
    "targets_from_dict",
    "whole",
]
