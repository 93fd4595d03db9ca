"""The tensors that a family adds to a layer."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


class Posterior(nn.Module):
    """The tensors a family added to a layer, under `layer.posterior`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return {**self._parameters, **self._buffers}  # type: ignore[dict-item]
