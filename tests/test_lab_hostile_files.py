"""Files that somebody else wrote, that were edited or damaged: nothing in them runs, and each is refused in words."""

from __future__ import annotations

import csv
import json
import pickle
import random
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from command_line import TINY, Cli, Done, cli_in, tiny_run
from torch import nn

from bayesify.lab.data import DataError
from bayesify.lab.data.files import read_npz
from bayesify.lab.data.spreadsheets import safe_cell
from bayesify.lab.models import ModelError, build
from bayesify.lab.models.user_networks import build_user_network
from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.runs import Run, RunError

NAMES = ("<script>alert(1)</script>", "=cmd|' /C calc'!A0", "+1+1", "@sum", "-2", "plain")


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return cli_in(tmp_path, monkeypatch, capsys)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("home") / "run")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be damaged."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    np.save(tmp_path / "image.npy", np.zeros((1, 1, 8, 8), dtype=np.uint8))
    return tmp_path / "image.npy"


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON or YAML file."""
    is_yaml = path.suffix == ".yaml"
    values = yaml.safe_load(path.read_text()) if is_yaml else json.loads(path.read_text())
    change(values)
    path.write_text(yaml.safe_dump(values) if is_yaml else json.dumps(values))


def refused(done: Done, *words: object) -> None:
    """The command failed as it should: an error that names what is wrong, and no bug."""
    assert done.code == 2, (done.code, done.out, done.err)
    assert "this is a bug" not in done.err and "Traceback" not in done.err
    for word in words:
        assert str(word) in done.err, done.err


# A recipe is no code.

EVIL = "from pathlib import Path\nPath({marker!r}).touch()\ndef make(**_): Path({marker!r}).touch()"


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that appears if anything runs; checked when the test ends."""
    path = tmp_path / "it-ran"
    (tmp_path / "evil.py").write_text(EVIL.format(marker=str(path)))
    yield path
    assert not path.exists(), "code from a file has run"


CODE = (
    "python:os:system",
    "python:evil:make",
    "evil.py:make",
    "./evil.py:make",
    "python:evil.py:make",
    "{here}/evil.py:make",
)


def with_code(name: str, here: Path, marker: Path) -> dict[str, Any]:
    options = {"command": f"touch {marker}"} if "system" in name else {}
    return {"name": name.format(here=here), "options": options}


@pytest.mark.parametrize("name", CODE)
def test_a_recipe_never_runs_code(name: str, tmp_path: Path, cli: Cli, marker: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        yaml.safe_dump({"model": with_code(name, tmp_path, marker), "data": {"limit": 60}})
    )
    refused(cli("train", "r.yaml", "--out", "out", "-q"), "trust")
    refused(cli("inspect", "r.yaml"), "trust")
    refused(cli("inspect", name.format(here=tmp_path)), "trust")
    refused(cli("compare", "r.yaml", "--out", "both", "-q"), "trust")


@pytest.mark.parametrize("name", CODE)
def test_a_received_run_never_runs_code(name: str, run: Path, image: Path, cli: Cli, marker: Path) -> None:
    edit(run / "recipe.yaml", lambda values: values.update(model=with_code(name, run.parent, marker)))
    shutil.copy(run.parent / "evil.py", run)
    refused(cli("inspect", run), "trust")
    refused(cli("predict", run, image), "trust")
    refused(cli("evaluate", run), "trust")
    refused(cli("report", run), "trust")
    refused(cli("export", run), "trust")
    cli("train", "--resume", run, "-q")  # finished: there is nothing to build
    edit(run / "run.json", lambda values: values.update(status="started"))
    refused(cli("train", "--resume", run, "-q"), "trust")


@pytest.mark.parametrize("option", ["trust_remote_code", "auto_map", "_attn_implementation", "attn_implementation"])
def test_a_recipe_never_asks_a_hub_for_code(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import SimpleNamespace

    fake = SimpleNamespace(AutoModelForImageClassification=None, AutoModelForSequenceClassification=None)
    monkeypatch.setitem(sys.modules, "transformers", fake)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=f"{option} is not allowed in a recipe"):
        build("hf:someone/net", shape=(3, 8, 8), outputs=2, **{option: True})


