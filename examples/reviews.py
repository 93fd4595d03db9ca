"""Short reviews from a small grammar, for the examples; the label is whether the writer was satisfied.

A clear review praises or criticises one thing. A mixed review praises one thing and criticises another, and its label
is random. An out-of-distribution review has words that no other review has.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

import bayesify as by

TOPICS = {
    "films": (
        ("plot", "hero", "music", "ending", "script", "villain"),
        ("gripping", "moving", "funny", "clever", "charming"),
        ("dull", "clumsy", "tedious", "silly", "predictable"),
    ),
    "restaurants": (
        ("soup", "waiter", "dessert", "wine", "pasta", "table"),
        ("tasty", "fresh", "friendly", "warm", "lovely"),
        ("bland", "stale", "rude", "cold", "dirty"),
    ),
}
OTHER_WORDS = ("tensor", "glacier", "quorum", "piston", "sonnet", "isotope", "lagoon", "trapeze", "ledger", "comet")
DEGREES = ("", "very ", "quite ")
SMALL = ("[pad]", "[cls]", "the", "was", "very", "quite", "but")
WORDS = [*SMALL, *(word for parts in TOPICS.values() for part in parts for word in part), *OTHER_WORDS]
LENGTH = 11


def clear(topic: str, dice: random.Random) -> tuple[str, int]:
    things, good, bad = TOPICS[topic]
    content = dice.random() < 0.5
    word = dice.choice(good if content else bad)
    return f"the {dice.choice(things)} was {dice.choice(DEGREES)}{word}", int(content)


def mixed(topic: str, dice: random.Random) -> tuple[str, int]:
    things, good, bad = TOPICS[topic]
    one, other = dice.sample(things, 2)
    first, second = dice.sample((dice.choice(good), dice.choice(bad)), 2)
    return f"the {one} was {first} but the {other} was {second}", dice.randrange(2)


def out_of_distribution(topic: str, dice: random.Random) -> tuple[str, int]:
    thing, word = dice.sample(OTHER_WORDS, 2)
    return f"the {thing} was {dice.choice(DEGREES)}{word}", dice.randrange(2)


def reviews(kind: Any, topic: str, count: int, seed: int) -> list[tuple[str, int]]:
    dice = random.Random(seed)
    return [kind(topic, dice) for _ in range(count)]


def encoded(texts: list[tuple[str, int]]) -> list[dict[str, Tensor]]:
    """Reviews as examples for a Trainer."""
    return [{**encode(text), "labels": torch.tensor(label)} for text, label in texts]


def encode(text: str) -> dict[str, Tensor]:
    ids = [WORDS.index(word) for word in ("[cls]", *text.split())]
    padding = LENGTH - len(ids)
    return {
        "input_ids": torch.tensor(ids + [0] * padding),
        "attention_mask": torch.tensor([1] * len(ids) + [0] * padding),
    }


def batch(texts: list[tuple[str, int]]) -> tuple[dict[str, Tensor], Tensor]:
    """All reviews in one batch: the inputs of a model, and the labels."""
    examples = encoded(texts)
    stacked = {name: torch.stack([example[name] for example in examples]) for name in examples[0]}
    return stacked, stacked.pop("labels")


@torch.no_grad()
def plain_prediction(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    """The prediction of a plain network, as `by.predict` returns it."""
    return by.Categorical().predictive(model.eval()(**inputs).logits.unsqueeze(0))


def table(rows: dict[str, dict[str, Any]], texts: dict[str, list[tuple[str, int]]]) -> str:
    """Metrics on clear and mixed reviews, and the mean uncertainty of each kind, for predictions by name and kind."""
    heads = "".join(f"{head:>10}" for head in ("accuracy", "NLL", "ECE"))
    kinds = "".join(f"{kind:>9}" for kind in texts)
    lines = [f"{'':16}{'clear and mixed reviews':>30}{'entropy':>27}{'epistemic':>27}", f"{'':16}{heads}{kinds}{kinds}"]
    for name, found in rows.items():
        uncertain = [found[kind].entropy for kind in texts] + [found[kind].epistemic for kind in texts]
        cells = [f"{score:10.3f}" for score in scores(found, texts).values()]
        lines.append(f"{name:16}" + "".join([*cells, *(f"{each.mean():9.3f}" for each in uncertain)]))
    return "\n".join(lines)


def conclusion(rows: dict[str, dict[str, Any]], texts: dict[str, list[tuple[str, int]]]) -> str:
    """A comparison of the second row of the table with the first."""
    (plain, before), (ours, after) = rows.items()
    old, new = scores(before, texts), scores(after, texts)
    metrics = [f"{name.upper()} is {_compared(new[name], old[name])}" for name in ("nll", "ece")]
    known, *others = texts
    epistemic = {kind: after[kind].epistemic.mean().item() for kind in texts}
    uncertainty = [f"{_compared(epistemic[kind], epistemic[known])} for {kind} reviews" for kind in others]
    return (
        f"{ours} compared with {plain}: {', '.join(metrics)}.\n"
        f"Compared with {known} reviews, its epistemic uncertainty is {', '.join(uncertainty)}."
    )


def _compared(new: float, old: float) -> str:
    return f"{'lower' if new < old else 'higher' if new > old else 'the same'} ({new:.3f} vs. {old:.3f})"


def scores(found: dict[str, Any], texts: dict[str, list[tuple[str, int]]]) -> dict[str, float]:
    """The metrics on clear and mixed reviews."""
    kinds = [kind for kind in texts if kind != "OOD"]
    labels = torch.tensor([label for kind in kinds for _, label in texts[kind]])
    return measures(torch.cat([found[kind].probs for kind in kinds]), labels)


def measures(probs: Tensor, labels: Tensor, bins: int = 15) -> dict[str, float]:
    """Accuracy, negative log-likelihood and expected calibration error."""
    confidence, label = probs.max(1)
    right = (label == labels).double()
    which = (confidence * bins).long().clamp(max=bins - 1)
    gaps = [(right[which == b].sum() - confidence[which == b].double().sum()).abs() for b in range(bins)]
    nll = -probs.gather(1, labels.unsqueeze(1)).clamp_min(1e-12).log().mean()
    return {"accuracy": right.mean().item(), "nll": nll.item(), "ece": (sum(gaps) / len(labels)).item()}
