"""Model cards in Markdown, of exported runs and of those on a hub: what was trained, on what, how good, its limits."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import bayesify as by
from bayesify.files.predictive_module import OUTPUTS
from bayesify.integrations.hub import HEADER
from bayesify.lab.data import Classes, Labels, Masks, Reals, Targets
from bayesify.lab.data.spreadsheets import printable
from bayesify.lab.runs import Run
from bayesify.lab.trained import Trained
from bayesify.layers import bayesian_layers
from bayesify.prediction.results import BinaryPrediction, Classification, Prediction, Regression

MOST_NAMES = 200
"""Of more classes or columns than this, the card has only the number."""
MARKUP = re.compile(r"([\\`*_\[\]()!|#~@]|:(?=//)|(?<=www)\.)")
"""What could begin emphasis, a link, an image, code or a column in Markdown, beside HTML."""
SPLITS = ("test", "validation", "train")
KINDS: dict[type[Targets], tuple[str, type[Prediction]]] = {
    Classes: ("classes, in the order of the outputs", Classification),
    Labels: ("labels, each yes or no, in the order of the outputs", BinaryPrediction),
    Masks: ("classes, one for each pixel, in the order of the outputs", Classification),
    Reals: ("real targets", Regression),
}
"""Each kind of targets in words, and what is predicted of it."""
MEANINGS = {
    "log_probs": "log-probability of each class; their exponentials are the probabilities, the largest is the label",
    "log_not_probs": "log-probability of no for each label, where log_probs is that of yes",
    "entropy": "total uncertainty in nats",
    "epistemic": "the part of it that is the model's, high for inputs unlike the training data, in nats",
    "mean": "predicted mean, in the target's own units",
    "std": "its standard deviation, in the same units",
    "epistemic_std": "the part of it that is the model's, high for inputs unlike the training data",
    "aleatoric_std": "the part of it that is the noise of the data",
}


@dataclass(frozen=True)
class InputText:
    """The raw inputs of an exported file in words; `columns` and `categories` are those of a table."""

    dtype: str
    shape: tuple[int, ...]
    meaning: str
    columns: tuple[str, ...] = ()
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)


def model_card(run: Run, trained: Trained, file: str, inputs: InputText, draws: str) -> str:
    """The card of a run's exported model.

    Args:
        run: The run.
        trained: Its model.
        file: The name of the exported file.
        inputs: What the file takes.
        draws: How many draws it makes, in words.

    Returns:
        The page, in Markdown.
    """
    metrics = run.metrics if (run.folder / "metrics.json").is_file() else {}
    sections = {
        "What was trained": _training(run, trained),
        "Data": _data(trained, metrics),
        "Metrics": _metrics(metrics),
        "Input": _input(inputs),
        "Outputs": _outputs(trained, draws),
        "Use": _use(file),
        "Limits": _limits(trained, metrics),
    }
    title = f"# {_text(file)}\n\nThe model of the run {_code(run.name)}, written by bayesify {by.__version__}.\n"
    return title + "".join(f"\n## {name}\n\n" + "\n".join(lines) + "\n" for name, lines in sections.items())


def hub_card(run: Run, trained: Trained, repo_id: str) -> str:
    """The card of a run in a repository on a hub.

    Args:
        run: The run.
        trained: Its model.
        repo_id: The repository.

    Returns:
        The page, in Markdown, with what the Hub reads of it at the top.
    """
    metrics = run.metrics if (run.folder / "metrics.json").is_file() else {}
    sections = {
        "What was trained": _training(run, trained),
        "Data": _data(trained, metrics),
        "Metrics": _metrics(metrics),
        "Use": _use_of_run(repo_id),
        "Limits": _limits(trained, metrics),
    }
    title = f"{HEADER}# {_text(repo_id)}\n\nThe run {_code(run.name)}, written by bayesify {by.__version__}.\n"
    return title + "".join(f"\n## {name}\n\n" + "\n".join(lines) + "\n" for name, lines in sections.items())


def _use_of_run(repo_id: str) -> Iterator[str]:
    folder = f"runs/{repo_id.rpartition('/')[2]}"
    lines = ["from bayesify import lab", f"run = lab.from_pretrained({repo_id!r}, {folder!r})"]
    yield "\n".join(["```python", *lines, "trained = run.load()  # trained.predict(inputs)", "```"])
    yield f"\nOr predict the rows of a file, or images in a folder: `bayesify predict {folder} FILE`."


def _training(run: Run, trained: Trained) -> Iterator[str]:
    recipe, facts, summary = trained.recipe, run.facts, by.summary(trained.model)
    methods = dict.fromkeys(str(layer.method) for layer in bayesian_layers(trained.model).values())
    weights = recipe.model.weights or ("pretrained weights" if recipe.model.pretrained else None)
    yield f"- network: {_code(recipe.model.name)}" + (f", from {_code(PurePath(weights).name)}" if weights else "")
    yield f"- method: {', '.join(map(_code, methods)) or 'none, a plain network'}"
    yield f"- parameters: {summary.base:,}, and {summary.added:,} that the method added"
    epochs, began = recipe.training.epochs, _text(facts.get("began") or "?")
    yield f"- training: {epochs} epoch{'s' * (epochs != 1)}, seed {recipe.seed}, begun {began}"
    versions = facts.get("versions") or {}
    yield f"- software: {', '.join(f'{_text(name)} {_text(value)}' for name, value in versions.items()) or 'unknown'}"


def _data(trained: Trained, metrics: Mapping[str, Any]) -> Iterator[str]:
    part, targets = trained.recipe.data, trained.targets
    file = f", file {_code(PurePath(part.path).name)}" if part.path else ""
    yield f"- data set: {_code(part.name)}{file}"
    sizes = [f"{metrics[split]['n']:,} rows of {split}" for split in SPLITS if split in metrics]
    yield f"- measured on: {', '.join(sizes) or 'nothing; run `bayesify evaluate`'}"
    kind, _ = KINDS[type(targets)]
    yield f"- {targets.count} {kind}: {_names(targets.names)}"


def _metrics(metrics: Mapping[str, Any]) -> Iterator[str]:
    splits = [split for split in SPLITS if split in metrics]
    if not splits:
        yield "Not measured."
        return
    yield f"Of {metrics[splits[0]].get('draws', '?')} draws; in parentheses a 95% interval.\n"
    yield f"| metric | {' | '.join(splits)} |\n|---|{'---:|' * len(splits)}"
    for name, value in metrics[splits[0]].items():
        if isinstance(value, (int, float)) and name not in ("n", "draws"):
            yield f"| {_text(name)} | {' | '.join(_value(metrics[split], name) for split in splits)} |"
    for other, scores in metrics[splits[0]].get("ood", {}).items():  # of the scores that an exported file has
        own = {name: each for name, each in scores.items() if each and name not in ("familiarity", "doubt")}
        found = {name: each["auroc"] for name, each in own.items() if each.get("auroc") is not None}
        if found:
            best = max(found, key=lambda name: found[name])
            yield f"\nAUROC of {_text(best)} for telling {_code(other)} from {splits[0]} inputs: {found[best]:.4f}."


def _input(inputs: InputText) -> Iterator[str]:
    yield "The preparation that the network was trained with is part of the file: give raw inputs.\n"
    yield "| name | type | shape | contents |\n|---|---|---|---|"
    yield f"| `x` | {inputs.dtype} | (N, {', '.join(map(str, inputs.shape))}), any N | {inputs.meaning} |"
    if inputs.columns or inputs.categories:
        yield "\n| column | name | contents |\n|---:|---|---|"
        for i, name in enumerate(inputs.columns):
            yield f"| {i} | {_code(name)} | a number |"
        for i, (name, words) in enumerate(inputs.categories.items(), len(inputs.columns)):
            yield f"| {i} | {_code(name)} | {_names([f'{j}: {word}' for j, word in enumerate(words)])} |"


def _outputs(trained: Trained, draws: str) -> Iterator[str]:
    targets, count = trained.targets, trained.targets.count
    yield f"The average over {draws}.\n"
    yield "| name | shape | contents |\n|---|---|---|"
    for name in OUTPUTS[KINDS[type(targets)][1]]:
        pixels = ", H, W" if isinstance(targets, Masks) else ""
        has_each = isinstance(targets, (Labels, Reals)) or name == "log_probs"
        shape = f"(N{pixels}, {count})" if has_each else f"(N{pixels})" if pixels else "(N,)"
        yield f"| `{name}` | {shape} | {MEANINGS[name]} |"


def _use(file: str) -> Iterator[str]:
    if file.endswith(".onnx"):
        lines = ["import onnxruntime", f"session = onnxruntime.InferenceSession({file!r})"]
        call = 'session.run(None, {"x": x})'
    elif file.endswith(".aoti.pt2"):
        lines = ["import torch", f"model = torch._inductor.aoti_load_package({file!r})"]
        call = "model(x)"
    else:
        lines = ["import torch", f"model = torch.export.load({file!r}).module()"]
        call = "model(x)"
    yield "\n".join(["```python", *lines, f"outputs = {call}  # in the order of the table above", "```"])


def _limits(trained: Trained, metrics: Mapping[str, Any]) -> Iterator[str]:
    yield "- Metrics hold for inputs like those of the data set; elsewhere, look at the epistemic uncertainty."
    yield "- High uncertainty is a warning; low uncertainty is no proof that a prediction is right."
    threshold = metrics.get("threshold")
    if threshold:
        reals = trained.targets if isinstance(trained.targets, Reals) else None
        unit = reals.std[0] if reals and reals.count == 1 else 1.0
        what = f"{_text(threshold.get('by', 'uncertainty'))} above {threshold['value'] * unit:.4g}"
        what += ", of standardised targets," if reals and reals.count > 1 else ""
        share = f"{threshold.get('share', 0):.0%} of the {_text(threshold.get('split', 'validation'))} inputs"
        yield f"- Abstain from inputs with {what}, which {share} exceed."
    if not bayesian_layers(trained.model):
        yield "- It is a single plain network: its epistemic uncertainty is 0 everywhere."
    yield "- Other units or another order of columns are not noticed by the file."
    yield "- NaN in the outputs means that a row can't be used: a value is missing, or a category is unknown."


def _value(values: Mapping[str, Any], name: str) -> str:
    value, bounds = values.get(name), values.get("interval", {}).get(name)
    if not isinstance(value, (int, float)):
        return ""
    return f"{value:.4f}" + (f" ({bounds[0]:.4f} to {bounds[1]:.4f})" if bounds else "")


def _names(names: Sequence[str]) -> str:
    return f"{len(names):,}, not listed" if len(names) > MOST_NAMES else ", ".join(map(_code, names))


def _code(value: Any) -> str:
    """A name from a data set or recipe as code, which can't be markup of the page.

    >>> _code("a|b` <i>")
    "`a/b' ‹i›`"
    """
    plain = printable(str(value)).replace("|", "/").replace("`", "'").replace("<", "‹").replace(">", "›")
    return f"`{' '.join(plain.split())}`"


def _text(value: Any) -> str:
    """Text from elsewhere on one line, with what Markdown would read as markup escaped.

    >>> print(_text("![a](https://b.org) <i>"))
    \\!\\[a\\]\\(https\\://b.org\\) &lt;i&gt;
    """
    return MARKUP.sub(r"\\\1", html.escape(" ".join(printable(str(value)).split()), quote=False))
