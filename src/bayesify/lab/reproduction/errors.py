"""The error of an experiment that can't be run as asked."""

from bayesify.errors import BayesifyError


class ReproductionError(BayesifyError):
    """An experiment that can't be run as asked; the message says what to do."""
