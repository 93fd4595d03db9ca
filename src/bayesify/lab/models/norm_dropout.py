"""Dropout before every norm layer of a network, the baseline of EMP."""

from collections import OrderedDict

from torch import nn

from bayesify.lab.models.errors import ModelError
from bayesify.layers import bayesian_type


def with_dropout_before_norms(network: nn.Module, p: float) -> nn.Module:
    """Put dropout in front of every norm layer, in place (EMP, appendices D.3, D.5 and D.7).

    >>> with_dropout_before_norms(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), 0.005)[1]
    Sequential(
      (dropout): Dropout(p=0.005, inplace=False)
      (norm): BatchNorm1d(8, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)
    )

    Args:
        network: The network.
        p: The rate of the dropout.

    Returns:
        The same network.

    Raises:
        ModelError: If it has no norm layers that can be replaced.
    """
    pairs: dict[nn.Module, nn.Module] = {}  # a norm that is used in two places stays one
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if _is_norm(layer):
                if layer not in pairs:
                    pairs[layer] = nn.Sequential(OrderedDict(dropout=nn.Dropout(p), norm=layer)).train(layer.training)
                setattr(parent, name, pairs[layer])
    if not pairs:
        raise ModelError(f"{type(network).__name__} has no norm layer to put dropout before; leave before_norms out")
    return network


def _is_norm(layer: nn.Module) -> bool:
    found = bayesian_type(layer)
    return not isinstance(found, str) and found.role == "norm"
