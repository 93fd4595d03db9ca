"""The other libraries, each used as its documentation says, with its own KL."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .methods import EXAMPLES, KINDS, Implementation, Prepare, Prepared, predict_by_loop

MEMBERS = 4
SHARED, FLIPOUT, ENSEMBLE = KINDS.values()
MODULES = {
    "bayesian-torch": "bayesian_torch.models.dnn_to_bnn",
    "blitz-bayesian-pytorch": "blitz.utils",
    "torch-uncertainty": "torch_uncertainty.methods",
    "laplace-torch": "laplace",
}
DEFINE_OPERATORS = """
import torch
operators = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    operators.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""torchvision, which the peers import, was built for CUDA: beside a CPU torch its import needs these two names."""
operator_library: dict[str, object] = {}
"""What the lines above made, where they were needed."""


def available() -> tuple[list[Implementation], dict[str, str]]:
    """What the libraries that can be imported here have, and why the others can't be."""
    make_torchvision_importable()
    missing = {}
    for library, module in MODULES.items():
        try:
            import_module(module)
        except Exception as error:  # whatever keeps a library from being imported is the reason to be told
            missing[library] = f"{type(error).__name__}: {error}"
    return [each for each in PEERS if each.library not in missing], missing


def versions(missing: dict[str, str]) -> dict[str, str]:
    """What was compared."""
    return {library: version(library) for library in MODULES if library not in missing}


def make_torchvision_importable() -> None:
    try:
        import_module("torchvision")
    except RuntimeError:
        exec(DEFINE_OPERATORS, operator_library)  # the library must stay alive: its names go with it
    except ModuleNotFoundError:
        pass  # then every peer says so


def replace_layers(
    module: nn.Module, linear: Callable[[nn.Linear], nn.Module], conv: Callable[[nn.Conv2d], nn.Module]
) -> None:
    """Put a library's layers in place of all plain ones, for libraries that leave this to the user."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, linear(child))
        elif type(child) is nn.Conv2d:
            setattr(module, name, conv(child))
        else:
            replace_layers(child, linear, conv)


def layer_arguments(layer: nn.Linear | nn.Conv2d) -> dict[str, object]:
    """The arguments that a Bayesian layer in place of a plain one is made with."""
    if isinstance(layer, nn.Linear):
        names = ["in_features", "out_features"]
    else:
        names = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"]
    return {name: getattr(layer, name) for name in names} | {"bias": layer.bias is not None}


def bayesian_torch(kind: str) -> Prepare:
    """`dnn_to_bnn`, its KL over the training set, and a loop over calls to predict."""

    def prepare(network: nn.Module) -> Prepared:
        library = import_module(MODULES["bayesian-torch"])
        prior = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0}
        library.dnn_to_bnn(network, {**prior, "type": kind, "moped_enable": True, "moped_delta": 0.1})

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(network(x), y) + library.get_kl_loss(network) / EXAMPLES

        return Prepared(network, loss, predict_by_loop(network))

    return prepare


def blitz(flipout: bool) -> Prepare:
    """Its layers in place of plain ones, `sample_elbo` with one sample, and `mfvi_forward`."""

    def prepare(network: nn.Module) -> Prepared:
        modules, utils = import_module("blitz.modules"), import_module("blitz.utils")
        wrap = utils.Flipout if flipout else lambda layer: layer
        linear, conv = wrap(modules.BayesianLinear), wrap(modules.BayesianConv2d)
        replace_layers(
            network, lambda layer: linear(**layer_arguments(layer)), lambda layer: conv(**layer_arguments(layer))
        )
        model = utils.variational_estimator(type("Network", (_Wrapper,), {}))(network)

        def predict(x: Tensor, draws: int) -> object:
            model.eval()
            with torch.no_grad():
                return model.mfvi_forward(x, sample_nbr=draws)

        return Prepared(model, lambda x, y: model.sample_elbo(x, y, F.cross_entropy, 1, 1 / EXAMPLES), predict)

    return prepare


class _Wrapper(nn.Module):
    """A class of its own for blitz's decorator to add its functions to."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)


def torch_uncertainty_bayesian(network: nn.Module) -> Prepared:
    """Its layers in place of plain ones, `ELBOLoss` with one sample, and `StochasticModel` to predict."""
    layers, losses = import_module("torch_uncertainty.layers"), import_module("torch_uncertainty.losses")
    stochastic = import_module("torch_uncertainty.methods.stochastic").StochasticModel
    replace_layers(
        network,
        lambda layer: layers.BayesLinear(**layer_arguments(layer)),
        lambda layer: layers.BayesConv2d(**layer_arguments(layer)),
    )
    loss = losses.ELBOLoss(network, nn.CrossEntropyLoss(), kl_weight=1 / EXAMPLES, num_samples=1)

    def predict(x: Tensor, draws: int) -> Tensor:
        model = stochastic(network, draws).eval()
        with torch.no_grad():
            return model(x).softmax(-1).unflatten(0, (draws, -1)).mean(0)

    return Prepared(network, loss, predict)


def torch_uncertainty_ensemble(network: nn.Module) -> Prepared:
    """Its BatchEnsemble, whose rows are split over the members in training and repeated for each in evaluation.

    Its own `convert_layers` cannot reach into modules, so the layers are put in one by one.
    """
    layers, methods = import_module("torch_uncertainty.layers"), import_module("torch_uncertainty.methods")
    replace_layers(
        network,
        lambda layer: layers.BatchLinear.from_linear(layer, num_estimators=MEMBERS),
        lambda layer: layers.BatchConv2d.from_conv2d(layer, num_estimators=MEMBERS),
    )
    model = methods.BatchEnsemble(network, MEMBERS)

    def predict(x: Tensor, draws: int) -> Tensor:
        model.eval()
        with torch.no_grad():
            return model(x).softmax(-1).unflatten(0, (draws, -1)).mean(0)

    return Prepared(model, lambda x, y: F.cross_entropy(model(x), y), predict, members=MEMBERS)


def laplace_head(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Prepared:
    """A last-layer Laplace approximation after one batch, predicting from draws of its outputs."""
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), batch_size=len(batch[0]))
    model = import_module("laplace").Laplace(
        network.eval(), "classification", subset_of_weights="last_layer", hessian_structure="diag"
    )
    model.fit(data)
    return Prepared(
        network,
        lambda x, y: F.cross_entropy(network(x), y),
        lambda x, draws: model(x, pred_type="glm", link_approx="mc", n_samples=draws),
    )


PEERS = [
    Implementation("bayesian-torch", "Reparameterization", bayesian_torch("Reparameterization"), SHARED),
    Implementation("blitz-bayesian-pytorch", "Bayesian layers", blitz(flipout=False), SHARED),
    Implementation("torch-uncertainty", "Bayesian layers", torch_uncertainty_bayesian, SHARED),
    Implementation("bayesian-torch", "Flipout", bayesian_torch("Flipout"), FLIPOUT),
    Implementation("blitz-bayesian-pytorch", "Flipout", blitz(flipout=True), FLIPOUT),
    Implementation("torch-uncertainty", "BatchEnsemble", torch_uncertainty_ensemble, ENSEMBLE),
]
