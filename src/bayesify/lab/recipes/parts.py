"""The parts of a recipe, except `method`."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from bayesify.lab.recipes.defaults import BATCH_SIZE
from bayesify.prediction.adaptive import Adaptive
from bayesify.prediction.conformal import K_REG, PENALTY
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


Time = Annotated[float, Field(ge=0, le=10**9)]
"""When something happens in training: below 1 a share of it, from 1 on a number of epochs."""


def rising(times: list[float]) -> list[float]:
    """The same times; raises unless they are in order and of one kind."""
    if not times or times != sorted(times) or (any(0 < time < 1 for time in times) and times[-1] >= 1):
        raise ValueError("expected times in order, all of them shares of training below 1, or epochs from 1 on")
    return times


class StepsPart(Part):
    """A learning rate, multiplied by `factor` at each of the `steps`: shares of training, or epochs from 1 on."""

    steps: Annotated[list[Time], AfterValidator(rising)]
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1

    @property
    def last(self) -> float:
        """The last time."""
        return self.steps[-1]


class PointsPart(Part):
    """A learning rate on lines between points (time, factor), constant before the first and after the last."""

    points: list[tuple[Time, NotNegative]]

    @field_validator("points")
    @classmethod
    def _check_order(cls, points: list[tuple[float, float]]) -> list[tuple[float, float]]:
        rising([time for time, _ in points])
        return points

    @property
    def last(self) -> float:
        """The last time."""
        return self.points[-1][0]


def _kind_of(schedule: Any) -> str:
    if isinstance(schedule, (str, Part)):
        return "ScheduleName" if isinstance(schedule, str) else type(schedule).__name__
    return "PointsPart" if isinstance(schedule, dict) and "points" in schedule else "StepsPart"


AnySchedule = Annotated[
    Annotated[ScheduleName, Tag("ScheduleName")]
    | Annotated[StepsPart, Tag("StepsPart")]
    | Annotated[PointsPart, Tag("PointsPart")],
    Discriminator(_kind_of),
]
"""A schedule by name, in steps, or as a line between points; an error is about the one that was meant."""


class DataPart(Part):
    """Which data, and how they are split, augmented and batched."""

    name: str = "digits"
    path: FileName | None = None
    validation: float | int | str = 0.1
    test: float | int | None = None
    calibration: float | int = 0
    limit: Count | None = None
    download: bool = False
    options: Options = {}
    augment: list[str | dict[str, Any]] = []
    batch_size: Count = BATCH_SIZE
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
    `input`, or with `auto` the better of these two by the validation rows, for which both are trained. With
    `units="target"` the number is that of the target in its own units. Training may use another number for standardised
    targets, `training_precision`, such as 2 for the squared error (EMP, C.1 and D.7). `calibrate` sets what can be set
    by the validation rows after training: the noise of real targets, unless `precision` is a number, and the
    temperature of classes, unless the network is plain.
    """

    name: Literal["auto", "categorical", "bernoulli", "gaussian"] = "auto"
    precision: Positive | Literal["learned", "input", "auto"] = "learned"
    units: Literal["standardised", "target"] = "standardised"
    training_precision: Positive | None = None
    calibrate: bool = True

    @model_validator(mode="after")
    def _check_number(self) -> LikelihoodPart:
        """Only a fixed precision has units, or is replaced in training."""
        if isinstance(self.precision, str) and (self.units == "target" or self.training_precision is not None):
            raise ValueError(f"units and training_precision need a number for precision, not {self.precision!r}")
        return self


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
    decay: Literal["base", "all"] = "base"
    schedule: AnySchedule = "cosine"
    posterior_schedule: AnySchedule | None = None
    final: Share = 0.0
    posterior_final: Share | None = None
    warmup: Share = 0.3
    warmup_epochs: Annotated[float, Field(ge=0, le=10**6)] = 0.0
    kl: Literal["loss", "gradient", "none"] = "loss"
    kl_weight: NotNegative = 1.0
    anneal: Share = 0.0
    anneal_by: Literal["step", "epoch"] = "step"
    samples: Draws = 1
    mixture: Literal["assign", "replicate"] = "assign"
    bound: Literal["average", "mixture"] = "average"
    freeze_base: bool = False
    alternate: Count | None = None
    recalibrate: Annotated[int, Field(ge=0, le=10**9)] = 0
    regulariser: RegulariserPart | None = None
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "64-true"] = "32-true"
    clip: Positive | None = None
    accumulate: Count = 1
    patience: Count | None = None
    validation_samples: Draws = 4
    checkpoint_steps: Count | None = None
    keep_epochs: Annotated[int, Field(ge=0, le=10**6)] = 0
    logger: Literal["csv", "tensorboard", "wandb", "mlflow"] = "tensorboard"
    compile: bool = False
    channels_last: bool = False
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps", "tpu"] = "auto"
    devices: Annotated[int, Field(ge=-1, le=10**5)] | Literal["auto"] = 1
    nodes: Annotated[int, Field(ge=1, le=10**5)] = 1
    strategy: Literal["auto", "ddp"] = "auto"
    sync_batchnorm: bool = False

    @model_validator(mode="after")
    def _check_prior(self) -> TrainingPart:
        """Weight decay on the posterior takes the place of its KL."""
        if self.decay == "all" and self.kl != "none":
            raise ValueError(f"decay='all' is the prior on every tensor, and kl={self.kl!r} too; use kl='none'")
        return self

    @model_validator(mode="after")
    def _check_times(self) -> TrainingPart:
        """A schedule for more epochs than there are would end somewhere in the middle."""
        times = {"warmup_epochs": self.warmup_epochs}
        for name, schedule in (("schedule", self.schedule), ("posterior_schedule", self.posterior_schedule)):
            times[name] = schedule.last if isinstance(schedule, (StepsPart, PointsPart)) else 0
        for name, time in times.items():
            if time > self.epochs:
                raise ValueError(f"{name} lasts until epoch {time:g}, but epochs={self.epochs}; use shares below 1")
        return self


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


class ConformalPart(Part):
    """Options of `by.conformal`, for sets or intervals that are calibrated on the rows of `data.calibration`."""

    coverage: Annotated[float, Field(gt=0, lt=1)] = 0.9
    score: Literal["lac", "aps", "raps", "normalised", "cqr"] | None = None
    class_conditional: bool = False
    penalty: NotNegative = PENALTY
    k_reg: Annotated[int, Field(ge=0, le=10**9)] = K_REG
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class EvaluationPart(Part):
    """The number of draws, and what is measured beside the metrics of the splits.

    `abstain` is the share of validation inputs on which the model abstains, by the score `abstain_by`: total or
    epistemic uncertainty, familiarity, or `auto` for the doubt, which combines total uncertainty and familiarity. `ood`
    lists out-of-distribution sets to detect, beside noise: names of data sets, files or folders, or parts like `data`.
    `shift` lists kinds of noise and corruption, or "corruptions" for all fifteen of ImageNet-C. Shift and attack are
    measured on this many `rows` of each split, evenly spread. `conformal` needs rows in `data.calibration`.
    """

    samples: Draws | AdaptivePart | None = None
    batch_size: Count = 500
    abstain: Share = 0.05
    abstain_by: Literal["auto", "total", "epistemic", "familiarity"] = "auto"
    ood: list[Name | DataPart] = []
    shift: list[str] = []
    attack: AttackPart | None = None
    rows: Count = 1000
    conformal: ConformalPart = ConformalPart()
