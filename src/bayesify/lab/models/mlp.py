"""A multi-layer perceptron, with or without norm layers."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn

from bayesify.lab.models.errors import ModelError, require_one_of, require_positive, size_list

NORMS: dict[str, type[nn.Module]] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}


class MLP(nn.Module):
    """Linear layers between successive `sizes`, with norm and activation after every one but the last.

    Inputs are flattened to one vector per example. `input_norm` puts a norm before the first layer, too; the weights of
    norms start at `norm_weight`.

    >>> model = MLP([784, 100, 10], norm="batch")
    >>> [name for name, _ in model.layers.named_children()]
    ['linear1', 'norm1', 'activation1', 'linear2']
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        bias: bool = True,
        norm: Literal["batch", "layer"] | None = None,
        input_norm: bool = False,
        norm_weight: float = 1.0,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ModelError(f"sizes needs an input and an output size, not {list(sizes)}")
        if norm is not None:
            require_one_of("norm", norm, NORMS)
        elif input_norm or norm_weight != 1:
            raise ModelError("input_norm and norm_weight need norm='batch' or norm='layer'")
        layers = OrderedDict(_named_layers(sizes, bias, norm, activation))
        if input_norm and norm is not None:
            layers["norm0"] = NORMS[norm](sizes[0])
            layers.move_to_end("norm0", last=False)
        self.layers = nn.Sequential(layers)
        for layer in self.layers:
            if isinstance(layer, (nn.BatchNorm1d, nn.LayerNorm)):
                nn.init.constant_(layer.weight, norm_weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x.flatten(1))
        return out


def _named_layers(
    sizes: Sequence[int], bias: bool, norm: str | None, activation: Callable[[], nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    for i, (in_features, out_features) in enumerate(pairwise(sizes), start=1):
        yield f"linear{i}", nn.Linear(in_features, out_features, bias=bias)
        if i == len(sizes) - 1:
            return
        if norm is not None:
            yield f"norm{i}", NORMS[norm](out_features)
        yield f"activation{i}", activation()


def mlp(
    in_features: int,
    classes: int = 1,
    *,
    hidden: int | Sequence[int] = (50,),
    norm: Literal["batch", "layer"] | None = None,
    input_norm: bool = False,
    norm_weight: float = 1.0,
    activation: str | Callable[[], nn.Module] = "relu",
    bias: bool = True,
) -> MLP:
    """A perceptron from the sizes of its hidden layers (`[]`: a linear model) and the name of its activation.

    One layer of 50 is the network of the UCI regression benchmark (Hernández-Lobato and Adams 2015); EMP's has
    `norm="batch", input_norm=True, norm_weight=0.2` (its appendix D.7).

    >>> [layer.out_features for layer in mlp(13, 1, activation="tanh").layers if isinstance(layer, nn.Linear)]
    [50, 1]
    """
    require_positive(in_features=in_features, classes=classes)
    if isinstance(activation, str):
        require_one_of("activation", activation, ACTIVATIONS)
        activation = ACTIVATIONS[activation]
    return MLP(
        [in_features, *size_list("hidden", hidden), classes],
        bias=bias,
        norm=norm,
        input_norm=input_norm,
        norm_weight=norm_weight,
        activation=activation,
    )
