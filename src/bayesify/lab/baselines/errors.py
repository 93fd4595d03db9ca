"""The error of post-hoc methods."""

from bayesify.errors import BayesifyError


class BaselineError(BayesifyError):
    """A network or data that a post-hoc method can't be applied to."""
