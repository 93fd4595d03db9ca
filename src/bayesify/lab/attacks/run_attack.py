"""`attack`: attack a model's posterior predictive, and predict the adversarial inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesify.lab.attacks.posterior_predictive import Drawing, PosteriorPredictive
from bayesify.lab.attacks.registry import SIZES, STEPS, AttackError, find_attack, foolbox
from bayesify.lab.data import Classes, Examples, Images, TensorExamples, loader
from bayesify.lab.data.examples import Batch
from bayesify.lab.metrics import accuracy, average_precision, scores
from bayesify.lab.trained import Trained
from bayesify.methods.draw_design import noise_seed
from bayesify.prediction.likelihood import Categorical
from bayesify.prediction.results import Classification


@dataclass(frozen=True)
class AttackResult:
    """The result of an attack.

    Attributes:
        name: The attack.
        epsilon: The bound on the change of an image, in the norm of the attack.
        steps: The number of steps; None if the attack has none.
        step_size: The size of a step; None if the attack has none.
        draws: Whether the attack used the same draws at every step ("frozen") or new ones ("fresh").
        inputs: The adversarial inputs, raw.
        targets: The true labels.
        clean: The prediction for the inputs before the attack.
        adversarial: The prediction for the adversarial inputs.
    """

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
        """The accuracy before the attack."""
        return float(accuracy(self.clean.probs, self.targets))

    @property
    def robust_accuracy(self) -> float:
        """The accuracy on the adversarial inputs."""
        return float(accuracy(self.adversarial.probs, self.targets))

    @property
    def average_precision(self) -> dict[str, float | None]:
        """How well each kind of uncertainty detects adversarial inputs; None for the epistemic one of a single draw."""
        before, after = scores(self.clean), scores(self.adversarial)
        found = {kind: float(average_precision(before[kind], after[kind])) for kind in ("entropy", "epistemic")}
        return found | ({"epistemic": None} if self.clean.samples == 1 else {})

    def to_dict(self) -> dict[str, Any]:
        """The entry of `metrics.json`."""
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
) -> AttackResult:
    """Attack the posterior predictive of an image classifier, -log mean_s p_s(y) (BayesAdapter, eq. 3).

    The predictions use other draws than the attack, which can't know them. (Methods whose components are points have
    only these; both use all of them.)

    Args:
        trained: What `run.load()` returned.
        examples: Images with their labels.
        name: One of `ATTACKS`.
        epsilon: The bound on the change of an image in the norm of the attack, for pixels from 0 to 1; by default the
            size usual for CIFAR-10.
        steps: The number of steps, for attacks that have them.
        step_size: The size of a step, for attacks that have one; by default that usual for CIFAR-10.
        samples: The number of draws, for the attack and for the predictions; the recipe's by default.
        draws: "frozen" uses the same draws at every step, "fresh" takes new ones.
        seed: The seed of draws, random starts and noise.
        batch_size: Images per batch; the recipe's by default.

    Returns:
        The adversarial inputs, and the predictions before and after.

    Raises:
        AttackError: If an option is not allowed, or the model does not classify images.
    """
    kind = find_attack(name)
    usual = SIZES[kind.norm]
    epsilon = _positive("epsilon", usual[0] if epsilon is None else epsilon)
    step_size = _positive("step_size", usual[1] if step_size is None else step_size)
    _require_steps(steps)
    _require_classes_of_images(trained, examples)
    samples = _samples(trained, samples)
    own = noise_seed(seed, 0, "attack")
    method = getattr(foolbox().attacks, kind.foolbox)(**kind.options(steps, step_size))

    def predict(these: Examples) -> Classification:
        found = trained.predict(these, samples, seed=seed, batch_size=batch_size)
        assert isinstance(found, Classification)
        return found

    with torch.inference_mode(False), torch.enable_grad(), _seeded_generators(own, _device(trained)):
        target = _target(trained, samples, draws, own)
        batches = loader(examples, batch_size or trained.recipe.evaluation.batch_size)
        clean = predict(examples)  # first, because it raises if the model's outputs are not finite
        inputs = _adversarial(partial(method, epsilons=epsilon), target, trained, batches)
        adversarial = predict(TensorExamples(inputs, examples.targets))
    return AttackResult(
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
    """The number of draws: the one given, else the recipe's; if that is adaptive, the default of the model."""
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
    """The adversarial inputs, on the CPU."""
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
def _seeded_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators, which foolbox uses, and restore them afterwards."""
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(seed)
        for each in gpus:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield


def _require_steps(steps: int) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise AttackError(f"steps={steps!r}: expected an integer >= 1")


def _positive(option: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise AttackError(f"{option}={value!r}: expected a number > 0, where pixels are from 0 to 1")
    return value


def _require_classes_of_images(trained: Trained, examples: Examples) -> None:
    if not isinstance(trained.likelihood, Categorical) or not isinstance(trained.targets, Classes):
        raise AttackError("this model predicts real numbers; only classifiers can be attacked")
    if not isinstance(trained.inputs, Images):
        raise AttackError(
            f"the inputs are {type(trained.inputs).__name__.lower()}; only classifiers of images can be attacked"
        )
    if not len(examples):
        raise AttackError("nothing to attack: there are no examples")
    low, high = int(examples.targets.min()), int(examples.targets.max())
    if not 0 <= low <= high < trained.targets.count:
        raise AttackError(f"labels from {low} to {high}: expected 0 to {trained.targets.count - 1}")


def _within_bounds(x: Tensor) -> Tensor:
    if x.min() < 0 or x.max() > 1:
        raise AttackError(
            f"pixels from {float(x.min()):.3g} to {float(x.max()):.3g}: expected bytes, or floats from 0 to 1"
        )
    return x
