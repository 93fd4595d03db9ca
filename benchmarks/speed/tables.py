"""The results in words: Markdown tables of what was measured, the goals, the other libraries and the growth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .goals import reason

Results = dict[str, Any]
MEASURES = {
    "step": "training step",
    "predict": "one draw of a prediction",
    "memory": "a step's peak memory",
    "parameters": "parameters",
    "step, side by side": "training step",
    "predict, side by side": "one draw of a prediction",
    "kl": "KL's share of the step",
    "head": "50 draws of the last layer",
    "single": "50 draws of one input, over a loop",
    "lstm": "a draw for the batch",
}
UNMEASURED = "Not measured yet: `make bench` writes its tables here.\n"
START, END = "<!-- written by make bench: start -->\n", "<!-- written by make bench: end -->\n"


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table.

    >>> print(markdown(["a", "b"], [["1", "2"]]), end="")
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    header = list(header)
    first, *rest = ("| " + " | ".join(line) + " |" for line in [header, *rows])
    return "\n".join([first, "|---" * len(header) + "|", *rest]) + "\n"


def threads(facts: Mapping[str, Any]) -> str:
    """How many threads torch had.

    >>> threads({"threads": 1}), threads({"threads": 2})
    ('1 thread', '2 threads')
    """
    count = facts["threads"]
    return f"{count} thread{'s' if count > 1 else ''}"


def setup(results: Results) -> str:
    """How the figures came about."""
    facts = results["setup"]
    words = f"`{facts['command']}`: torch {facts['torch']}, {threads(facts)}, {facts['machine']}; "
    words += ", ".join(f"{library} {version}" for library, version in facts["versions"].items())
    words += f". {facts['rounds']}; optimizer: {facts['optimizer']}; memory: {facts['memory']}."
    return ("A quick run with small batches, whose figures mean nothing. " if facts["quick"] else "") + words


def find(results: Results, **wanted: str) -> list[dict[str, Any]]:
    """The rows that have all these values."""
    return [row for row in results["rows"] if all(row[key] == value for key, value in wanted.items())]


def met(row: dict[str, Any]) -> bool:
    """Whether a figure, rounded as it is shown, is within its goal."""
    return round(row["value"], decimals(row)) <= row["goal"]


def decimals(row: dict[str, Any]) -> int:
    return 4 if row["measure"] == "kl" else 2


def cell(row: dict[str, Any] | None) -> str:
    """A figure as the tables have it: bold where its goal is missed, a dash where there is none."""
    if row is None:
        return "–"
    value = f"{row['value']:.2%}" if row["measure"] == "kl" else f"{row['value']:.2f}"
    return f"**{value}**" if row["goal"] is not None and not met(row) else value


def implementations(results: Results) -> list[tuple[str, str]]:
    """Every (library, method) that was measured on whole networks, in order."""
    return list(dict.fromkeys((row["library"], row["method"]) for row in results["rows"] if row["measure"] == "step"))


def label(library: str, method: str) -> str:
    return f"`{method}`" if library == "bayesify" else f"{library}: {method}"


def case_table(results: Results, case: str) -> str:
    """All that was measured on one network."""
    measures = ("step", "predict", "memory", "parameters", "kl")

    def line(library: str, method: str) -> list[str]:
        rows = {row["measure"]: row for row in find(results, case=case, library=library, method=method)}
        seconds = f"{1000 * rows['conversion']['value']:.0f}" if "conversion" in rows else "–"
        return [label(library, method), *(cell(rows.get(measure)) for measure in measures), seconds]

    header = ["method", *(MEASURES[measure] for measure in measures), "conversion, ms"]
    return markdown(header, [line(*each) for each in implementations(results)])


def head_table(results: Results) -> str:
    """A Bayesian last layer alone."""
    rows = [row for row in results["rows"] if row["measure"] == "head"]
    lines = [[results["cases"][row["case"]], label(row["library"], row["method"]), cell(row)] for row in rows]
    return markdown(["network", "method", "50 draws, in plain forward passes"], lines)


def call_table(results: Results) -> str:
    """One input, and LSTMs."""
    rows = [row for row in results["rows"] if row["measure"] in ("single", "lstm")]
    methods = dict.fromkeys(row["method"] for row in rows)

    def figure(method: str, case: str) -> str:
        return cell(next((row for row in rows if (row["method"], row["case"]) == (method, case)), None))

    cases = {row["case"]: row["measure"] for row in rows}
    header = ["method", *(f"{case}: {MEASURES[measure]}" for case, measure in cases.items())]
    return markdown(header, [[f"`{method}`", *(figure(method, case) for case in cases)] for method in methods])


def goal_table(results: Results) -> str:
    """Each goal, met or missed."""
    rows = [row for row in results["rows"] if row["goal"] is not None]
    header = ["network", "measure", "method", "median", "best", "goal", "", "why"]
    return markdown(header, map(goal_line, rows))


def goal_line(row: dict[str, Any]) -> list[str]:
    target = f"{row['goal']:.0%}" if row["measure"] == "kl" else f"{row['goal']:.2f}"
    why = "" if met(row) else reason(row["case"], row["measure"], row["method"])
    verdict = "met" if met(row) else "missed"
    best = "" if row["best"] is None else f"{row['best']:.2f}"
    what = [row["case"], MEASURES[row["measure"]], f"`{row['method']}`"]
    return [*what, cell(row), best, f"≤ {target}", verdict, why]


def rivals(results: Results) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Ours and a peer's figure for the same kind of method, network and measure."""
    for ours in find(results, library="bayesify"):
        if ours["kind"] and ours["measure"] in ("step, side by side", "predict, side by side", "memory"):
            for peer in find(results, case=ours["case"], measure=ours["measure"], kind=ours["kind"]):
                if peer["library"] != "bayesify":
                    yield ours, peer


