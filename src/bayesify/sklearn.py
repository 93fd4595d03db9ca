"""Estimators of scikit-learn: `BayesifyClassifier` and `BayesifyRegressor`; they need `bayesify[sklearn]`."""

from bayesify.integrations.sklearn import BayesifyClassifier, BayesifyRegressor

__all__ = ["BayesifyClassifier", "BayesifyRegressor"]
