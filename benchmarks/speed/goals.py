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
REASONS = {
    ("mlp", "predict"): "a draw writes every weight once and a forward pass reads it for B rows: less for larger B",
    ("transformer", "predict"): "a draw writes every weight once, and this network's forward pass is short",
}
"""By case and measure: why a goal can't be met there."""


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
    return {"predict": PREDICT, "memory": MEMORY}.get(measure) if method in CHEAP else None
