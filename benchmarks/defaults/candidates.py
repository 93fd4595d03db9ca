"""Sets of method strings to compare, by name; see `Recipe` in trial.py for what a string may say."""

from __future__ import annotations


def rank1(size: float, *, prior: float = 1.0, means: float = 1.0, extra: str = "") -> str:
    """Rank1 with noise of `size` divided by the root of the number of layers, and prior and means relative to it.

    >>> rank1(0.45, prior=2, extra=" + anneal")
    'Rank1(mean_std=0.45 / sqrt(L), prior_std=0.9 / sqrt(L), dropout_rate=rate(0.45 / sqrt(L))) + anneal'
    """
    parts = [f"mean_std={means * size:g}", f"prior_std={prior * size:g}"]
    return f"Rank1({', '.join(f'{part} / sqrt(L)' for part in parts)}, dropout_rate=rate({size:g} / sqrt(L))){extra}"


def ibnn(size: float) -> str:
    """IBNN with noise of `size` divided by the root of the number of layers."""
    scales = ("prior_std", "mean_std", "scale_mean")
    return f"IBNN({', '.join(f'{name}={size:g} / sqrt(L)' for name in scales)}, scale_std=0)"


METHODS = (
    *("Rank1", "IBNN", "EMP", "ECMP", "MeanField", "LowRankEnsemble", "BatchEnsemble", "MCDropout", "DropConnect"),
)
CANDIDATES = {
    "baselines": ["plain longer"],
    "all": [f"{name}()" for name in METHODS],
    "noise": [f"{name}(noise={noise})" for noise in (0.35, 0.2, 0.5) for name in METHODS],
    "small": [f"{name}(noise={noise})" for noise in (0.1, 0.05) for name in METHODS],
    "patches": [f"{name}(jitter={jitter})" for name in ("EMP", "ECMP") for jitter in (0.7, 1.0, 1.5)],
    "spread": ["Rank1(mean_std=0.1)", "Rank1(mean_std=0.2)", "Rank1(noise=0.28)", "Rank1(noise=0.28, mean_std=0.1)"],
    "rank1": [
        "Rank1()",
        rank1(0.25),
        rank1(0.45),
        rank1(0.7),
        rank1(0.45, prior=2),
        rank1(0.45, extra=" + anneal"),
    ],
    "rank1-more": [
        rank1(0.45, means=0.5),
        rank1(0.45, extra=" + posterior_lr=10"),
        rank1(0.45, extra=" + samples=2"),
        rank1(0.25, prior=2),
        rank1(0.7, prior=2),
        rank1(0.25, prior=2, extra=" + posterior_lr=10"),
    ],
    "ibnn": ["IBNN()", ibnn(0.25), ibnn(0.45), ibnn(0.7), ibnn(1.0)],
    "mc-dropout": ["MCDropout()", *(f"MCDropout(rate({size:g} / sqrt(L)))" for size in (0.25, 0.45, 0.7, 1.0))],
    "ecmp": ["ECMP()", *(f"ECMP(jitter={jitter})" for jitter in (0.1, 0.2, 0.4))],
    "mean-field": [
        "MeanField()",
        "MeanField(estimator='flipout')",
        *(f"MeanField(estimator='flipout', init_log_std=({x}, {x}))" for x in (-5.0, -4.0, -3.5, -3.0)),
        "MeanField(estimator='local', init_log_std=(-3.5, -3.5))",
    ],
}
