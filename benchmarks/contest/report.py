"""The page of the contest, the claims in the README and the table in docs/choose.md, from committed results alone.

Claims are of one method for each data set, the one with the lowest NLL on the rows to choose by. All measures are gone
through, and what is said is every difference whose 95% interval does not contain zero, for or against the method.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from benchmarks.contest.contestants import METHODS, TRIALS
from benchmarks.contest.results import LARGEST, SCALED, TEMPERATURE, Results
from benchmarks.contest.trial import STORE
from benchmarks.store import ROOT

FILE, README, GUIDE = STORE.lines.with_suffix(".json"), ROOT / "README.md", ROOT / "docs" / "choose.md"
WIDTH = 120
START, END = "<!-- written by make contest: start -->", "<!-- written by make contest: end -->"


@dataclass(frozen=True)
class Column:
    """A measure: its name, which sign is better, and how it is shown."""

    title: str
    better: int
    percent: bool = False

    def shown(self, value: float | None, sign: str = "") -> str:
        """A number of the table."""
        if value is None:
            return "–"
        return f"{100 * value:{sign}.2f}" if self.percent else f"{value:{sign}.4f}"

    def between(self, low: float, high: float) -> str:
        """An interval."""
        return f"{self.shown(low, '+')} to {self.shown(high, '+')}"


FIT = {
    "accuracy": Column("accuracy", 1, percent=True),
    "nll": Column("NLL", -1),
    "ece": Column("ECE", -1, percent=True),
    "aurc": Column("AURC", -1),
    "cnll": Column("cNLL", -1),
    "cece": Column("cECE", -1, percent=True),
}
SCORES = {"entropy": "entropy", "mi": "mutual information", "doubt": "doubt"}
DETECTION = {
    f"{measure} {place} {score}": Column(f"{title} {place}, {name}", better)
    for measure, title, better in (("auroc", "AUROC", 1), ("fpr95", "FPR95", -1))
    for place in ("near", "far")
    for score, name in SCORES.items()
}
WORDS = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "aurc": "AURC",
    "cnll": "NLL under corruptions",
    "cece": "ECE under corruptions",
    "auroc near mi": "AUROC on near data",
    "auroc far mi": "AUROC on far data",
}
"""What claims are made about; AUROC is by mutual information, or by entropy for a single network."""


# Claims.


@dataclass(frozen=True)
class Finding:
    """A difference whose interval does not contain zero."""

    measure: str
    is_better: bool
    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        column = (FIT | DETECTION)[self.measure]
        unit = " points" if column.percent else ""
        lower, upper = sorted((abs(self.low), abs(self.high)))
        more = "higher" if self.mean > 0 else "lower"
        return (
            f"{WORDS[self.measure]} {column.shown(abs(self.mean))}{unit} {more} "
            f"({column.shown(lower)} to {column.shown(upper)})"
        )


def findings(row: Results, reference: str) -> list[Finding]:
    """All that can be said of a row beside a reference, of the measures that claims are made about."""
    found = []
    for measure in WORDS:
        mean, low, high = row["against"].get(reference, {}).get(measure, (0.0, 0.0, 0.0))
        if low > 0 or high < 0:
            is_better = (FIT | DETECTION)[measure].better * mean > 0
            found.append(Finding(measure, is_better, mean, low, high))
    return found


def featured(found: Results) -> str | None:
    """The method, with temperature, that has the lowest NLL on the rows to choose by."""
    ours = {name: row["tuning_loss"] for name, row in found["rows"].items() if name.removesuffix(SCALED) in METHODS}
    ours = {name: loss for name, loss in ours.items() if name.endswith(SCALED)}
    return min(ours, key=lambda name: ours[name]) if ours else None


def claims(results: Results) -> str:
    """What the README says: for each data set what the method gains and loses; nothing where nothing was shown."""
    lines = []
    for found in results.values():
        name = featured(found)
        if name is None:
            continue
        row, parts = found["rows"][name], []
        for reference, words in ((TEMPERATURE, "temperature scaling"), (LARGEST, "a deep ensemble of 4")):
            said = findings(row, reference)
            for is_better, verb in ((True, "gains on"), (False, "loses to")):
                some = [str(each) for each in said if each.is_better == is_better]
                if some:
                    parts.append(f"{verb} {words}: {', '.join(some)}")
        if parts:
            cost = f"{100 * row['added']:.1f}% more parameters" if row["added"] else "no more parameters"
            method = f"`{name.removesuffix(SCALED)}`"
            text = f"- {found['title']}: {method} with temperature ({cost}) {'; '.join(parts)}."
            lines.append(" ".join([text, *familiarity(found["rows"], name)]))
    if not lines:
        return ""
    words = (
        "What a Bayesian network is worth beside temperature scaling and a deep ensemble, which has a temperature, "
        "too, all tuned alike. Shown is every difference whose 95% interval over rows and seeds leaves out zero, from "
        "the [contest](benchmarks/results/contest.md); AUROC is by mutual information, or by entropy for one network:"
    )
    return "\n".join([fill(words, WIDTH), "", *(fill(line, WIDTH, subsequent_indent="  ") for line in lines)])


def with_claims(readme: str, results: Results) -> str:
    """The README with the claims between their two marks."""
    return marked(readme, claims(results))


def with_summary(guide: str, results: Results) -> str:
    """The page on choosing with the table between its two marks."""
    return marked(guide, summary(results))


def marked(text: str, inside: str) -> str:
    """A text with something else between its two marks."""
    whole = "\n".join([START, inside, END] if inside else [START, END])
    return re.sub(f"{re.escape(START)}.*?{re.escape(END)}", lambda _: whole, text, flags=re.DOTALL)


def summary(results: Results) -> str:
    """For each data set temperature scaling, the method that claims are of, and the largest deep ensemble."""
    heads = ("data", "", "added", "NLL", "ECE", "cNLL", "AUROC near / far", "with familiarity")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for found in results.values():
        names = [name for name in (TEMPERATURE, featured(found), LARGEST) if name in found["rows"]]
        for place, name in enumerate(names):
            row = found["rows"][name]
            cells = [beyond_chance(row, measure) for measure in ("nll", "ece", "cnll")]
            own = "mi" if "auroc near mi" in row["means"] else "entropy"
            cells += [
                " / ".join(beyond_chance(row, f"auroc {data} {score}") for data in ("near", "far"))
                for score in (own, "doubt")
            ]
            title = f"{found['title']}, {found['seeds']} seeds" if place == 0 else ""
            lines.append(f"| {title} | {label(name)} | {100 * row['added']:.0f}% | {' | '.join(cells)} |")
    return "\n".join(lines)


def beyond_chance(row: Results, measure: str) -> str:
    """A mean, in bold if its difference from temperature scaling's has an interval that leaves out zero."""
    _, low, high = row["against"].get(TEMPERATURE, {}).get(measure, (0.0, 0.0, 0.0))
    text = (FIT | DETECTION)[measure].shown(row["means"].get(measure))
    return f"**{text}**" if low > 0 or high < 0 else text


