"""The page benchmarks/results/defaults.md, from the committed lines alone: defaults beside what people do instead.

Every method has its default options. Differences are paired by seed; their intervals are Student's, over seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import t as student

from benchmarks.defaults import store
from benchmarks.defaults.candidates import METHODS
from benchmarks.defaults.tasks import TASKS
from benchmarks.defaults.trial import LONGER, LOOPS, PLAIN, Trial
from benchmarks.store import ROOT

SPEED = ROOT / "benchmarks" / "results" / "speed.json"
SEEDS = 3
"""How many seeds a figure needs."""
FASTER = " + posterior_lr={}"
RATES = (3, 10, 30)
"""What a posterior's rate is tried at, in multiples of the weights' rate."""
TEMPERATURE, UNKNOWN = "temperature scaling", "not measured"
NOMINAL = 0.9
"""The coverage that intervals of real targets should have."""
CLOTHING = {"nll": 1.05, "ece": 0.025, "auroc": 0.03}
"""The goals on clothing: NLL over temperature scaling's, ECE, and AUROC above temperature scaling's."""
NOISY_NLL, STEP_COST, LOST, MOVED = 1.02, 4.0, 0.05, 0.01
"""Other goals: NLL over the plain network's on noisy digits; MeanField's step in plain steps; accuracy that may go;
how far MeanField's posterior moves at least."""
BETTER = {"nll": -1, "ece": -1, "auroc": 1}
"""Which sign of a difference is better; AUROC is by entropy (or standard deviation), which every network has."""
SHOWN = {"nll": (1, 3), "ece": (100, 1), "auroc": (1, 3), "mi": (1, 3)}
"""A factor and the number of digits."""
TITLES = {"nll": "NLL", "ece": "ECE", "auroc": "AUROC"}
STARTS = {"trained": "from trained weights", "scratch": "from scratch"}
Records = dict[Trial, dict[str, Any]]
Measures = dict[str, float]


@dataclass(frozen=True)
class Setting:
    """A task, a start and a loop."""

    task: str
    start: str
    loop: str

    @classmethod
    def of(cls, trial: Trial) -> Setting:
        """The setting of a trial."""
        return cls(trial.task, trial.start, trial.loop)

    def __str__(self) -> str:
        return f"{self.task}, {STARTS[self.start]}, {self.loop}"

    @property
    def references(self) -> list[str]:
        """What a method is compared with: from scratch, the plain network has all epochs."""
        return [PLAIN, LONGER, TEMPERATURE] if self.start == "trained" else [PLAIN, TEMPERATURE]


