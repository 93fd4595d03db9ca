"""The results as a picture: a column of dots for each network, ours and other libraries' apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .tables import find, implementations

MARKS = {"step": ("o", "training step", -0.16), "predict": ("d", "one draw of a prediction", 0.16)}
"""Each measure's mark, its name, and how far below its line it stands."""
OURS, PEER = "#1f5fbf", "#d2691e"
TICKS = (1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 200)


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the figure to a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    methods = implementations(results)
    height = 0.3 * len(methods) + 1.9
    size = (3.2 * len(results["cases"]) + 2.2, height)
    figure, axes = plt.subplots(1, len(results["cases"]), sharey=True, figsize=size)
    for ax, (case, title) in zip(axes, results["cases"].items(), strict=True):
        _column(ax, results, case, methods)
        ax.set_title(title.replace(", ", "\n", 1), fontsize=9)
    labels = [name if library == "bayesify" else f"{library}: {name}" for library, name in methods]
    axes[0].set_yticks(range(len(methods)), labels, fontsize=8)
    axes[0].invert_yaxis()
    for label, (library, _) in zip(axes[0].get_yticklabels(), methods, strict=True):
        label.set_color(OURS if library == "bayesify" else PEER)
    handles = [
        plt.Line2D([], [], marker=mark, linestyle="", color="#444", markerfacecolor=fill("#444", measure), label=label)
        for measure, (mark, label, _) in MARKS.items()
    ]
    handles += [
        plt.Line2D([], [], marker="s", linestyle="", color=color, label=label)
        for color, label in ((OURS, "bayesify"), (PEER, "other libraries"))
    ]
    handles.append(plt.Line2D([], [], marker="|", markersize=10, linestyle="", color="#444", label="goal of the step"))
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.supxlabel("cost, in plain networks (logarithmic)", fontsize=9, y=0.32 / height)
    figure.tight_layout(rect=(0, 0.3 / height, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def fill(color: str, measure: str) -> str:
    """Steps are full, predictions hollow."""
    return color if measure == "step" else "white"


def _column(ax: Any, results: dict[str, Any], case: str, methods: list[tuple[str, str]]) -> None:
    """One network's dots."""
    ax.set_xscale("log")
    values = [1.0]
    for i, (library, method) in enumerate(methods):
        color = OURS if library == "bayesify" else PEER
        for measure, (mark, _, below) in MARKS.items():
            for row in find(results, case=case, library=library, method=method, measure=measure):
                inside = fill(color, measure)
                ax.plot(row["value"], i + below, mark, color=color, markerfacecolor=inside, markersize=6, zorder=3)
                values.append(row["value"])
                if measure == "step" and row["goal"] is not None:
                    ax.plot(row["goal"], i + below, "|", color="#444", markersize=11, zorder=2)
    low, high = min(values) / 1.12, max(values) * 1.12
    ticks = [tick for tick in TICKS if low <= tick <= high]
    ticks = ticks if len(ticks) <= 6 else [tick for tick in ticks if tick in (1, 2, 5, 10, 20, 50, 100, 200)]
    ax.set_xlim(low, high)
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    ax.minorticks_off()
    ax.axvline(1, color="#999", linewidth=1, zorder=1)
    ours = sum(library == "bayesify" for library, _ in methods)
    ax.axhline(ours - 0.5, color="#ccc", linewidth=1)
    ax.grid(axis="both", color="#eee", zorder=0)
    ax.set_axisbelow(True)
