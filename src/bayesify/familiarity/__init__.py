"""How familiar an input is: a density of the training inputs in the network's own features."""

from bayesify.familiarity.familiarity import Familiarity

__all__ = ["Familiarity"]