@dataclass(frozen=True)
class Difference:
    """A mean over seeds and its 95% interval; infinite where something is not finite."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Difference:
        """Student's interval around the mean of some values.

        >>> Difference.of([1.0, 2.0, 3.0]).low  # 4.303 standard errors of 1 / √3 below 2
        -0.484...
        """
        mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
        half = float(student.ppf(0.975, len(values) - 1)) * error
        return cls(mean, mean - half, mean + half)

    @property
    def is_shown(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0

    def shown(self, measure: str) -> str:
        """The cell of a table, bold if the interval leaves out zero."""
        scale, digits = SHOWN[measure]
        mean, low, high = (f"{scale * each:+.{digits}f}" for each in (self.mean, self.low, self.high))
        return f"**{mean} ({low} to {high})**" if self.is_shown else f"{mean} ({low} to {high})"


def measures_of(record: dict[str, Any], part: str) -> Measures:
    """NLL, calibration and detection of a trial; for real targets the calibration error is that of 90% intervals."""
    found = record[part]
    ece = found["ece"] if "ece" in found else abs(found["coverage"] - NOMINAL)
    return {"nll": found["nll"], "ece": ece, "auroc": found["auroc_entropy"], "mi": found["auroc_mi"]}


class Results:
    """Finished trials by setting, method and seed."""

    def __init__(self, records: Records) -> None:
        self.records = {each: record for each, record in records.items() if "failed" not in record}
        self.failed = sorted((each for each in records if each not in self.records), key=str)
        self.rows: dict[tuple[Setting, str], dict[int, dict[str, Any]]] = {}
        for each, record in self.records.items():
            self.rows.setdefault((Setting.of(each), each.method), {})[each.seed] = record

    def settings(self) -> list[Setting]:
        """Those in which a method was run with its defaults and enough seeds, in the order of the tasks."""
        every = [Setting(task, start, loop) for task in TASKS for start in STARTS for loop in LOOPS]
        return [each for each in every if self.methods(each)]

    def methods(self, setting: Setting) -> list[str]:
        """The methods that were run there with enough seeds."""
        return [name for name in METHODS if len(self.rows.get((setting, f"{name}()"), ())) >= SEEDS]

    def by_seed(self, setting: Setting, row: str, part: str = "test") -> dict[int, Measures]:
        """The measures of each seed of a row: a method string, or what methods are compared with."""
        method, part = (PLAIN, f"{part}_t") if row == TEMPERATURE else (row, part)
        return {seed: measures_of(each, part) for seed, each in self.rows.get((setting, method), {}).items()}

    def mean(self, setting: Setting, row: str, measure: str) -> float:
        """The mean over seeds."""
        return float(np.mean([each[measure] for each in self.by_seed(setting, row).values()]))

    def difference(
        self, setting: Setting, row: str, reference: str, measure: str, part: str = "test"
    ) -> Difference | None:
        """A row minus another one, over the seeds that both have."""
        ours, theirs = self.by_seed(setting, row, part), self.by_seed(setting, reference, part)
        values = [ours[seed][measure] - theirs[seed][measure] for seed in sorted(ours.keys() & theirs.keys())]
        return Difference.of(values) if len(values) >= SEEDS else None

    def cells(self) -> Iterator[tuple[Setting, str, str, str, Difference]]:
        """Every difference of a method with defaults: setting, name, reference, measure."""
        for setting in self.settings():
            for name in self.methods(setting):
                for reference in setting.references:
                    for measure in BETTER:
                        if (found := self.difference(setting, f"{name}()", reference, measure)) is not None:
                            yield setting, name, reference, measure, found


# Goals.


@dataclass(frozen=True)
class Goal:
    """What was wanted, what was found, and whether that is enough."""

    wanted: str
    found: str
    is_met: bool

    def __str__(self) -> str:
        verdict = "" if self.found == UNKNOWN else "met" if self.is_met else "**not met**"
        return f"| {self.wanted} | {self.found} | {verdict} |"


def goals(results: Results, steps: dict[str, float]) -> list[Goal]:
    """All goals; `steps` is the cost of a step of MeanField on each network of the bench."""
    every = list(results.cells())
    found = []
    for reference, title in ((PLAIN, "before"), (LONGER, "after as many further epochs")):
        for measure in BETTER:
            some = [cell for cell in every if cell[2:4] == (reference, measure)]
            found.append(share(f"{TITLES[measure]} better than the plain network's {title}", some))
    found += on_clothing(results, Setting("fashion", "trained", "adam"))
    found += [noisy(results, Setting("digits", "trained", "adam")), learning(results), moving(results)]
    wanted = f"a step of MeanField at most {STEP_COST:g} plain steps on every network of the bench"
    return [*found, Goal(wanted, by_name(steps, "{:.2f}"), max(steps.values()) <= STEP_COST)]


def noisy(results: Results, setting: Setting) -> Goal:
    """The goal on small noisy data."""
    wanted = f"noisy digits: NLL at most {NOISY_NLL} times the plain network's"
    plain = results.mean(setting, PLAIN, "nll") if results.methods(setting) else 1.0
    ratios = {name: results.mean(setting, f"{name}()", "nll") / plain for name in results.methods(setting)}
    return goal(wanted, by_name(ratios, "{:.2f}"), all(each <= NOISY_NLL for each in ratios.values()))


def goal(wanted: str, found: str, is_met: bool) -> Goal:
    """A goal, of which nothing may be known."""
    return Goal(wanted, found or UNKNOWN, is_met and bool(found))


def share(wanted: str, cells: list[tuple[Setting, str, str, str, Difference]]) -> Goal:
    """In how many settings and methods a default is better; by its mean, and beyond chance."""
    better = [each for *_, measure, each in cells if BETTER[measure] * each.mean > 0]
    beyond = sum(each.is_shown for each in better)
    found = f"{len(better)} of {len(cells)} settings and methods, {beyond} of them beyond chance" if cells else ""
    return goal(wanted, found, len(better) == len(cells))


def on_clothing(results: Results, setting: Setting) -> list[Goal]:
    """The goals for Rank1, and for every other method, on clothing."""
    names = results.methods(setting)
    found = rank1_on_clothing(results, setting) if "Rank1" in names else []
    for measure, sign in BETTER.items():
        values = {name: results.mean(setting, f"{name}()", measure) for name in names if name != "Rank1"}
        plain = results.mean(setting, PLAIN, measure) if values else 0.0
        scale, digits = SHOWN[measure]
        worse = {name: scale * value for name, value in values.items() if sign * (value - plain) <= 0}
        text = f"{len(values) - len(worse)} of {len(values)} methods" if values else ""
        if worse:
            text += f"; not {by_name(worse, f'{{:.{digits}f}}')}, where plain has {scale * plain:.{digits}f}"
        wanted = f"clothing, every other method: {TITLES[measure]} better than the plain network's"
        found.append(goal(wanted, text, not worse))
    return found


def rank1_on_clothing(results: Results, setting: Setting) -> list[Goal]:
    """The goals for Rank1 beside temperature scaling."""
    ours, theirs = (results.by_seed(setting, row) for row in ("Rank1()", TEMPERATURE))
    ratio = Difference.of([ours[seed]["nll"] / theirs[seed]["nll"] for seed in sorted(ours.keys() & theirs.keys())])
    ece, aurocs = results.mean(setting, "Rank1()", "ece"), results.mean(setting, TEMPERATURE, "auroc")
    gains = [results.mean(setting, "Rank1()", score) - aurocs for score in ("auroc", "mi")]
    return [
        Goal(
            f"clothing, Rank1: NLL at most {CLOTHING['nll']} times temperature scaling's",
            f"{ratio.mean:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
            ratio.mean <= CLOTHING["nll"],
        ),
        Goal(f"clothing, Rank1: ECE at most {100 * CLOTHING['ece']}%", f"{100 * ece:.1f}%", ece <= CLOTHING["ece"]),
        Goal(
            f"clothing, Rank1: AUROC on MNIST by entropy at least {CLOTHING['auroc']} above temperature scaling's",
            "{:+.3f}; by mutual information {:+.3f}".format(*gains),
            gains[0] >= CLOTHING["auroc"],
        ),
    ]


def learning(results: Results) -> Goal:
    """Whether every method learns, from scratch and from trained weights, with every loop."""
    diverged = [each for each in results.failed if each.method.removesuffix("()") in METHODS]
    failed = [f"{each.method} in {Setting.of(each)} (seed {each.seed}: diverged)" for each in diverged]
    worst, trials = 0.0, len(failed)
    for trial, record in results.records.items():
        setting = Setting.of(trial)
        plain = results.records.get(Trial(trial.task, trial.start, trial.loop, PLAIN, trial.seed))
        if trial.method.removesuffix("()") not in METHODS or plain is None or setting not in results.settings():
            continue
        trials += 1
        lost = lost_by(record["test"], plain["test"])
        worst = max(worst, lost)
        if not lost <= LOST:
            failed.append(f"{trial.method} in {setting} (seed {trial.seed}: {100 * lost:.1f})")
    found = f"{100 * worst:.1f} points at most in {trials} trials" + (f": {', '.join(failed)}" if failed else "")
    wanted = f"nothing fails to learn: at most {100 * LOST:g} points of accuracy (or of R²) below the plain network"
    return Goal(wanted, found, not failed)


def lost_by(ours: Measures, plain: Measures) -> float:
    """The accuracy that was lost, or for real targets, which are standardised, the share of the variance explained."""
    lost = plain["accuracy"] - ours["accuracy"] if "accuracy" in ours else ours["rmse"] ** 2 - plain["rmse"] ** 2
    return lost if math.isfinite(lost) else 1.0


def moving(results: Results) -> Goal:
    """Whether MeanField's standard deviations move in every loop."""
    by_setting: dict[str, list[float]] = {}
    for trial, record in results.records.items():
        if trial.method == "MeanField()":
            setting = Setting.of(trial)
            change = record["noise_after"]["scale"] / record["noise_before"]["scale"] - 1
            by_setting.setdefault(str(setting), []).append(change)
    means = {name: float(np.mean(values)) for name, values in by_setting.items()}
    shown = "; ".join(f"{name} {100 * value:+.1f}%" for name, value in means.items())
    wanted = f"MeanField's mean standard deviation moves by {100 * MOVED:g}% or more everywhere"
    return goal(wanted, shown, all(abs(each) >= MOVED for each in means.values()))


