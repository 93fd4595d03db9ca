"""What a method is: it makes a layer's posterior, draws a perturbation of the layer, and gives a divergence.

A method sees a `Site` (a layer's tensors, never its type), is asked for `Draws`, and answers with a `Perturbation`.
How a perturbation is applied is the layer's concern: see `bayesify.layers.base`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import UnionType
from typing import Any, Literal, NoReturn, Protocol, Self, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.errors import BayesifyError

Per = Literal["batch", "component", "row"]
NoiseKind = Literal["normal", "cauchy", "uniform"]
Role = Literal["linear", "conv", "recurrent", "attention", "norm", "embedding", "custom", "dropout", "input", "output"]

NOISE, SHALLOW = 0.35, 4
"""The default noise of a layer relative to what is perturbed, in networks of up to so many layers. In deeper ones
layers get less; benchmarks/defaults shows how all this was chosen."""

Gradients = list[tuple[Tensor, Tensor, float]]  # (tensor, direction, factor): its gradient is direction · factor


class Noise(Protocol):
    """Makes the noise (G, *shape) of G draws, as `Draws` does."""

    def normal(self, shape: tuple[int, ...]) -> Tensor: ...

    def cauchy(self, shape: tuple[int, ...]) -> Tensor: ...

    def uniform(self, shape: tuple[int, ...], period: int) -> Tensor: ...


@dataclass(frozen=True)
class Draws:
    """A request for G draws: their positions choose the components, and they supply the noise.

    Draw g serves the rows g, g + G, g + 2G, … of the batch. Noise is float32 and made on the device of `position`: by
    torch's default generator in training; by `generators`, one for each draw or one for all; or by a `noise` that knows
    all draws of a prediction, or all samples of a row (see `methods/draw_design.py`).

    >>> draws = Draws(torch.arange(3, 7))
    >>> draws.component(4)
    tensor([3, 0, 1, 2])
    >>> draws.normal((2, 5)).shape
    torch.Size([4, 2, 5])
    """

    position: Tensor
    generators: tuple[torch.Generator, ...] = ()
    reproducible: bool = False  # whether a seed reproduces each draw on its own, as in prediction, unlike in training
    noise: Noise | None = None
    samples: int = 1  # how many draws side by side are samples of one row whose noise cancels

    @classmethod
    def seeded(cls, position: Tensor, seeds: list[int]) -> Draws:
        """Draws whose noise comes from their seeds, on the device of `position`."""
        if position.is_meta:  # the meta device has shapes but no values, and no generator
            return cls(position, reproducible=True)
        return cls(position, tuple([torch.Generator(position.device).manual_seed(seed) for seed in seeds]), True)

    @property
    def size(self) -> int:
        """The number G of draws."""
        return self.position.shape[0]

    def component(self, components: int) -> Tensor:
        """The component of each draw: its position modulo K."""
        return self.position % components

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal noise of shape (G, *shape)."""
        if self.noise is not None:
            return self.noise.normal(shape)
        if self.generators:
            return self._seeded(torch.randn, shape)
        return torch.randn((self.position.shape[0], *shape), dtype=torch.float32, device=self.position.device)

    def cauchy(self, shape: tuple[int, ...]) -> Tensor:
        """Standard Cauchy noise of shape (G, *shape)."""
        if self.noise is not None:
            return self.noise.cauchy(shape)
        return torch.tan(math.pi * (self.uniform(shape) - 0.5))

    def uniform(self, shape: tuple[int, ...], period: int = 1) -> Tensor:
        """Noise of shape (G, *shape), uniform on [0, 1).

        In a prediction with balanced draws, an element goes through [0, 1) in steps of 1/period in as many draws.
        """
        if self.noise is not None:
            return self.noise.uniform(shape, period)
        if self.generators:
            return self._seeded(torch.rand, shape)
        return torch.rand((self.position.shape[0], *shape), dtype=torch.float32, device=self.position.device)

    def _seeded(self, make: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        noise = torch.empty((self.size, *shape), dtype=torch.float32, device=self.position.device)
        if len(self.generators) == 1:
            return make(noise.shape, generator=self.generators[0], out=noise)
        for generator, part in zip(self.generators, noise, strict=True):
            make(shape, generator=generator, out=part)
        return noise


@dataclass(frozen=True)
class Perturbation:
    """What G draws do to a layer `y = op(x ∘ in_scale; weight) ∘ out_scale + bias`; a None changes nothing.

    Tensors have a leading dimension of G, or 1 where all draws share them. `statistics` replaces a norm layer's running
    statistics by those of each draw's `component`. `plus` is a second term to add (flipout); `variance` has variances
    in place of weight and bias, for noise on the output (local reparameterisation), which cancels between the `samples`
    of a row. `kernel_scale` multiplies each row of the base weight, flattened to (out, …), by the same factors.
    """

    size: int
    in_scale: Tensor | None = None
    out_scale: Tensor | None = None
    kernel_scale: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    statistics: Mapping[str, Tensor] | None = None
    component: Tensor | None = None
    plus: Perturbation | None = None
    variance: Perturbation | None = None
    samples: int = 1

    def only(self, draw: int) -> Perturbation:
        """One of the draws."""
        return self if self.size == 1 else self.mapped(lambda stack: stack.narrow(0, draw, 1), 1)

    def at(self, index: Tensor) -> Perturbation:
        """The draws at these places: of K components, those of G draws."""
        return self.mapped(lambda stack: stack.index_select(0, index), len(index))

    def mapped(self, change: Callable[[Tensor], Tensor], size: int) -> Perturbation:
        """The perturbation by `size` draws, with a function applied to each tensor that has the draws of this one."""
        parts = {each.name: _part(getattr(self, each.name), change, self.size, size) for each in fields(self)}
        return replace(self, **parts | {"size": size})


def _part(value: Any, change: Callable[[Tensor], Tensor], before: int, after: int) -> Any:
    """A field of a perturbation with other draws; not a closure, whose cycle would keep the tensors in memory."""
    if isinstance(value, Perturbation):
        return value.mapped(change, after)
    if isinstance(value, Mapping):
        return {name: _part(tensor, change, before, after) for name, tensor in value.items()}
    return change(value) if isinstance(value, Tensor) and value.shape[0] == before else value


@dataclass(frozen=True)
class Site:
    """What a method sees of a layer: its tensors and its number of inputs and outputs, not its type.

    `in_size` and `out_size` are None where the layer has no input or output to scale; `is_matrix` says that the weight
    is a plain (out, in) matrix, `outputs_first` that its first dimension is the outputs', `recurs` that one draw of it
    is used at every step of a sequence. `reset` returns freshly initialised values of the layer's tensors.
    """

    base: Mapping[str, Tensor]
    posterior: Mapping[str, Tensor] = field(default_factory=dict)
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    in_size: int | None = None
    out_size: int | None = None
    is_matrix: bool = False
    outputs_first: bool = False
    recurs: bool = False
    reset: Callable[[], Mapping[str, Tensor]] = dict
    kind: str = "layer"

    @property
    def bias(self) -> Tensor | None:
        """The layer's bias, if it has one."""
        return self.base.get("bias")

    @property
    def device(self) -> torch.device | None:
        """The device of the layer's tensors; None where it has none."""
        tensors = [*self.base.values(), *self.statistics.values()]
        return tensors[0].device if tensors else None


class Method:
    """A method: a frozen dataclass of hyper-parameters that makes a posterior, draws from it and gives its KL.

    A method defines, in this order: where it applies (`roles`, `refusal`), the tensors it adds (`init`), a draw
    (`draw`), its components' means (`mean`) and its divergence from the prior (`kl`).
    """

    title: str = ""  # its name in the literature, in lists of methods
    adds: str = ""  # what each converted layer gets, in the same lists
    components: int = 1
    draws_per: Per = "batch"  # in training, one draw per batch, per component, or per row
    roles: tuple[Role, ...] = ("linear", "conv", "recurrent", "attention")  # the layers that are converted by default
    skips_input: bool = False  # whether these leave out the first layer, if it is a Linear or Conv and not the only one
    covers_base: bool = True  # whether `kl` has a prior on the base tensors, so that weight decay would count twice
    noisy: bool = True  # whether draws of the same component differ; if not, each component is a single point
    noise_kind: NoiseKind = "normal"  # what its draws ask `Draws` for
    noise_period: int = 1  # and with which period, if that is uniform noise
    ties_components: bool = True  # whether a row keeps one component through all layers
    needs_factors: bool = False  # whether it scales inputs and outputs, so that a layer must have both
    rows_at_once: int | None = None  # where each row has its own weights, for how many at a time; None for all
    noise: float = 0.0  # its size in shallow networks, from which options that are None are derived
    derived: frozenset[str] = frozenset()  # the options that `sized` filled in
    factorised: bool = False
    """Whether each element of the weight is drawn independently, from the elements at the same place in the posterior's
    tensors whose names begin with "weight": an embedding then draws only the entries that it looks up."""

    def __post_init__(self) -> None:
        """Raise unless every option is one of the values that its type lists, True or False, or in its range."""
        types = get_type_hints(type(self))
        for option in fields(self):  # type: ignore[arg-type]
            name, kind = option.name, types[option.name]
            parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
            allowed = [value for part in parts if get_origin(part) is Literal for value in get_args(part)]
            if getattr(self, name) is None and type(None) in parts:
                continue
            if allowed and getattr(self, name) not in allowed:
                refuse(self, name, f"one of {', '.join(map(repr, allowed))}")
            if kind is bool and not isinstance(getattr(self, name), bool):
                refuse(self, name, "True or False")
            if name in RANGES:
                check_number(self, name, **RANGES[name])

    def sized(self, layers: int) -> Self:
        """The method for a network of which L `layers` are converted: what is None is derived from `noise`.

        The noise of layers adds up, so that each gets noise · (4/L)^¾, or all of it if there are at most four.

        >>> import bayesify as by
        >>> [by.BatchEnsemble(noise=0.4).sized(layers).mean_std for layers in (1, 4, 64)]
        [0.4, 0.4, 0.05]
        """
        derived = self.options_for(self.noise * (SHALLOW / max(layers, SHALLOW)) ** 0.75)
        left = {name: float(f"{value:.4g}") for name, value in derived.items() if getattr(self, name) is None}
        return replace(self, **left).with_derived(left) if left else self  # type: ignore[type-var]

    def with_derived(self, names: Iterable[str]) -> Self:
        """The same method, knowing that these options were derived, so that they are not shown."""
        same = copy.copy(self)
        object.__setattr__(same, "derived", frozenset(names))
        return same

    def options_for(self, noise: float) -> dict[str, float]:
        """The options that give a layer noise of this size, relative to what it perturbs."""
        return {}

    def refusal(self, site: Site) -> str | None:
        """Why the method can't apply to a layer, or None."""
        if "weight" not in site.base:
            return f"{site.kind} has no weight (affine=False or elementwise_affine=False): nothing to perturb"
        if self.needs_factors and None in (site.in_size, site.out_size):
            problem = f"{site.kind} has no input and output factors, which {type(self).__name__} needs"
            return f"{problem}; use MeanField, EMP or ECMP there"
        return None

    def init(self, site: Site) -> dict[str, Tensor]:
        """The tensors to add to a layer, if any; an `nn.Parameter` is trained, a plain tensor becomes a buffer."""
        return {}

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        """G draws from the posterior: by default, where there is no noise, the mean of each draw's component."""
        if self.noisy:
            raise NotImplementedError
        return self.mean(site).at(draws.component(self.components))

    def mean(self, site: Site) -> Perturbation:
        """The means of the K components, as K draws: by default, for one component, the base tensors."""
        if self.components > 1:
            raise NotImplementedError
        return Perturbation(1)

    def weights(self, site: Site) -> Tensor | None:
        """The probabilities of the K components, or None where they are equal."""
        return None

    def smallest_noise(self, posterior: Mapping[str, Tensor]) -> float | None:
        """The smallest scale of the noise on activations, softplus(ρ) of tensors "…_rho"; None if there is none."""
        rhos = [tensor.detach() for name, tensor in posterior.items() if name.endswith("_rho")]
        return min((float(F.softplus(rho).min()) for rho in rhos), default=None)

    def l2_terms(self, site: Site) -> list[tuple[Tensor, float]] | None:
        """Tensors t and factors λ if the KL is the L2 penalty Σ (λ/2)‖t‖², which needs no `kl`; else None."""
        return None

    def kl(self, site: Site) -> Tensor:
        """A layer's KL divergence from the prior, summed over elements: by default that of `l2_terms`."""
        terms = self.l2_terms(site)
        if terms is None:
            raise NotImplementedError
        penalties = [at_least_float32(tensor).square().sum() * (factor / 2) for tensor, factor in terms]
        return sum(penalties, torch.zeros((), device=site.device))

    def total_kl(self, sites: list[Site]) -> Tensor:
        """That of several layers: the sum of `kl`, or defined in its place where layers share a component."""
        return torch.stack([self.kl(site) for site in sites]).sum()

    def kl_grad(self, sites: list[Site]) -> Gradients:
        """The gradient of `total_kl` with respect to the tensors that it depends on, trained or not."""
        terms = [self.l2_terms(site) for site in sites]
        if None not in terms:
            return [(tensor, tensor.detach(), factor) for each in terms for tensor, factor in each or ()]
        tensors = [t for site in sites for t in (*site.base.values(), *site.posterior.values()) if t.requires_grad]
        with torch.enable_grad():
            total = self.total_kl(sites)
        grads = torch.autograd.grad(total, tensors, allow_unused=True) if total.requires_grad else [None] * len(tensors)
        return [(t, g, 1.0) for t, g in zip(tensors, grads, strict=True) if g is not None]

    def options(self) -> dict[str, Any]:
        """The hyper-parameters as plain values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def __str__(self) -> str:
        """The call that creates this method, with the options that differ from their defaults."""
        options = [option for option in fields(self) if option.name not in self.derived]  # type: ignore[arg-type]
        given = [(option, getattr(self, option.name)) for option in options]
        positional = [str(value) for option, value in given if not option.kw_only and value is not None]
        named = [f"{o.name}={value!r}" for o, value in given if o.kw_only and value != o.default]
        return f"{type(self).__name__}({', '.join(positional + named)})"


def parameter(value: Tensor) -> nn.Parameter:
    """A parameter in float32 at least, also in half-precision networks."""
    return nn.Parameter(at_least_float32(value.detach()))


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in its own dtype if that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def dropout_rate_of(noise: float) -> float:
    """The dropout rate whose factors have this standard deviation: √(p/(1-p)) = noise."""
    return noise**2 / (1 + noise**2)


def noise_of(dropout_rate: float) -> float:
    """The standard deviation √(p/(1-p)) of the factors of a dropout rate, Bernoulli(1-p)/(1-p)."""
    return math.sqrt(dropout_rate / (1 - dropout_rate))


def underlying_parameter(tensor: Tensor) -> Tensor:
    """The parameter that a base tensor is, or of which it is a slice (in layers that pack several weights into one)."""
    return tensor if isinstance(tensor, nn.Parameter) or tensor._base is None else tensor._base


# Options.

RANGES: dict[str, dict[str, Any]] = {
    **{name: {"low": 1, "integer": True} for name in ("components", "rank", "kl_samples", "rows_at_once")},
    **{name: {"low": 0} for name in ("mean_std", "scale_std", "std", "jitter")},
    **{name: {"low": 0, "open_low": True} for name in ("noise", "prior_std", "scale_mean", "relative_std")},
    "p": {"low": 0, "high": 1},
    "signs": {"low": 0, "high": 1 + 1e-9},
    "dropout_rate": {"low": 0, "high": 1, "open_low": True},
}
"""The numbers that an option may be, by its name: it means the same in every method."""


def check_number(
    method: Method, name: str, low: float, high: float = float("inf"), *, integer: bool = False, open_low: bool = False
) -> None:
    """Raise unless an option is a number in [low, high) (or (low, high) with `open_low`)."""
    value = getattr(method, name)
    right_type = isinstance(value, int if integer else (int, float)) and not isinstance(value, bool)
    if not (right_type and (low < value if open_low else low <= value) and value < high):
        above, below = f"{'>' if open_low else '>='} {low}", "" if high == float("inf") else f" and < {high}"
        refuse(method, name, f"{'an integer' if integer else 'a number'} {above}{below}")


def refuse(method: Method, name: str, expected: str) -> NoReturn:
    """Raise for the value of an option."""
    raise BayesifyError(f"{type(method).__name__}({name}={getattr(method, name)!r}): expected {expected}")
