"""The attacks of foolbox by name, and their usual sizes."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any

from bayesify.errors import BayesifyError
from bayesify.lab.data.errors import nearest, need

STEPS = 20
SIZES = {"linf": (0.031, 0.003), "l2": (0.5, 0.05), "l1": (12.0, 1.2)}
"""The size of an attack and of its steps by norm, for CIFAR-10: BayesAdapter's (appendix B), and what is usual for the
others. For ImageNet and faces BayesAdapter takes 16/255 and 1/255."""


class AttackError(BayesifyError):
    """An attack that can't be made as asked."""


@dataclass(frozen=True)
class Attack:
    """A class of `foolbox.attacks`, the norm in which it is bounded, and which options it takes."""

    foolbox: str
    norm: str
    steps: bool = True
    step_size: bool = False

    def options(self, steps: int, step_size: float) -> dict[str, Any]:
        """What foolbox calls the options that this attack takes."""
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
"""Attacks by name: in the maximum norm, unless the name says otherwise; `noise` knows nothing of the model."""


def attack_called(name: str) -> Attack:
    """The attack of a name."""
    if name not in ATTACKS:
        raise AttackError(f"no attack is called {name!r}; {nearest(name, ATTACKS)}")
    return ATTACKS[name]


def foolbox() -> Any:
    """Foolbox; its import warns of scipy's future and asks for the program git, neither of which concerns attacks."""
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return need("foolbox", "an attack", extra="attacks")
