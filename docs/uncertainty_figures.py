"""Draw the figures of docs/uncertainty.md from networks trained here: python -m docs.uncertainty_figures.

Takes about a minute on one core, and writes PNG files to docs/images.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from sklearn.datasets import make_moons
from torch import Tensor, nn

import bayesify as by
from bayesify.lab.report.figures.style import INK, SERIES, STYLE

IMAGES = Path(__file__).parent / "images"
REACH = 6.0
"""How far the maps of two inputs go in each direction; the data end at about 2.5."""


def main() -> None:
    torch.set_num_threads(1)  # small networks are not faster with more
    IMAGES.mkdir(exist_ok=True)
    model, familiarity, x, y = moons()
    with matplotlib.rc_context(STYLE):
        for name, figure in {
            "uncertainty_map": maps(model, familiarity, x, y),
            "uncertainty_far": walk(model, familiarity, x),
            "uncertainty_curve": curve(),
        }.items():
            figure.savefig(IMAGES / f"{name}.png", dpi=180)
            print(IMAGES / f"{name}.png")


def trained(model: nn.Module, x: Tensor, y: Tensor, likelihood: by.Categorical | by.Gaussian, epochs: int) -> nn.Module:
    """A converted network after training on all rows."""
    optimizer = torch.optim.Adam(by.parameter_groups(model, lr=3e-3, posterior_lr=1e-2))
    for epoch in range(epochs):
        for rows in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            beta = by.anneal(epoch, over=epochs // 2)
            by.elbo(model, x[rows], y[rows], n=len(x), beta=beta, likelihood=likelihood).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model.eval()


# Two inputs and two classes.


def moons() -> tuple[nn.Module, by.Familiarity, Tensor, Tensor]:
    """A network for two crescents of points that overlap where they meet."""
    torch.manual_seed(0)
    points, classes = make_moons(800, noise=0.25, random_state=0)
    x, y = torch.tensor(points, dtype=torch.float32) - torch.tensor([0.5, 0.25]), torch.tensor(classes)
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    model = trained(by.convert(net, by.Rank1(8)), x[:600], y[:600], by.Categorical(), 150)
    familiarity = by.Familiarity.fit(model, (x[:600], y[:600]), held_out=x[600:])
    familiarity = familiarity.calibrated(by.predict(model, x[600:], samples=80, familiarity=familiarity))
    return model, familiarity, x[:600], y[:600]


def maps(model: nn.Module, familiarity: by.Familiarity, x: Tensor, y: Tensor) -> Figure:
    """Each kind of uncertainty over the plane of both inputs."""
    side = torch.linspace(-REACH, REACH, 121)
    grid = torch.cartesian_prod(side, side)
    p = by.predict(model, grid, samples=80, familiarity=familiarity)
    panels = {
        "aleatoric (nats)": p.aleatoric,
        "epistemic (nats)": p.epistemic,
        "entropy, their sum (nats)": p.entropy,
        "unfamiliarity: 1 - familiarity": 1 - p.familiarity,
    }
    figure = Figure(figsize=(6.6, 5.6), layout="constrained")
    for ax, (title, values) in zip(figure.subplots(2, 2, sharex=True, sharey=True).flat, panels.items(), strict=True):
        shown = ax.imshow(
            values.reshape(121, 121).T,
            extent=(-REACH, REACH, -REACH, REACH),
            origin="lower",
            cmap="viridis",
            vmin=0,
            vmax=1 if title.startswith("un") else 0.693,
        )
        for label in range(2):
            ax.scatter(*x[y == label].T, s=2, color=("white", SERIES[1])[label], linewidths=0)
        ax.set_title(title)
        ax.grid(False)
        figure.colorbar(shown, ax=ax, shrink=0.8)
    return figure


def walk(model: nn.Module, familiarity: by.Familiarity, x: Tensor) -> Figure:
    """The same scores on the way from the centre of the data outwards, averaged over directions."""
    angles = torch.linspace(0, 2 * torch.pi, 73)[:-1]
    distances = torch.linspace(0, 20, 81)
    points = distances[:, None, None] * torch.stack([angles.cos(), angles.sin()], 1)
    p = by.predict(model, points.reshape(-1, 2), samples=80, familiarity=familiarity)
    figure = Figure(figsize=(5.4, 3), layout="constrained")
    ax = figure.subplots()
    scores = {"aleatoric": p.aleatoric / 0.693, "epistemic": p.epistemic / 0.693, "unfamiliarity": 1 - p.familiarity}
    for colour, (name, values) in zip(SERIES, scores.items(), strict=False):
        ax.plot(distances, values.reshape(81, -1).mean(1), color=colour, label=name)
    ax.axvspan(0, x.norm(dim=1).quantile(0.99).item(), color=SERIES[0], alpha=0.1, label="the data")
    ax.set_xlabel("distance from the centre of the data")
    ax.set_ylabel("share of the largest possible")
    ax.legend(loc="center right", fontsize=8)
    return figure


# One input and a real target.


def curve() -> Figure:
    """A curve with noise that grows to the right, and a gap in the middle."""
    torch.manual_seed(0)
    x = torch.cat([torch.empty(300).uniform_(-3, -0.8), torch.empty(300).uniform_(0.8, 3)])[:, None]
    y = torch.sin(2 * x) + 0.3 * x + (0.05 + 0.2 * (x > 0)) * torch.randn_like(x)
    likelihood = by.Gaussian(precision="input")
    net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    model = trained(by.convert(net, by.Rank1(8, noise=0.1)), x, y, likelihood, 300)
    grid = torch.linspace(-5, 5, 201)[:, None]
    p = by.predict(model, grid, samples=80, likelihood=likelihood)
    figure = Figure(figsize=(6.6, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    low, high = (bound[:, 0] for bound in p.interval(0.9))
    left.fill_between(grid[:, 0], low, high, color=SERIES[0], alpha=0.25, label="90% interval")
    left.plot(grid, p.mean, color=SERIES[0], label="mean")
    left.scatter(x, y, s=2, color=INK, linewidths=0)
    left.set_title("prediction")
    left.legend(loc="upper left", fontsize=8)
    right.plot(grid, p.aleatoric_std, color=SERIES[0], label="aleatoric_std")
    right.plot(grid, p.epistemic_std, color=SERIES[1], label="epistemic_std")
    right.plot(x, torch.zeros_like(x), "|", color=INK, markersize=6, markeredgewidth=0.4)
    right.set_title("its two parts")
    right.set_ylim(0)
    right.legend(loc="upper center", fontsize=8)
    for ax in (left, right):
        ax.set_xlabel("input")
    return figure


if __name__ == "__main__":
    main()
