"""The `method` part of a recipe: one of the Bayesian methods, a baseline, or none."""

from __future__ import annotations

from dataclasses import fields
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import ConfigDict, Field, create_model, field_validator, model_validator
from torch import nn

import bayesify as by
from bayesify.conversion.last import last
from bayesify.files.checkpoint import bounded_method
from bayesify.lab.recipes.parts import Count, Part, Positive, Share
from bayesify.methods import METHODS
from bayesify.methods.base import Method


class MethodPart(Part):
    """A recipe's `method` part: a name, and the options of that method."""

    keeps_dropout: ClassVar[bool] = False
    """Whether the network's own dropout stays active in evaluation."""

    def convert(self, network: nn.Module, noise: float | None = None) -> nn.Module:
        """Make a network Bayesian in place; `noise` is for parts without one."""
        method = self.for_convert(network, noise)
        return network if method is None else by.convert(network, method, keep_dropout=self.keeps_dropout)

    def for_convert(
        self, network: nn.Module | None = None, noise: float | None = None
    ) -> Method | dict[Any, Method | None] | None:
        """What to pass to `by.convert` for a network; None if it stays plain. `noise` is for parts without one."""
        return None


class BayesianPart(MethodPart):
    """One of the Bayesian methods, for the layers it converts by default or those that match `layers`.

    `last_blocks` limits it to the last blocks of the network, as `by.last` does. The options are the fields of the
    method's dataclass, `method`; if `noise` is None, it depends on the start and on the targets: see `default_noise`.
    """

    model_config = ConfigDict(allow_inf_nan=True)  # the method checks its numbers itself

    method: ClassVar[type[Method]]
    layers: list[str] | None = None
    last_blocks: Annotated[int, Field(ge=0, le=10**6)] | None = None

    @model_validator(mode="after")
    def _check_layers(self) -> BayesianPart:
        """Both say which layers."""
        if self.layers is not None and self.last_blocks is not None:
            raise ValueError("layers and last_blocks both choose layers: use one of them")
        return self

    def to_method(self, noise: float | None = None) -> Method:
        """The method with the options of this part."""
        given = {option.name: getattr(self, option.name) for option in fields(self.method)}  # type: ignore[arg-type]
        if "noise" in given and given["noise"] is None:
            given["noise"] = self.method.noise if noise is None else noise
        return bounded_method(self.method, given)

    def for_convert(
        self, network: nn.Module | None = None, noise: float | None = None
    ) -> Method | dict[Any, Method | None]:
        method = self.to_method(noise)
        if network is not None and self.last_blocks is not None:
            return last(network, method, self.last_blocks)
        return method if self.layers is None else dict.fromkeys(self.layers, method)


class PlainPart(MethodPart):
    """No method: a plain network, for comparison."""

    name: Literal["none"] = "none"


class OwnDropoutPart(MethodPart):
    """MC dropout of the dropout layers that the network has itself, as its authors placed them.

    `before_norms` puts dropout of that rate in front of every norm layer, as in EMP (0.005).
    """

    keeps_dropout = True
    name: Literal["own_dropout"] = "own_dropout"
    before_norms: Annotated[float, Field(gt=0, lt=1)] | None = None

    def for_convert(
        self, network: nn.Module | None = None, noise: float | None = None
    ) -> Method | dict[Any, Method | None]:
        return {}


class DeepEnsemblePart(MethodPart):
    """Plain networks trained one after another with different seeds, then joined into one `Ensemble`."""

    name: Literal["deep_ensemble"] = "deep_ensemble"
    members: Annotated[int, Field(ge=2, le=1000)] = 5


class PostHocPart(MethodPart):
    """A step after training. Trained weights are used unchanged, unless `finetune` trains them further first."""

    finetune: bool = False


class TemperaturePart(PostHocPart):
    """A plain network whose logits are divided by a temperature fitted to the validation rows (Guo et al. 2017)."""

    name: Literal["temperature"] = "temperature"


