"""Is what bayesify says about a case that it refuses true? A refusal counts as an answer only then."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import nn

from fuzz.around import AROUND, Around, Views
from fuzz.case import Case

Truth = Callable[[Case], bool]


def is_true(refusal: Exception, case: Case) -> bool:
    """Whether the reason that an error, its note or a warning gives is there, and all layers that it names."""
    text = "\n".join([str(refusal), *getattr(refusal, "__notes__", ())])
    found = [truth for words, truth in REASONS.items() if re.search(words, text)]
    return any(truth(case) for truth in found) and _names_are_there(text, case)


def _names_are_there(text: str, case: Case) -> bool:
    """Whether the layers that a message names are those of the network, or of its part, in which it was converted."""
    names = re.findall(r"layer '([^']*)'", text)
    with torch.random.fork_rng(devices=[]):
        network: nn.Module = case.network()
    known = {name for name, _ in network.named_modules()}
    known |= {name.removeprefix("part.") for name in known if name.startswith("part.")}
    return known >= {re.sub("^(left|right)[.]?", "", name) for name in names}


# What may be so about a case.


def has_block(case: Case, *names: str) -> bool:
    return any(name in names for name, _ in case.blocks)


def reads_weights(case: Case) -> bool:
    return case.has("reads_weights") or case.beside_output == "reads" or has_block(case, "tied_embedding")


def keeps_results(case: Case) -> bool:
    return case.has("keeps_results")


def misleads(case: Case) -> bool:
    """Whether bayesify isn't told where the rows are: not first, or a table that all rows share has as many numbers."""
    first_rows = {"one row": 1, "fewer rows": max(case.rows - 1, 1)}.get(case.first, case.rows)
    is_alike = case.form != "tensor" and case.input.features in (case.rows, first_rows)
    return not case.tells_batch_dim or case.form == "shift first" or is_alike or case.misleads_about_rows


def has_other_rows(case: Case) -> bool:
    """Whether a layer gets others than the rows of the batch: positions, classes, some that the data decide."""
    return misleads(case) or case.has("jumps") or has_block(case, "positions", "class_embeddings", "folded_windows")


def mixes_rows(case: Case) -> bool:
    """Whether rows are mixed, or a part gets others than its network."""
    mixes = case.has("mixes_rows") or case.has("mixes_in_training") or case.beside_output == "mixed"
    return mixes or not AROUND.get(case.around, Around).is_sound


def drowns_rows(case: Case) -> bool:
    """Whether noise that is the same in every call may be all that is left of rows that were made very small."""
    return has_block(case, "noise") and has_block(case, "scale")


def folds_rows(case: Case) -> bool:
    """Whether a dropout may get several rows for one of the batch, and another dimension may have their number."""
    return has_block(case, "folded_tokens", "folded_windows") or issubclass(AROUND.get(case.around, Around), Views)


def always(case: Case) -> bool:
    return True


def any_of(*truths: Truth) -> Truth:
    return lambda case: any(truth(case) for truth in truths)


REASONS: dict[str, Truth] = {
    # Of conversion, which says what a layer is.
    "found no layer to convert|can't be applied|earlier keys already take|matches (no|(dropout modules )?only)": always,
    "keep_dropout does not support|keep_dropout=True alone": lambda case: case.keep_dropout,
    "no chosen layer is called on the example": any_of(reads_weights, keeps_results),
    # Of the check at a first call.
    "weight is read": any_of(reads_weights, keeps_results),
    "the output is not what the plain network": any_of(reads_weights, keeps_results),
    "is not what the plain network with that row's draw gives": any_of(
        mixes_rows, has_other_rows, reads_weights, keeps_results
    ),
    "Rows are mixed or reordered before": any_of(mixes_rows, has_other_rows),
    "computes something else for row": any_of(mixes_rows, has_other_rows),
    "so they can't be matched|no row of the batch changes|gets one row for all": any_of(mixes_rows, has_other_rows),
    "which rows it gets depends on their contents": any_of(misleads, keeps_results, lambda case: case.has("jumps")),
    "with one draw and .* with one for each row": has_other_rows,
    "and would get different masks": lambda case: case.keep_dropout and (misleads(case) or folds_rows(case)),
    "keep_dropout: a row's output changes with the order": lambda case: case.keep_dropout,
    "in training mode, the network computes something else": any_of(mixes_rows, has_other_rows, drowns_rows),
    "calls a converted part more than once": lambda case: case.around == "siamese",
    # Of predictions.
    "the network stores results|keeps results of its calls": keeps_results,
    r"the network gave \d+ rows": misleads,
    "can't tell which of the inputs|may have a row for each of": lambda case: case.form != "tensor",
    "bayesify: layer .* got 1 row while the model got": has_other_rows,
    "can't be exported|can't be traced|classes in dimension|the exported file": always,
}
"""Words of a message, and what must be so about the case."""
