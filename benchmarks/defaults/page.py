"""The page benchmarks/results/defaults.md, from the committed lines alone."""

from __future__ import annotations

import json

from benchmarks.defaults import store
from benchmarks.defaults.differences import (
    BETTER,
    NOMINAL,
    SEEDS,
    SHOWN,
    STARTS,
    TITLES,
    Records,
    Results,
    Setting,
)
from benchmarks.defaults.goals import UNKNOWN, goals
from benchmarks.defaults.tasks import TASKS
from benchmarks.store import ROOT

SPEED = ROOT / "benchmarks" / "results" / "speed.json"
FASTER = " + posterior_lr="
RATES = (3, 10, 30)
"""What a posterior's rate is tried at, in multiples of the weights' rate."""


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
        "(the same seeds; 95% intervals over seeds). Methods with options in brackets were candidates for the defaults."
    )
    lines = [
        "| setting | method | " + " | ".join(f"× {rate}" for rate in RATES) + " |",
        "|---" * (2 + len(RATES)) + "|",
    ]
    every = results.failed + list(results.records)
    pairs = {(Setting.of(each), each.method.partition(FASTER)[0]) for each in every if FASTER in each.method}
    for setting, method in sorted(pairs, key=lambda pair: (list(TASKS).index(pair[0].task), str(pair[0]), pair[1])):
        cells = [rate_cell(results, setting, method, rate) for rate in RATES]
        if any(cell != "–" for cell in cells):
            lines.append(f"| {setting} | `{method.removesuffix('()')}` | {' | '.join(cells)} |")
    return f"{words}\n\n" + "\n".join(lines)


def rate_cell(results: Results, setting: Setting, method: str, rate: int) -> str:
    """The difference that a rate makes, or how many seeds diverged."""
    row = f"{method}{FASTER}{rate}"
    failed = sum(Setting.of(each) == setting and each.method == row for each in results.failed)
    if failed:
        return f"diverged with {failed} of {failed + len(results.by_seed(setting, row))} seeds"
    found = results.difference(setting, row, method, "nll", "validation")
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