# The page.


def page(results: Results) -> str:
    """The whole page in Markdown."""
    words = (
        "# The contest\n\nWritten by `make contest` (`python -m benchmarks.contest`), which describes data, networks "
        f"and contestants. Every contestant had {TRIALS} options to choose from, by its NLL on rows to choose by, with "
        "a seed of its own; test rows are for showing. (SWAG and Laplace choose between plain networks besides; one "
        "that others fine-tune is as it is.) "
        "Figures are means over seeds, differences have 95% bootstrap intervals over rows and seeds and are bold where "
        "these leave out zero; accuracy and ECE are in percent. cNLL and cECE are under 15 corruptions at severities "
        "1, 3 and 5. Other data is detected by entropy, by mutual information, or by doubt, which adds familiarity to "
        "the entropy and is there for plain networks, too. Training and the prediction of 2,000 rows are "
        "in seconds of CPU time on one core, and in multiples of the plain network's; training before fine-tuning is "
        "included, unless weights were published."
    )
    return "\n\n".join([words, sceptic(results), *(section(found) for found in results.values())]) + "\n"


def sceptic(results: Results) -> str:
    """Where a Bayesian network pays, where temperature scaling is enough, and where to buy an ensemble."""
    lines = ["## For sceptics"]
    for found in results.values():
        name = featured(found)
        if name is None:
            continue
        row = found["rows"][name]
        method = f"`{name.removesuffix(SCALED)}`"
        parts = []
        beside, ensemble = (findings(row, reference) for reference in (TEMPERATURE, LARGEST))
        gains = [str(each) for each in beside if each.is_better]
        losses = [str(each) for each in beside if not each.is_better]
        missing = [WORDS[m] for m in WORDS if m in row["means"] and m not in {each.measure for each in beside}]
        parts.append(
            f"A Bayesian network pays: beside temperature scaling, {method} with temperature has {', '.join(gains)}."
            if gains
            else f"Temperature scaling is enough: {method} with temperature is better in nothing that was measured."
        )
        if losses:
            parts.append(f"It is worse in this: {', '.join(losses)}.")
        if gains and missing:
            parts.append(f"Temperature scaling is enough for {', '.join(missing)}, where no difference was shown.")
        better = [str(each) for each in ensemble if not each.is_better]
        if LARGEST in row["against"]:
            parts.append(
                f"Buy a deep ensemble of 4 where it is ahead: beside it, {method} has {', '.join(better)}."
                if better
                else f"A deep ensemble of 4 was better than {method} in nothing that was measured."
            )
            ahead = [str(each) for each in ensemble if each.is_better]
            parts += [f"{method} is ahead of the ensemble: {', '.join(ahead)}."] if ahead else []
        parts += familiarity(found["rows"], name)
        lines.append(f"**{found['title']}.** {' '.join(parts)}")
    return "\n\n".join(lines)


