"""The one abstraction: a family draws a perturbation, a layer applies it; neither knows the other's types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .memory import Memory
from .noise import coarse, is_eager, normal

Grain = Literal["batch", "component", "row"]
Role = Literal["linear", "conv", "recurrent", "attention", "norm", "embedding", "custom", "dropout", "input", "output"]

Gradients = list[tuple[Tensor, Tensor, float]]
"""Tensors, each with a direction (maybe the tensor itself) and a factor; its gradient is their product."""


@dataclass(frozen=True)
class Draws:
    """A request for G draws: their positions choose the components, their noise is made here.

    Draw g serves the rows g, g + G, g + 2G, … of the batch. Noise is float32. In training it is drawn on the layer's
    device, and draws may share some of it. With `generators`, one for each draw, it is drawn on the CPU: a seed means
    the same function everywhere, and draws are functions of their own; it may be in memory that is lent for a while.
    With `seed` the same noise is made each time.

    >>> draws = Draws(torch.arange(3, 7))
    >>> draws.component(4)
    tensor([3, 0, 1, 2])
    >>> draws.normal((2, 5)).shape
    torch.Size([4, 2, 5])
    """

    position: Tensor
    generators: tuple[torch.Generator, ...] = ()
    seed: int | None = None
    memory: Memory | None = None
    _components: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def size(self) -> int:
        """The number G of draws."""
        return self.position.shape[0]

    def some(self, start: int, stop: int) -> Draws:
        """A part of these draws."""
        return Draws(self.position[start:stop], seed=None if self.seed is None else self.seed + start)

    def component(self, components: int) -> Tensor:
        """The component of each draw, evenly spread."""
        if components not in self._components:
            self._components[components] = self.position % components
        return self._components[components]

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal noise of shape (G, *shape)."""
        own = not self.generators and self.seed is None and self.position.is_cpu and is_eager()
        return normal((self.size, *shape)) if own else self._noise(torch.randn, shape)

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """Noise of shape (G, *shape), uniform on [0, 1)."""
        return self._noise(torch.rand, shape)

    def coarse(self, shape: tuple[int, ...]) -> Tensor:
        """Noise like `uniform`, of 16 bits, on the CPU in a third of its time: for choices among few."""
        if not is_eager() or (not self.generators and (self.seed is not None or not self.position.is_cpu)):
            return self.uniform(shape)
        into = (self.memory or Memory(reused=False)).take((self.size, *shape))
        return coarse(into, self.generators or (None,)).to(self.position.device)

    def _noise(self, make: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        full, device = (self.size, *shape), self.position.device
        if not self.generators:
            generator = None if self.seed is None else torch.Generator(device).manual_seed(self.seed)
            return make(full, device=device, dtype=torch.float32, generator=generator)
        noise = (self.memory or Memory(reused=False)).take(full)
        for generator, part in zip(self.generators, noise, strict=True):
            make(shape, generator=generator, out=part)
        return noise.to(device)


@dataclass(frozen=True)
class Elementwise:
    """A tensor still to be drawn, element by element: `function(*operands, noise)`.

    Layers that need only some of its entries (an embedding) draw only those: `at` takes the operands there first.
    Operands end in the dimensions of the tensor they describe.
    """

    function: Callable[..., Tensor]
    operands: tuple[Tensor, ...]
    draws: Draws
    noise: Literal["normal", "uniform", "coarse"]

    def all(self, shape: tuple[int, ...]) -> Tensor:
        """Every entry: (G, *shape)."""
        return self.function(*self.operands, getattr(self.draws, self.noise)(shape))

    def at(self, rows: Tensor, dims: int) -> Tensor:
        """Only the entries at `rows` (G, T) of the first of `dims` dimensions, one draw per row and entry.

        Entries that occur twice for one draw are the same entry, so they share its noise.
        """
        taken = tuple(_take(operand, rows, dims) for operand in self.operands)
        tail = self.operands[0].shape[self.operands[0].dim() - dims + 1 :]
        noise = getattr(self.draws, self.noise)((rows.shape[1], *tail))
        first = _first_places(rows).reshape(*rows.shape, *[1] * len(tail))
        return self.function(*taken, noise.gather(1, first.expand_as(noise)))


def _first_places(rows: Tensor) -> Tensor:
    """For each entry of (G, T) the place of the first one in its row that equals it, without comparing all pairs."""
    ordered, order = rows.sort(dim=1, stable=True)
    places = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    starts = torch.where(ordered == ordered.roll(1, 1), 0, places).cummax(1).values
    return torch.zeros_like(order).scatter(1, order, order.gather(1, starts))


def _take(operand: Tensor, rows: Tensor, dims: int) -> Tensor:
    axis = operand.dim() - dims
    taken = operand.index_select(axis, rows.reshape(-1))
    return taken.reshape(*operand.shape[:axis], *rows.shape, *operand.shape[axis + 1 :])


@dataclass(frozen=True)
class Perturbation:
    """What G draws do to a layer `y = op(x ∘ in_scale; weight) ∘ out_scale + bias`; None leaves a part as it is.

    Tensors have a leading G, or 1 where all draws share it. `patch_scale` multiplies the base weight (out, …) by a
    factor for everything that one output reads. `statistics` replaces a norm layer's running statistics, those of
    `component`. `choice` (one draw per row) replaces the rule that draw g serves rows g, g + G, …. `plus` is a second
    term to add (flipout); `variance` holds variances in place of tensors, for noise on the output (local
    reparameterisation).
    """

    size: int
    in_scale: Tensor | Elementwise | None = None
    out_scale: Tensor | None = None
    weight: Tensor | Elementwise | None = None
    patch_scale: Tensor | None = None
    bias: Tensor | None = None
    statistics: Mapping[str, Tensor] | None = None
    component: Tensor | None = None
    choice: Tensor | None = None
    plus: Perturbation | None = None
    variance: Perturbation | None = None

    @property
    def is_shared(self) -> bool:
        """Whether one draw serves all rows."""
        return self.size == 1 and self.choice is None

    def draw_of(self, row: int) -> int:
        """The draw that serves a row of the batch."""
        return row % self.size if self.choice is None else int(self.choice[row])


@dataclass(frozen=True)
class Site:
    """What a family sees of a layer: its tensors and its number of inputs and outputs, not its type.

    `in_size` and `out_size` are None where the layer has no such factor; `is_matrix` says that the weight is a plain
    (out, in) matrix, `reads_patches` that it is (out, …) and takes factors of all that one output reads, `recurs` that
    one draw of it acts at every step of a sequence. `reset` gives the layer's usual random initial values afresh.
    """

    base: Mapping[str, Tensor]
    posterior: Mapping[str, Tensor] = field(default_factory=dict)
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    in_size: int | None = None
    out_size: int | None = None
    is_matrix: bool = False
    reads_patches: bool = False
    recurs: bool = False
    reset: Callable[[], Mapping[str, Tensor]] = dict
    kind: str = "layer"

    @property
    def bias(self) -> Tensor | None:
        """The layer's bias, if it has one."""
        return self.base.get("bias")


class Family:
    """A method: a frozen dataclass of hyper-parameters that makes a posterior, draws from it and gives its KL.

    A family gives, in this order: where it applies (`roles`, `refusal`), the tensors it adds (`init`), a draw (`draw`),
    its components' means (`mean`) and its divergence from the prior (`kl`).
    """

    components: int = 1
    grain: Grain = "batch"
    """How far a training draw reaches: the batch, the rows of one component, or a single row."""
    roles: tuple[Role, ...] = ("linear", "conv", "recurrent", "attention")
    """The layers that are converted by default."""
    spares_input: bool = False
    """Whether the first Linear or Conv is left out by default, where there are others."""
    covers_base: bool = True
    """Whether `kl` is a prior on the base tensors too, so that weight decay on them would count twice."""
    noisy: bool = True
    """Whether a component is more than a point."""
    tied: bool = True
    """Whether a row keeps one component through all layers."""
    rows_at_once: int | None = None
    """Of how many rows the weights are held at a time, where each row has its own; None is all."""
    factors_only: bool = False
    """Whether `draw` makes in_scale and out_scale alone, each element from its own: then layers are drawn together."""
    factors_matrices: bool = False  # the same, if only where the weight is a plain matrix
    elements: tuple[str, ...] = ()
    """The base tensors that `draw` changes, each of their elements as if it stood in a weight and by what the posterior
    has at its place, under names that begin with the tensor's: then those of small layers are drawn as one."""

    def __init_subclass__(cls) -> None:
        """What is said of one `draw` is not said of another: a subclass with its own says it again, or not at all."""
        for name in ("factors_only", "factors_matrices", "elements"):
            if "draw" in vars(cls) and name not in vars(cls):
                setattr(cls, name, getattr(Family, name))

    def refusal(self, site: Site) -> str | None:
        """Why the family can't apply to a layer, or None."""
        if "weight" not in site.base:
            return f"{site.kind} has no weight (affine=False or elementwise_affine=False): nothing to perturb"
        return None

    def smallest_noise(self, posterior: Mapping[str, Tensor]) -> float | None:
        """The smallest scale of noise that multiplies activations, or None where none does."""
        return None

    def init(self, site: Site) -> dict[str, Tensor]:
        """The tensors added to a layer; a `nn.Parameter` is trained, a plain tensor is a buffer."""
        raise NotImplementedError

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        """G draws from the posterior."""
        raise NotImplementedError

    def mean(self, site: Site) -> Perturbation:
        """The mean of each of the K components as K draws."""
        raise NotImplementedError

    def weights(self, site: Site) -> Tensor | None:
        """The probabilities of the K components, or None where they are equal."""
        return None

    def kl(self, site: Site) -> Tensor:
        """The divergence from the prior, summed over the layer's elements."""
        raise NotImplementedError

    def total_kl(self, sites: list[Site]) -> Tensor:
        """The summed `kl` of several layers; families that can, compute them together."""
        return torch.stack([self.kl(site) for site in sites]).sum()

    def kl_grad(self, sites: list[Site]) -> Gradients:
        """The gradient of `total_kl` by the tensors that it depends on."""
        tensors = [t for site in sites for t in (*site.base.values(), *site.posterior.values()) if t.requires_grad]
        with torch.enable_grad():
            total = self.total_kl(sites)
        grads = torch.autograd.grad(total, tensors, allow_unused=True) if total.requires_grad else [None] * len(tensors)
        return [(t, g, 1.0) for t, g in zip(tensors, grads, strict=True) if g is not None]

    def options(self) -> dict[str, Any]:
        """The hyper-parameters as plain values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def __str__(self) -> str:
        """The call that makes this family, with what differs from the defaults."""
        shown = []
        for i, option in enumerate(fields(self)):  # type: ignore[arg-type]
            value = getattr(self, option.name)
            if i == 0 and not option.kw_only:
                shown.append(f"{value}")
            elif value != option.default:
                shown.append(f"{option.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def need_factors(site: Site, method: str) -> str | None:
    """Why a family of input and output factors can't apply to a layer, or None."""
    if None in (site.in_size, site.out_size):
        return f"{site.kind} has no input and output factors, which {method} needs; use MeanField, EMP or ECMP there"
    return None


def parameter(value: Tensor) -> nn.Parameter:
    """A parameter of at least single precision, which it keeps in half-precision networks."""
    return nn.Parameter(precise(value.detach()))


def whole(tensor: Tensor) -> Tensor:
    """The parameter that a base tensor is or, in a layer that packs several weights into one, is rows of."""
    return tensor if isinstance(tensor, nn.Parameter) or tensor._base is None else tensor._base


def precise(tensor: Tensor) -> Tensor:
    """A tensor in at least single precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
