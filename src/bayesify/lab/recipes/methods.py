"""What makes the network Bayesian, as a part of a recipe; the ten families' options are their dataclasses' own."""

from __future__ import annotations

from dataclasses import fields
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import Field, create_model

from bayesify.families import FAMILIES
from bayesify.family import Family
from bayesify.lab.recipes.parts import Part


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


SomeMethod = Annotated[SomeFamily | PlainPart | DeepPart | MixedPart, Field(discriminator="name")]
METHODS: dict[str, type[MethodPart]] = {
    **FAMILY_PARTS,
    "none": PlainPart,
    "deep_ensemble": DeepPart,
    "mixed": MixedPart,
}
