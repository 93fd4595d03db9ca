"""Writes what becomes of networks that nobody here wrote: `python zoo/table.py all benchmarks/results/zoo.json`.

The networks are `sample`, `all` (torchvision's classifiers, a small network of each of timm's families and five
of transformers, small ones first), or names. Each runs in a process of its own with a time-out; networks that are in
the file already are not run again. The table for people is written beside the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from networks import SAMPLE, on_meta

SECONDS = 1800
UNKNOWN = 1 << 40
TRIED = 6
"""How many networks of a family of timm are made to find a small one."""
SMALL = ("test", "atto", "femto", "pico", "nano", "micro", "mini", "xxs", "tiny", "xs", "small", "_s", "b0", "18")


def chosen(which: list[str]) -> list[str]:
    """The names of the networks that are asked for."""
    if which == ["all"]:
        return everything()
    return SAMPLE if which == ["sample"] else which


def everything() -> list[str]:
    """Every classifier of torchvision, and a small network of each module of timm, small ones first."""
    import timm
    import torchvision
    from timm.models._registry import _model_to_module

    families: dict[str, list[str]] = {}
    for name in timm.list_models():
        families.setdefault(_model_to_module[name], []).append(f"timm:{name}")
    networks = [min(sorted(names, key=_sounds_large)[:TRIED], key=parameters) for names in families.values()]
    networks += [f"torchvision:{name}" for name in torchvision.models.list_models(module=torchvision.models)]
    sequences = [name for name in SAMPLE if name.startswith("transformers:")]
    return sequences + sorted(networks, key=parameters)


def _sounds_large(name: str) -> int:
    return next((rank for rank, word in enumerate(SMALL) if word in name), len(SMALL))


def parameters(name: str) -> int:
    """How many parameters a network has, as far as it can be told without making them."""
    try:
        return sum(p.numel() for p in on_meta(name).parameters())
    except Exception:
        return UNKNOWN


def rows_of(name: str) -> list[dict[str, Any]]:
    """The outcomes of one network in a process of its own."""
    command = [sys.executable, __file__, "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as late:
        lines = (late.stdout or b"").decode().splitlines()
        return [*_parsed(lines), _lost(name, f"no end after {SECONDS} s")]
    rows = _parsed(done.stdout.splitlines())
    last = (done.stderr.strip().splitlines() or [""])[-1][:200]
    return rows if done.returncode == 0 else [*rows, _lost(name, f"the process ended with {done.returncode}: {last}")]


def _parsed(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines if line.startswith("{")]


def _lost(name: str, said: str) -> dict[str, Any]:
    return {"name": name, "method": "-", "result": "failed", "said": said}


def written(rows: list[dict[str, Any]]) -> str:
    """A line for each network, then what was refused or failed, then why tensors are not drawn."""
    methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "-"))
    networks: dict[str, dict[str, str]] = {}
    for row in rows:
        counts = f"{row.get('converted')} · {row.get('shared')} · {row.get('refused')}"
        networks.setdefault(row["name"], {})[row["method"]] = counts if row["result"] == "converted" else row["result"]
    totals = Counter(row["result"] for row in rows)
    said = ", ".join(f"{count:,} {result}" for result, count in totals.most_common())
    cells = [[name, *(by_method.get(m, "–") for m in methods)] for name, by_method in networks.items()]
    lines = [
        f"# {len(networks)} networks, {len(methods)} methods",
        f"Of {len(rows):,} pairs: {said} ({totals['converted'] / len(rows):.1%} converted). Converted means that the "
        "network was converted, checked and trained for one step, that it predicts, is saved, loaded with equal "
        "predictions, and reverted to the network it drew. Each cell has the numbers of parameter tensors that are "
        "drawn · shared by the method's choice · left out with a reason.",
        _table(["network", *methods], cells),
    ]
    lost = [[row["name"], row["method"], row["result"], row["said"]] for row in rows if row["result"] != "converted"]
    if lost:
        lines += ["## Refused or failed", _table(["network", "method", "outcome", "reason"], lost)]
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons.update(row.get("reasons", {}))
    if reasons:
        why = [[count, reason] for reason, count in reasons.most_common()]
        lines += ["## Why tensors were left out", _table(["tensors", "reason"], why)]
    return "\n\n".join(lines) + "\n"


def _table(heads: list[str], rows: list[list[Any]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main() -> None:
    """Run one network and print its outcomes as JSON, or all and write their table."""
    if sys.argv[1] == "--one":
        import torch
        from outcomes import outcomes

        torch.set_num_threads(1)
        for outcome in outcomes(sys.argv[2]):
            print(json.dumps(asdict(outcome)), flush=True)
        return
    *which, out = sys.argv[1:]
    path = Path(out)
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    for name in chosen(which):
        if name in {row["name"] for row in rows}:
            continue
        rows += rows_of(name)
        print(name, dict(Counter(row["result"] for row in rows if row["name"] == name)), flush=True)
        fresh = path.with_suffix(".new")
        fresh.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
        os.replace(fresh, path)
        path.with_suffix(".md").write_text(written(rows))


if __name__ == "__main__":
    main()
