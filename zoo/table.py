"""Writes what becomes of networks that nobody here wrote: `python zoo/table.py all benchmarks/results/zoo.json`.

The networks are `sample`, `all` (torchvision's classifiers, a small network of each of timm's families and five
of transformers, small ones first), or names. Each runs in a process of its own with one thread and a time-out, and is
written when it is done; networks that are in the file already are not run again, unless --again is given and they were
run on another core, the package without `lab` and `cli`. --jobs N runs N at a time, of which one at most is large. The
table for people is written beside the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from networks import SAMPLE, on_meta

SECONDS = 7200
UNKNOWN = 1 << 40
LARGE = 250_000_000
"""Two networks with more parameters than this would fill a machine's memory."""
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


@cache
def parameters(name: str) -> int:
    """How many parameters a network has, as far as it can be told without making them."""
    library, _, kind = name.partition(":")
    if library == "torchvision":
        import torchvision

        return int(torchvision.models.get_model_weights(kind)["DEFAULT"].meta["num_params"])
    try:
        return sum(p.numel() for p in on_meta(name).parameters())
    except Exception:
        return UNKNOWN


@cache
def core() -> str:
    """A short hash of the source of bayesify's core."""
    (package,) = map(Path, find_spec("bayesify").submodule_search_locations)  # type: ignore[union-attr, arg-type]
    files = sorted(package.rglob("*.py"))
    own = [path for path in files if path.relative_to(package).parts[0] not in ("lab", "cli")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in own)).hexdigest()[:12]


def rows_of(name: str) -> list[dict[str, Any]]:
    """The outcomes of one network in a process of its own."""
    command = [sys.executable, __file__, "--one", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
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
    versions = Counter({row["name"]: row["core"] for row in rows}.values()).most_common()
    said = ", ".join(f"{count:,} {result}" for result, count in totals.most_common())
    cells = [[name, *(by_method.get(m, "–") for m in methods)] for name, by_method in networks.items()]
    lines = [
        f"# {len(networks)} networks, {len(methods)} methods",
        f"Of {len(rows):,} pairs: {said} ({totals['converted'] / len(rows):.1%} converted). Converted means that the "
        "network was converted, checked and trained for one step, that it predicts, is saved, loaded with equal "
        "predictions, and reverted to the network it drew. Each cell has the numbers of parameter tensors that are "
        "drawn · shared by the method's choice · left out with a reason.",
        "Networks by the core they were run on: "
        + ", ".join(f"{count} on {version}" for version, count in versions)
        + ".",
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


def run_all(names: Sequence[str], jobs: int, run: Callable[[str], None]) -> None:
    """Run each name in one of so many threads; several share the small networks, the first takes the large ones."""
    large = [name for name in names if jobs > 1 and parameters(name) > LARGE]
    waiting, large_ones = deque(name for name in names if name not in large), deque(large)

    def work(takes_large: bool) -> None:
        for queue in (large_ones, waiting) if takes_large else (waiting,):
            while queue:
                try:
                    name = queue.popleft()
                except IndexError:  # another thread was faster
                    break
                run(name)

    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(work, worker == 0) for worker in range(jobs)]:
            future.result()


def make_table(names: list[str], path: Path, jobs: int, *, again: bool = False) -> None:
    """Run the networks that the file has not, or not on this core, and write file and table whenever one is done."""
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    present = {row["name"] for row in rows if not again or row["core"] == core()}
    missing = [name for name in names if name not in present]
    place = {name: position for position, name in enumerate(names)}
    done, lock = 0, Lock()

    def run(name: str) -> None:
        nonlocal done
        start = time.perf_counter()
        found = [row | {"core": core()} for row in rows_of(name)]
        with lock:
            done += 1
            rows[:] = [row for row in rows if row["name"] != name] + found
            rows.sort(key=lambda row: place.get(row["name"], -1))
            fresh = path.with_suffix(".new")
            fresh.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
            os.replace(fresh, path)
            path.with_suffix(".md").write_text(written(rows))
            results = ", ".join(f"{count} {result}" for result, count in Counter(r["result"] for r in found).items())
            print(f"[{done}/{len(missing)}] {name}: {results} in {time.perf_counter() - start:.0f} s", flush=True)

    print(f"{len(missing)} of {len(names)} networks to run, {jobs} at a time", flush=True)
    run_all(missing, jobs, run)


def run_one(name: str) -> None:
    """Print the outcomes of a network as JSON."""
    import torch
    from outcomes import outcomes

    torch.set_num_threads(1)
    for outcome in outcomes(name):
        print(json.dumps(asdict(outcome)), flush=True)


def main() -> None:
    """Run one network and print its outcomes, or several and write their table."""
    if sys.argv[1:2] == ["--one"]:
        run_one(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="+", help="sample, all, or names")
    parser.add_argument("file", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    make_table(chosen(options.networks), options.file, options.jobs, again=options.again)


if __name__ == "__main__":
    main()
