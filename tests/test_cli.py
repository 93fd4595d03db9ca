"""The command line: help worth reading, a whole flow, and errors that say what to do."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from command_line import Cli, Done, cli_in

import bayesify as by
from bayesify.cli.run_folder import FOLDER_VARIABLE, folder_of
from bayesify.lab.recipes import Recipe
from bayesify.lab.run_names import first_free
from bayesify.lab.training import Interrupted  # now: Lightning's log would keep the stderr of the test that imports it
from bayesify.methods import METHODS

COMMANDS = ("train", "tune", "evaluate", "predict", "compare", "report", "export", "reproduce", "inspect", "schema")
TINY = ("training.epochs=1", "data.limit=100", "evaluation.samples=3")


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return cli_in(tmp_path, monkeypatch, capsys)


def python(*words: object, cwd: Path | None = None) -> Done:
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, cwd=cwd)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that the command made in a process of its own, on what is there by default."""
    home = tmp_path_factory.mktemp("home")
    done = python("-m", "bayesify", "train", *TINY, cwd=home)
    assert done.code == 0 and done.err == "", done.err  # no chatter of other packages
    assert "accuracy" in done.out and done.out.splitlines()[-1] == "runs/digits-Rank1"
    return home / "runs/digits-Rank1"


def test_a_run_works_from_any_folder(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef make(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))"
    )
    x, y = np.random.default_rng(0).random((60, 64), dtype=np.float32), np.arange(60) % 10
    np.savez(tmp_path / "rows.npz", x=x.reshape(60, 1, 8, 8), y=y)
    data, trust = ("data.name=npz", "data.path=rows.npz"), ("--trust", tmp_path / "net.py")
    assert cli("train", "model.name=net.py:make", *data, "training.epochs=1", "--out", "here", "-q", *trust).code == 0
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    assert cli("evaluate", "../here", *trust).code == 0


def test_another_method_brings_its_own_training_to_a_runs_recipe(cli: Cli, run_folder: Path) -> None:
    assert cli("train", run_folder / "recipe.yaml", "method=EMP", "--out", "emp", "-q").code == 0
    recipe = Recipe.read("emp/recipe.yaml")
    usual = Recipe.of({"method": "EMP"}).training
    assert recipe.training == usual.model_copy(update={"epochs": 1}) and recipe.data.limit == 100


def test_evaluate_takes_keys_of_its_part_alone(cli: Cli, run_folder: Path) -> None:
    done = cli("evaluate", run_folder, "evaluation.rows=20", "--split", "test", "--shift", "fog", "--ood", "digits")
    assert done.code == 0 and "accuracy, fog 5" in done.out and "digits AUROC by variance" in done.out
    done = cli("evaluate", run_folder, "training.epochs=3")
    assert done.code == 2 and "expected evaluation.KEY=VALUE" in done.err
    done = cli("evaluate", run_folder, "evaluation.rwos=3")
    assert done.code == 2 and "evaluation.rwos: no such key; did you mean 'rows'?" in done.err
    done = cli("evaluate", run_folder, "--attack", "pdg")
    assert done.code == 2 and "no attack is called 'pdg'; did you mean 'pgd'" in done.err


# Help.


@pytest.mark.parametrize("command", COMMANDS)
def test_help(cli: Cli, command: str) -> None:
    done = cli(command, "--help")
    assert done.code == 0
    assert f"Usage: bayesify {command}" in done.out and f"bayesify {command}" in done.out.split("Examples")[1]


def test_without_words_there_is_help(cli: Cli) -> None:
    for words in ([], ["--help"]):
        done = cli(*words)
        assert all(command in done.out for command in COMMANDS) and "--version" in done.out


def test_version(cli: Cli) -> None:
    assert cli("--version") == Done(0, f"bayesify {by.__version__}\n", "")


def test_help_does_not_import_what_trains() -> None:
    code = (
        "import sys; from bayesify.cli import main; main(['--help']); print({'lightning', 'pydantic'} & {*sys.modules})"
    )
    assert python("-c", code).out.endswith("set()\n")


def test_unknown_words_are_errors(cli: Cli) -> None:
    for words in (["trian"], ["train", "--epochs", "3"], ["evaluate"], ["compare", "--seeds", "0"]):
        done = cli(*words)
        assert done.code == 2 and done.out == "" and "Usage: bayesify" in done.err


# From data to predictions.


