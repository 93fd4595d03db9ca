"""What was converted, what it costs, and what was left out and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from bayesify.conversion.select import drawn_parameters, own_parameters, parts_of, structural_refusal
from bayesify.layers import BayesianLayer, bayesian_layers
from bayesify.layers.base import plain_type, unwrapped
from bayesify.methods.base import underlying_parameter


@dataclass(frozen=True)
class Row:
    """One module with parameters of its own."""

    name: str
    kind: str
    method: str
    base: int
    added: int
    note: str = ""


@dataclass(frozen=True)
class Summary:
    """A table of a model's layers, to be printed."""

    rows: tuple[Row, ...]

    @property
    def base(self) -> int:
        """The parameters of the plain network."""
        return sum(row.base for row in self.rows)

    @property
    def added(self) -> int:
        """The parameters that conversion added."""
        return sum(row.added for row in self.rows)

    @property
    def overhead(self) -> float:
        """What conversion added, in percent."""
        return 100 * self.added / max(self.base, 1)

    def __str__(self) -> str:
        head = ("layer", "type", "method", "base", "added", "overhead", "")
        body = [_cells(row) for row in self.rows]
        total = ("total", "", "", f"{self.base:,}", f"{self.added:,}", f"{self.overhead:.2f}%", "")
        lines = [head, *body, total]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        rule = "-" * (sum(widths[:-1]) + 2 * (len(widths) - 2))
        text = [
            _line(head, widths),
            rule,
            *(_line(cells, widths) for cells in body),
            rule,
            _line(total, widths),
        ]
        return "\n".join(text)


def summary(model: nn.Module) -> Summary:
    """The layers of a model with their method, parameters and overhead, and why others stay plain.

    >>> import bayesify as by
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> print(by.summary(by.convert(net, by.Rank1(2))))
    layer  type       method    base  added  overhead
    -------------------------------------------------
    0      Linear     Rank1(2)    40     48   120.00%
    1      LayerNorm  -           16      0     0.00%  Rank1 leaves norm layers shared by default
    2      Linear     Rank1(2)    27     44   162.96%
    -------------------------------------------------
    total                         83     92   110.84%

    Args:
        model: A network, converted or not.

    Returns:
        A table to print, with its `rows` and the totals `base`, `added` and `overhead`.
    """
    model = unwrapped(model)
    reasons: dict[str, str] = {}
    layers = bayesian_layers(model).values()
    for layer in layers:
        reasons |= layer.scope.skipped
    seen: set[int] = set()
    inside = {id(module) for layer in layers for module in (*layer.posterior.modules(), *parts_of(layer).values())}
    rows = []
    for name, module in model.named_modules():
        if id(module) not in inside and (own_parameters(module) or isinstance(module, BayesianLayer)):
            rows.append(_row(name, module, reasons, seen))
    return Summary(tuple(rows))


def _row(name: str, module: nn.Module, reasons: dict[str, str], seen: set[int]) -> Row:
    parameters = drawn_parameters(module) if isinstance(module, BayesianLayer) else own_parameters(module)
    new = [p for p in parameters.values() if id(p) not in seen]
    tied = len(new) < len(parameters)
    seen.update(map(id, new))
    base = sum(p.numel() for p in new if not nn.parameter.is_lazy(p))
    note = "tied to a layer above" if tied else ""
    shown = name or "(model)"
    if isinstance(module, BayesianLayer):
        added = sum(p.numel() for p in module.posterior.parameters())
        note = "; ".join(filter(None, (_note_on_shared(module), note)))
        return Row(shown, plain_type(module).__name__, str(module.method), base, added, note)
    reason = reasons.get(name) or structural_refusal(module) or "not selected"
    return Row(shown, type(module).__name__, "-", base, 0, "; ".join(filter(None, (reason, note))))


def shared_parameters(layer: BayesianLayer) -> list[str]:
    """The names of a converted layer's parameters that no draw changes."""
    drawn = {id(underlying_parameter(tensor)) for site in layer.sites().values() for tensor in site.base.values()}
    return [name for name, p in drawn_parameters(layer).items() if id(p) not in drawn]


def _note_on_shared(layer: BayesianLayer) -> str:
    shared = shared_parameters(layer)
    return f"{', '.join(shared)} stay{'s' * (len(shared) == 1)} shared" if shared else ""


def _cells(row: Row) -> tuple[str, ...]:
    overhead = f"{100 * row.added / row.base:.2f}%" if row.base else "-"
    return (row.name, row.kind, row.method, f"{row.base:,}", f"{row.added:,}", overhead, row.note)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    padded = [
        cell.rjust(width) if i in (3, 4, 5) else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()
