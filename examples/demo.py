"""Make a trained network Bayesian by five methods and compare them on scikit-learn's handwritten digits.

Trains a small convolutional network on few images, so that it can't be sure of all it sees, then fine-tunes Bayesian
copies of it, and all that on four random splits of the data. Every choice between settings is made on validation
images; every figure shown is from test images. Prints a table and writes runs/demo/report.md and runs/demo/report.html.
Takes about a minute on two cores.
"""

from __future__ import annotations

import copy
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from html import escape
from pathlib import Path
from statistics import mean

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as by

FOLDER = Path("runs/demo")
TRAIN, VALIDATION = 100, 300  # images; the other 1,397 are the test part
STRANGE = 400  # images of each kind that are no digits
SPLITS = 4
BATCH = 50
EPOCHS = 40  # of fine-tuning
METHODS = {
    "Rank1": [by.Rank1(4), by.Rank1(4, mean_std=0.3, prior_std=0.3, dropout_rate=0.05)],
    "IBNN": [by.IBNN(4), by.IBNN(4, mean_std=0.3, prior_std=0.3)],
    "ECMP": [by.ECMP(5, patches=("norm",)), by.ECMP(5, patches=("norm",), jitter=0.15)],
    "BatchEnsemble": [by.BatchEnsemble(4), by.BatchEnsemble(4, mean_std=0.3)],
    "ECMP + Rank1": [{nn.BatchNorm2d: by.ECMP(5), "*": by.Rank1(4, mean_std=0.3, prior_std=0.3)}],
}
Families = by.families.Family | dict
Predictor = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass
class Part:
    """Images with labels, and images that are no digits."""

    x: Tensor
    y: Tensor
    noise: Tensor
    shuffled: Tensor


@dataclass
class Row:
    """One model's figures."""

    name: str
    accuracy: float
    nll: float
    ece: float
    noise: float
    shuffled: float
    overhead: float
    seconds: float


# Data


def digits(split: int) -> tuple[Part, Part, Part]:
    """Training, validation and test parts of a random split."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(split))
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16
    y = torch.tensor(labels)[order]
    cuts = (slice(TRAIN), slice(TRAIN, TRAIN + VALIDATION), slice(TRAIN + VALIDATION, None))
    train, validation, test = (part(x[cut], y[cut]) for cut in cuts)
    return train, validation, test


def part(x: Tensor, y: Tensor) -> Part:
    return Part(x, y, torch.rand_like(x[:STRANGE]), shuffled(x[:STRANGE]))


def shuffled(x: Tensor) -> Tensor:
    """Images whose pixels have changed places, in each by another order."""
    order = torch.rand(len(x), 64).argsort(1)
    return x.flatten(1).gather(1, order).reshape(x.shape)


def batches(part: Part) -> Iterator[tuple[Tensor, Tensor]]:
    for rows in torch.randperm(len(part.y)).split(BATCH):
        yield part.x[rows], part.y[rows]


# Training


def network() -> nn.Module:
    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(*block(1, 24, 1), *block(24, 48, 2), *block(48, 48, 2), nn.Flatten(), nn.Linear(192, 10))


def train_plain(model: nn.Module, data: Part, lr: float, epochs: int) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    model.train()
    for _ in range(epochs):
        for x, y in batches(data):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


def fine_tune(model: nn.Module, data: Part, lr: float, epochs: int) -> nn.Module:
    """The same loop with three lines of bayesify: its parameter groups, its KL, and the batch statistics anew."""
    groups = by.parameter_groups(model, lr=lr, posterior_lr=5 * lr, weight_decay=5e-4)
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    model.train()
    for epoch in range(epochs):
        beta = by.anneal(epoch, over=epochs * 2 / 3)
        for x, y in batches(data):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + beta * by.kl(model) / len(data.y)
            loss.backward()
            optimizer.step()
        schedule.step()
    by.recalibrate(model, [x for _ in range(10) for x, _ in batches(data)])
    return model.eval()


# Measures


def plain_predictor(model: nn.Module) -> Predictor:
    """Log-probabilities and their entropy: one network has no epistemic part to show."""

    @torch.no_grad()
    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = model(x).log_softmax(-1)
        return log_probs, -(log_probs.exp() * log_probs).sum(-1)

    return predict


def bayesian_predictor(model: nn.Module) -> Predictor:
    """Log-probabilities and epistemic uncertainty of 20 draws."""

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        prediction = by.predict(model, x, samples=20)
        return prediction.log_probs, prediction.epistemic

    return predict


def ece(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error: |accuracy - confidence| in equal bins of confidence, weighted by their size."""
    confidence, predicted = probs.max(-1)
    correct = (predicted == labels).float()
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gaps = torch.zeros(bins).index_add(0, place, correct - confidence)
    return float(gaps.abs().sum() / len(labels))