def peer_table(results: Results) -> str:
    """Ours against each peer on the same method, measured in the same rounds: their figure over ours."""
    lines = []
    for ours, peer in rivals(results):
        cells = [ours["kind"], ours["case"], MEASURES[ours["measure"]], peer["library"]]
        values = [f"{row['value']:.2f}" for row in (ours, peer)]
        lines.append([*cells, *values, over(peer["value"], ours["value"]), over(peer["best"], ours["best"])])
    header = ["method", "network", "measure", "library", "ours", "theirs", "theirs / ours", "of the best"]
    return markdown(header, lines)


def over(theirs: float | None, ours: float | None) -> str:
    """How many times ours their figure is, bold where ours is larger.

    >>> over(3.0, 2.0), over(1.0, 2.0), over(None, None)
    ('1.50', '**0.50**', '')
    """
    if ours is None or theirs is None:
        return ""
    return f"{theirs / ours:.2f}" if theirs >= ours else f"**{theirs / ours:.2f}**"


def growth_table(results: Results, axis: str) -> str:
    """How a method's figures change along one axis: a line for each method, a column for each value."""
    rows = [row for row in results["growth"] if row["axis"] == axis]
    values = sorted({row["value"] for row in rows})
    measures = [name for name in ("forward passes", "step", "memory", "predict") if name in rows[0]]

    def figures(method: str, value: int) -> str:
        row = next(row for row in rows if (row["method"], row["value"]) == (method, value))
        return " / ".join(f"{row[measure]:.2f}" for measure in measures)

    methods = list(dict.fromkeys(row["method"] for row in rows))
    header = [f"{' / '.join(measures)}", *(f"{axis} = {value}" for value in values)]
    return markdown(header, [[method, *(figures(method, value) for value in values)] for method in methods])


def import_table(results: Results) -> str:
    lines = [[name, f"{value:.2f}"] for name, value in results["imports"].items()]
    return markdown(["import", "seconds"], lines)


def optimizer_table(results: Results) -> str:
    lines = [[name, f"{value:.2f}"] for name, value in results["optimizers"].items()]
    return markdown(["SGD", "Rank1's step over the plain one, ResNet-20"], lines)


def page(results: Results) -> str:
    """benchmarks/results/speed.md."""
    parts = [f"# What being Bayesian costs\n\n{setup(results)}\n"]
    parts.append("Ratios to the plain network; figures that miss their goal are bold.\n\n![The figures](speed.png)\n")
    for case, title in results["cases"].items():
        parts.append(f"## {title}\n\n{case_table(results, case)}")
    parts.append(f"## The last layer alone\n\n{head_table(results)}")
    parts.append(f"## One input, and LSTMs\n\n{call_table(results)}")
    both = "Goals are for the median of the rounds; beside it stands the best time over the plain network's best.\n"
    parts.append(f"## Goals\n\n{both}\n{goal_table(results)}")
    together = "Ours and all of theirs in the same rounds, each with a call of the plain network.\n"
    parts.append(f"## Other libraries on the same method\n\n{together}\n{peer_table(results)}")
    parts.append("## Growth\n\n" + "\n".join(growth_table(results, axis) for axis in ("K", "S", "B", "width")))
    parts.append(f"## Imports\n\nBeyond torch's own.\n\n{import_table(results)}")
    parts.append(f"## The optimizer\n\n{optimizer_table(results)}")
    failed = [f"- {each['library']}, {each['method']}, {each['case']}: {each['reason']}" for each in results["failed"]]
    failed += [f"- {library}: {reason}" for library, reason in results["missing"].items()]
    parts.append("## What could not be measured\n\n" + ("\n".join(failed) or "Nothing.") + "\n")
    return "\n".join(parts)


def docs_block(results: Results) -> str:
    """The tables of docs/performance.md."""
    cases = list(results["cases"])

    def line(library: str, method: str) -> list[str]:
        rows = {(row["case"], row["measure"]): row for row in find(results, library=library, method=method)}
        steps = [cell(rows.get((case, "step"))) for case in cases]
        rest = [cell(rows.get(("resnet20", measure))) for measure in ("predict", "memory", "parameters")]
        return [label(library, method), *steps, *rest]

    header = ["method", *(f"step, {case}" for case in cases), "a draw, resnet20", "memory, resnet20", "parameters"]
    links = "[All figures](../benchmarks/results/speed.md).\n\n![Costs by network](../benchmarks/results/speed.png)\n"
    parts = [f"{setup(results)}\n", links, markdown(header, [line(*each) for each in implementations(results)])]
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