def test_a_run_holds_everything(run_folder: Path) -> None:
    expected = {"recipe.yaml", "run.json", "metrics.csv", "metrics.json", "model.safetensors", "preprocessing.json"}
    assert expected <= {path.name for path in run_folder.iterdir()}


def test_evaluate(cli: Cli, run_folder: Path) -> None:
    done = cli("evaluate", run_folder, "--samples", 2)
    assert (done.code, done.err) == (0, "")
    for word in ("validation", "test", "accuracy", "nll", "ece", "2 draws"):
        assert word in done.out


def test_evaluate_refuses_an_unknown_split(cli: Cli, run_folder: Path) -> None:
    assert_refused(cli("evaluate", run_folder, "--split", "tset"), "'tset'", "train, validation and test")


@pytest.mark.parametrize("out", ["predictions.csv", "deep/er/table.parquet"])
def test_predict(cli: Cli, run_folder: Path, tmp_path: Path, out: str) -> None:
    np.savez(tmp_path / "new.npz", x=np.zeros((5, 8, 8), np.uint8))
    done = cli("predict", run_folder, "new.npz", "--out", out)
    assert done == Done(0, f"wrote 5 predictions to {out}\n", "")
    if out.endswith(".csv"):
        rows = list(csv.DictReader((tmp_path / out).read_text().splitlines()))
        assert len(rows) == 5 and {"label", "probability", "aleatoric", "epistemic", "abstain"} <= set(rows[0])


def test_predict_refuses_another_format(cli: Cli, run_folder: Path) -> None:
    assert_refused(cli("predict", run_folder, "new.npz", "--out", "p.xls"), "p.xls", ".csv or .parquet")


def test_predict_refuses_another_shape(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "new.npz", x=np.zeros((5, 9, 9), np.uint8))
    assert_refused(cli("predict", run_folder, "new.npz"), "9, 9", "8, 8")


def test_resuming_a_finished_run_shows_it_again(cli: Cli, run_folder: Path) -> None:
    done = cli("train", "--resume", run_folder)
    assert done.code == 0 and "accuracy" in done.out and "already finished" in done.err


def test_options_are_keys_of_the_recipe(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "bayesify.lab.training.train", lambda recipe, folder, **_: seen.append((recipe, folder)) or 1 / 0
    )
    Path("mine.yaml").write_text("method: IBNN\nseed: 1\n")
    cli("train", "mine.yaml", "method.components=8", "--seed", 7, "--devices", 2, "--weights", "a b.pt")
    ((recipe, folder),) = seen
    assert recipe.method.to_method().components == 8 and (recipe.seed, recipe.training.devices) == (7, 2)
    assert recipe.model.weights == "a b.pt" and recipe.training.epochs == 3  # as for fine-tuning
    assert folder == Path("runs/mine-IBNN")


def test_compare(cli: Cli, tmp_path: Path) -> None:
    words = ("compare", "--methods", "Rank1,MCDropout", "--seeds", 1, "--out", "both", "-q", *TINY)
    done = cli(*words)
    assert (done.code, done.err) == (0, "")
    for word in ("plain network", "Rank1", "MCDropout", "NLL", "ECE"):
        assert word in done.out
    assert {"comparison.csv", "report.html", "base", "Rank1", "MCDropout"} <= {p.name for p in Path("both").iterdir()}
    assert cli(*words).out == done.out  # nothing is trained again


def test_compare_refuses_what_it_can_not_compare(cli: Cli) -> None:
    Path("a.yaml").write_text("method: IBNN")
    Path("b.yaml").write_text("model: {weights: w.pt}")
    assert_refused(cli("compare", "a.yaml", "b.yaml", "--methods", "EMP"), "--methods EMP", "single recipe")
    assert_refused(cli("compare", "a.yaml", "method=EMP"), "--methods")
    assert_refused(cli("compare", "a.yaml", "--methods", "EMP,Rank2"), "Rank2", "did you mean 'Rank1'?")
    assert_refused(cli("compare", "b.yaml", "--scratch"), "--scratch", "model.weights")
    assert_refused(cli("compare", "a.yaml", "training.devices=2"), "one device", "--devices 2")


# Inspecting.


def test_inspect_a_network_by_name(cli: Cli) -> None:
    done = cli("inspect", "mlp", "--shape", 13, "--outputs", 2, "--method", "IBNN", "components=8")
    assert done.code == 0 and "IBNN(8, noise=0.2)" in done.out and "total" in done.out


def test_inspect_with_options_of_the_network(cli: Cli) -> None:
    done = cli("inspect", "mlp", "--shape", "4", "--method", "none", "model.options.hidden=[7]")
    assert done.code == 0 and "35" in done.out  # 4 × 7 weights and 7 biases


