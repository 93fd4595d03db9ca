"""Makes metrics.json: metrics by other libraries, which need more than the tests should install.

pip install netcal==1.4.0 scoringrules==0.10.0 uncertainty-toolbox==0.1.1 && python make_metrics.py
"""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import scoringrules
import uncertainty_toolbox
from netcal.metrics import ECE, MCE

rng = np.random.default_rng(0)


def classes(rows: int = 162, count: int = 4) -> dict:
    """Rows whose confidences fill most bins, ten of which are exactly 1."""
    logits = rng.normal(size=(rows, count)) * rng.uniform(0.2, 6, size=(rows, 1))
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    probs[:10] = np.eye(count)[np.arange(10) % count]
    y = np.array([rng.choice(count, p=0.8 * p + 0.2 / count) for p in probs])
    one = [ECE(bins=15).measure(probs[:, k], y == k) for k in range(count)]
    return {
        "probs": probs.tolist(),
        "y": y.tolist(),
        "ece": ECE(bins=15).measure(probs, y),
        "mce": MCE(bins=15).measure(probs, y),
        "ece20": ECE(bins=20, sample_threshold=6).measure(probs, y),
        "mce20": MCE(bins=20, sample_threshold=6).measure(probs, y),
        "adaptive_ece": ECE(bins=15, equal_intervals=False).measure(probs, y),
        "classwise_ece": float(np.mean(one)),
    }


def reals(rows: int = 40, draws: int = 7) -> dict:
    """A mixture of Gaussians per row, and one Gaussian of a mean and a width of its own."""
    means, stds = rng.normal(size=(draws, rows)), rng.uniform(0.2, 2, size=(draws, rows))
    y = rng.normal(size=rows)
    return {
        "means": means.tolist(),
        "stds": stds.tolist(),
        "y": y.tolist(),
        "crps_mixture": scoringrules.crps_mixnorm(y, means, stds, m_axis=0).tolist(),
        "crps_normal": scoringrules.crps_normal(y, means[0], stds[0]).tolist(),
        "quantile_error_normal": uncertainty_toolbox.mean_absolute_calibration_error(
            means[0], stds[0], y, num_bins=100, vectorized=True, prop_type="quantile"
        ),
    }


found = {
    "versions": {name: version(name) for name in ("netcal", "scoringrules", "uncertainty-toolbox")},
    "classes": classes(),
    "reals": reals(),
}
Path(__file__).with_name("metrics.json").write_text(json.dumps(found) + "\n")
