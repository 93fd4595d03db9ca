"""What becomes of a network: convert, check, one training step, predict, save, load, revert."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from networks import CLASSES, ROWS, logits, network, with_batch
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as by
from bayesify.conversion.select import drawn_parameters
from bayesify.conversion.summary import shared_parameters
from bayesify.layers import bayesian_layers
from bayesify.methods.base import Method

METHODS: list[Method] = [
    by.Rank1(2),
    by.IBNN(2),
    by.EMP(2),
    by.ECMP(2),
    by.MeanField(estimator="shared"),
    by.LowRankEnsemble(2),
]

Counts = tuple[int, int, int]


@dataclass(frozen=True)
class Outcome:
    """One network under one method; `said` is why it was refused or failed, `reasons` why tensors of it were."""

    name: str
    method: str
    result: str
    converted: int = 0
    shared: int = 0
    refused: int = 0
    seconds: float = 0.0
    said: str = ""
    reasons: dict[str, int] = field(default_factory=dict)


def outcomes(name: str) -> Iterator[Outcome]:
    """Of a network under every method."""
    try:
        size, x = with_batch(name)[1:]
    except Exception as error:
        yield Outcome(name, "-", "failed", said=_line(error))
        return
    for method in METHODS:
        start = time.perf_counter()
        try:
            counts, reasons = passed(name, size, x, method)
            yield Outcome(name, str(method), "converted", *counts, time.perf_counter() - start, reasons=reasons)
        except by.BayesifyError as error:
            yield Outcome(name, str(method), "refused", seconds=time.perf_counter() - start, said=_line(error))
        except Exception as error:
            yield Outcome(name, str(method), "failed", seconds=time.perf_counter() - start, said=_line(error))


def passed(name: str, size: int | None, x: Tensor, method: Method) -> tuple[Counts, dict[str, int]]:
    """The numbers of parameter tensors converted, shared by choice and refused, these by their reasons as well.

    Raises where anything goes wrong. The largest networks fill a machine's memory: only one is there at a time.
    """
    plain = network(name, size)
    settle(plain, x)
    tensors = sum(1 for _ in plain.parameters())
    model = by.convert(plain, method, example=x)
    counts, reasons = accounted(model, tensors)
    by.check(model, x)
    step(model, x)
    model.eval()
    found = by.predict(model, x, samples=2, seed=0)
    assert found.probs.shape == (ROWS, CLASSES) and bool(found.probs.isfinite().all()), "predictions"
    with tempfile.TemporaryDirectory() as folder:
        by.save(model, Path(folder) / "model.safetensors")
        with torch.no_grad():
            drawn = logits(by.draw(model, 1)(x))
            plain = by.revert(model, 1).eval()
            assert not bayesian_layers(plain), "reverted"
            torch.testing.assert_close(logits(plain(x)), drawn, rtol=1e-4, atol=1e-5)
        del plain, model
        again = by.load(network(name, size), Path(folder) / "model.safetensors").eval()
    assert torch.equal(by.predict(again, x, samples=2, seed=0).probs, found.probs), "saved and loaded"
    return counts, reasons


@torch.no_grad()
def settle(model: nn.Module, x: Tensor) -> None:
    """Give batch norms the statistics of the batch: without them, deep random networks vanish or explode."""
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None
    model.train()(x)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum


def step(model: nn.Module, x: Tensor) -> None:
    """One step of training, in which every posterior tensor of a layer that was called has a gradient."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    model.train()
    loss = F.cross_entropy(logits(model(x)), torch.arange(ROWS) % CLASSES)
    loss.backward()
    dead = [
        n for n, layer in bayesian_layers(model).items() if any(p.grad is None for p in layer.posterior.parameters())
    ]
    idle = {n for n, layer in bayesian_layers(model).items() if all(p.grad is None for p in layer.parameters())}
    assert not set(dead) - idle, f"no gradient in the posterior of {dead[:3]}"
    by.add_kl_grad_(model, n=1000)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # random networks on few small images may have huge gradients
    optimizer.step()
    model.zero_grad()


def accounted(model: nn.Module, tensors: int) -> tuple[Counts, dict[str, int]]:
    """Every parameter tensor is converted, shared by choice, or refused with a reason."""
    notes = {row.name: row.note for row in by.summary(model).rows}
    converted = shared = 0
    refused: Counter[str] = Counter()
    layers, seen = bayesian_layers(model), set()
    for layer in layers.values():
        undrawn = set(shared_parameters(layer))
        new = {name: p for name, p in drawn_parameters(layer).items() if id(p) not in seen}
        seen |= {id(p) for p in (*new.values(), *layer.posterior.parameters())}
        converted, shared = converted + len(set(new) - undrawn), shared + len(set(new) & undrawn)
    for name, module in model.named_modules():
        own = {id(p) for p in module._parameters.values() if p is not None and id(p) not in seen}
        if own:
            seen |= own
            note = notes[name or "(model)"]
            assert note, f"{name}: no reason"
            if "shared by default" in note:
                shared += len(own)
            else:
                refused[note] += len(own)
    assert converted + shared + refused.total() == tensors, "a parameter is not accounted for"
    return (converted, shared, refused.total()), dict(refused)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0].replace("|", "/")[:400]
