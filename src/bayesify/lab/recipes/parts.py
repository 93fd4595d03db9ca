"""The parts of a recipe, except `method`."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from bayesify.prediction.adaptive import Adaptive
from bayesify.training.ood import ALPHA, DRAWS, GAMMA, PAPER

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Draws = Annotated[int, Field(ge=1, le=10**6)]
Share = Annotated[float, Field(ge=0, le=1)]

LARGEST = 10_000_000
"""The largest number in the options of a network or a data set."""


def absolute_path(path: str) -> str:
    """A path made absolute if something is there, so that a recipe means the same in any folder.

    >>> absolute_path("$BAYESIFY_DATA/digits.csv"), absolute_path("/"), absolute_path("squad")
    ('$BAYESIFY_DATA/digits.csv', '/', 'squad')
    """
    file, colon, function = path.partition(".py:")
    there = f"{file}.py" if colon else path
    return f"{os.path.abspath(there)}{':' if colon else ''}{function}" if os.path.exists(there) else path


def absolute_path_or_name(name: str) -> str:
    """The same for a value that may also be a name, which has no slash and no dot.

    >>> absolute_path_or_name("resnet20")
    'resnet20'
    """
    return absolute_path(name) if {"/", ".", os.sep} & set(name) else name


def bounded(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a network or a data set; raises for a number that can only be a mistake, such as a width of 10**9.

    >>> bounded({"hidden": [100, 10**9]})
    Traceback (most recent call last):
    ValueError: hidden=1000000000 is too large: the largest number in options is 10,000,000
    """
    for name, value in options.items():
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, (int, float)) and not abs(each) <= LARGEST:
                raise ValueError(f"{name}={each} is too large: the largest number in options is {LARGEST:,}")
            if isinstance(each, dict):
                bounded(each)
    return options


FileName = Annotated[str, AfterValidator(absolute_path)]
Name = Annotated[str, AfterValidator(absolute_path_or_name)]
Options = Annotated[dict[str, Any], AfterValidator(bounded)]
ScheduleName = Literal["constant", "cosine", "linear", "one_cycle", "late_linear"]


