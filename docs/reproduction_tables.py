"""Write the tables of docs/reproduction.md from the experiments and their results: `make lists`.

Every table and figure of the four papers has one row. Where it belongs to an experiment, claim and verdict are those of
`bayesify reproduce`; where something else of this repository shows it, the row says what; otherwise that it is not run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bayesify.lab.reproduction import EXPERIMENTS
from bayesify.lab.reproduction.experiment import Exhibit, Experiment
from bayesify.lab.reproduction.page import figure
from bayesify.lab.reproduction.run import known_results
from bayesify.lab.reproduction.verdict import PairedTest, Results

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "reproduction" / "results"
BENCHMARKS = ROOT / "benchmarks" / "results"
NOT_RUN = "not run here"
HEADER = ("table or figure", "claim", "verdict", "our figure", "command")


@dataclass(frozen=True)
class Row:
    """A table or figure: part of an experiment, by its exhibit's title; or shown by something else, or not at all."""

    place: str
    claim: str = ""
    experiment: str = ""
    exhibit: str = ""
    verdict: str = NOT_RUN
    ours: str = ""
    command: str = ""


def of(place: str, experiment: str, exhibit: str, ours: str = "") -> Row:
    """A row of an experiment; `ours` is said in addition to its results."""
    return Row(place, experiment=experiment, exhibit=exhibit, ours=ours)


COUNTS, ZOO = "`pytest tests/test_counts.py`", "`make zoo`"
IMAGENET = "needs ImageNet"


def contradicted_noise() -> str:
    """What the committed comparison on Fashion-MNIST says of iBNN's figure 8."""
    metrics = json.loads((BENCHMARKS / "fashion-mnist.json").read_text())["metrics"]
    ours, dropout = (metrics[name]["test"]["shift"]["mixing"] for name in ("IBNN", "MCDropout"))
    shares = [100 * each["0.6"]["epistemic"] / each["0.6"]["entropy"] for each in (ours, dropout)]
    return (
        "one seed of [another comparison](../benchmarks/results/fashion-mnist.md), fine-tuned, contradicts both: "
        f"the entropy rises to {ours['0.6']['entropy']:.2f} at γ = 0.6 and falls to {ours['1']['entropy']:.2f} at 1; "
        f"of it {shares[0]:.0f}% is epistemic at 0.6, and {shares[1]:.0f}% with MC dropout"
    )


def contradicted_records() -> str:
    """What the committed comparison on PhysioNet says of the order in Rank-1's table 4."""
    found = json.loads((BENCHMARKS / "physionet2012.json").read_text())["test"]
    means = {name: sum(values["nll"]) / len(values["nll"]) for name, values in found.items()}
    order = sorted((name for name in means if name != "deep_ensemble"), key=lambda name: means[name])
    shown = ", ".join(f"{name.replace('_', ' ')} {means[name]:.4f}" for name in order)
    seeds = len(next(iter(found.values()))["nll"])
    return (
        f"[{seeds} seeds with other epochs for each method](../benchmarks/results/physionet2012.md) have another order "
        f"by NLL than the paper, where the Gaussian Rank-1 BNN is best and the fully Bayesian network worst: {shown}"
    )


