"""What was aimed at, as ratios to the plain network, and why some of it is missed."""

from __future__ import annotations

FACTORS = ("Rank1", "IBNN", "BatchEnsemble", "LowRankEnsemble")
PATCHES = ("EMP", "ECMP")
CHEAP = (*FACTORS, *PATCHES)
STEP = {
    **dict.fromkeys(("BatchEnsemble", "EMP", "ECMP", "LowRankEnsemble", "MeanField shared"), 1.10),
    "IBNN": 1.12,
    "Rank1": 1.20,
    "MeanField flipout": 2.2,
    "MeanField exemplar": 2.5,
}
HEAD = {"resnet20": 1.5, "resnet18": 1.3}
PREDICT, MEMORY, KL = 1.03, 1.15, 0.01
CALLS = {"single": 0.33, "lstm": 1.10}
REASONS: dict[tuple[str, str, str], str] = {}
"""By case, measure and method: why a goal is missed. Only what a profile or an experiment has shown belongs here."""


def goal(case: str, measure: str, library: str, method: str) -> float | None:
    """At most this is aimed at, or None where nothing is.

    >>> goal("resnet20", "step", "bayesify", "Rank1"), goal("mlp", "step", "bayesify", "Rank1")
    (1.2, None)
    """
    if library != "bayesify":
        return None
    if measure == "step":
        return STEP.get(method) if case in HEAD else None
    if measure == "head":
        return HEAD.get(case)
    if measure == "kl":
        return KL
    if measure in CALLS:
        return CALLS[measure]
    return {"predict": PREDICT, "memory": MEMORY}.get(measure) if method in CHEAP else None
