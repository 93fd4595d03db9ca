"""How a perturbation is applied, one file per layer type; `LAYERS` has the Bayesian type of each plain one."""

from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from bayesify.layers import attention, conv, dropout, embedding, linear, norm, recurrent
from bayesify.layers.base import BayesianLayer, Posterior, bayesian_layers
from bayesify.layers.dropout import BayesianDropout
from bayesify.layers.foreign.third_party import Traits, generated_type, inherits_all, name_clash
from bayesify.layers.foreign.trial import traits_of

LAYERS: dict[type[nn.Module], type[BayesianLayer]] = {
    layer.plain: layer
    for file in (linear, conv, norm, embedding, recurrent, attention, dropout)
    for layer in vars(file).values()
    if isinstance(layer, type) and issubclass(layer, BayesianLayer) and "plain" in vars(layer)
}

REFUSED: dict[type[nn.Module], str] = {
    nn.Bilinear: "Bilinear has two inputs, so it has no input factor, and rows can't be followed through it",
    nn.EmbeddingBag: "EmbeddingBag sums before a perturbation can be applied; use Embedding and a sum",
    NonDynamicallyQuantizableLinear: "MultiheadAttention reads its weight without calling it",
}

_trials: WeakKeyDictionary[nn.Module, Traits | str] = WeakKeyDictionary()
"""What the trials of one conversion found; the next one forgets it, for a layer may have changed."""


def forget_trials() -> None:
    """Try third-party layers again when they are asked about."""
    _trials.clear()


def known_type(kind: type[nn.Module]) -> type[BayesianLayer] | None:
    """The Bayesian type of the supported layer that a type is, or inherits from."""
    return next((LAYERS[part] for part in kind.__mro__ if part in LAYERS), None)


def bayesian_type(layer: nn.Module) -> type[BayesianLayer] | str:
    """The type that a plain layer becomes, or why it can't be Bayesian."""
    kind = type(layer)
    known = known_type(kind)
    if kind in LAYERS:
        return LAYERS[kind]
    if not any(p is not None for p in layer._parameters.values()):
        return f"{kind.__name__} is not a supported layer type: it has no parameters"
    reason = name_clash(layer)
    if reason is not None:
        return reason
    if known is not None and inherits_all(kind, known.plain):
        return generated_type(kind, known, None)
    if layer not in _trials:
        _trials[layer] = traits_of(layer, known)
    found = _trials[layer]
    return found if isinstance(found, str) else generated_type(kind, known, found)


__all__ = ["LAYERS", "REFUSED", "BayesianDropout", "BayesianLayer", "Posterior"]
__all__ += ["bayesian_layers", "bayesian_type", "forget_trials", "known_type"]