def familiarity(rows: Results, name: str) -> list[str]:
    """What familiarity detects on the plain network, and whether the method adds anything to it."""
    parts = []
    for place in ("near", "far"):
        measure = f"auroc {place} doubt"
        if measure not in rows.get(TEMPERATURE, {}).get("means", {}) or measure not in rows[name]["means"]:
            continue
        plain, ours = (DETECTION[measure].shown(rows[each]["means"][measure]) for each in (TEMPERATURE, name))
        _, low, high = rows[name]["against"][TEMPERATURE][measure]
        words = "beyond chance" if low > 0 or high < 0 else "no difference was shown"
        parts.append(f"{plain} on {place} data ({ours} with {label(name)}: {words})")
    return [f"With familiarity the plain network has AUROC {' and '.join(parts)}."] if parts else []


def section(found: Results) -> str:
    """The tables of one data set."""
    rows = found["rows"]
    texts = [f"## {found['title']}, {found['seeds']} seeds"]
    for columns, has_costs in ((FIT, True), (DETECTION, False)):
        present = {name: column for name, column in columns.items() if any(name in r["means"] for r in rows.values())}
        if not present:
            continue
        texts.append(measure_table(rows, present, has_costs))
        for reference in (TEMPERATURE, LARGEST):
            shown = {name: column for name, column in present.items() if not name.startswith("fpr95")}
            if reference in rows:
                texts.append(difference_table(rows, shown, reference))
    texts.append(options_table(rows))
    return "\n\n".join(texts)


def measure_table(rows: Results, columns: dict[str, Column], has_costs: bool) -> str:
    """Means over seeds, and costs."""
    heads = [column.title for column in columns.values()]
    heads += ["added parameters", "training", "prediction"] if has_costs else []
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, row in rows.items():
        cells = [column.shown(row["means"].get(measure)) for measure, column in columns.items()]
        if has_costs:
            cells += [f"{100 * row['added']:.1f}%", *(cost_of(row, kind) for kind in ("train", "predict"))]
        lines.append(f"| {label(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cost_of(row: Results, kind: str) -> str:
    """CPU seconds, also in multiples of the plain network's unless its weights were published."""
    ratio = "" if row[kind] is None else f" (× {row[kind]:.1f})"
    return f"{row[f'{kind}_seconds']:.2g} s{ratio}"


def difference_table(rows: Results, columns: dict[str, Column], reference: str) -> str:
    """Differences from one row with intervals; those that leave out zero are bold."""
    heads = [column.title for column in columns.values()]
    lines = [f"| minus {label(reference)} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, row in rows.items():
        if reference not in row["against"]:
            continue
        cells = []
        for measure, column in columns.items():
            if measure not in row["against"][reference]:
                cells.append("–")
                continue
            mean, low, high = row["against"][reference][measure]
            text = f"{column.shown(mean, '+')} ({column.between(low, high)})"
            cells.append(f"**{text}**" if low > 0 or high < 0 else text)
        lines.append(f"| {label(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def options_table(rows: Results) -> str:
    """What was chosen."""
    lines = ["| chosen | options |", "|---|---|"]
    for name, row in rows.items():
        each = [", ".join(f"{key}={value:g}" for key, value in some.items()) or "–" for some in row["options"]]
        lines.append(f"| {label(name)} | {'; '.join(dict.fromkeys(each))} |")
    return "\n".join(lines)


def label(name: str) -> str:
    """The name of a row.

    >>> label("plain + temperature"), label("Rank1")
    ('temperature scaling', '`Rank1`')
    """
    if name == TEMPERATURE:
        return "temperature scaling"
    base = name.removesuffix(SCALED)
    return name.replace(base, f"`{base}`") if base in METHODS else name


def stored(file: Path = FILE) -> Results:
    """The committed results by data set; none if there are none."""
    found: Results = json.loads(file.read_text()) if file.exists() else {}
    return found


def write(results: Results, file: Path = FILE, readme: Path = README, guide: Path = GUIDE) -> None:
    """Write results, page, claims and the table of the page on choosing."""
    file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    file.with_suffix(".md").write_text(page(results))
    readme.write_text(with_claims(readme.read_text(), results))
    guide.write_text(with_summary(guide.read_text(), results))
