"""bayesify inside other libraries' training loops."""

from bayesify.integrations.transformers import KLCallback

__all__ = ["KLCallback"]