def test_inspect_a_run_and_a_recipe(cli: Cli, run_folder: Path) -> None:
    of_run, of_recipe = cli("inspect", run_folder), cli("inspect", run_folder / "recipe.yaml")
    assert of_run.code == of_recipe.code == 0 and "Rank1(4, noise=0.2)" in of_run.out
    assert of_run.out.splitlines()[-1] == of_recipe.out.splitlines()[-1]


def test_inspect_refuses(cli: Cli, run_folder: Path) -> None:
    assert_refused(cli("inspect", "resnet21"), "resnet21", "resnet20")
    assert_refused(cli("inspect", "lenet", "--shape", "3,a"), "--shape 3,a", "3,32,32")
    assert_refused(cli("inspect", "lenet", "componets=3"), "componets", "did you mean 'components'?")
    assert_refused(cli("inspect", run_folder, "--method", "IBNN"), "leave out")
    assert_refused(cli("inspect", run_folder / "model.safetensors"), "the run's folder")
    assert_refused(cli("inspect", "lenet", "--weights", "none.pt"), "none.pt", "no such file")


def test_schema(cli: Cli) -> None:
    done = cli("schema")
    schema = json.loads(done.out)
    assert set(METHODS) <= set(schema["$defs"]) and "\x1b" not in done.out
    assert set(schema["x-training"]["from scratch"]) >= set(METHODS)


# Errors, one of each kind.


def assert_refused(done: Done, *words: str) -> None:
    assert done.code == 2 and done.out == "" and done.err.startswith("error: "), done
    assert all(word in done.err for word in words), done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nothing.yaml"], ["nothing.yaml", "no such file"]),
        (["list.yaml"], ["list.yaml", "expected keys"]),
        (["trainig.epochs=3"], ["trainig", "did you mean 'training'?"]),
        (["method.componets=3"], ["method.componets", "did you mean 'components'?"]),
        (["method=Rank2"], ["Rank2", "did you mean 'Rank1'?"]),
        (["training.epochs=0"], ["training.epochs", "greater than or equal to 1", "got 0"]),
        (["data.name=digit"], ["'digit'", "did you mean 'digits'?"]),
        (["list.yaml", "nothing.yaml"], ["one recipe", "list.yaml nothing.yaml"]),
        (["--weights", "none.pt"], ["none.pt", "no such file"]),
        (["model.name=lenet"], ["lenet", "28, 28", "(1, 8, 8)"]),
        (["data.path=none.csv", "data.name=table"], ["none.csv doesn't exist"]),
        (["data.path=nan.csv", "data.name=table", "data.options.target=y"], ["nan.csv", "1 missing", "rows 7"]),
        (["data.path=nan.npz", "data.name=npz"], ["NaN or infinity", "rows 3"]),
        (["data.path=minus.npz", "data.name=npz"], ["-1 in row 0", "0, 1, 2"]),
        (["data.path=gap.npz", "data.name=npz"], ["no training example", "classes: 1"]),
        (["--resume", "list.yaml"], ["not a run"]),
        (["--resume", "runs/x", "training.epochs=9", "--seed", "3"], ["unchanged", "training.epochs=9 --seed"]),
    ],
)
def test_train_refuses(cli: Cli, words: list[str], expected: list[str]) -> None:
    write_broken_files()
    assert_refused(
        cli("train", "model.name=mlp", *words) if "data.path" in words[0] else cli("train", *words), *expected
    )


