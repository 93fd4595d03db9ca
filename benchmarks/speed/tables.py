"""The results in words: Markdown tables of what was measured, the goals, the other libraries and the growth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .goals import reason

Results = dict[str, Any]
MEASURES = {
    "step": "training step",
    "predict": "one draw of a prediction",
    "memory": "a step's peak memory",
    "parameters": "parameters",
    "step, in turn": "training step",
    "predict, in turn": "one draw of a prediction",
    "kl": "KL's share of the step",
    "head": "50 draws of the last layer",
    "single": "50 draws of one input, over a loop",
    "lstm": "a draw for the batch",
}
UNMEASURED = "Not measured yet: `make bench` writes its tables here.\n"
START, END = "<!-- written by make bench: start -->\n", "<!-- written by make bench: end -->\n"


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table.

    >>> print(markdown(["a", "b"], [["1", "2"]]), end="")
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    heads = list(heads)
    lines = [heads, *rows]
    shown = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([shown[0], "|---" * len(heads) + "|", *shown[1:]]) + "\n"


def made(results: Results) -> str:
    """How the figures came about."""
    facts = results["made"]
    words = f"{facts['command']}: torch {facts['torch']}, {facts['threads']} threads, {facts['machine']}; "
    words += ", ".join(f"{library} {version}" for library, version in facts["versions"].items())
    words += f". Best of {facts['rounds']} rounds in turn with the plain network; optimizer: {facts['optimizer']}; "
    words += f"memory: {facts['memory']}."
    return ("A smoke run with small batches, whose figures mean nothing. " if facts["quick"] else "") + words


def find(results: Results, **wanted: str) -> list[dict[str, Any]]:
    """The rows that have all these values."""
    return [row for row in results["rows"] if all(row[key] == value for key, value in wanted.items())]


def met(row: dict[str, Any]) -> bool:
    """Whether a figure, rounded as it is shown, is within its goal."""
    return round(row["value"], places(row)) <= row["goal"]


def places(row: dict[str, Any]) -> int:
    return 4 if row["measure"] == "kl" else 2


def shown(row: dict[str, Any] | None) -> str:
    """A figure as the tables have it: bold where its goal is missed, a dash where there is none."""
    if row is None:
        return "–"
    value = f"{row['value']:.2%}" if row["measure"] == "kl" else f"{row['value']:.2f}"
    return f"**{value}**" if row["goal"] is not None and not met(row) else value


def only(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    return rows[0] if rows else None


def places_of(results: Results) -> list[tuple[str, str]]:
    """Every (library, method) that was measured on whole networks, in order."""
    return list(dict.fromkeys((row["library"], row["method"]) for row in results["rows"] if row["measure"] == "step"))


def named(library: str, method: str) -> str:
    return f"`{method}`" if library == "bayesify" else f"{library}: {method}"


def case_table(results: Results, case: str) -> str:
    """All that was measured on one network."""
    measures = ("step", "predict", "memory", "parameters", "kl")

    def line(library: str, method: str) -> list[str]:
        rows = {row["measure"]: row for row in find(results, case=case, library=library, method=method)}
        seconds = f"{1000 * rows['conversion']['value']:.0f}" if "conversion" in rows else "–"
        return [named(library, method), *(shown(rows.get(measure)) for measure in measures), seconds]

    heads = ["method", *(MEASURES[measure] for measure in measures), "conversion, ms"]
    return markdown(heads, [line(*place) for place in places_of(results)])


def head_table(results: Results) -> str:
    """A Bayesian last layer alone."""
    rows = [row for row in results["rows"] if row["measure"] == "head"]
    lines = [[results["cases"][row["case"]], named(row["library"], row["method"]), shown(row)] for row in rows]
    return markdown(["network", "method", "50 draws, in plain forward passes"], lines)


def call_table(results: Results) -> str:
    """One input, and LSTMs."""
    rows = [row for row in results["rows"] if row["measure"] in ("single", "lstm")]
    methods = dict.fromkeys(row["method"] for row in rows)

    def cell(method: str, case: str) -> str:
        return shown(only([row for row in rows if (row["method"], row["case"]) == (method, case)]))

    cases = {row["case"]: row["measure"] for row in rows}
    heads = ["method", *(f"{case}: {MEASURES[measure]}" for case, measure in cases.items())]
    return markdown(heads, [[f"`{method}`", *(cell(method, case) for case in cases)] for method in methods])


def goal_table(results: Results) -> str:
    """Each goal, met or missed."""
    rows = [row for row in results["rows"] if row["goal"] is not None]
    heads = ["network", "measure", "method", "measured", "median", "goal", "", "why"]
    return markdown(heads, map(goal_line, rows))


def goal_line(row: dict[str, Any]) -> list[str]:
    target = f"{row['goal']:.0%}" if row["measure"] == "kl" else f"{row['goal']:.2f}"
    why = "" if met(row) else reason(row["case"], row["measure"], row["method"])
    verdict = "met" if met(row) else "missed"
    median = "" if row["median"] is None else f"{row['median']:.2f}"
    place = [row["case"], MEASURES[row["measure"]], f"`{row['method']}`"]
    return [*place, shown(row), median, f"≤ {target}", verdict, why]


def contests(results: Results) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Ours and a peer's figure for the same kind of method, network and measure."""
    for ours in find(results, library="bayesify"):
        if ours["kind"] and ours["measure"] in ("step, in turn", "predict, in turn", "memory"):
            for peer in find(results, case=ours["case"], measure=ours["measure"], kind=ours["kind"]):
                if peer["library"] != "bayesify":
                    yield ours, peer


