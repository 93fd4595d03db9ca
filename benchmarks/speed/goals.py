"""What is aimed at, as ratios to the plain network, and why some of it is missed."""

from __future__ import annotations

FACTOR_METHODS = ("Rank1", "IBNN", "BatchEnsemble", "LowRankEnsemble")
PATCH_METHODS = ("EMP", "ECMP")
CHEAP = (*FACTOR_METHODS, *PATCH_METHODS)
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
SMALL = ("mlp", "transformer")
WEIGHT_NOISE = ("ECMP", "MeanField shared", "DropConnect")
LARGE_LSTM = "LSTM 256-256, two layers, B=64, 100 steps"
REASONS: list[tuple[tuple[str, ...], str, tuple[str, ...], str]] = [
    ((), "step", ("MeanField flipout",), "two convolutions, and activations multiplied by signs before and after one"),
    ((), "step", ("BatchEnsemble", "IBNN", "Rank1"), "activations multiplied by factors, forward and backward"),
    ((), "step", ("LowRankEnsemble",), "20 weights for each layer: as many products and as many gradients"),
    (("resnet18",), "step", ("MeanField exemplar",), "32 weights of 11 million numbers are drawn in a step"),
    (("resnet18",), "step", ("MeanField shared",), "11 million numbers are drawn in a step, by one thread"),
    (("resnet18",), "memory", ("LowRankEnsemble",), "20 weights of a layer, their gradients, and its own parameters"),
    (SMALL, "memory", FACTOR_METHODS, "factors and noise for each row, and products that the plain network has not"),
    ((), "kl", ("LowRankEnsemble",), "its gradient has as many numbers as 20 candidates have factors"),
    ((), "kl", (), "passes over all parameters, where a step has little arithmetic for each"),
    ((), "predict", (), "a pass over all weights for each draw, where a forward pass has little arithmetic for each"),
    ((), "single", WEIGHT_NOISE, "noise for every weight of fifty draws, by one thread"),
    ((LARGE_LSTM,), "lstm", WEIGHT_NOISE, "noise for a million weights, by one thread"),
    ((), "lstm", WEIGHT_NOISE, "noise for 98,000 weights, beside a forward pass of a few milliseconds"),
    ((), "lstm", (), "small operations that draw factors and multiply weights by them"),
]
"""Cases (or all), a measure and methods (or all), and why a goal is missed there: the first that fits. Only what
follows from the method's arithmetic, or what a profile or an experiment has shown, belongs here."""


def reason(case: str, measure: str, method: str) -> str:
    """Why a goal is missed.

    >>> reason("mlp", "kl", "Rank1")
    'passes over all parameters, where a step has little arithmetic for each'
    """
    for cases, its_measure, methods, why in REASONS:
        if measure == its_measure and (not cases or case in cases) and (not methods or method in methods):
            return why
    return "not profiled"


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