def papers() -> dict[str, tuple[Row, ...]]:
    """The tables and figures of each paper, tables first."""
    return {
        "Rank-1 BNNs (Dusenberry et al. 2020; v1 is the first version on arXiv)": (
            Row("table 1", "ResNet-50 on ImageNet: better than baselines by all measures", ours=IMAGENET),
            Row("table 1, parameters", "26.0M with four components", verdict="exact", ours="25,974,144", command=ZOO),
            of("table 2", "rank1-scratch", "Rank-1, tables 2 and 3"),
            Row(
                "table 3",
                "The same on CIFAR-100",
                ours="needs CIFAR-100's training images",
                command=paper_scale("rank1-scratch"),
            ),
            of("table 4", "rank1-records", "Rank-1, table 4", contradicted_records()),
            Row("tables 5 to 7 (v1)", "Settings", verdict="–", ours="`defaults: papers` in [recipes](recipes.md)"),
            of("table 8 (v1)", "rank1-ablation", "Rank-1, table 8 (v1)"),
            Row(
                "figure 1",
                "Factors make the induced weight prior sparse",
                ours="[`analyses.induced_priors`](analyses.md#functions-from-the-prior), tested against closed forms",
            ),
            of("figure 2", "rank1-ablation", "Rank-1, figure 2"),
            of("figure 3", "rank1-ablation", "Rank-1, figure 3"),
            of("figure 4", "rank1-ablation", "Rank-1, figure 4"),
            of("figure 5 (v1)", "rank1-ablation", "Rank-1, figure 5 (v1)"),
            of("figure 5 (v1: 6)", "rank1-scratch", "Rank-1, figure 5"),
            Row("figure 6 (v1: 7)", "ImageNet-C by severity", ours=IMAGENET),
            Row("figure 7 (v1: 8)", "CIFAR-10-C and CIFAR-100-C by severity", ours="the means are in `rank1-scratch`"),
            of("figure 9 (v1)", "rank1-ablation", "Rank-1, figure 9 (v1)"),
            Row("figures 10 to 12 (v1)", "Single corruptions by severity"),
        ),
        "iBNN (Trinh et al. 2020)": (
            Row(
                "table 1",
                "Nodes of six networks",
                verdict="exact",
                ours="AlexNet, VGG16, ResNet-50, WideResNet-28-10; “LeNet 23” contradicts the paper's own definition",
                command=f"{COUNTS}, {ZOO}",
            ),
            Row("table 2", "Settings", verdict="–", ours="`defaults: papers` in [recipes](recipes.md)"),
            of("tables 3, 4, 5", "rank1-scratch", "iBNN, tables 3 to 5, figure 5"),
            of("table 6", "rank1-ablation", "iBNN, table 6, figure 6"),
            of("table 7", "adapter-quality", "iBNN, table 7"),
            of("figure 1", "ibnn-depth", "iBNN, figure 1"),
            Row("figure 2", "Components spread over a wide mode", ours="[`analyses.component_weights`](analyses.md)"),
            Row("figure 3", "The least and most certain images", ours="[`analyses.extremes`](analyses.md)"),
            of("figure 4", "ibnn-width", "iBNN, figure 4"),
            of("figure 5", "rank1-scratch", "iBNN, tables 3 to 5, figure 5"),
            of("figure 6", "rank1-ablation", "iBNN, table 6, figure 6"),
            Row("figure 7", "Better calibrated at every confidence", ours="the ECE is in `rank1-scratch`"),
            of("figure 8", "ibnn-noise", "iBNN, figure 8", contradicted_noise()),
        ),
        "EMP and ECMP (Chang et al. 2019)": (
            Row(
                "table 1",
                "Parameters of other methods",
                verdict="exact",
                ours="17.9% and 1.10% for EMP",
                command=f"{COUNTS}, {ZOO}",
            ),
            Row("table 2", "Special cases of one family", verdict="–", ours="definitions, which the methods follow"),
            Row(
                "table 3",
                "Parameters of an MLP, ResNet-18 and PyramidNet, and effective ensemble sizes",
                verdict="exact",
                ours="1,129,100; 13,779,912; 28,825,299; 5^100 and 5^29,800 networks for EMP and ECMP of the MLP",
                command=f"{COUNTS}, {ZOO}",
            ),
            Row("table 4", "ResNet-18 on ImageNet", ours=IMAGENET, command=paper_scale("emp-patches")),
            Row("table 5", "ImageNet-C", ours=IMAGENET, command=paper_scale("emp-patches")),
            of("tables 4 and 6, in small", "emp-patches", "EMP, tables 4 and 6, figures 4, 5 and 7"),
            of("tables 5, 7 and 8, in small", "emp-patches", "EMP, tables 5, 7 and 8"),
            of("tables 9 and 10", "emp-patches", "EMP, tables 9 and 10, figure 6"),
            of("table 11", "emp-patches", "EMP, table 11"),
            of("table 12", "emp-uci", "EMP, table 12"),
            of("table 13", "emp-uci", "EMP, table 13"),
            Row("figure 1", "The memory of GPUs", verdict="–", ours="not about networks"),
            Row("figure 2", "An illustration", verdict="–"),
            Row(
                "figure 3", "EMP's functions are finer than dropout's", ours="[`analyses.prior_functions`](analyses.md)"
            ),
            of("figures 4, 5, 7", "emp-patches", "EMP, tables 4 and 6, figures 4, 5 and 7"),
            of("figure 6", "emp-patches", "EMP, tables 9 and 10, figure 6"),
        ),
        "BayesAdapter (Deng et al. 2020)": (
            of("tables 1 and 2, performance", "adapter-quality", "BayesAdapter, tables 1 and 2, performance"),
            of(
                "tables 1 and 2, uncertainty",
                "adapter-ood",
                "BayesAdapter, tables 1 and 2, uncertainty; figures 3 and 4",
                "short trials at the paper's rates of 1e-4 and 1e-3 saw no effect of the regulariser, which works at "
                "larger ones",
            ),
            of("table 3", "adapter-faces", "BayesAdapter, table 3"),
            of("table 4", "adapter-quality", "BayesAdapter, table 4"),
            Row("table 5, accuracy", "Rank 1 is enough for PSE", ours=IMAGENET),
            Row(
                "table 5, parameters",
                "27.21M, 38.76M and 51.95M",
                verdict="exact",
                ours="27,206,852; 38,755,592; 51,954,152",
                command=ZOO,
            ),
            of("table 6", "adapter-ood", "BayesAdapter, table 6"),
            of("tables 7 and 8", "adapter-faces", "BayesAdapter, tables 7 and 8", "fakes of faces are not at hand"),
            Row("figures 1 and 2", "An illustration, and code", verdict="–"),
            of("figures 3 and 4", "adapter-ood", "BayesAdapter, tables 1 and 2, uncertainty; figures 3 and 4"),
            of("figure 5a", "adapter-quality", "BayesAdapter, figure 5a"),
            of("figure 5b", "adapter-quality", "BayesAdapter, figure 5b"),
            Row("figures 6 and 7", "Pictures", verdict="–", ours="[`analyses.kernel_moments`](analyses.md)"),
            Row(
                "section 4.4",
                "Sharing a draw makes gradients vary 100 times as much as a draw for each row",
                ours="see [gradient variance](../benchmarks/results/gradient_variance.md)",
            ),
        ),
    }


