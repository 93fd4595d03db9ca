"""The goals of the defaults, and whether the finished trials meet them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from benchmarks.defaults.candidates import METHODS
from benchmarks.defaults.differences import BETTER, SHOWN, TEMPERATURE, TITLES, Difference, Measures, Results, Setting
from benchmarks.defaults.trial import LONGER, PLAIN, Trial

UNKNOWN = "not measured"
CLOTHING = {"nll": 1.05, "ece": 0.025, "auroc": 0.03}
"""On clothing: NLL over temperature scaling's, ECE, and AUROC above temperature scaling's."""
NOISY_NLL, STEP_COST, LOST, MOVED = 1.02, 4.0, 0.05, 0.01
"""NLL over the plain network's on noisy digits; MeanField's step in plain steps; accuracy that may be lost; and how far
MeanField's posterior moves at least."""


@dataclass(frozen=True)
class Goal:
    """What was wanted, what was found, and whether that is enough."""

    wanted: str
    found: str
    is_met: bool
    is_all: bool = True
    """Whether everything was measured that the goal is about."""

    def __str__(self) -> str:
        verdict = ("met" if self.is_all else "met where measured") if self.is_met else "**not met**"
        verdict = "" if self.found == UNKNOWN else verdict
        return f"| {self.wanted} | {self.found} | {verdict} |"


def goals(results: Results, steps: dict[str, float]) -> list[Goal]:
    """All goals; `steps` is the cost of a step of MeanField on each network of the bench."""
    every, is_all = list(results.cells()), results.is_complete()
    found = []
    for reference, title in ((PLAIN, "before"), (LONGER, "after as many further epochs")):
        for measure in BETTER:
            some = [cell for cell in every if cell[2:4] == (reference, measure)]
            found.append(share(f"{TITLES[measure]} better than the plain network's {title}", some, is_all))
    found += on_clothing(results, Setting("fashion", "trained", "adam"))
    found += [noisy(results, Setting("digits", "trained", "adam")), learning(results), moving(results)]
    wanted = f"a step of MeanField at most {STEP_COST:g} plain steps on every network of the bench"
    return [*found, Goal(wanted, by_name(steps, "{:.2f}"), max(steps.values()) <= STEP_COST)]


def noisy(results: Results, setting: Setting) -> Goal:
    """The goal on small noisy data."""
    wanted = f"noisy digits: NLL at most {NOISY_NLL} times the plain network's"
    plain = results.mean(setting, PLAIN, "nll") if results.methods(setting) else 1.0
    ratios = {name: results.mean(setting, f"{name}()", "nll") / plain for name in results.methods(setting)}
    is_met = all(each <= NOISY_NLL for each in ratios.values())
    return goal(wanted, by_name(ratios, "{:.2f}"), is_met, len(ratios) == len(METHODS))


def goal(wanted: str, found: str, is_met: bool, is_all: bool = True) -> Goal:
    """A goal, of which nothing may be known."""
    return Goal(wanted, found or UNKNOWN, is_met and bool(found), is_all)


def share(wanted: str, cells: list[tuple[Setting, str, str, str, Difference]], is_all: bool) -> Goal:
    """In how many settings and methods a default is better; by its mean, and beyond chance."""
    better = [each for *_, measure, each in cells if BETTER[measure] * each.mean > 0]
    beyond = sum(each.is_shown for each in better)
    found = f"{len(better)} of {len(cells)} settings and methods, {beyond} of them beyond chance" if cells else ""
    return goal(wanted, found, len(better) == len(cells), is_all)


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
        found.append(goal(wanted, text, not worse, len(values) == len(METHODS) - 1))
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
    return Goal(wanted, found, not failed, results.is_complete())


def lost_by(ours: Measures, plain: Measures) -> float:
    """The accuracy that was lost, or for real targets, which are standardised, the share of the variance explained."""
    lost = plain["accuracy"] - ours["accuracy"] if "accuracy" in ours else ours["rmse"] ** 2 - plain["rmse"] ** 2
    return lost if math.isfinite(lost) else 1.0


def moving(results: Results) -> Goal:
    """Whether MeanField's standard deviations move in every loop."""
    by_setting: dict[str, list[float]] = {}
    for trial, record in results.records.items():
        if trial.method == "MeanField()" and "MeanField" in results.methods(setting := Setting.of(trial)):
            change = record["noise_after"]["scale"] / record["noise_before"]["scale"] - 1
            by_setting.setdefault(str(setting), []).append(change)
    means = {name: float(np.mean(values)) for name, values in by_setting.items()}
    shown = "; ".join(f"{name} {100 * value:+.1f}%" for name, value in means.items())
    wanted = f"MeanField's mean standard deviation moves by {100 * MOVED:g}% or more everywhere"
    return goal(wanted, shown, all(abs(each) >= MOVED for each in means.values()), results.is_complete())


def by_name(values: dict[str, float], form: str) -> str:
    """Values with their names, the smallest first."""
    return ", ".join(f"{name} {form.format(values[name])}" for name in sorted(values, key=lambda name: values[name]))
