"""What the demo found: two tables and a few sentences for the terminal, a picture and a page."""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from textwrap import wrap
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from rich.table import Table as RichTable
from torch import Tensor

import bayesify as by
from bayesify.lab.comparison.chance import paired_difference
from bayesify.lab.familiarity import reasons
from bayesify.lab.metrics import accuracy, auroc, ece, nll
from bayesify.lab.report.verdict import join_words
from bayesify.prediction.results import Classification

PLAIN, RANK1 = "plain network", "Rank1"
ASKED, SURE = 0.05, 0.9
"""The share of validation digits that each asks a person about, and the probability above which one is sure."""
SCORES = {"entropy": "entropy", "epistemic": "mutual information", "doubt": "with familiarity"}
"""By what a model asks a person. The doubt combines entropy and familiarity."""
SHOWN = {"letters": 4, "digits on their side": 2, "photographs": 1, "noise": 1}
RED, GREEN, BLUE, GREY = "#b3261e", "#1b6e3c", "#1a5f9a", "#555555"


@dataclass(frozen=True)
class Fold:
    """One split of the digits: the images, what they are, and what each model predicts for them.

    The images are `validation` and `test`, whose `labels` are known, and other images by their kind.
    """

    images: Mapping[str, Tensor]
    names: Mapping[str, Sequence[str]]
    labels: Tensor
    predictions: Mapping[str, Mapping[str, Classification]]
    parameters: Mapping[str, int]
    familiarity: by.Familiarity

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in self.images if kind not in ("validation", "test")]

    def quality(self, model: str) -> dict[str, float]:
        """How good a model's probabilities are, and how often it is sure of other images."""
        p, y = self.predictions[model]["test"], self.labels
        sure = {kind: 100 * share(self.predictions[model][kind].confidence > SURE) for kind in self.kinds}
        return {
            "accuracy": 100 * float(accuracy(p.probs, y)),
            "nll": float(nll(p.log_probs, y)),
            "ece": 100 * float(ece(p.probs, y)),
            "others": fmean(sure.values()),
            **sure,
            "parameters": self.parameters[model],
        }

    def threshold(self, model: str, score: str) -> float:
        """The value above which a model asks a person."""
        return float(getattr(self.predictions[model]["validation"], score).quantile(1 - ASKED))

    def asking(self, model: str, score: str) -> dict[str, float]:
        """How often a model asks a person, if it does so by a score, and how well the score detects other images."""
        limit, p = self.threshold(model, score), self.predictions[model]
        values = {part: getattr(p[part], score) for part in ("test", *self.kinds)}
        answered = {kind: 100 * share(values[kind] <= limit) for kind in self.kinds}
        is_wrong = (p["test"].label != self.labels) & (values["test"] <= limit)
        areas = {f"auroc_{kind}": 100 * float(auroc(values["test"], values[kind])) for kind in self.kinds}
        asked = 100 * share(values["test"] > limit)
        return {"asked": asked, "wrong": 100 * share(is_wrong), "others": fmean(answered.values()), **answered, **areas}


@dataclass(frozen=True)
class Column:
    """One measure in a table."""

    key: str
    head: str
    best: Any = None
    """`min`, `max` or None."""
    digits: int = 1
    is_detail: bool = False
    """Whether it is of one kind of images."""


@dataclass(frozen=True)
class Table:
    """Models in rows, with the value of each measure in every fold. The first row is what others are compared with."""

    title: str
    columns: Sequence[Column]
    rows: Mapping[str, Sequence[Mapping[str, float]]]

    def values(self, row: str, key: str) -> list[float]:
        return [values[key] for values in self.rows[row]]

    def mean(self, row: str, key: str) -> float:
        return fmean(self.values(row, key))

    def cell(self, row: str, column: Column) -> str:
        """The mean and standard deviation over folds, and whether it is better or worse than the first row's."""
        values = self.values(row, column.key)
        spread = f"±{stdev(values):.{column.digits}f}" if column.best and len(values) > 1 else ""
        first = next(iter(self.rows))
        mark = " ✓" if self.is_better(row, first, column) else " ✗" if self.is_better(first, row, column) else ""
        return f"{fmean(values):,.{column.digits}f}{spread}{mark}"

    def is_better(self, row: str, other: str, column: Column) -> bool:
        """Whether a row is better than another beyond chance."""
        mean, margin = paired_difference(self.values(row, column.key), self.values(other, column.key))
        return column.best is not None and abs(mean) > margin and (mean < 0) == (column.best is min)

    def better_by(self, row: str, other: str) -> list[str]:
        """The measures by which a row is better than another beyond chance."""
        return [column.head.removesuffix(" %") for column in self.columns if self.is_better(row, other, column)]

    @property
    def short(self) -> Table:
        """The same without the columns of single kinds of images."""
        return replace(self, columns=[column for column in self.columns if not column.is_detail])


