"""What oracles compare: a network that is built again, its draws by hand, the state of a model."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

import bayesify as by
from bayesify.batches import call_with
from fuzz.case import Case
from fuzz.layers import Flag, Noise
from fuzz.rounding import Expected, is_rounding, largest

DRAWS = 5


# Models.


def converted(case: Case) -> nn.Module:
    """The case's network, converted and moved a little, as if it had been trained."""
    model = case.convert(case.network())
    move_parameters(model, 0)
    return model


@torch.no_grad()
def move_parameters(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.add_(0.1 * torch.randn(p.shape, generator=generator).to(p.dtype))
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            module.running_mean.add_(0.1 * torch.randn(module.running_mean.shape, generator=generator))
            module.running_var.mul_(1 + torch.rand(module.running_var.shape, generator=generator))


def make_rows_independent(network: nn.Module, noise: bool = False) -> None:
    """Batch norms as in evaluation, no dropout, and no noise: a row's output is its own, and not random."""
    for module in network.modules():
        if isinstance(module, Noise) and module.kind == "random" and not noise:
            module.std = 0.0
        if isinstance(module, _BatchNorm):
            module.eval()
        elif isinstance(module, _DropoutNd):
            module.p = 0.0


def set_flags(network: nn.Module, value: bool) -> None:
    """Set the flags of a network."""
    for module in network.modules():
        if isinstance(module, Flag):
            module.flag = value


# What is expected.


def reference(case: Case, drawn: nn.Module) -> nn.Module:
    """The case's network, built again, with the tensors and the dropout masks of a draw."""
    network = case.network().eval()
    untie(network)
    network.load_state_dict(drawn.state_dict())
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its fast path would leave out dropout
        if isinstance(module, _DropoutNd):
            network.set_submodule(name, copy.deepcopy(drawn.get_submodule(name)))
    return network


def untie(network: nn.Module) -> None:
    """Give every layer tensors of its own."""
    for module in network.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(p.detach().clone())


def expected(case: Case, compute: Callable[[], Tensor]) -> Expected:
    """What the case's networks compute; factors are in float32, also those of a network in float64."""
    return Expected(compute, torch.finfo(torch.bfloat16 if case.dtype == "bfloat16" else torch.float32).eps)


def outputs_of(case: Case, networks: list[nn.Module], batch: Any) -> Expected:
    """The outputs of plain networks, which are copied for each call, as some keep results."""

    @torch.no_grad()
    def compute() -> Tensor:
        return torch.stack([case.call(copy.deepcopy(network), batch) for network in networks])

    return expected(case, compute)


def output_of(case: Case, network: nn.Module, batch: Any) -> Expected:
    """The output of a plain network."""
    return outputs_of(case, [network], batch).then(lambda outputs: outputs[0])


def other_outputs_of(case: Case, network: nn.Module, batch: Any) -> list[Expected]:
    """What a plain network returns for rows beside that."""

    def computed() -> Any:
        return case.others(call_with(copy.deepcopy(network), batch))

    with torch.no_grad():
        count = len(computed())
    return [expected(case, torch.no_grad()(lambda place=place: computed()[place][0])) for place in range(count)]


def expected_draws(case: Case, model: nn.Module, batch: Any, flag: bool = False, draws: int = DRAWS) -> Expected:
    """The outputs of draws 0, 1, … by one network after the other."""
    networks = [reference(case, by.draw(model, case.seed, index=index)) for index in range(draws)]
    for network in networks:
        set_flags(network, flag)
    return outputs_of(case, networks, batch)


def predicted_draws(case: Case, model: nn.Module, batch: Any, batch_size: int | None = None) -> Tensor:
    """The outputs of the same draws by `predict`."""
    options = case.predict_options | {"seed": case.seed, "likelihood": by.Gaussian(), "batch_size": batch_size}
    return by.predict(model, batch, DRAWS, draws=True, **options).draws


def same(found: Tensor, expected: Expected, what: str, least: float = 0.0) -> None:
    """Require that numbers are equal but for rounding, or for differences of `least` times the largest."""
    found = found.detach().double()
    assert found.shape == expected.value.shape, f"{what}: shape {[*found.shape]}, expected {[*expected.value.shape]}"
    assert expected.value.isfinite().all(), f"{what}: the expected numbers are not finite"
    difference, size = largest(found - expected.value), largest(expected.value)
    assert difference <= least * size or is_rounding(difference, expected), (
        f"{what}: differs by {difference:.3g}, where the largest expected number is {size:.3g}; rounding all operands "
        f"makes {expected.moved:.3g}"
    )


# The state of a model.


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything about a model, and the global random states."""
    state: dict[str, Any] = {f"tensor {name}": t.clone() for name, t in model.state_dict().items()}
    state |= {
        "torch's random state": torch.get_rng_state(),
        "Python's": random.getstate(),
        "NumPy's": np.random.get_state(),
    }
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if not key.startswith("_") and key != "scope"}
        state[f"module {name!r}"] = copy.deepcopy(own), type(module), len(module._forward_hooks)
    return state


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **after} if not _equal(before.get(name), after.get(name))]


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if type(one).__module__ == "fuzz.layers":
        return _equal(vars(one), vars(other))
    return bool(one == other)