def by_name(values: dict[str, float], form: str) -> str:
    """Values with their names, the smallest first."""
    return ", ".join(f"{name} {form.format(values[name])}" for name in sorted(values, key=lambda name: values[name]))


# The page.


def page(records: Records, steps: dict[str, float]) -> str:
    """The whole page in Markdown."""
    results = Results(records)
    words = (
        "# Defaults by evidence\n\nWritten by `python -m benchmarks.defaults page` from the lines of defaults.jsonl. "
        "Tasks, networks and loops are described in benchmarks/defaults: the loop is one that people write, with one "
        "group of parameters, Adam or AdamW at 1e-3 or SGD at 1e-2. Every method has its default options, chosen on "
        "validation rows; all figures but those on learning rates are of test rows. Differences are paired by seed, "
        "with Student's 95% intervals over the seeds, and bold where these leave out zero: test rows are the same for "
        "all seeds, so that an interval says what other training runs would give on these rows. NLL and ECE are better "
        "if lower, AUROC (of other data, by entropy) if higher; ECE is in percent. For real targets the ECE is the "
        f"distance of the 90% intervals' coverage from {NOMINAL:.0%}, and temperature scaling the best width of "
        "intervals on validation rows."
    )
    wanted = ["| goal | found | |", "|---|---|---|", *map(str, goals(results, steps))]
    sections = ["## Goals\n\n" + "\n".join(wanted), "## What was measured\n\n" + measured(results)]
    sections.append("## Where defaults are not better\n\n" + not_better(results))
    sections.append("## The learning rate of the posterior\n\n" + rates(results))
    sections += [f"## {setting}\n\n{tables(results, setting)}" for setting in results.settings()]
    return "\n\n".join([words, *sections]) + "\n"


