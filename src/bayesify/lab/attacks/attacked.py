"""Adversarial inputs, and what a model makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesify.lab.attacks.known import SIZES, STEPS, AttackError, attack_called, foolbox
from bayesify.lab.attacks.posterior import Drawing, PosteriorPredictive
from bayesify.lab.data import Classes, Examples, Images, TensorExamples, loader
from bayesify.lab.data.examples import Batch
from bayesify.lab.evaluation.predictive import predictive
from bayesify.lab.metrics import accuracy, average_precision, scores
from bayesify.lab.runs import Trained
from bayesify.likelihood import Categorical
from bayesify.prediction import Classification
from bayesify.values import noise_seed


@dataclass(frozen=True)
class Attacked:
    """An attack and what came of it; `inputs` are the raw adversarial inputs, `steps` None where an attack has none."""

    name: str
    epsilon: float
    steps: int | None
    step_size: float | None
    draws: Drawing
    inputs: Tensor
    targets: Tensor
    clean: Classification
    adversarial: Classification

    @property
    def clean_accuracy(self) -> float:
        """The accuracy on the examples as they were."""
        return float(accuracy(self.clean.probs, self.targets))

    @property
    def robust_accuracy(self) -> float:
        """The accuracy on the adversarial inputs."""
        return float(accuracy(self.adversarial.probs, self.targets))

    @property
    def average_precision(self) -> dict[str, float | None]:
        """How well each uncertainty tells adversarial from clean inputs; a single draw's epistemic one can't."""
        before, after = scores(self.clean), scores(self.adversarial)
        found = {kind: float(average_precision(before[kind], after[kind])) for kind in ("entropy", "epistemic")}
        return found | ({"epistemic": None} if self.clean.samples == 1 else {})

    def to_dict(self) -> dict[str, Any]:
        """For `metrics.json`."""
        return {
            "epsilon": self.epsilon,
            "steps": self.steps,
            "step_size": self.step_size,
            "draws": self.draws,
            "samples": self.clean.samples,
            "n": len(self.targets),
            "clean_accuracy": self.clean_accuracy,
            "robust_accuracy": self.robust_accuracy,
            "average_precision": self.average_precision,
        }


def attack(
    trained: Trained,
    examples: Examples,
    *,
    name: str = "pgd",
    epsilon: float | None = None,
    steps: int = STEPS,
    step_size: float | None = None,
    samples: int | None = None,
    draws: Drawing = "frozen",
    seed: int = 0,
    batch_size: int | None = None,
) -> Attacked:
    """Attack -log mean_s p_s(y) of a classifier of images (BayesAdapter, eq. 3), and see what it then predicts.

    `epsilon` bounds the change of pixels, from 0 to 1, in the attack's norm; sizes that aren't given are those for
    CIFAR-10. `samples`, for the attack and the predictions, are as in `predictive`. The predictions use other draws
    than the attack, which can't know them; where components are points, both use each of them.
    """
    kind = attack_called(name)
    usual = SIZES[kind.norm]
    epsilon = _positive("epsilon", usual[0] if epsilon is None else epsilon)
    step_size = _positive("step_size", usual[1] if step_size is None else step_size)
    _require_steps(steps)
    _require_classes_of_images(trained, examples)
    samples = _samples(trained, samples)
    own = noise_seed(seed, 0, "attack")
    method = getattr(foolbox().attacks, kind.foolbox)(**kind.options(steps, step_size))

    def predicted(these: Examples) -> Classification:
        found = predictive(trained, these, samples=samples, seed=seed, batch_size=batch_size)
        assert isinstance(found, Classification)
        return found

    with torch.inference_mode(False), torch.enable_grad(), _own_randomness(own, _device(trained)):
        target = _target(trained, samples, draws, own)
        batches = loader(examples, batch_size or trained.recipe.evaluation.batch_size)
        clean = predicted(examples)  # first, because it says what is wrong with a model that gives no numbers
        inputs = _adversarial(partial(method, epsilons=epsilon), target, trained, batches)
        adversarial = predicted(TensorExamples(inputs, examples.targets))
    return Attacked(
        name=name,
        epsilon=epsilon,
        steps=steps if kind.steps else None,
        step_size=step_size if kind.step_size else None,
        draws=draws,
        inputs=inputs,
        targets=examples.targets,
        clean=clean,
        adversarial=adversarial,
    )


def _samples(trained: Trained, given: int | None) -> int | None:
    """Those given, else the recipe's; where they are adaptive, the attack itself uses the model's own number."""
    own = trained.recipe.evaluation.samples
    return own if given is None and isinstance(own, int) else given


def _target(trained: Trained, samples: int | None, draws: Drawing, seed: int) -> PosteriorPredictive:
    temperature = float(getattr(trained.likelihood, "temperature", 1.0))
    return PosteriorPredictive(
        trained.model, trained.inputs.prepare, samples=samples, draws=draws, seed=seed, temperature=temperature
    )


def _adversarial(
    method: Callable[..., Any], target: PosteriorPredictive, trained: Trained, batches: Iterable[Batch]
) -> Tensor:
    """The attacked inputs, on the CPU."""
    device, inputs = _device(trained), trained.inputs
    assert isinstance(inputs, Images)
    model = foolbox().PyTorchModel(target, bounds=(0, 1), device=device)
    parts = []
    for raw, y in batches:
        _, found, _ = method(model, _within_bounds(inputs.unit(raw.to(device))), y.to(device))
        parts.append(found.clamp(0, 1).cpu())
    return torch.cat(parts)


def _device(trained: Trained) -> torch.device:
    return next((p.device for p in trained.model.parameters()), torch.device("cpu"))


@contextmanager
def _own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Foolbox uses torch's global generators: seed them, and give them back as they were."""
    graphics = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(graphics):
        torch.default_generator.manual_seed(seed)
        for each in graphics:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield


def _require_steps(steps: int) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise AttackError(f"steps={steps!r}: expected a whole number >= 1")


def _positive(option: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise AttackError(f"{option}={value!r}: expected a number > 0, where pixels are from 0 to 1")
    return value


def _require_classes_of_images(trained: Trained, examples: Examples) -> None:
    if not isinstance(trained.likelihood, Categorical) or not isinstance(trained.targets, Classes):
        raise AttackError("this model predicts real numbers: attacks make a model mistake one class for another")
    if not isinstance(trained.inputs, Images):
        raise AttackError(
            f"inputs that are {type(trained.inputs).__name__.lower()}: expected images, whose pixels have bounds and a "
            "scale in which a change is small"
        )
    if not len(examples):
        raise AttackError("nothing to attack: there are no examples")
    low, high = int(examples.targets.min()), int(examples.targets.max())
    if not 0 <= low <= high < trained.targets.count:
        raise AttackError(
            f"labels from {low} to {high}: expected 0 to {trained.targets.count - 1}; an attack needs them"
        )


def _within_bounds(x: Tensor) -> Tensor:
    if x.min() < 0 or x.max() > 1:
        raise AttackError(f"pixels from {float(x.min()):.3g} to {float(x.max()):.3g}: expected bytes, or 0 to 1")
    return x
