"""What a training step and a prediction cost, in counted operations: no noise of a machine can change these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import bayesify as by
from bayesify.family import Draws, Family
from bayesify.lab.models import MODELS
from bayesify.layers import bayesian_layers

ROWS, LARGE = 16, 16 * 64 * 8 * 8
"""Of a batch, and the numbers of the smallest activations behind a convolution; no weight has as many."""
VIEWS = ("view", "detach", "slice", "select", "unsqueeze", "squeeze", "expand", "t.", "as_strided", "alias", "split")
"""Operations that touch no element."""
NEW = ("new_", "empty", "ones", "zeros")
"""Operations that read none."""


class Counted(TorchDispatchMode):
    """Counts operations that touch elements: all of them, and those that pass over activations."""

    def __init__(self) -> None:
        super().__init__()
        self.all: Counter[str] = Counter()
        self.passes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        if not name.startswith(VIEWS):
            self.all[name] += 1
        if not name.startswith((*VIEWS, *NEW)):
            self.passes[name] += any(isinstance(x, Tensor) and x.numel() >= LARGE for x in (*args, out))
        return out


def counted(call: Callable[[], object]) -> Counted:
    with Counted() as found:
        call()
    return found


def flops(call: Callable[[], object]) -> int:
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        call()
    return int(counter.get_total_flops())


def network() -> nn.Module:
    torch.manual_seed(0)
    return MODELS["resnet20"]()


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 3, 32, 32)


def step(model: nn.Module) -> None:
    F.cross_entropy(model(batch()), torch.arange(ROWS) % 10).backward()


MOST: dict[Family, tuple[int, int | None]] = {
    by.Rank1(4): (505, 166),
    by.IBNN(4): (220, 92),
    by.BatchEnsemble(4): (376, None),
    by.MCDropout(0.1): (52, 36),
    by.EMP(5): (265, 0),
    by.ECMP(5): (102, 0),
    by.LowRankEnsemble(4): (406, None),  # three a layer to make its weights again, so that none is kept
    by.MeanField(estimator="shared"): (50, 9),
}
"""Operations, and passes over activations, that a step of ResNet-20 has beyond the plain network's (None: its grouped
convolutions have folded weights as large as activations; mean field's weights, drawn as one, are too)."""


@pytest.mark.parametrize("family", MOST, ids=str)
def test_a_step_adds_few_operations_and_passes(family: Family) -> None:
    other, model = network(), by.convert(network(), family)
    plain, found = counted(lambda: step(other)), counted(lambda: step(model))
    operations, passes = MOST[family]
    assert found.all.total() - plain.all.total() <= operations
    if passes is not None:
        assert found.passes.total() - plain.passes.total() <= passes, found.passes - plain.passes


@pytest.mark.parametrize("family", MOST, ids=str)
def test_a_training_forward_does_no_more_arithmetic_in_its_layers(family: Family) -> None:
    model, x = by.convert(network(), family).train(), batch()
    plain = network()
    assert flops(lambda: model(x)) <= 1.02 * flops(lambda: plain(x))


@pytest.mark.parametrize("family", MOST, ids=str)
def test_the_gradient_of_the_kl_is_a_few_operations_for_all_layers(family: Family) -> None:
    model = by.convert(network(), family)
    step(model)
    layers = len(bayesian_layers(model))
    most = 25 * layers if isinstance(family, by.LowRankEnsemble) else 50
    assert counted(lambda: by.add_kl_grad_(model, n=1000)).all.total() <= most


@pytest.mark.parametrize("family", MOST, ids=str)
def test_draws_are_one_forward_each(family: Family) -> None:
    model, plain, x = by.convert(network(), family).eval(), network().eval(), batch()
    by.predict(model, x, samples=2)  # the first time two rows tell what is faster
    assert flops(lambda: by.predict(model, x, samples=6)) <= 6.1 * flops(lambda: plain(x))


@pytest.mark.parametrize("family", MOST, ids=str)
def test_draws_are_made_once_for_all_batches(family: Family) -> None:
    model, x = by.convert(network(), family).eval(), batch(4)
    one, four = (counted(lambda b=b: by.predict(model, [x] * b, samples=3)).all for b in (1, 4))  # type: ignore[misc]
    noise = [name for name in (one | four) if name.startswith("rand")]
    assert all(one[name] == four[name] for name in noise)


def test_more_draws_than_members_are_counted_together() -> None:
    model, x = by.convert(nn.Linear(4, 3), by.Ensemble(4)), torch.randn(2, 4)
    by.predict(model, x, samples=50)  # the first time it finds out that nothing is random
    assert counted(lambda: by.predict(model, x, samples=50)).all["amax.default"] == 1
    assert by.predict(model, x, samples=50).samples == 50


def test_what_stands_before_a_bayesian_head_is_computed_once() -> None:
    model, plain, x = by.convert(network(), {"linear": by.Rank1(4)}).eval(), network().eval(), batch()
    by.predict(model, x, samples=2)  # the first time it is tried on two rows
    assert flops(lambda: by.predict(model, x, samples=50)) <= 1.01 * flops(lambda: plain(x))


FACTORS = [by.Rank1(4), by.Rank1(4, posterior="cauchy", factors="input"), by.IBNN(4), by.BatchEnsemble(4)]


@pytest.mark.parametrize("family", [*FACTORS, by.MCDropout(0.3)], ids=str)
def test_factors_drawn_together_are_those_drawn_apart(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """With noise that is the same number everywhere, only the way could differ."""
    model = by.convert(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Tanh(), nn.GRUCell(5, 4)), family).train()
    for noise in ("normal", "uniform"):
        monkeypatch.setattr(Draws, noise, lambda self, shape: torch.full((self.size, *shape), 0.4))
    x, scope = torch.randn(8, 4), next(iter(bayesian_layers(model).values())).scope
    scope.start = torch.zeros(1, dtype=torch.long)
    together = model(x)
    monkeypatch.setattr(type(family), "factors_only", False)
    assert torch.allclose(model(x), together, atol=1e-6)