class LaplacePart(PostHocPart):
    """A Gaussian around a plain network's weights, from the curvature of its likelihood (Daxberger et al. 2021).

    The `posterior` is over the last layer, Kronecker-factored or diagonal, or diagonal over all layers. The curvature
    is the exact or the empirical Fisher information. `prior_precision` is a number, or chosen on the validation rows,
    or by the marginal likelihood. A Kronecker-factored posterior is kept as this many `draws`, a diagonal one as a
    `MeanField`.
    """

    name: Literal["laplace"] = "laplace"
    posterior: Literal["last_kron", "last_diagonal", "all_diagonal"] = "last_kron"
    fisher: Literal["exact", "empirical"] = "exact"
    prior_precision: Positive | Literal["validation", "marginal"] = "validation"
    draws: Annotated[int, Field(ge=2, le=10_000)] = 20

    @model_validator(mode="after")
    def _check_fisher(self) -> LaplacePart:
        """laplace-torch 0.3 computes zero for the diagonal of a last layer's empirical Fisher information."""
        if self.posterior == "last_diagonal" and self.fisher == "empirical":
            raise ValueError("posterior='last_diagonal' needs fisher='exact', which costs little for one layer")
        return self


class SwagPart(MethodPart):
    """A Gaussian fitted to the weights along the training trajectory (Maddox et al. 2019), kept as an `Ensemble`.

    Once the share `start` of training is done, `snapshots` of the weights are taken per epoch. The last `rank`
    deviations form the low-rank part of the covariance; rank 0 is diagonal. `scale` multiplies the covariance. Each of
    the `draws` has its own batch statistics, from `recalibrate` batches.
    """

    name: Literal["swag"] = "swag"
    rank: Annotated[int, Field(ge=0, le=10_000)] = 20
    draws: Annotated[int, Field(ge=2, le=10_000)] = 20
    scale: Positive = 1.0
    snapshots: Count = 10
    start: Annotated[Share, Field(lt=1)] = 0.9
    recalibrate: Count = 100

    @field_validator("rank")
    @classmethod
    def _check_rank(cls, rank: int) -> int:
        """D Dᵀ/(K-1) needs two deviations."""
        if rank == 1:
            raise ValueError("expected 0 for a diagonal covariance, or at least 2")
        return rank


def _bayesian_part(method: type[Method]) -> type[BayesianPart]:
    """A method's dataclass as a part of a recipe."""
    hints = get_type_hints(method)
    options: dict[str, Any] = {each.name: (hints[each.name], each.default) for each in fields(method)}  # type: ignore[arg-type]
    options |= {"noise": (float | None, None)} if "noise" in options else {}
    options["name"] = (Literal[method.__name__], method.__name__)
    part = create_model(method.__name__, __base__=BayesianPart, __doc__=method.__doc__, **options)
    part.method = method
    return part


BAYESIAN_PARTS = {name: _bayesian_part(method) for name, method in METHODS.items()}
"""The part of each Bayesian method, by the method's name."""
if TYPE_CHECKING:
    AnyBayesianPart = BayesianPart
else:
    AnyBayesianPart = reduce(or_, BAYESIAN_PARTS.values())


class MixedPart(MethodPart):
    """Different methods for different layers, by name pattern.

    The first pattern that matches a layer decides; "none" leaves it plain.
    """

    name: Literal["mixed"] = "mixed"
    layers: dict[str, Annotated[AnyBayesianPart | PlainPart, Field(discriminator="name")]]

    def for_convert(self, network: nn.Module | None = None, noise: float | None = None) -> dict[Any, Method | None]:
        parts = self.layers.items()
        return {pattern: part.to_method(noise) if isinstance(part, BayesianPart) else None for pattern, part in parts}


Baseline = OwnDropoutPart | DeepEnsemblePart | TemperaturePart | LaplacePart | SwagPart
AnyMethodPart = Annotated[AnyBayesianPart | PlainPart | MixedPart | Baseline, Field(discriminator="name")]
METHOD_PARTS: dict[str, type[MethodPart]] = {
    **BAYESIAN_PARTS,
    "none": PlainPart,
    "own_dropout": OwnDropoutPart,
    "deep_ensemble": DeepEnsemblePart,
    "temperature": TemperaturePart,
    "laplace": LaplacePart,
    "swag": SwagPart,
    "mixed": MixedPart,
}
"""Everything that `method.name` may be."""