def paper_scale(name: str) -> str:
    """The command that runs an experiment at the paper's scale."""
    return f"`bayesify reproduce {name} --scale paper`"


def tables() -> str:
    """The tables, a section for each paper."""
    return "\n".join(line for title, rows in papers().items() for line in section(title, rows)) + "\n"


def section(title: str, rows: tuple[Row, ...]) -> Iterator[str]:
    """The table of one paper."""
    yield from (f"## {title}", "", f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER))
    for row in rows:
        yield f"| {' | '.join(cells(row))} |"
    yield ""


def cells(row: Row) -> tuple[str, ...]:
    """The cells of a row."""
    if not row.experiment:
        return row.place, row.claim, row.verdict, row.ours, row.command
    experiment = EXPERIMENTS[row.experiment]
    exhibit = next(each for each in experiment.exhibits if each.title == row.exhibit)
    results = known_results(experiment, "small", RESULTS)
    command = f"`bayesify reproduce {row.experiment}`"
    tests = [test for test in results.tests(exhibit) if test.seeds]
    if not tests:
        return row.place, exhibit.claim, NOT_RUN, row.ours, command
    page = f"../reproduction/results/{row.experiment}.md"
    ours = "; ".join(filter(None, [headline(results, tests, len(list(results.tests(exhibit)))), row.ours]))
    return row.place, exhibit.claim, f"[**{results.verdict(exhibit)}**]({page})", ours, command


def headline(results: Results, tests: list[PairedTest], every: int) -> str:
    """The first comparison, and how many of all hold or are contradicted."""
    first = max(tests, key=lambda test: test.seeds)
    expectation, column = first.expectation, results.experiment.column(first.expectation.measure)
    sides = [expectation.better, *([expectation.worse] if isinstance(expectation.worse, str) else [])]
    shown = ", ".join(
        f"{row} {figure(column, list(results.cell(first.setting, row, expectation.measure).values()))}" for row in sides
    )
    counts = {outcome: sum(test.outcome == outcome for test in tests) for outcome in ("holds", "contradicted")}
    return (
        f"{first.setting}, {first.seeds} seeds or splits, {column.head}: {shown}; of {every} comparisons "
        f"{counts['holds']} hold, {counts['contradicted']} are contradicted, {every - len(tests)} not run"
    )


def accounted_for(experiment: Experiment) -> list[Exhibit]:
    """The exhibits of an experiment that have a row."""
    named = {(row.experiment, row.exhibit) for rows in papers().values() for row in rows}
    return [exhibit for exhibit in experiment.exhibits if (experiment.name, exhibit.title) in named]
