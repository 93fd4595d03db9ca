"""The attacks by name, and their usual sizes."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any

from bayesify.errors import BayesifyError
from bayesify.lab.data.errors import import_optional, suggest

STEPS = 20
SIZES = {"linf": (0.031, 0.003), "l2": (0.5, 0.05), "l1": (12.0, 1.2)}
"""The default epsilon and step size by norm, for CIFAR-10: those of BayesAdapter (appendix B) for the maximum norm, and
usual ones for the others. For ImageNet and faces BayesAdapter uses 16/255 and 1/255."""


class AttackError(BayesifyError):
    """An attack that is unknown, or does not fit the model."""


@dataclass(frozen=True)
class Attack:
    """A class of `foolbox.attacks`, the norm that bounds it, and which options it has."""

    foolbox: str
    norm: str
    steps: bool = True
    step_size: bool = False

    def options(self, steps: int, step_size: float) -> dict[str, Any]:
        """The options of this attack, under foolbox's names."""
        return ({"steps": steps} if self.steps else {}) | ({"abs_stepsize": step_size} if self.step_size else {})


ATTACKS = {
    "pgd": Attack("LinfProjectedGradientDescentAttack", "linf", step_size=True),
    "pgd_l2": Attack("L2ProjectedGradientDescentAttack", "l2", step_size=True),
    "pgd_l1": Attack("L1ProjectedGradientDescentAttack", "l1", step_size=True),
    "bim": Attack("LinfBasicIterativeAttack", "linf", step_size=True),
    "bim_l2": Attack("L2BasicIterativeAttack", "l2", step_size=True),
    "momentum": Attack("LinfMomentumIterativeFastGradientMethod", "linf", step_size=True),
    "momentum_l2": Attack("L2MomentumIterativeFastGradientMethod", "l2", step_size=True),
    "sparse_l1": Attack("SparseL1DescentAttack", "l1", step_size=True),
    "fgsm": Attack("LinfFastGradientAttack", "linf", steps=False),
    "fgsm_l2": Attack("L2FastGradientAttack", "l2", steps=False),
    "deepfool": Attack("LinfDeepFoolAttack", "linf"),
    "deepfool_l2": Attack("L2DeepFoolAttack", "l2"),
    "fmn": Attack("LInfFMNAttack", "linf"),
    "fmn_l2": Attack("L2FMNAttack", "l2"),
    "ddn_l2": Attack("DDNAttack", "l2"),
    "carlini_wagner_l2": Attack("L2CarliniWagnerAttack", "l2"),
    "noise": Attack("LinfAdditiveUniformNoiseAttack", "linf", steps=False),
    "noise_l2": Attack("L2AdditiveUniformNoiseAttack", "l2", steps=False),
}
"""Attacks by name: in the maximum norm unless the name ends in another; `noise` does not look at the model."""


def find_attack(name: str) -> Attack:
    """The attack with a name."""
    if name not in ATTACKS:
        raise AttackError(f"no attack is called {name!r}; {suggest(name, ATTACKS)}")
    return ATTACKS[name]


def foolbox() -> Any:
    """Import foolbox, without the warnings of its import about scipy and git."""
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_optional("foolbox", "an attack", extra="attacks")
