"""Networks around a part that is converted by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn

from fuzz.outputs import FORMS

Convert = Callable[[nn.Module], nn.Module]


class Around(nn.Module):
    """Computes something before and after its part, for each row by itself.

    Args:
        part: The network that is converted.
        form: What the part returns.
        row_dim: The dimension of the rows in its output.
    """

    is_sound = True
    """Whether a row of a training call has one draw of each part."""

    def __init__(self, part: nn.Module, form: str, row_dim: int) -> None:
        super().__init__()
        self.part, self.form, self.row_dim = part, form, row_dim

    def call(self, part: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return FORMS[self.form].main(part(*args, **kwargs))

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.after(self.call(self.part, *args, **kwargs))

    def after(self, y: Tensor) -> Tensor:
        """What is computed from the output of the part."""
        dims = [dim for dim in range(y.dim()) if dim != self.row_dim]
        return y + y.mean(dims, keepdim=True)

    @classmethod
    def convert(cls, network: nn.Module, convert: Convert) -> nn.Module:
        """Convert its part, and nothing else."""
        convert(network.part)
        return network


class PoolsRows(Around):
    """Takes off the mean of the rows."""

    is_sound = False

    def after(self, y: Tensor) -> Tensor:
        return y - y.mean(self.row_dim, keepdim=True)


class Siamese(Around):
    """Calls its part twice."""

    is_sound = False

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.call(self.part, *args, **kwargs) - 2 * self.call(self.part, *args, **kwargs)


class Views(Around):
    """Folds two views of each row into the batch: side by side, or behind each other."""

    is_sound = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.call(self.part, x.repeat_interleave(2, 0))
        return y[0::2] + 2 * y[1::2]


class ViewsBehind(Views):
    def forward(self, x: Tensor) -> Tensor:
        one, other = self.call(self.part, x.repeat(2, *[1] * (x.dim() - 1))).chunk(2)
        return one + 2 * other


class SomeRows(Views):
    """Lets its part compute about half of the rows, and gives each of them to two rows."""

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.part, x[0::2]).repeat_interleave(2, 0)[: len(x)]


class Copies(Around):
    """Has its part, and a deep copy of it that is made after conversion."""

    def __init__(self, part: nn.Module, form: str, row_dim: int) -> None:
        super().__init__(part, form, row_dim)
        self.other = copy.deepcopy(part)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.call(self.part, *args, **kwargs) + 2 * self.call(self.other, *args, **kwargs)

    @classmethod
    def convert(cls, network: nn.Module, convert: Convert) -> nn.Module:
        network.other = copy.deepcopy(convert(network.part))
        return network


class Apart(Copies):
    """Has two parts that are converted one by one."""

    @classmethod
    def convert(cls, network: nn.Module, convert: Convert) -> nn.Module:
        convert(network.other)
        convert(network.part)
        return network


AROUND: dict[str, type[Around]] = {
    "after": Around,
    "apart": Apart,
    "copies": Copies,
    "rows pooled": PoolsRows,
    "siamese": Siamese,
    "some rows": SomeRows,
    "views side by side": Views,
    "views behind": ViewsBehind,
}
