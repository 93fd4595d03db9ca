"""What makes the network Bayesian, as a part of a recipe; the ten families' options are their dataclasses' own."""

from __future__ import annotations

from dataclasses import fields
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import Field, create_model, field_validator, model_validator

from bayesify.families import FAMILIES
from bayesify.family import Family
from bayesify.lab.recipes.parts import Count, Part, Positive, Share


class MethodPart(Part):
    """What makes the network Bayesian; the options are the method's own."""

    def families(self) -> Family | dict[Any, Family | None] | None:
        """What `convert` takes; None for a plain network."""
        return None


class FamilyPart(MethodPart):
    """One of the ten families for the layers it converts by default, or those that `layers` names."""

    family: ClassVar[type[Family]]
    layers: list[str] | None = None

    def one(self) -> Family:
        """The family with its options."""
        given = {option.name: getattr(self, option.name) for option in fields(self.family)}  # type: ignore[arg-type]
        return self.family(**{key: tuple(v) if isinstance(v, list) else v for key, v in given.items()})

    def families(self) -> Family | dict[Any, Family | None]:
        return self.one() if self.layers is None else {pattern: self.one() for pattern in self.layers}


class PlainPart(MethodPart):
    """No method: an ordinary network, for comparison."""

    name: Literal["none"] = "none"


class DeepPart(MethodPart):
    """Networks trained one after another from seeds of their own, then one `Ensemble`."""

    name: Literal["deep_ensemble"] = "deep_ensemble"
    members: Annotated[int, Field(ge=2)] = 5


class PostHocPart(MethodPart):
    """A step after training; trained weights are taken as they are, unless `finetune` trains them further first."""

    finetune: bool = False


class TemperaturePart(PostHocPart):
    """A plain network whose logits are divided by one temperature, fitted to the validation rows (Guo et al. 2017)."""

    name: Literal["temperature"] = "temperature"


class LaplacePart(PostHocPart):
    """A Gaussian around a plain network's weights, from the curvature of its likelihood (Daxberger et al. 2021).

    `posterior` is over the last layer, with Kronecker factors or diagonal, or diagonal over all layers. The curvature
    is the Fisher information, exact or empirical. `prior_precision` is a number, or chosen on the validation rows, or
    by the marginal likelihood. So many `draws` are kept of a Kronecker posterior; a diagonal one is a `MeanField`.
    """

    name: Literal["laplace"] = "laplace"
    posterior: Literal["last_kron", "last_diagonal", "all_diagonal"] = "last_kron"
    fisher: Literal["exact", "empirical"] = "exact"
    prior_precision: Positive | Literal["validation", "marginal"] = "validation"
    draws: Annotated[int, Field(ge=2)] = 20

    @model_validator(mode="after")
    def _of_a_fisher_that_is_right(self) -> LaplacePart:
        """laplace-torch 0.3 finds zero for the empirical Fisher information of a last layer's diagonal."""
        if self.posterior == "last_diagonal" and self.fisher == "empirical":
            raise ValueError("posterior='last_diagonal' needs fisher='exact', which costs little for one layer")
        return self


class SwagPart(MethodPart):
    """A Gaussian fitted to the weights that training passes through (Maddox et al. 2019), and an `Ensemble` of draws.

    After the share `start` of training, `snapshots` are taken each epoch. The last `rank` deviations are the low-rank
    part of the covariance, which `scale` multiplies; rank 0 is the diagonal alone. Each of the `draws` has batch
    statistics of its own, from `recalibrate` batches.
    """

    name: Literal["swag"] = "swag"
    rank: Annotated[int, Field(ge=0)] = 20
    draws: Annotated[int, Field(ge=2)] = 20
    scale: Positive = 1.0
    snapshots: Count = 10
    start: Annotated[Share, Field(lt=1)] = 0.9
    recalibrate: Count = 100

    @field_validator("rank")
    @classmethod
    def _enough_to_vary(cls, rank: int) -> int:
        """D Dᵀ/(K-1) needs two deviations."""
        if rank == 1:
            raise ValueError("expected 0, for the diagonal alone, or at least 2")
        return rank


def _family_part(family: type[Family]) -> type[FamilyPart]:
    """The family's dataclass as a part of a recipe."""
    hints = get_type_hints(family)
    options: dict[str, Any] = {each.name: (hints[each.name], each.default) for each in fields(family)}  # type: ignore[arg-type]
    options["name"] = (Literal[family.__name__], family.__name__)
    part = create_model(family.__name__, __base__=FamilyPart, __doc__=family.__doc__, **options)
    part.family = family
    return part


FAMILY_PARTS = {name: _family_part(family) for name, family in FAMILIES.items()}
if TYPE_CHECKING:
    SomeFamily = FamilyPart
else:
    SomeFamily = reduce(or_, FAMILY_PARTS.values())


class MixedPart(MethodPart):
    """Several methods, by name patterns; the first that matches a layer decides, and "none" leaves it plain."""

    name: Literal["mixed"] = "mixed"
    layers: dict[str, Annotated[SomeFamily | PlainPart, Field(discriminator="name")]]

    def families(self) -> dict[Any, Family | None]:
        parts = self.layers.items()
        return {pattern: part.one() if isinstance(part, FamilyPart) else None for pattern, part in parts}


Baseline = DeepPart | TemperaturePart | LaplacePart | SwagPart
SomeMethod = Annotated[SomeFamily | PlainPart | MixedPart | Baseline, Field(discriminator="name")]
METHODS: dict[str, type[MethodPart]] = {
    **FAMILY_PARTS,
    "none": PlainPart,
    "deep_ensemble": DeepPart,
    "temperature": TemperaturePart,
    "laplace": LaplacePart,
    "swag": SwagPart,
    "mixed": MixedPart,
}
