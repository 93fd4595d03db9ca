"""bayesify and other libraries: the `Trainer` of transformers, estimators of scikit-learn, the Hugging Face Hub."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bayesify.integrations.transformers import KLCallback

__all__ = ["KLCallback"]


def __getattr__(name: str) -> Any:
    """Import transformers, which takes seconds, for its callback only."""
    if name != "KLCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bayesify.integrations.transformers import KLCallback

    return KLCallback