def test_a_recipe_cannot_trust_on_the_users_behalf(tmp_path: Path, cli: Cli, marker: Path) -> None:
    values: dict[str, Any] = {"model": {"name": "evil.py:make"}, "trust": "evil.py"}
    with pytest.raises(RecipeError, match="trust: no such key"):
        Recipe.of(values)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({"model": {"name": "evil.py:make", "trust": "evil.py"}}))
    refused(cli("train", "r.yaml"), "model.trust: no such key")
    refused(cli("train", "model.name=evil.py:make", "model.options.trust=evil.py", *TINY), "--trust")
    refused(cli("train", "model.name=evil.py:make", "trust=evil.py", *TINY), "no such key")


def test_pickles_in_a_run_and_in_weights_never_run(run: Path, image: Path, cli: Cli, marker: Path) -> None:
    torch.save({"state_dict": Evil(marker)}, run / "model.safetensors")
    refused(cli("predict", run, image), "model.safetensors")
    torch.save(Evil(marker), run.parent / "weights.pt")
    refused(cli("train", "--weights", run.parent / "weights.pt", *TINY), "weights.pt")
    torch.save({"state_dict": Evil(marker), "batches_done": 1}, run / "checkpoint.ckpt")
    edit(run / "run.json", lambda values: values.update(status="started"))
    refused(cli("train", "--resume", run, "-q"), "checkpoint.ckpt")


def test_pickles_in_data_never_run(tmp_path: Path, cli: Cli, marker: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.array([Evil(marker)] * 9, dtype=object), y=np.arange(9))
    refused(cli("train", "data.name=npz", "data.path=x.npz"), "x.npz")
    np.save(tmp_path / "x.npy", np.array([Evil(marker)], dtype=object))
    with pytest.raises(DataError, match=r"x\.npy"):
        read_npz(tmp_path / "x.npy")
    (tmp_path / "cifar").mkdir()
    (tmp_path / "cifar/test_batch").write_bytes(pickle.dumps({"data": Evil(marker), "labels": [1]}, protocol=2))
    refused(cli("train", "data.name=cifar10", "data.path=cifar"), "could run code")


def test_a_run_with_symbolic_links_is_refused(run: Path, image: Path, cli: Cli) -> None:
    secret = run.parent / "secret"
    secret.write_text("keep me")
    for name in ("run.part", "metrics.part", ".hold", "tensorboard", "checkpoint.part"):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.symlink_to(secret)
        for words in (("evaluate", run), ("predict", run, image), ("train", "--resume", run), ("report", run)):
            refused(cli(*words), "symbolic link", name)
        path.unlink()
    (run / "member-1/deep").mkdir(parents=True)
    for name in ("member-1/checkpoint.part", "member-1/deep/run.json"):
        (run / name).symlink_to(secret)
        for words in (("evaluate", run), ("predict", run, image), ("train", "--resume", run), ("report", run)):
            refused(cli(*words), "symbolic link", name)
        (run / name).unlink()
    (run.parent / "new/sub").mkdir(parents=True)
    (run.parent / "new/sub/run.json").symlink_to(secret)
    refused(cli("train", *TINY, "--out", run.parent / "new", "-q"), "symbolic link", "sub/run.json")
    assert secret.read_text() == "keep me"


# What a user trusts.

NETWORKS = """
from os import system
from torch import nn
from torch.nn import Linear
from neighbour import WIDTH

class Net(nn.Sequential):
    def __init__(self, width=WIDTH):
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

class Text(str):
    pass

def make(width=8):
    return Net(width)

def number():
    return 3

def _hidden():
    return Net()

alias = system
"""


