"""Single calls: fifty draws of one input beside a loop, and a draw of an LSTM beside the plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

import bayesify as by
from bayesify.lab.models import MLP

from .goals import LARGE_LSTM
from .measure import HEAD_DRAWS, Row, compare_calls
from .methods import METHODS, predict_by_loop

SINGLE = "MLP 20-64-64-5, one row"
LSTMS = {
    "LSTM 64-128, B=128, 48 steps": (64, 128, 1, 128, 48),
    LARGE_LSTM: (256, 256, 2, 64, 100),
}
"""Input, width, layers, rows and steps."""
TRAINING_ONLY = ("MeanField flipout", "MeanField local", "MeanField exemplar")
"""These differ from "MeanField shared" in training alone."""


def single_calls(quick: bool) -> Iterator[Row]:
    """All of them, for every method that they differ for."""
    for name, method in METHODS.items():
        if name not in TRAINING_ONLY:
            yield Row(SINGLE, "single", "bayesify", name, "", *one_input(method, 1 if quick else 20))
            for case, (size, width, layers, rows, steps) in LSTMS.items():
                make, x = partial(nn.LSTM, size, width, layers, batch_first=True), torch.randn(rows, steps, size)
                rounds = 1 if quick else 40 // layers
                yield Row(case, "lstm", "bayesify", name, "", *one_draw_of_an_lstm(method, make, x, rounds))


def one_input(method: object, rounds: int) -> tuple[float, float]:
    """`predict` over a loop of as many calls of the model."""
    model, x = by.convert(MLP([20, 64, 64, 5]), {nn.Linear: method}).eval(), torch.randn(1, 20)
    loop = predict_by_loop(model)
    return compare_calls(lambda: loop(x, HEAD_DRAWS), lambda: by.predict(model, x, samples=HEAD_DRAWS), rounds)


def one_draw_of_an_lstm(
    method: object, make: Callable[[], nn.Module], x: torch.Tensor, rounds: int
) -> tuple[float, float]:
    """A draw that serves the batch, over the plain forward pass."""
    plain = make().eval()
    model = by.convert(nn.Sequential(make()), {"0": method}).eval()
    return compare_calls(_without_gradients(plain, x), _without_gradients(model, x), rounds)


def _without_gradients(network: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return network(x)

    return call