def auroc(familiar: Tensor, strange: Tensor) -> float:
    """The probability that a strange image gets more uncertainty than a familiar one."""
    is_strange = torch.cat([torch.zeros(len(familiar)), torch.ones(len(strange))])
    return float(roc_auc_score(is_strange, torch.cat([familiar, strange])))


def measure(name: str, predict: Predictor, part: Part, overhead: float, seconds: float) -> Row:
    log_probs, uncertainty = predict(part.x)
    return Row(
        name,
        accuracy=float((log_probs.argmax(-1) == part.y).float().mean()),
        nll=float(F.nll_loss(log_probs, part.y)),
        ece=ece(log_probs.exp(), part.y),
        noise=auroc(uncertainty, predict(part.noise)[1]),
        shuffled=auroc(uncertainty, predict(part.shuffled)[1]),
        overhead=overhead,
        seconds=seconds,
    )


# The comparison


Candidate = Callable[[], tuple[nn.Module, Predictor]]


def compare(split: int) -> tuple[list[Row], dict[str, str]]:
    """The rows of one split's table, the plain network first, and each method's conversion summary."""
    torch.set_num_threads(1)  # images this small run no faster on more, and the splits share the cores
    torch.manual_seed(split)
    train, validation, test = digits(split)
    trained = train_plain(network(), train, lr=0.05, epochs=100)
    size = sum(p.numel() for p in trained.parameters())
    rows, summaries = [], {}

    def plain(lr: float) -> tuple[nn.Module, Predictor]:
        model = train_plain(copy.deepcopy(trained), train, lr, EPOCHS)
        return model, plain_predictor(model)

    def bayesian(families: Families) -> tuple[nn.Module, Predictor]:
        model = fine_tune(by.convert(copy.deepcopy(trained), families), train, 0.05, EPOCHS)
        return model, bayesian_predictor(model)

    def add_best(name: str, candidates: list[Candidate]) -> nn.Module:
        model, predict, seconds = best(candidates, validation)
        overhead = 100 * (sum(p.numel() for p in model.parameters()) / size - 1)
        rows.append(measure(name, predict, test, overhead, seconds))
        return model

    add_best("plain network", [partial(plain, lr) for lr in (0.02, 0.05)])
    for name, settings in METHODS.items():
        model = add_best(name, [partial(bayesian, families) for families in settings])
        summaries[name] = str(by.summary(model))
    return rows, summaries


def best(candidates: list[Candidate], validation: Part) -> tuple[nn.Module, Predictor, float]:
    """The candidate with the lowest NLL on validation images, and the seconds it took to make."""
    found = []
    for make in candidates:
        start = time.perf_counter()
        model, predict = make()
        seconds = time.perf_counter() - start
        nll = float(F.nll_loss(predict(validation.x)[0], validation.y))
        found.append((nll, model, predict, seconds))
    return min(found, key=lambda one: one[0])[1:]


def average(splits: list[list[Row]]) -> list[Row]:
    """The mean of every figure over the splits."""
    figures = [field.name for field in fields(Row) if field.name != "name"]
    return [
        Row(rows[0].name, **{figure: mean(getattr(row, figure) for row in rows) for figure in figures})
        for rows in zip(*splits, strict=True)
    ]


def in_words(rows: list[Row], splits: list[list[Row]]) -> str:
    """What the table says, whichever way it turned out."""
    plain, bayesian = rows[0], rows[1:]
    lower = sum(row.nll < plain.nll for row in bayesian)
    calibrated = sum(row.ece < plain.ece for row in bayesian)
    best = min(bayesian, key=lambda row: row.nll)
    place = rows.index(best)
    times = sum(split[place].nll < split[0].nll for split in splits)
    noise, mixed = (max(bayesian, key=lambda row: getattr(row, field)) for field in ("noise", "shuffled"))
    return (
        f"Averaged over {len(splits)} random splits, {lower} of {len(bayesian)} Bayesian models have a lower NLL than "
        f"the plain network, and {calibrated} of {len(bayesian)} a lower calibration error. The lowest NLL of a "
        f"Bayesian model is {best.nll:.3f} ({best.name}, {best.overhead:.1f}% more parameters) against the plain "
        f"network's {plain.nll:.3f}; it is the lower of the two in {times} of {len(splits)} splits. Noise is told from "
        f"digits best by {_winner(noise, plain, 'noise')}; shuffled digits by {_winner(mixed, plain, 'shuffled')}."
    )


def _winner(best: Row, plain: Row, field: str) -> str:
    ours, theirs = getattr(best, field), getattr(plain, field)
    if ours > theirs:
        return f"{best.name} (AUROC {ours:.3f}, the plain network {theirs:.3f})"
    return f"the plain network (AUROC {theirs:.3f}, the best Bayesian model, {best.name}, {ours:.3f})"


# The report

