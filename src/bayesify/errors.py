"""The errors a user can meet, each naming the value, what was expected and how to fix it."""


class BayesifyError(ValueError):
    """Base of every error that bayesify raises on purpose."""


class ConversionError(BayesifyError):
    """A layer or model that can't be made Bayesian as asked."""


class RowError(BayesifyError):
    """Rows of the batch that can't be followed through a layer."""


class RowCountError(RowError):
    """A layer gets a number of rows that the rows of the batch can't be matched with."""


class CheckpointError(BayesifyError):
    """A file that can't be read back into a model."""
