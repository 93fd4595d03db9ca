"""Data sets for training and evaluation: built in, from files in common formats, or from Hugging Face."""

from bayesify.lab.data.arrays import Arrays
from bayesify.lab.data.augment import AUGMENTATIONS, Cutout, Flip, PadCrop, augment, cutout, flip, pad_crop, step
from bayesify.lab.data.columns import Columns
from bayesify.lab.data.dataset import Data, inputs_from_dict
from bayesify.lab.data.errors import DataError
from bayesify.lab.data.examples import Examples, FolderExamples, TensorExamples, loader, whole
from bayesify.lab.data.images import IMAGENET_MEAN, IMAGENET_STD, Images
from bayesify.lab.data.inputs import Inputs
from bayesify.lab.data.loading import DATASETS, load, options_of
from bayesify.lab.data.series import Series
from bayesify.lab.data.targets import Classes, Reals, Targets, targets_from_dict

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Arrays",
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
    "PadCrop",
    "Reals",
    "Series",
    "Targets",
    "TensorExamples",
    "augment",
    "cutout",
    "flip",
    "inputs_from_dict",
    "load",
    "loader",
    "options_of",
    "pad_crop",
    "step",
    "targets_from_dict",
    "whole",
]