def peer_table(results: Results) -> str:
    """Ours against each peer on the same method, measured in turn with each other: their figure over ours."""
    lines = []
    for ours, peer in contests(results):
        cells = [ours["kind"], ours["case"], MEASURES[ours["measure"]], peer["library"]]
        values = [f"{row['value']:.2f}" for row in (ours, peer)]
        lines.append([*cells, *values, ahead(ours["value"], peer["value"]), ahead(ours["median"], peer["median"])])
    heads = ["method", "network", "measure", "library", "ours", "theirs", "theirs / ours", "of medians"]
    return markdown(heads, lines)


def ahead(ours: float | None, theirs: float | None) -> str:
    """How many times ours their figure is, bold where that is less.

    >>> ahead(2.0, 3.0), ahead(2.0, 1.0), ahead(None, None)
    ('1.50', '**0.50**', '')
    """
    if ours is None or theirs is None:
        return ""
    return f"{theirs / ours:.2f}" if theirs >= ours else f"**{theirs / ours:.2f}**"


def growth_table(results: Results, axis: str) -> str:
    """How a method's figures change along one axis: a line for each method, a column for each value."""
    rows = [row for row in results["growth"] if row["axis"] == axis]
    values = sorted({row["value"] for row in rows})
    measures = [name for name in ("forwards", "step", "memory", "predict") if name in rows[0]]

    def cell(method: str, value: int) -> str:
        row = next(row for row in rows if (row["method"], row["value"]) == (method, value))
        return " / ".join(f"{row[measure]:.2f}" for measure in measures)

    methods = list(dict.fromkeys(row["method"] for row in rows))
    heads = [f"{' / '.join(measures)}", *(f"{axis} = {value}" for value in values)]
    return markdown(heads, [[method, *(cell(method, value) for value in values)] for method in methods])


def import_table(results: Results) -> str:
    lines = [[name, f"{value:.2f}"] for name, value in results["imports"].items()]
    return markdown(["import", "seconds"], lines)


def optimizer_table(results: Results) -> str:
    lines = [[name, f"{value:.2f}"] for name, value in results["optimizers"].items()]
    return markdown(["SGD", "Rank1's step over the plain one, ResNet-20"], lines)


def page(results: Results) -> str:
    """benchmarks/results/speed.md."""
    parts = [f"# What being Bayesian costs\n\n{made(results)}\n"]
    parts.append("Ratios to the plain network; figures that miss their goal are bold.\n\n![The figures](speed.png)\n")
    for case, title in results["cases"].items():
        parts.append(f"## {title}\n\n{case_table(results, case)}")
    parts.append(f"## The last layer alone\n\n{head_table(results)}")
    parts.append(f"## One input, and LSTMs\n\n{call_table(results)}")
    of_medians = "Measured is the best time over the plain network's best; beside it stands the median of all pairs.\n"
    parts.append(f"## Goals\n\n{of_medians}\n{goal_table(results)}")
    in_turn = "Ours and all of theirs in turn with each other and with the plain network.\n"
    parts.append(f"## Other libraries on the same method\n\n{in_turn}\n{peer_table(results)}")
    parts.append("## Growth\n\n" + "\n".join(growth_table(results, axis) for axis in ("K", "S", "B", "width")))
    parts.append(f"## Imports\n\nBeyond torch's own.\n\n{import_table(results)}")
    parts.append(f"## The optimizer\n\n{optimizer_table(results)}")
    refused = [f"- {each['library']}, {each['method']}, {each['case']}: {each['reason']}" for each in results["cannot"]]
    refused += [f"- {library}: {reason}" for library, reason in results["missing"].items()]
    parts.append("## What could not be measured\n\n" + ("\n".join(refused) or "Nothing.") + "\n")
    return "\n".join(parts)


def docs_block(results: Results) -> str:
    """The tables of docs/performance.md."""
    cases = list(results["cases"])

    def line(place: tuple[str, str]) -> list[str]:
        rows = {(row["case"], row["measure"]): row for row in find(results, library=place[0], method=place[1])}
        steps = [shown(rows.get((case, "step"))) for case in cases]
        rest = [shown(rows.get(("resnet20", measure))) for measure in ("predict", "memory", "parameters")]
        return [named(*place), *steps, *rest]

    heads = ["method", *(f"step, {case}" for case in cases), "a draw, resnet20", "memory, resnet20", "parameters"]
    links = "[All figures](../benchmarks/results/speed.md).\n\n![Costs by network](../benchmarks/results/speed.png)\n"
    parts = [f"{made(results)}\n", links, markdown(heads, map(line, places_of(results)))]
    titles = {"K": "components", "S": "draws", "B": "rows", "width": "width"}
    parts += [f"With the number of {title}:\n\n{growth_table(results, axis)}" for axis, title in titles.items()]
    return "\n".join(parts).replace("number of width", "width")


def with_block(text: str, block: str) -> str:
    """A page with the part between its markers written anew.

    >>> with_block("a\\n" + START + "old\\n" + END + "b\\n", "new\\n").split("\\n")[2]
    'new'
    """
    before, rest = text.split(START)
    return f"{before}{START}{block}{END}{rest.split(END)[1]}"