@dataclass(frozen=True)
class Card:
    """An image with the answers of the plain and of the Bayesian network."""

    image: Tensor
    name: str
    plain: str
    is_plain_right: bool
    bayesian: str
    why: str
    is_bayesian_right: bool

    @property
    def link(self) -> str:
        """The image as a data URI."""
        file = io.BytesIO()
        pixels = (255 * self.image[0]).round().byte().numpy()
        Image.fromarray(pixels).resize((96, 96), Image.Resampling.NEAREST).save(file, "PNG")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def write(folds: Sequence[Fold], folder: Path) -> None:
    """Print the tables and the sentences, and write picture and page."""
    shutil.rmtree(folder, ignore_errors=True)  # so that nothing of an earlier version is shown
    folder.mkdir(parents=True)
    quality, asking = quality_table(folds), asking_table(folds)
    words = list(sentences(quality.short, asking.short))
    others, digits = other_cards(folds[0]), digit_cards(folds[0])
    picture(others, digits).savefig(folder / "demo.png", dpi=150)
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    ).get_template("demo_report.html.jinja")
    contents = {"words": words, "others": others, "digits": digits, "tables": [quality, asking], "folds": len(folds)}
    (folder / "report.html").write_text(template.render(contents), encoding="utf-8")
    console = Console(highlight=False)
    for table in (quality, asking):
        console.print(for_terminal(table.short), "")
    console.print(f"mean±sd over {len(folds)} test sets; ✓ better, ✗ worse than the first row, beyond chance\n")
    for sentence in words:
        console.print(f"- {sentence}")
    console.print(f"\nThe picture is {folder / 'demo.png'}, the report {folder / 'report.html'}.")


# The numbers


def quality_table(folds: Sequence[Fold]) -> Table:
    columns = [
        Column("accuracy", "accuracy %", max),
        Column("nll", "NLL", min, 3),
        Column("ece", "ECE %", min),
        Column("others", "sure of other images %", min),
        *(Column(kind, f"sure of {kind} %", min, is_detail=True) for kind in folds[0].kinds),
        Column("parameters", "parameters", None, 0),
    ]
    rows = {model: [fold.quality(model) for fold in folds] for model in folds[0].predictions}
    return Table(f"The networks. Sure: with a probability above {SURE:.0%}", columns, rows)


def asking_table(folds: Sequence[Fold]) -> Table:
    columns = [
        Column("asked", "digits asked about %", min),
        Column("wrong", "digits answered wrongly %", min),
        Column("others", "other images answered %", min),
        Column("auroc_letters", "AUROC letters %", max),
        *(Column(kind, f"{kind} answered %", min, is_detail=True) for kind in folds[0].kinds),
        Column("auroc_photographs", "AUROC photographs %", max, is_detail=True),
    ]
    rows = {}
    for score, name in SCORES.items():
        for model, found in folds[0].predictions.items():
            p = found["test"]
            has_score = p.doubt is not None if score == "doubt" else p.samples > 1 or score == "entropy"
            if has_score and model != "trained longer":
                rows[f"{model}, {name}"] = [fold.asking(model, score) for fold in folds]
    return Table(f"Asking a person about what is doubted more than {1 - ASKED:.0%} of validation digits", columns, rows)


def sentences(quality: Table, asking: Table) -> Iterator[str]:
    """What the tables show, for and against the Bayesian network."""
    plain, familiar, ours = (
        f"{model}, {SCORES[score]}" for model, score in ((PLAIN, "entropy"), (PLAIN, "doubt"), (RANK1, "doubt"))
    )
    yield (
        f"The plain network gets {quality.mean(PLAIN, 'accuracy'):.1f}% of the digits right. Shown other images "
        f"({join_words(list(SHOWN))}), it takes {quality.mean(PLAIN, 'others'):.0f}% of them for a digit with a "
        f"probability above {SURE:.0%}. If it asks a person where its entropy is high, it still answers "
        f"{asking.mean(plain, 'others'):.0f}% of them."
    )
    yield (
        f"Its Bayesian version, by entropy and familiarity, answers {asking.mean(ours, 'others'):.1f}% of the other "
        f"images, and asks about {asking.mean(ours, 'asked'):.1f}% of the digits."
    )
    wins = asking.better_by(ours, familiar)
    rest = (
        f"Rank1 is better beyond chance by: {join_words(wins)}." if wins else "Its difference from Rank1 may be chance."
    )
    yield (
        "Familiarity does most of it, and needs no Bayesian network: with it the plain one answers "
        f"{asking.mean(familiar, 'others'):.1f}%, and asks about {asking.mean(familiar, 'asked'):.1f}%. {rest}"
    )
    added = quality.mean(RANK1, "parameters") / quality.mean(PLAIN, "parameters") - 1
    shares = [f"{model} {quality.mean(model, 'others'):.0f}%" for model in quality.rows if model != RANK1]
    yield (
        f"Rank1 alone, for {added:.0%} more parameters, is sure of {quality.mean(RANK1, 'others'):.0f}% of the other "
        f"images ({', '.join(shares)}). It also tells whether an input is ambiguous or its draws disagree."
    )
    differences = [words for column in quality.columns if (words := against_others(quality, column))]
    yield f"Rank1 alone against these, beyond chance: {'; '.join(differences) or 'no difference'}."


