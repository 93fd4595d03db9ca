"""What was converted, what it costs, and what was left out and why."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.conversion.select import drawn_parameters, own_parameters, parts_of, structural_refusal
from bayesify.layers import BayesianLayer, bayesian_layers
from bayesify.layers.base import plain_type, unwrapped
from bayesify.methods.base import Draws, Method, Site, underlying_parameter


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
    log10_networks: float = 0.0  # the effective ensemble size (EMP, table 3); infinite with noise or kept dropout

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
        table = [("layer", "type", "method", "base", "added", "overhead", "")]
        for row in (*self.rows, Row("total", "", "", self.base, self.added)):
            overhead = f"{100 * row.added / row.base:.2f}%" if row.base else "-"
            table.append((row.name, row.kind, row.method, f"{row.base:,}", f"{row.added:,}", overhead, row.note))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        places = "  ".join(f"{{:{side}{width}}}" for side, width in zip("<<<>>><", widths, strict=True))
        head, *body, total = [places.format(*cells).rstrip() for cells in table]
        rule = "-" * (sum(widths[:-1]) + 2 * (len(widths) - 2))
        size = f"{10**self.log10_networks:,.0f}" if self.log10_networks < 6 else f"10^{self.log10_networks:,.0f}"
        one_of = [f"a draw is one of {size} networks"] if 0 < self.log10_networks < math.inf else []
        return "\n".join([head, rule, *body, rule, total, *one_of])


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
        A table to print, with its `rows`, the totals `base`, `added` and `overhead`, and `log10_networks`.
    """
    model = unwrapped(model)
    layers = bayesian_layers(model).values()
    reasons = {name: reason for layer in layers for name, reason in layer.scope.skipped.items()}
    inside = {id(module) for layer in layers for module in (*layer.posterior.modules(), *parts_of(layer).values())}
    seen: set[int] = set()
    rows = []
    for name, module in model.named_modules():
        if id(module) not in inside and (own_parameters(module) or isinstance(module, BayesianLayer)):
            rows.append(_row(name, module, reasons, seen))
    return Summary(tuple(rows), _log10_networks([*layers]))


def _log10_networks(layers: list[BayesianLayer]) -> float:
    if any(each.role == "dropout" or (each.method.noisy and each.method.noise_kind != "uniform") for each in layers):
        return math.inf
    tied = math.lcm(*(each.method.components for each in layers if each.method.ties_components))
    noisy = [(each.method, site) for each in layers if each.method.noisy for site in each.sites().values()]
    return math.log10(tied) + sum(_choices(*each) * math.log10(max(each[0].components, 2)) for each in noisy)


def _choices(method: Method, site: Site) -> int:
    """How many choices a draw of a layer makes: for each it asks for a uniform number."""
    asked = []

    def uniform(shape: tuple[int, ...], period: int) -> Tensor:
        asked.append(math.prod(shape))
        return torch.zeros(1, *shape, device=site.device)

    noise: Any = SimpleNamespace(uniform=uniform)
    method.draw(site, Draws(torch.zeros(1, dtype=torch.long, device=site.device), noise=noise))
    return sum(asked)


def _row(name: str, module: nn.Module, reasons: dict[str, str], seen: set[int]) -> Row:
    """The row of a module; `seen` are the parameters of those above it."""
    method, added = "-", 0
    parameters, notes = own_parameters(module), []
    if isinstance(module, BayesianLayer):
        parameters, shared = drawn_parameters(module), shared_parameters(module)
        method, added = str(module.method), sum(p.numel() for p in module.posterior.parameters())
        notes += [f"{', '.join(shared)} stay{'s' * (len(shared) == 1)} shared"] if shared else []
    else:
        notes.append(reasons.get(name) or structural_refusal(module) or "not selected")
    new = [p for p in parameters.values() if id(p) not in seen]
    notes += ["tied to a layer above"] if len(new) < len(parameters) else []
    seen.update(map(id, new))
    base = sum(p.numel() for p in new if not nn.parameter.is_lazy(p))
    return Row(name or "(model)", plain_type(module).__name__, method, base, added, "; ".join(notes))


def shared_parameters(layer: BayesianLayer) -> list[str]:
    """The names of a converted layer's parameters that no draw changes."""
    drawn = {id(underlying_parameter(tensor)) for site in layer.sites().values() for tensor in site.base.values()}
    return [name for name, p in drawn_parameters(layer).items() if id(p) not in drawn]
