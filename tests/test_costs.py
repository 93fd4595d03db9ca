"""What a training step and a prediction cost, in counted operations: no noise of a machine can change these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import bayesify as by
from bayesify.lab.models import MODELS
from bayesify.methods.base import Method

ROWS, LARGE = 16, 16 * 64 * 8 * 8
"""Of a batch, and the numbers of the smallest activations behind a convolution; no weight has as many."""
VIEWS = (
    *(
        "view",
        "_unsafe_view",
        "detach",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "expand",
        "t.",
        "transpose",
        "split",
    ),
    *("as_strided", "alias", "promote_types"),
)
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


@dataclass(frozen=True)
class Most:
    """At most so many operations, and passes over activations, of a step of ResNet-20 beyond the plain network's; and
    operations of the gradient of its divergence."""

    operations: int
    passes: int
    divergence: int


MOST: dict[Method, Most] = {
    by.Rank1(4): Most(850, 190, 120),
    by.IBNN(4): Most(400, 95, 90),
    by.BatchEnsemble(4): Most(480, 60, 0),
    by.MCDropout(0.1): Most(145, 55, 20),
    by.EMP(5): Most(230, 0, 80),
    by.ECMP(5): Most(290, 0, 80),
    by.LowRankEnsemble(4): Most(365, 55, 335),
    by.MeanField(estimator="shared"): Most(490, 0, 300),
}


@pytest.mark.parametrize("method", MOST, ids=str)
def test_a_step_adds_few_operations_and_passes(method: Method) -> None:
    other, model = network(), by.convert(network(), method)
    step(model)  # checks that rows get their own draws, once
    model.zero_grad()
    plain, found = counted(lambda: step(other)), counted(lambda: step(model))
    assert found.all.total() - plain.all.total() <= MOST[method].operations
    assert found.passes.total() - plain.passes.total() <= MOST[method].passes, found.passes - plain.passes
    divergence = counted(lambda: by.add_kl_grad_(model, n=1000)).all.total()
    assert divergence <= MOST[method].divergence


@pytest.mark.parametrize("method", MOST, ids=str)
def test_a_training_forward_does_no_more_arithmetic_in_its_layers(method: Method) -> None:
    model, x = by.convert(network(), method).train(), batch()
    plain = network()
    model(x)  # checks that rows get their own draws, once
    assert flops(lambda: model(x)) <= 1.02 * flops(lambda: plain(x))


@pytest.mark.parametrize("method", MOST, ids=str)
def test_draws_are_one_forward_each(method: Method) -> None:
    model, plain, x = by.convert(network(), method).eval(), network().eval(), batch()
    check = 4 / len(x)  # four rows of a draw are computed twice, to see that draws share no results
    assert flops(lambda: by.predict(model, x, samples=6)) <= (6.1 + check) * flops(lambda: plain(x))


@pytest.mark.parametrize("method", MOST, ids=str)
def test_draws_are_made_once_for_all_batches(method: Method) -> None:
    model, x = by.convert(network(), method).eval(), batch(4)
    one, four = (counted(lambda b=b: by.predict(model, [x] * b, samples=3)).all for b in (1, 4))  # type: ignore[misc]
    noise = [name for name in (one | four) if name.startswith("rand")]
    assert all(one[name] == four[name] for name in noise)


def test_what_stands_before_a_bayesian_head_is_computed_once() -> None:
    model, plain, x = by.convert(network(), {"linear": by.Rank1(4)}).eval(), network().eval(), batch()
    assert flops(lambda: by.predict(model, x, samples=50)) <= 1.01 * flops(lambda: plain(x))