def measured(results: Results) -> str:
    """Which methods were run with enough seeds."""
    lines = [f"With {SEEDS} seeds or more; of all other settings and methods the page says nothing.", ""]
    lines += ["| task | start | loop | methods |", "|---|---|---|---|"]
    for task in TASKS:
        for each in [each for each in results.settings() if each.task == task] or [None]:
            names = ", ".join(f"`{name}`" for name in results.methods(each)) if each else UNKNOWN
            place = f"{STARTS[each.start]} | {each.loop}" if each else "– | –"
            lines.append(f"| {TASKS[task].title} (`{task}`) | {place} | {names} |")
    return "\n".join(lines)


def not_better(results: Results) -> str:
    """For each setting and measure, the methods that are worse, and those of which neither was shown."""
    found: dict[tuple[Setting, str, str], dict[bool, list[str]]] = {}
    for setting, name, reference, measure, each in results.cells():
        kinds = found.setdefault((setting, reference, measure), {True: [], False: []})
        if not each.is_shown or BETTER[measure] * each.mean < 0:
            kinds[each.is_shown].append(f"`{name}`")
    lines = ["| setting | beside | measure | worse | no difference shown |", "|---|---|---|---|---|"]
    for (setting, reference, measure), kinds in found.items():
        if any(kinds.values()):
            cells = [", ".join(kinds[is_shown]) or "–" for is_shown in (True, False)]
            lines.append(f"| {setting} | {reference} | {TITLES[measure]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rates(results: Results) -> str:
    """What a larger rate for the posterior changes, on validation rows."""
    words = (
        "Validation NLL with the posterior at some multiple of the weights' rate, minus that with one rate for all "
        "(the same seeds; 95% intervals over seeds)."
    )
    lines = [
        "| setting | method | " + " | ".join(f"× {rate}" for rate in RATES) + " |",
        "|---" * (2 + len(RATES)) + "|",
    ]
    for setting in results.settings():
        for name in results.methods(setting):
            cells = [rate_cell(results, setting, name, rate) for rate in RATES]
            if any(cell != "–" for cell in cells):
                lines.append(f"| {setting} | `{name}` | {' | '.join(cells)} |")
    return f"{words}\n\n" + "\n".join(lines)


def rate_cell(results: Results, setting: Setting, name: str, rate: int) -> str:
    """The difference that a rate makes, or how many seeds diverged."""
    row = f"{name}()" + FASTER.format(rate)
    failed = sum(Setting.of(each) == setting and each.method == row for each in results.failed)
    if failed:
        return f"diverged with {failed} of {failed + len(results.by_seed(setting, row))} seeds"
    found = results.difference(setting, row, f"{name}()", "nll", "validation")
    return "–" if found is None else found.shown("nll")


def tables(results: Results, setting: Setting) -> str:
    """The measures of one setting, and a table of differences for each."""
    rows = {name: name for name in setting.references} | {f"`{name}`": f"{name}()" for name in results.methods(setting)}
    lines = ["| | seeds | NLL | ECE | AUROC by entropy | by mutual information |", "|---" * 6 + "|"]
    for title, row in rows.items():
        count = len(results.by_seed(setting, row))
        cells = [f"{scale * results.mean(setting, row, name):.{digits}f}" for name, (scale, digits) in SHOWN.items()]
        lines.append(f"| {title} | {count} | {' | '.join(cells)} |")
    texts = ["\n".join(lines)]
    for measure, title in TITLES.items():
        lines = [f"| {title} minus that of | {' | '.join(setting.references)} |"]
        lines.append("|---" * (1 + len(setting.references)) + "|")
        for name in results.methods(setting):
            found = [results.difference(setting, f"{name}()", each, measure) for each in setting.references]
            lines.append(f"| `{name}` | {' | '.join('–' if each is None else each.shown(measure) for each in found)} |")
        texts.append("\n".join(lines))
    return "\n\n".join(texts)


def step_costs() -> dict[str, float]:
    """The cost of a training step of MeanField as it is, in plain steps, on each network of the bench."""
    rows = json.loads(SPEED.read_text())["rows"]
    return {
        row["case"]: row["value"]
        for row in rows
        if row["measure"] == "step" and row["library"] == "bayesify" and row["method"] == "MeanField flipout"
    }


def committed() -> str:
    """The page of the committed lines."""
    return page(store.STORE.records(), step_costs())