def write_broken_files() -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3
    Path("list.yaml").write_text("- a\n- b\n")
    rows = [[*row[:2], label] for row, label in zip(x, y, strict=True)]
    rows[7][0] = "nan"
    with Path("nan.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "y"], *rows])
    np.savez("minus.npz", x=x, y=[-1, *y[1:]])
    np.savez("gap.npz", x=x, y=y // 2 * 2)
    x[3, 1] = np.nan
    np.savez("nan.npz", x=x, y=y)


def test_a_folder_with_a_run_is_refused(cli: Cli, run_folder: Path) -> None:
    assert_refused(cli("train", "--out", run_folder), "already holds a run", "--resume")


@pytest.mark.parametrize("words", [["evaluate", "none"], ["predict", "none", "new.csv"], ["train", "--resume", "none"]])
def test_a_folder_without_a_run_is_refused(cli: Cli, words: list[str]) -> None:
    assert_refused(cli(*words), "none: not a run")


def test_a_folder_that_can_not_be_written_is_refused(cli: Cli) -> None:
    Path("file").write_text("")
    assert_refused(cli("train", "--out", "file/run"), "file")


def test_long_messages_wrap_without_breaking_names(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "dumb")
    name = "a-long-folder-name/" * 4 + "recipe.yaml"
    lines = cli("train", name).err.splitlines()
    assert len(lines) > 2 and any(name in line for line in lines)
    assert all(len(line) <= 40 or name in line for line in lines)


def test_a_missing_package_is_named() -> None:
    code = "import sys; sys.modules['lightning'] = None; from bayesify.cli import main; sys.exit(main(['train']))"
    assert_refused(python("-c", code), "lightning", "pip install 'bayesify[lab]'")


def test_without_typer_there_is_a_message(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    for module in ("app", "error_handling"):
        monkeypatch.delitem(sys.modules, f"bayesify.cli.{module}", raising=False)
    assert_refused(cli("train"), "typer", "pip install 'bayesify[lab]'")


def fail(error: BaseException) -> Callable[..., Any]:
    def failing(*_: Any, **__: Any) -> Any:
        raise error

    return failing


def test_an_unexpected_error_is_called_a_bug(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayesify.cli.inspection.recipe_schema", fail(ZeroDivisionError("oh [red]")))
    done = cli("schema")
    assert done.code == 1 and "ZeroDivisionError: oh [red]" in done.err and "--debug" in done.err
    for words in (["--debug", "schema"], ["schema", "--debug"]):
        with pytest.raises(ZeroDivisionError):
            cli(*words)


def test_interruptions_end_with_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayesify.cli.inspection.recipe_schema", fail(KeyboardInterrupt()))
    assert cli("schema") == Done(130, "", "stopped\n")
    monkeypatch.setattr("bayesify.lab.training.train", fail(Interrupted("stopped; go on with --resume")))
    assert cli("train") == Done(130, "", "stopped; go on with --resume\n")
    monkeypatch.setattr("bayesify.lab.comparison.compare_recipes.compare", fail(Interrupted("stopped")))
    done = cli("compare", "--out", "both")
    assert done.code == 130 and "continue by running the same command with --out both" in done.err


def test_ctrl_c_keeps_a_checkpoint(tmp_path: Path) -> None:
    words = ["train", "training.epochs=100000", "data.limit=100", "data.validation=0", "--out", "long"]
    process = subprocess.Popen(
        [sys.executable, "-m", "bayesify", *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    give_up = time.monotonic() + 60
    while not (tmp_path / "long/checkpoint.ckpt").exists() and time.monotonic() < give_up:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume long" in err and "Traceback" not in err


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-m", "bayesify", "schema"], stdout=pipe, stderr=pipe)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.wait()
    process.stderr.close()


def test_only_warnings_for_the_user_are_shown(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn() -> dict[str, Any]:
        warnings.simplefilter("always")
        warnings.warn("look at your data", stacklevel=1)
        warnings.warn_explicit("use more workers", UserWarning, "/site-packages/lightning/trainer.py", 1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return {}

    monkeypatch.setattr("bayesify.cli.inspection.recipe_schema", warn)
    assert cli("schema").err == "warning: look at your data\n"


# Folders, and several processes.


def test_the_first_free_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert first_free(tmp_path / "a") == tmp_path / "a"  # empty
    for name in ("a", "a-2"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "recipe.yaml").touch()
    assert first_free(tmp_path / "a") == tmp_path / "a-3"


def test_processes_that_lightning_starts_share_the_folder(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    inherited: list[str] = []
    monkeypatch.setattr("bayesify.lab.training.train", lambda *_, **__: inherited.append(os.environ[FOLDER_VARIABLE]))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv(FOLDER_VARIABLE, "runs/the-first")
    assert cli("train") == Done(0, "", "")
    assert inherited == ["runs/the-first"]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_torchrun_needs_a_folder(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(by.BayesifyError, match="--out"):
        folder_of(None, "digits-Rank1")
    assert folder_of(Path("there"), "digits-Rank1") == Path("there")


# The page.

PAGE = (Path(__file__).parents[1] / "docs/cli.md").read_text(encoding="utf-8")


def test_the_pages_recipes_are_recipes() -> None:
    recipes = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert recipes and all(Recipe.of(yaml.safe_load(text)) for text in recipes)


def test_the_page_has_every_command() -> None:
    for command in COMMANDS:
        assert f"$ bayesify {command}" in PAGE