class Part(BaseModel):
    """A part of a recipe; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class DataPart(Part):
    """Which data, and how they are split, augmented and batched."""

    name: str = "digits"
    path: FileName | None = None
    validation: float | int | str = 0.1
    test: float | int | None = None
    limit: Count | None = None
    options: Options = {}
    augment: list[str | dict[str, Any]] = []
    batch_size: Count = 128
    workers: Annotated[int, Field(ge=0, le=1000)] = 0


class ModelPart(Part):
    """Which network, and the weights that it starts from."""

    name: Name = "cnn"
    weights: FileName | None = None
    ignore: list[str] = []
    pretrained: bool = False
    options: Options = {}

    @property
    def is_trained(self) -> bool:
        """Whether training starts from trained weights."""
        return self.weights is not None or self.pretrained


class LikelihoodPart(Part):
    """What the network's outputs mean; `auto` follows the targets.

    `precision` is that of standardised real targets: a number, one that is `learned` for all inputs, one for each
    `input`, or with `auto` the better of these two by the validation rows, for which both are trained. `calibrate` sets
    what can be set by the validation rows after training: the noise of real targets, unless `precision` is a number,
    and the temperature of classes, unless the network is plain.
    """

    name: Literal["auto", "categorical", "bernoulli", "gaussian"] = "auto"
    precision: Positive | Literal["learned", "input", "auto"] = "learned"
    calibrate: bool = True


class RegulariserPart(Part):
    """A loss for uncertainty on out-of-distribution inputs (BayesAdapter, section 3).

    The inputs are training images with Uniform(±epsilon) noise, or those of another data set, `data`, changed by its
    `augment`, or both: `noise` is the share of the former, by default none with `data` and all without. There are
    `share` as many as training rows in a batch. The preset `paper` has the paper's settings; other keys go before it.
    """

    preset: Literal["default", "paper"] = "default"
    alpha: Positive = ALPHA
    gamma: Positive = GAMMA
    draws: Annotated[int, Field(ge=2, le=1000)] = DRAWS
    share: Annotated[float, Field(gt=0, le=1)] = 0.25
    noise: Share | None = None
    epsilon: Positive = 0.3
    data: DataPart | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, given: Any) -> Any:
        """Fill in what the preset sets."""
        if not isinstance(given, dict) or given.get("preset") != "paper":
            return given
        both = {"noise": 0.5} if given.get("data") is not None else {}
        return {**PAPER, "share": 0.5, "epsilon": 0.031, **both, **given}

    @model_validator(mode="after")
    def _check_noise(self) -> RegulariserPart:
        """There must be inputs of the kinds that `noise` asks for."""
        if self.data is None and self.noise not in (None, 1):
            raise ValueError(f"noise={self.noise:g} needs data: without, all inputs are noisy training images")
        if self.data is not None and self.noise == 1:
            raise ValueError("noise=1 leaves nothing to data: lower noise, or leave out data")
        return self

    @property
    def share_of_noise(self) -> float:
        """The share of inputs that are training images with noise."""
        if self.noise is not None:
            return self.noise
        return 1.0 if self.data is None else 0.0


class TrainingPart(Part):
    """Epochs, optimizer, objective, precision and devices; defaults depend on the method (`bayesify schema`)."""

    epochs: Count = 3
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Positive = 0.01
    posterior_lr: Positive | None = None
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    weight_decay: NotNegative = 0.0
    schedule: ScheduleName = "cosine"
    posterior_schedule: ScheduleName | None = None
    final: Share = 0.0
    posterior_final: Share | None = None
    warmup: Share = 0.3
    kl: Literal["loss", "gradient", "none"] = "loss"
    kl_weight: NotNegative = 1.0
    anneal: Share = 0.0
    anneal_by: Literal["step", "epoch"] = "step"
    samples: Draws = 1
    mixture: Literal["assign", "replicate"] = "assign"
    bound: Literal["average", "mixture"] = "average"
    freeze_base: bool = False
    recalibrate: Annotated[int, Field(ge=0, le=10**9)] = 0
    regulariser: RegulariserPart | None = None
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "64-true"] = "32-true"
    clip: Positive | None = None
    accumulate: Count = 1
    patience: Count | None = None
    validation_samples: Draws = 4
    checkpoint_steps: Count | None = None
    compile: bool = False
    channels_last: bool = False
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps", "tpu"] = "auto"
    devices: Annotated[int, Field(ge=-1, le=10**5)] | Literal["auto"] = 1
    nodes: Annotated[int, Field(ge=1, le=10**5)] = 1
    strategy: Literal["auto", "ddp"] = "auto"
    sync_batchnorm: bool = False


class AttackPart(Part):
    """An attack on the posterior predictive; default sizes are those usual for CIFAR-10."""

    name: str = "pgd"
    epsilon: Positive | None = None
    steps: Count | None = None
    step_size: Positive | None = None
    samples: Draws | None = None
    draws: Literal["frozen", "fresh"] = "frozen"


class AdaptivePart(Part):
    """As many draws for each input as it needs, by the rule of `by.Adaptive`."""

    max: Draws = Adaptive.max
    tolerance: Positive = Adaptive.tolerance
    error: Annotated[float, Field(gt=0, lt=1)] = Adaptive.error
    first: Annotated[int, Field(ge=2, le=10**6)] = Adaptive.first

    def rule(self) -> Adaptive:
        """The rule for `by.predict`."""
        return Adaptive(**self.model_dump())


class EvaluationPart(Part):
    """The number of draws, and what is measured beside the metrics of the splits.

    `abstain` is the share of validation inputs on which the model abstains, by the score `abstain_by`: total or
    epistemic uncertainty, familiarity, or `auto` for the doubt, which combines total uncertainty and familiarity. `ood`
    lists out-of-distribution sets to detect, beside noise: names of data sets, files or folders, or parts like `data`.
    `shift` lists kinds of noise and corruption, or "corruptions" for all fifteen of ImageNet-C. Shift and attack are
    measured on this many `rows` of each split, evenly spread.
    """

    samples: Draws | AdaptivePart | None = None
    batch_size: Count = 500
    abstain: Share = 0.05
    abstain_by: Literal["auto", "total", "epistemic", "familiarity"] = "auto"
    ood: list[Name | DataPart] = []
    shift: list[str] = []
    attack: AttackPart | None = None
    rows: Count = 1000