def against_others(table: Table, column: Column) -> str:
    """Which models Rank1 is better and worse than by a measure."""
    others = [model for model in table.rows if model != RANK1]
    found = {
        "better": [other for other in others if table.is_better(RANK1, other, column)],
        "worse": [other for other in others if table.is_better(other, RANK1, column)],
    }
    words = [f"{word} than {'all' if some == others else join_words(some)}" for word, some in found.items() if some]
    return f"{column.head.removesuffix(' %')} {', '.join(words)}" if words else ""


def for_terminal(table: Table) -> RichTable:
    found = RichTable(
        box=None, pad_edge=False, collapse_padding=True, title=table.title, title_justify="left", title_style="bold"
    )
    found.add_column("", no_wrap=True)
    for column in table.columns:
        found.add_column("\n".join(wrap(column.head, 10)), justify="right", vertical="bottom", no_wrap=True)
    for row in table.rows:
        found.add_row(row, *(table.cell(row, column) for column in table.columns))
    return found


def share(is_so: Tensor) -> float:
    return float(is_so.float().mean())


# The picture


def other_cards(fold: Fold) -> list[Card]:
    """Of each kind of other images those that the plain network is surest of, each letter or digit once."""
    found = []
    for kind, count in SHOWN.items():
        order = fold.predictions[PLAIN][kind].confidence.argsort(descending=True).tolist()
        once = {fold.names[kind][row]: row for row in reversed(order)}
        found += cards(fold, kind, sorted(once.values(), key=order.index)[:count])
    return found


def digit_cards(fold: Fold, first: int = 6, doubted: int = 2) -> list[Card]:
    """The first test digits, and those that the Bayesian network doubts most."""
    doubt = fold.predictions[RANK1]["test"].doubt
    assert doubt is not None
    return cards(fold, "test", [*range(first), *doubt.argsort(descending=True)[:doubted].tolist()])


def cards(fold: Fold, part: str, rows: Sequence[int]) -> list[Card]:
    plain, bayesian = (fold.predictions[model][part] for model in (PLAIN, RANK1))
    why = reasons(bayesian, "doubt", fold.threshold(RANK1, "doubt"), fold.familiarity)
    found = []
    for row in rows:
        label = int(fold.labels[row]) if part == "test" else None
        asks, answer = bool(why[row]), int(bayesian.label[row])
        found.append(
            Card(
                fold.images[part][row],
                fold.names[part][row],
                f"{int(plain.label[row])}, {percent(plain.confidence[row])}",
                int(plain.label[row]) == label,
                "ask a person" if asks else f"{answer}, {percent(bayesian.confidence[row])}",
                ", ".join(why[row]),
                asks or answer == label,
            )
        )
    return found


def percent(p: Tensor) -> str:
    """A probability, never rounded up to certainty."""
    return f"{min(int(100 * p), 99)}%"


def picture(others: Sequence[Card], digits: Sequence[Card]) -> Figure:
    """The cards of other images above those of digits."""
    figure = Figure(figsize=(13, 7.2))
    titles = "What the network was not trained on", "Digits it has not seen: the first six, and the two most doubted"
    for part, (title, some) in enumerate(zip(titles, (others, digits), strict=True)):
        top = 0.95 - 0.5 * part
        figure.text(0.09, top, title, fontsize=15, fontweight="bold", va="center")
        for who, below in (("plain\nnetwork", 0.305), ("Bayesian", 0.362)):
            figure.text(0.045, top - below, who, fontsize=11, color=GREY, ha="center", va="center")
        for column, card in enumerate(some):
            axes = figure.add_axes((0.09 + 0.114 * column, top - 0.27, 0.1, 0.19))
            axes.imshow(card.image[0].numpy(), cmap="gray", vmin=0, vmax=1, aspect="auto")
            axes.set_axis_off()
            axes.set_title(card.name, fontsize=11)
            bayesian = BLUE if card.why else GREEN if card.is_bayesian_right else RED
            for text, below, colour, size, weight in (
                (card.plain, 0.305, GREEN if card.is_plain_right else RED, 14, "bold"),
                (card.bayesian, 0.362, bayesian, 12 if card.why else 14, "bold"),
                (card.why.replace(", ", ",\n"), 0.385, GREY, 10, "normal"),
            ):
                place = {"ha": "center", "va": "top" if weight == "normal" else "center"}
                figure.text(
                    0.14 + 0.114 * column, top - below, text, color=colour, fontsize=size, weight=weight, **place
                )
    return figure
