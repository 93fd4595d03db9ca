"""Writes the table of what becomes of networks: `python zoo/table.py sample zoo/sample.md`.

The networks are the sample, `all` (torchvision's classifiers and one network of each of timm's families), or names.
Each runs in a process of its own with a time-out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from networks import SAMPLE

SECONDS = 900
HEAD = "| network | method | outcome | converted | shared | refused | s | reason |\n|---|---|---|--:|--:|--:|--:|---|\n"


def chosen(which: list[str]) -> list[str]:
    """The names of the networks that are asked for."""
    if which == ["all"]:
        return everything()
    return SAMPLE if which == ["sample"] else which


def everything() -> list[str]:
    """Every classifier of torchvision, and the smallest network of each module of timm."""
    import timm
    import torchvision
    from timm.models._registry import _model_to_module

    vision = torchvision.models.list_models(module=torchvision.models)
    smallest: dict[str, tuple[int, str]] = {}
    for name in timm.list_models():
        try:
            size = sum(p.numel() for p in _on_meta(name).parameters())
        except Exception:
            size = 1 << 40
        family = _model_to_module[name]
        smallest[family] = min(smallest.get(family, (1 << 41, "")), (size, name))
    sequences = [name for name in SAMPLE if name.startswith("transformers:")]
    return [*(f"torchvision:{name}" for name in vision), *(f"timm:{name}" for _, name in smallest.values()), *sequences]


def _on_meta(name: str):
    import timm
    import torch

    with torch.device("meta"):
        return timm.create_model(name)


def rows_of(name: str) -> list[dict[str, object]]:
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


def _parsed(lines: list[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in lines if line.startswith("{")]


def _lost(name: str, said: str) -> dict[str, object]:
    return {"name": name, "method": "-", "result": "failed", "said": said}


def written(rows: list[dict[str, object]]) -> str:
    """The table with its totals."""
    keys = ("name", "method", "result", "converted", "shared", "refused", "seconds", "said")
    shown = [{**row, "seconds": f"{float(str(row.get('seconds', 0))):.1f}"} for row in rows]
    lines = ["| " + " | ".join(str(row.get(key, "")) for key in keys) + " |" for row in shown]
    totals = Counter(str(row["result"]) for row in rows)
    said = ", ".join(f"{count} {result}" for result, count in totals.most_common())
    networks = len({row["name"] for row in rows})
    return (
        f"{networks} networks: {said}. Numbers of parameter tensors; seconds by the clock with one thread.\n\n{HEAD}"
        + "\n".join(lines)
        + "\n"
    )


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
    rows: list[dict[str, object]] = []
    for name in chosen(which):
        rows += rows_of(name)
        print(name, Counter(str(row["result"]) for row in rows if row["name"] == name), flush=True)
        Path(out).write_text(written(rows))


if __name__ == "__main__":
    main()
