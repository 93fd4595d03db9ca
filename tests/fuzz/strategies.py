"""How hypothesis draws cases: an input, blocks that fit it, methods with their options, options of `convert`."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from fuzz.around import AROUND, Around, Views
from fuzz.case import Case
from fuzz.networks import BLOCKS, Signal
from fuzz.outputs import BESIDE
from fuzz.outputs import FORMS as RETURNS

Strategy = st.SearchStrategy[Any]

SHAPES: dict[str, list[list[int]]] = {
    "vector": [[4], [1], [5], [8]],
    "sequence": [[3, 4], [2, 5], [6, 2], [1, 3], [4, 1]],
    "maps": [[2, 4], [3, 4, 4], [1, 3, 5], [2, 1, 3, 2], [2, 3, 3, 3]],
    "ids": [[3], [5], [1]],
}
FORMS = ["tensor"] * 6 + ["shift", "gain", "shift first", "both"]
MOST_BLOCKS = 5


def _options(required: dict[str, Strategy], **optional: Strategy) -> Strategy:
    return st.fixed_dictionaries(required, optional=optional)


def _one_of(*values: Any) -> Strategy:
    return st.sampled_from(values)


K = _one_of(2, 1, 3, 4)
# Wide posteriors and factors of both signs: what is wrong with a draw is seen in the output.
METHOD_OPTIONS: dict[str, Strategy] = {
    "Rank1": st.one_of(
        _options(
            {"components": K, "dropout_rate": _one_of(0.2, 0.05)},
            factors=_one_of("both", "input", "output"),
            signs=_one_of(0.5),
            bias=_one_of("shared", "component"),
            divergence=_one_of("average", "sum", "moment", "pairwise"),
        ),
        _options(
            {"components": K, "posterior": st.just("lognormal")}, factors=_one_of("input"), bias=_one_of("component")
        ),
        _options(
            {"components": K, "posterior": st.just("cauchy"), "clip": _one_of(3.0), "dropout_rate": _one_of(0.05)},
            divergence=_one_of("average", "sum"),
        ),
        _options({"components": K, "prior": st.just("cauchy"), "kl_samples": _one_of(3)}, clip=_one_of(1.1)),
    ),
    "IBNN": _options(
        {"components": K, "mean_std": _one_of(0.5, 0.0), "scale_mean": _one_of(0.2)},
        bias_noise=st.booleans(),
        divergence=_one_of("average", "moment"),
    ),
    "EMP": _options(
        {"components": K, "patches": _one_of(["norm", "output"], ["norm", "output", "input"])},
        init_copies=_one_of("random"),
        jitter=_one_of(0.5),
        reach=_one_of("batch", "row"),
        learn_mixing=st.booleans(),
        divergence=_one_of("average", "sum"),
    ),
    "MeanField": st.one_of(
        _options({"init_log_std": _one_of([-1.5, -1.0])}, estimator=_one_of("exemplar", "shared", "flipout", "local")),
        _options(
            {"init_log_std": _one_of([-1.5, -1.0]), "rows_at_once": _one_of(1, 2), "estimator": _one_of("exemplar")}
        ),
    ),
    "LowRankEnsemble": _options({"components": K, "rank": _one_of(1, 2), "std": _one_of(0.5)}),
    "BatchEnsemble": _options(
        {"components": K, "mean_std": _one_of(0.4)}, signs=_one_of(0.5), bias=_one_of("shared", "component")
    ),
    "MCDropout": _options({"p": _one_of(0.3, 0.6)}),
    "DropConnect": _options({"p": _one_of(0.3)}, reach=_one_of("batch", "row")),
    "Ensemble": _options({"components": K, "jitter": _one_of(0.5)}, init_copies=_one_of("jitter", "random")),
}
METHOD_OPTIONS["ECMP"] = METHOD_OPTIONS["EMP"]


@st.composite
def methods(draw: st.DrawFn, blocks: list[list[Any]]) -> list[list[Any]]:
    """A single method for the layers it takes by default, a dict of keys, the last of them "*", or the last blocks."""

    def method() -> list[Any]:
        name = draw(st.sampled_from(sorted(METHOD_OPTIONS)))
        return [name, draw(METHOD_OPTIONS[name])]

    kind = draw(st.sampled_from(["one", "one", "one", "dict", "last"]))
    if kind == "one":
        return [[None, *method()]]
    trained = [str(place) for place, (name, _) in enumerate(blocks) if BLOCKS[name].trained]
    if kind == "last":
        chosen = method()
        return [[place, *chosen] for place in trained[draw(st.integers(0, len(trained) - 1)) :]]
    if any(name == "linear" for name, _ in blocks) and draw(st.booleans()):
        return [["type:Linear", *method()]]
    keys = draw(st.lists(st.sampled_from(trained), unique=True, max_size=min(2, len(trained) - 1)))
    entries = [[key, *(method() if draw(st.booleans()) else [None, {}])] for key in keys]
    return [*entries, ["*", *method()]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A case: mostly classifiers with a few blocks and a linear head."""
    kind = draw(st.sampled_from(sorted(SHAPES, reverse=True)))
    shape = draw(st.sampled_from(SHAPES[kind]))
    batch_dim = draw(st.sampled_from([0, 0, 1])) if kind in ("sequence", "ids") else 0
    signal, blocks = Signal(kind, tuple(shape), batch_dim), []

    def add(name: str) -> None:
        nonlocal signal
        options = {key: draw(st.sampled_from(choices)) for key, choices in BLOCKS[name].options.items()}
        signal = BLOCKS[name].build(signal, **options)[1]
        blocks.append([name, options])

    if kind == "ids":
        add(draw(st.sampled_from(["embedding", "embedding", "tied_embedding"])))
    for _ in range(draw(st.integers(0, MOST_BLOCKS))):
        add(draw(st.sampled_from([name for name, block in BLOCKS.items() if signal.kind in block.kinds])))
    if signal.kind == "maps" or (signal.kind == "sequence" and draw(st.booleans())):
        add("pool")
    if draw(st.booleans()) or not any(BLOCKS[name].trained for name, _ in blocks):
        add("linear")
    steady = not any(BLOCKS[name].jumps or name == "map_pool" for name, _ in blocks)  # torch can't average bfloat16
    form = "tensor" if kind == "ids" else draw(st.sampled_from(FORMS))
    around = draw(st.sampled_from([""] * 14 + [*AROUND]))
    around = around if (form == "tensor" and not batch_dim) or not issubclass(AROUND.get(around, Around), Views) else ""
    returns = draw(st.sampled_from(["tensor"] * 6 + [*RETURNS]))
    returns = returns if form == "tensor" or RETURNS[returns].is_known else "tensor"
    return Case(
        kind=kind,
        shape=shape,
        blocks=blocks,
        methods=draw(methods(blocks)),
        rows=draw(st.sampled_from([5, 2, 3, 1, 4, 6, 8])),
        form=form,
        batch_dim=batch_dim,
        tells_batch_dim=not batch_dim or not RETURNS[returns].is_known or draw(st.sampled_from([True, True, False])),
        gives_example=draw(st.sampled_from([False, False, False, True])),
        keep_dropout=any(name in ("dropout", "transformer") for name, _ in blocks) and draw(st.booleans()),
        dtype=draw(st.sampled_from(["float64", "float64", "float32", *(["bfloat16"] if steady else [])])),
        seed=draw(st.integers(0, 99)),
        returns=returns,
        beside=draw(st.sampled_from(BESIDE)) if returns != "tensor" else BESIDE[0],
        around=around,
        first=draw(st.sampled_from([""] * 5 + ["one row", "fewer rows", "equal rows", "zeros", "other mode"])),
    )