@pytest.fixture
def networks(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/neighbour.py").write_text("WIDTH = 5")
    (tmp_path / "code/networks.py").write_text(NETWORKS)
    return tmp_path / "code/networks.py"


def test_a_trusted_file_is_used_by_every_command(networks: Path, image: Path, cli: Cli) -> None:
    trust = ("--trust", networks)
    words = ("train", "model.name=code/networks.py:make", *TINY, "--out", "run", "-q")
    refused(cli(*words), "--trust")
    assert cli(*words, *trust).code == 0
    assert "trust" not in yaml.safe_load(Path("run/recipe.yaml").read_text())
    moved = shutil.move("run", "moved")  # with the file elsewhere, too
    shutil.copytree(networks.parent, "elsewhere")
    trust = ("--trust", "elsewhere/networks.py")
    for command in (("inspect", moved), ("predict", moved, image), ("evaluate", moved), ("report", moved)):
        refused(cli(*command), "--trust")
        done = cli(*command, *trust)
        assert done.code == 0, done.err
    assert cli("inspect", "code/networks.py:Net", "--shape", "1,8,8", *trust).code == 0
    assert Run(moved, trust=networks).load().predict(np.zeros((1, 1, 8, 8), dtype=np.uint8)).probs.shape == (1, 10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("networks.py:system", "not a function or a subclass of torch.nn.Module that this file itself defines"),
        ("networks.py:alias", "not a function or a subclass"),
        ("networks.py:Linear", "not a function or a subclass"),
        ("networks.py:nn.Linear", "is not a function"),
        ("networks.py:Text", "not a function or a subclass"),
        ("networks.py:WIDTH", "has no function 'WIDTH'"),
        ("networks.py:mke", "did you mean 'make'"),
        ("networks.py:number", "must return a torch.nn.Module, not int"),
        ("other.py:make", "this network is in other.py, but the file that you trust is"),
        ("python:networks:make", "networks are not imported by the name of a module"),
        ("networks.py", "is not a function"),
        ("networks.py:_hidden", "names that begin with _ are private"),
    ],
)
def test_only_what_a_trusted_file_defines_can_be_named(networks: Path, name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_user_network(name, {}, trust=networks)


def test_a_trusted_file_does_not_open_its_folder_to_other_imports(networks: Path) -> None:
    (networks.parent / "timm.py").write_text("raise AssertionError('this is not timm')")
    assert isinstance(build_user_network("networks.py:Net", {"width": 4}, trust=networks), nn.Module)
    with pytest.raises(ModelError, match="the package timm is not installed"):
        build("timm:resnet18", shape=(3, 8, 8), outputs=2)


@pytest.mark.parametrize("trust", ["missing.py", "code", "image.npy"])
def test_what_can_be_trusted_is_a_python_file(networks: Path, trust: str) -> None:
    with pytest.raises(ModelError, match=r"no such file|expected a \.py file"):
        build_user_network("missing.py:make", {}, trust=networks.parents[1] / trust)


# Every file of a run, damaged in every way.


def memory() -> float:
    """The most bytes that this process has had."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


READERS = {
    "recipe.yaml": ("inspect", "predict", "evaluate", "report", "resume"),
    "run.json": ("resume", "report"),
    "metrics.json": ("predict", "report", "evaluate"),
    "preprocessing.json": ("inspect", "predict", "evaluate", "report"),
    "model.safetensors": ("inspect", "predict", "evaluate", "report"),
    "familiarity.safetensors": ("inspect", "predict", "evaluate", "report"),
    "checkpoint.ckpt": ("resume",),
    "metrics.csv": ("resume",),
    "evaluation.npz": ("report",),
    "gallery.npz": ("report",),
}
"""The commands that read each file, beside others."""
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "binary": lambda content: random.Random(0).randbytes(2000),
    "foreign": lambda content: b"PK\x03\x04 something else\n" * 9,
    "a list": lambda content: b"[1, 2, 3]",
    "a number": lambda content: b"3",
    "nested": lambda content: b"[" * 100_000 + b"]" * 100_000,
    "many digits": lambda content: b'{"status": ' + b"9" * 10_000 + b"}",
}


HARMLESS = {("metrics.csv", "empty"), ("metrics.csv", "truncated")}
"""A log may end at any line."""


@pytest.mark.parametrize(("file", "damage"), [(f, d) for f in READERS for d in DAMAGES if (f, d) not in HARMLESS])
def test_a_damaged_file_of_a_run_is_named(file: str, damage: str, run: Path, image: Path, cli: Cli) -> None:
    path = run / file
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    if "resume" in READERS[file] and file != "run.json":
        edit(run / "run.json", lambda values: values.update(status="started"))
    words = {"predict": ("predict", run, image), "resume": ("train", "--resume", run, "-q")}
    for command in READERS[file]:
        refused(cli(*words.get(command, (command, run))), file)


def at(*keys: Any) -> Callable[[Any], Callable[[dict[str, Any]], None]]:
    """Set an entry at a path of keys."""

    def setting(value: Any) -> Callable[[dict[str, Any]], None]:
        def change(values: dict[str, Any]) -> None:
            inner: Any = values
            for key in keys[:-1]:
                inner = inner[key]
            inner[keys[-1]] = value

        return change

    return setting


EDITS: list[tuple[str, str, Callable[[dict[str, Any]], None]]] = [
    *(
        ("preprocessing.json", "predict", at("inputs", "shape")(v))
        for v in ([3, 10**9, 10**9], [1, 10**4, 10**4], "x", [], [0, 8, 8], [1.5, 8, 8])
    ),
    *(("preprocessing.json", "predict", at("inputs", "std")(v)) for v in ([0.0], [float("nan")], ["1"], 3, [1.0, 1.0])),
    *(("preprocessing.json", "predict", at("inputs", "mean")(v)) for v in ([float("inf")], None, [[0.0]])),
    *(("preprocessing.json", "predict", at("inputs", "kind")(v)) for v in ("posix", None, ["images"], "series")),
    *(
        ("preprocessing.json", "predict", at("targets", "names")(v))
        for v in ("0123456789", [1, 2], ["a"] * 10**4, None)
    ),
    *(("preprocessing.json", "predict", at("targets")(v)) for v in ([], None, {"kind": "reals"})),
    *(("preprocessing.json", "predict", at("temperature")(v)) for v in (0, -1, float("nan"), "1", None)),
    *(("metrics.json", "predict", at("threshold", "value")(v)) for v in (float("nan"), "1", None, [1.0])),
    *(("metrics.json", "predict", at("threshold")(v)) for v in ({}, 3, None)),
    *(("metrics.json", "predict", at("abstain")(v)) for v in ({}, 3, None, {"value": "1"}, {"value": 1, "by": "x"})),
    *(("metrics.json", "report", at("test")(v)) for v in (3, {}, {"n": "x"}, {"n": -1}, [1])),
    *(
        ("metrics.json", "report", at("test", "ood")(v))
        for v in (3, {"noise": 3}, {"noise": {"entropy": {"auroc": "x"}}})
    ),
    *(("metrics.json", "report", at("test", "nll")(v)) for v in ("x", [1], {})),
    *(("metrics.json", "report", at("test", "interval")(v)) for v in (3, {"nll": 3})),
    *(("metrics.json", "report", at("parameters")(v)) for v in (3, {"base": "x", "added": 1})),
    *(("run.json", "resume", at("status")(v)) for v in (3, None, ["finished"])),
    *(("run.json", "report", at("seconds")(v)) for v in ("x", float("nan"), -1)),
    *(
        ("recipe.yaml", "predict", at("model", "options")(v))
        for v in ({"channels": [10**9]}, {"channels": 10**6}, {"channels": [1] * 9000}, 3, {"channels": float("nan")})
    ),
    *(
        ("recipe.yaml", "predict", at("model", "name")(v))
        for v in (3, "wide_resnet_99999_10", "mlp", "cnn:x", "../../x")
    ),
    *(("recipe.yaml", "predict", at("evaluation", "samples")(v)) for v in (10**12, -1, float("inf"))),
    *(("recipe.yaml", "predict", at("data", "workers")(v)) for v in (10**6, -1)),
    *(
        ("recipe.yaml", "inspect", at("method")(v))
        for v in (
            3,
            {"name": "system"},
            {"name": "Rank1", "components": 10**10},
            {"name": "deep_ensemble", "members": 10**9},
        )
    ),
    *(("recipe.yaml", "inspect", at("seed")(v)) for v in (-1, 10**30, "x")),
    *(("recipe.yaml", "inspect", at("training", "lr")(v)) for v in (float("nan"), float("inf"), 0)),
]


@pytest.mark.parametrize(("file", "command", "change"), EDITS)
def test_an_edited_entry_of_a_run_is_refused(
    file: str, command: str, change: Callable[[dict[str, Any]], None], run: Path, image: Path, cli: Cli
) -> None:
    edit(run / file, change)
    most = memory()
    words = {"predict": ("predict", run, image), "resume": ("train", "--resume", run, "-q")}
    refused(cli(*words.get(command, (command, run))))
    assert memory() - most < 300e6


# What we write.


def test_formulas_in_class_names_reach_no_csv_and_tags_no_page(tmp_path: Path, cli: Cli) -> None:
    rows = [[i / 60, (i * 7 % 11) / 11, NAMES[i % len(NAMES)]] for i in range(120)]
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "=kind"], *rows])
    data = ("data.name=table", "data.path=t.csv", "data.options={target: =kind}", "model.name=mlp")
    assert cli("train", *data, "training.epochs=1", "evaluation.samples=2", "--out", "run", "-q").code == 0
    assert cli("predict", "run", "t.csv", "--out", "out.csv").code == 0
    table = list(csv.reader((tmp_path / "out.csv").read_text().splitlines()))
    expected = {"p_" + name for name in NAMES}
    assert expected <= set(table[0])
    labels = {row[table[0].index("label")] for row in table[1:]}
    assert labels <= {safe_cell(name) for name in NAMES} and labels
    assert not any(cell.startswith(("=", "+", "@", "\t", "\r")) for row in table for cell in row)
    assert cli("report", "run").code == 0
    assert "<script>alert" not in (tmp_path / "report.html").read_text()
    tables = [list(csv.reader(path.read_text().splitlines())) for path in (tmp_path / "report_files").glob("*.csv")]
    assert tables and not any(safe_cell(cell) != cell for table in tables for row in table for cell in row)


def test_predictions_that_overflow_are_refused_and_never_count_as_sure(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "t.csv").write_text("a,y\n" + "".join(f"{i},{2 * i + i % 3}\n" for i in range(60)))
    words = ("data.name=table", "data.path=t.csv", "data.options={target: y}", "model.name=mlp", "method.name=none")
    assert cli("train", *words, "training.epochs=1", "--out", "run", "-q").code == 0
    mode = Path("run/model.safetensors").stat().st_mode
    assert mode == Path("run/run.json").stat().st_mode and mode & 0o044, "a plain model was a private file"
    assert cli("predict", "run", "t.csv", "--out", "p.csv").code == 0
    Path("p.csv").unlink()
    for key, value in (("std", 1e300), ("mean", 1e300), ("std", 3e38)):
        before = Path("run/preprocessing.json").read_text()
        edit(Path("run/preprocessing.json"), at("targets", key)([value]))
        refused(cli("predict", "run", "t.csv", "--out", "p.csv"), "infinite", "preprocessing.json")
        assert not Path("p.csv").exists()
        Path("run/preprocessing.json").write_text(before)


def test_a_model_card_has_no_markup_from_a_run(run: Path, cli: Cli) -> None:
    text = "![x](https://evil.org/a.png) **b** <img src=x> `c` [d](www.e.org) \x1b[31m\u202e|"
    edit(run / "run.json", lambda values: values.update(began=text, versions={text: text}))
    edit(run / "preprocessing.json", lambda values: values["targets"]["names"].__setitem__(0, text))
    edit(run / "metrics.json", lambda values: values["threshold"].update(by=text, split=text))
    done = cli("export", run, "--out", "m.pt2", "--samples", 2)
    assert done.code == 0, done.err
    card = Path("m.card.md").read_text()
    assert all(line.isprintable() for line in card.splitlines())
    outside = re.sub(r"`[^`]*`", "", re.sub(r"\\.", "", card))  # without code, and what is escaped
    assert "evil.org" in outside and not re.search(r"!\[|\]\(|\*\*|<img|://|www\.", outside), outside


def test_a_comparison_uses_a_trusted_file(networks: Path, cli: Cli) -> None:
    words = (
        "compare",
        "model.name=code/networks.py:make",
        *TINY,
        "--methods",
        "Rank1",
        "--seeds",
        1,
        "-q",
        "--out",
        "c",
    )
    refused(cli(*words), "--trust")
    for _ in range(2):  # the second time it opens what it has trained
        done = cli(*words, "--trust", networks)
        assert done.code == 0, done.err


def test_a_deep_ensemble_and_an_interrupted_run_use_a_trusted_file(networks: Path, cli: Cli) -> None:
    words = (
        "model.name=code/networks.py:make",
        *TINY,
        "method.name=deep_ensemble",
        "method.members=2",
        "--out",
        "e",
        "-q",
    )
    assert cli("train", *words, "--trust", networks).code == 0
    edit(Path("e/run.json"), lambda values: values.update(status="started"))
    refused(cli("train", "--resume", "e", "-q"), "--trust")
    assert cli("train", "--resume", "e", "-q", "--trust", networks).code == 0


def test_control_characters_never_reach_the_terminal(run: Path, cli: Cli) -> None:
    edit(run / "recipe.yaml", lambda values: values["model"].update(name="\x1b[2J\x1b]0;x\x07net"))
    done = cli("inspect", run)
    refused(done, "net")
    assert "\x1b" not in done.err and "\x07" not in done.err


def test_a_run_error_is_what_python_gets_too(run: Path) -> None:
    (run / "run.json").write_text("[]")
    with pytest.raises(RunError, match=r"run\.json: expected an object"):
        _ = Run.open(run).facts
