"""The error of methods that come after training."""

from bayesify.errors import BayesifyError


class BaselineError(BayesifyError):
    """A network or data that a method after training can't be applied to."""
