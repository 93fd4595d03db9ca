"""Tables of finished trials: their measures, paired differences, and a ranking of candidates on validation rows."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from benchmarks.defaults import store
from benchmarks.defaults.measures import Rows, each_row, paired, with_temperature
from benchmarks.defaults.trial import LONGER, PLAIN, Trial

Setting = tuple[str, str, str]
"""Task, start and loop."""
SHOWN = ("accuracy", "rmse", "nll", "ece", "coverage", "epistemic", "auroc_entropy", "auroc_mi")
COMPARED = ("nll", "ece", "accuracy", "rmse", "auroc_entropy", "auroc_mi")
SCALED = " with temperature"


def settings(tasks: list[str] | None = None) -> dict[Setting, dict[str, list[Trial]]]:
    """The trials of each setting by their method, in the order of their seeds."""
    found: dict[Setting, dict[str, list[Trial]]] = defaultdict(lambda: defaultdict(list))
    for trial, record in sorted(store.STORE.records().items(), key=lambda each: each[0].seed):
        if "failed" not in record and (tasks is None or trial.task in tasks):
            found[trial.task, trial.start, trial.loop][trial.method].append(trial)
    return found


def measure_table(trials: dict[str, list[Trial]], part: str) -> str:
    """Means ± standard deviations over seeds of every method's measures, also with temperature, in Markdown."""
    done = store.STORE.records()
    rows: list[tuple[str, list[dict[str, float]]]] = []
    for method, some in trials.items():
        rows.append((method, [done[trial][part] for trial in some]))
        rows.append((method + SCALED, [done[trial][f"{part}_t"] for trial in some]))
    names = [name for name in SHOWN if name in rows[0][1][0]]
    lines = [f"| method | seeds | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for method, measures in rows:
        cells = [mean_and_deviation(name, [each[name] for each in measures]) for name in names]
        lines.append(f"| {method} | {len(measures)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_and_deviation(name: str, values: list[float]) -> str:
    """The cell of a table."""
    scale, digits = (100, 2) if name in ("accuracy", "ece", "coverage") else (1, 4)
    spread = f" ± {scale * np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * np.mean(values):.{digits}f}{spread}"


def difference_table(trials: dict[str, list[Trial]], part: str, against: str) -> str:
    """Paired differences of every method from one row of the table, with intervals, in Markdown."""
    reference = by_seed(trials.get(against.removesuffix(SCALED), []), part, against.endswith(SCALED))
    lines: list[str] = []
    for method, some in trials.items():
        ours = by_seed(some, part, False)
        seeds = sorted(ours.keys() & reference.keys())
        if not seeds or method == against:
            continue
        found = paired([ours[seed] for seed in seeds], [reference[seed] for seed in seeds])
        names = [name for name in COMPARED if name in found]
        if not lines:
            lines = [f"| minus {against} | seeds | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
        lines.append(f"| {method} | {len(seeds)} | {' | '.join(difference(name, *found[name]) for name in names)} |")
    return "\n".join(lines)


def difference(name: str, mean: float, low: float, high: float) -> str:
    """The cell of a table of differences."""
    scale, digits = (100, 2) if name in ("accuracy", "ece") else (1, 4)
    return f"{scale * mean:+.{digits}f} ({scale * low:+.{digits}f} to {scale * high:+.{digits}f})"


def by_seed(trials: list[Trial], part: str, is_scaled: bool) -> dict[int, Rows]:
    """What is known of each row, by seed; trials whose rows are not here are left out."""
    rows = {trial.seed: store.STORE.rows_of(trial) for trial in trials}
    return {
        seed: each_row(with_temperature(found) if is_scaled else found, part)
        for seed, found in rows.items()
        if found is not None
    }


def ranking(kind: str, tasks: list[str] | None = None) -> str:
    """The candidates of one method over all settings, by their validation NLL relative to the plain network's.

    The score of a setting is the mean over seeds of log(NLL / NLL of plain), or for real targets the difference of the
    two; candidates are ordered by their worst setting's score and shown with every setting's. Only settings that all
    candidates have been tried in count.
    """
    done, found = store.STORE.records(), settings(tasks)
    scores: dict[str, dict[Setting, float]] = defaultdict(dict)
    for setting, trials in found.items():
        plain = {trial.seed: done[trial]["validation"]["nll"] for trial in trials.get(PLAIN, [])}
        for method, some in trials.items():
            if method.startswith(kind) or method == LONGER:
                gains = [gain(done[t]["validation"], plain[t.seed]) for t in some if t.seed in plain]
                scores[method][setting] = float(np.mean(gains)) if gains else float("nan")
    ours = {method: each for method, each in scores.items() if method != LONGER}
    if not ours:
        return f"no finished trial of {kind}"
    common = [setting for setting in found if all(setting in each for each in ours.values())]
    order = sorted(scores, key=lambda method: max((scores[method].get(each, np.nan) for each in common), default=0))
    heads = " | ".join("/".join(setting) for setting in common)
    lines = [f"| log(NLL / plain) on validation | worst | mean | {heads} |", "|---" * (len(common) + 3) + "|"]
    for method in order:
        values = [scores[method].get(setting, float("nan")) for setting in common]
        cells = " | ".join(f"{value:+.3f}" for value in values)
        lines.append(f"| {method} | {max(values, default=0):+.3f} | {np.mean(values):+.3f} | {cells} |")
    return "\n".join(lines)


def gain(measures: dict[str, float], plain: float) -> float:
    """How much worse an NLL is than the plain network's."""
    is_regression = "rmse" in measures
    return measures["nll"] - plain if is_regression else float(np.log(measures["nll"] / plain))


def page(tasks: list[str] | None = None, part: str = "test", *, differences: bool = True) -> str:
    """Everything about some tasks, in Markdown."""
    texts: list[str] = []
    for setting, trials in settings(tasks).items():
        texts.append(f"## {', '.join(setting)}: {part}\n\n{measure_table(trials, part)}")
        if differences:
            against = (PLAIN, LONGER, PLAIN + SCALED)
            texts += [text for each in against if (text := difference_table(trials, part, each))]
    return "\n\n".join(texts)
