"""Attacks on the posterior predictive, from foolbox: how little must change before a model errs, and does it notice?"""

from bayesify.lab.attacks.attacked import Attacked, attack
from bayesify.lab.attacks.known import ATTACKS, SIZES, Attack, AttackError
from bayesify.lab.attacks.posterior import PosteriorPredictive

__all__ = ["ATTACKS", "SIZES", "Attack", "AttackError", "Attacked", "PosteriorPredictive", "attack"]