HEAD = ("model", "accuracy", "NLL", "ECE", "AUROC noise", "AUROC shuffled", "parameters", "seconds")
BEST = {1: max, 2: min, 3: min, 4: max, 5: max}
NOTE = (
    f"{TRAIN} training, {VALIDATION} validation and 1,397 test images of scikit-learn's digits, in {SPLITS} random "
    "splits whose figures are averaged. In a split all rows are fine-tuned from the same trained network for the same "
    "number of epochs, the plain network too; learning rates and the like are chosen on the validation images. "
    "The network, the training size and the number of splits were chosen with test figures in view, so this is an "
    "illustration and no benchmark. Accuracy, negative "
    "log-likelihood (NLL) and expected calibration error (ECE, 15 bins) are from the test images. AUROC is the "
    "probability that an image that is no digit gets more uncertainty than one that is: epistemic uncertainty of 20 "
    "draws, for the plain network entropy. Seconds are those of one fine-tuning."
)


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        f"{100 * row.accuracy:.1f}%",
        f"{row.nll:.3f}",
        f"{100 * row.ece:.1f}%",
        f"{row.noise:.3f}",
        f"{row.shuffled:.3f}",
        f"+{row.overhead:.1f}%",
        f"{row.seconds:.1f}",
    )


def is_best(rows: list[Row], row: Row, column: int) -> bool:
    """Whether a cell is the best of its column, ties included."""
    values = {other.name: float(cells(other)[column].rstrip("%")) for other in rows} if column in BEST else {}
    return bool(values) and values[row.name] == BEST[column](values.values())


def as_text(rows: list[Row]) -> str:
    lines = [HEAD, *map(cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    padded = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([padded[0], "-" * len(padded[0]), *padded[1:]])


def as_markdown(rows: list[Row], words: str, summaries: dict[str, str]) -> str:
    def line(row: Row) -> str:
        shown = (f"**{cell}**" if is_best(rows, row, i) else cell for i, cell in enumerate(cells(row)))
        return f"| {' | '.join(shown)} |"

    table = [f"| {' | '.join(HEAD)} |", "|---|" + "---:|" * (len(HEAD) - 1), *map(line, rows)]
    parts = [f"### {name}\n\n```\n{text}\n```" for name, text in summaries.items()]
    return "\n\n".join(["# bayesify demo", words, "\n".join(table), NOTE, "## What was converted", *parts]) + "\n"


STYLE = """
:root { color-scheme: light dark; --line: #d5d9e0; --soft: #5b6470; --best: #e4f3e8; --page: #fff; --ink: #1b1f24; }
@media (prefers-color-scheme: dark) {
  :root { --line: #363c45; --soft: #9aa4b1; --best: #1d3a27; --page: #14171b; --ink: #e6e9ed; }
}
body { margin: 0 auto; max-width: 60rem; padding: 1.25rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.lead { font-size: 1.05rem; } .note { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-size: .85rem; color: var(--soft); vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
td.best { background: var(--best); font-weight: 600; }
summary { cursor: pointer; padding: .4rem 0; }
pre { overflow-x: auto; font-size: .8rem; line-height: 1.4; }
@media (max-width: 40rem) {
  thead { display: none; }
  tr { display: block; border-bottom: 2px solid var(--line); padding: .5rem 0; }
  td { display: flex; justify-content: space-between; border: 0; padding: .15rem .4rem; }
  td::before { content: attr(data-label); color: var(--soft); font-weight: 400; }
  td:first-child { font-weight: 600; } td:first-child::before { content: none; }
}
"""


def as_html(rows: list[Row], words: str, summaries: dict[str, str]) -> str:
    def line(row: Row) -> str:
        shown = (
            f'<td data-label="{HEAD[i]}"{" class=best" if is_best(rows, row, i) else ""}>{escape(cell)}</td>'
            for i, cell in enumerate(cells(row))
        )
        return f"<tr>{''.join(shown)}</tr>"

    head = "".join(f"<th>{name}</th>" for name in HEAD)
    body = "\n".join(map(line, rows))
    parts = "\n".join(
        f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>"
        for name, text in summaries.items()
    )
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>bayesify demo</title>
<style>{STYLE}</style>
<h1>bayesify demo</h1>
<p class="lead">{escape(words)}</p>
<div class="scroll"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody></table></div>
<p class="note">{escape(NOTE)}</p>
<h2>What was converted</h2>
{parts}
</html>
"""


def main() -> None:
    print(f"Training on {SPLITS} splits of scikit-learn's digits: a plain network, then five Bayesian copies of it …")
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(compare, range(SPLITS)))
    splits, summaries = [rows for rows, _ in found], found[0][1]
    rows = average(splits)
    words = in_words(rows, splits)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "report.md").write_text(as_markdown(rows, words, summaries), encoding="utf-8")
    (FOLDER / "report.html").write_text(as_html(rows, words, summaries), encoding="utf-8")
    print(f"\n{as_text(rows)}\n\n{words}\n\nThe report is in {FOLDER / 'report.html'} and {FOLDER / 'report.md'}.")


if __name__ == "__main__":
    main()
