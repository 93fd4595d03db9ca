"""Adversarial attacks on the posterior predictive, with foolbox."""

from bayesify.lab.attacks.posterior_predictive import PosteriorPredictive
from bayesify.lab.attacks.registry import ATTACKS, SIZES, Attack, AttackError
from bayesify.lab.attacks.run_attack import AttackResult, attack

__all__ = ["ATTACKS", "SIZES", "Attack", "AttackError", "AttackResult", "PosteriorPredictive", "attack"]
