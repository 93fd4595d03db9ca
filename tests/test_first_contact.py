"""First contact: a table, a folder of images and a network of one's own, each in a few commands; docs/first_steps.md.

Each test of a finding is named after it: what a newcomer met, and what happens now.
"""

from __future__ import annotations

import csv
import datetime
import importlib
import inspect
import json
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from bayesify import lab
from bayesify.cli import main
from bayesify.lab import recipe_for_data
from bayesify.lab.data import Columns, DataError, load
from bayesify.lab.recipes import RecipeError
from bayesify.lab.runs import RunError

ROOT = Path(__file__).parents[1]
HEADER = ["customer_id", "signup_date", "age", "tenure", "spend", "plan", "city", "currency", "churn"]
Row = list[str]


def customers(rows: int, first: int = 0) -> list[Row]:
    """Customers with gaps in numbers and words; those of a short tenure and a basic plan leave more often."""
    rng = np.random.default_rng(first)
    found = []
    for i in range(rows):
        tenure, plan = int(rng.integers(0, 72)), ("basic", "plus", "pro")[int(rng.integers(3))]
        leaves = rng.random() < 1 / (1 + np.exp(0.08 * tenure - 2 - 2 * (plan == "basic")))
        day = datetime.date(2020, 1, 1) + datetime.timedelta(days=int(rng.integers(0, 900)))
        age = str(rng.integers(18, 80)) if i % 9 else ""
        words = [plan if i % 11 else "", ("Rome", "Oslo")[int(rng.integers(2))], "EUR", "yes" if leaves else "no"]
        found.append([f"C{first + i:05d}", day.isoformat(), age, str(tenure), f"{rng.gamma(2, 30):.2f}", *words])
    return found


def write_csv(path: Path, rows: list[Row], header: Row = HEADER) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_photos(folder: Path, count: int = 12) -> Path:
    """Photographs by class, of different sizes, some grey."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for name, level in {"cat": 50, "dog": 130, "owl": 210}.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            size = (*rng.integers(20, 40, 2).tolist(), *([] if i % 4 == 0 else [3]))
            pixels = rng.normal(level, 20, size).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def of_documentation(section: str) -> list[list[str]]:
    """The commands in a section of docs/first_steps.md."""
    text = (ROOT / "docs/first_steps.md").read_text(encoding="utf-8")
    part = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [line.split("#")[0].split() for line in re.findall(r"^\$ bayesify (.*)$", part, re.MULTILINE)]


@pytest.fixture(autouse=True)
def few_epochs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recipe_for_data, "EPOCHS", 2)
    monkeypatch.setattr(recipe_for_data, "LEAST_STEPS", 20)
    monkeypatch.setattr(importlib.import_module("bayesify.lab.evaluation.evaluate"), "NOISE_INPUTS", 30)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the page, which takes a second, where the one of the table has shown that it is written."""
    monkeypatch.setattr(lab.Run, "report", lambda run: run.folder / "report.html")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> lab.Run:
    """A run on a table, with nothing said but the target."""
    folder = tmp_path_factory.mktemp("shop")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_for_data, "EPOCHS", 10)
        patch.setattr(recipe_for_data, "LEAST_STEPS", 20)
        data = write_csv(folder / "customers.csv", customers(600))
        return lab.train(data, folder / "run", target="churn", progress=False)


# Transcripts: the commands of docs/first_steps.md, as they stand there.


def test_transcript_of_a_stranger_with_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(tmp_path / "customers.csv", customers(300))
    write_csv(tmp_path / "new.csv", [row[:-1] for row in customers(20, first=5000)], HEADER[:-1])
    commands = of_documentation("A table")
    assert [words[0] for words in commands] == ["train", "predict", "predict", "train"]
    assert main(commands[0]) == 0
    done = capsys.readouterr()
    for chosen in (
        "target      churn: 2 classes",
        "numbers     age (11% missing), tenure, spend",
        "categories  plan (9% missing), city",
        "left out    customer_id (identifier or free text), signup_date (date), currency (always 'EUR')",
        "network     mlp",
        "method      Rank1",
        "training    ",
    ):
        assert chosen in done.err
    lines = done.out.splitlines()
    assert len(lines) <= 8 and lines[-1] == "runs/customers-Rank1" and lines[0].startswith("test (60 rows): accuracy")
    run = lab.Run("runs/customers-Rank1")
    written = {path.name for path in run.folder.iterdir()}
    assert {"recipe.yaml", "report.html", "metrics.txt"} <= written
    assert "classwise_ece" in (run.folder / "metrics.txt").read_text()  # the rest is in the file
    for words in commands[1:]:
        assert main(words) == 0
    assert len(read_csv(Path("predictions.csv"))) == 20
    assert lab.Run("runs/recipe-IBNN").recipe.data.options == run.recipe.data.options


def test_transcript_of_a_stranger_with_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_report: None
) -> None:
    write_photos(tmp_path / "photos")
    write_photos(tmp_path / "new", count=2)
    first, *others = of_documentation("A folder of images")
    assert main(first) == 0
    told = capsys.readouterr().err
    assert "36 files of different sizes, 9 grey, made coloured" in told and "cat 12, dog 12, owl 12" in told
    assert "cropped and resized to 24x24" in told and "network     cnn" in told
    assert others and all(main(words) == 0 for words in others)
    assert {row["input"] for row in read_csv(Path("predictions.csv"))} == {
        f"{name}/{i}.png" for name in ("cat", "dog", "owl") for i in range(2)
    }


def test_transcript_of_a_stranger_with_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_report: None
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 6)).astype(np.float32)
    np.savez(tmp_path / "signals.npz", x=x, y=(x[:, 0] > 0).astype(int) + (x[:, 1] > 1))
    np.savez(tmp_path / "new.npz", x=x[:5])
    text = (ROOT / "docs/first_steps.md").read_text(encoding="utf-8")
    (tmp_path / "mynet.py").write_text(re.search(r"mynet\.py.*?```py\n(.*?)```", text, re.DOTALL)[1])  # type: ignore[index]
    first, *others = of_documentation("A network of your own")
    assert main(first) == 0
    assert "network     yours, which gets inputs of 6 and returns 3 outputs" in capsys.readouterr().err
    assert others and all(main(words) == 0 for words in others)
    assert len(read_csv(Path("predictions.csv"))) == 5
    assert main([*others[0][:3]]) == 2  # without --trust, a run never runs code
    assert "runs only if you trust it" in capsys.readouterr().err


# 1. First contact: what is chosen.


def test_eight_failed_commands_for_a_table_are_one_message(tmp_path: Path) -> None:
    rows = customers(300)
    rows[7][3], rows[8][3], rows[9][8] = "", "?", ""
    with pytest.raises(DataError) as error:
        load("table", path=write_csv(tmp_path / "t.csv", rows), target="churn")
    found = str(error.value)
    assert found.startswith("7 problems:\n- ")  # two of them with 'tenure'
    for name in ("'signup_date'", "'age'", "'tenure'", "'plan'", "'customer_id'", "target 'churn'"):
        assert name in found, name


def test_a_recipe_from_a_table_can_be_edited_and_run_again(shop: lab.Run) -> None:
    written = yaml.safe_load(shop.recipe_file.read_text())
    assert written["data"]["options"] == {
        "target": "churn",
        "missing": "indicator",
        "unseen": "zeros",
        "drop": ["customer_id", "signup_date", "currency"],
    }
    assert lab.Recipe.of(written) == shop.recipe and written["data"]["calibration"] == 0.1
    assert len(json.loads((shop.folder / "run.json").read_text())["choices"]) == 9


def test_missing_numbers_and_categories_are_inputs_of_their_own(shop: lab.Run) -> None:
    inputs = shop.load().inputs
    assert isinstance(inputs, Columns) and inputs.gaps == ("age",)
    assert {"age is missing", "plan=(missing)"} <= set(inputs.names)
    x = shop.data().train.raw(np_all(shop))
    prepared = inputs.prepare(x)
    column = inputs.names.index("age is missing")
    assert prepared[:, column].sum() == x[:, 0].isnan().sum() > 0 and prepared.isfinite().all()
    assert (prepared[x[:, 0].isnan(), 0] == 0).all()  # the mean


def np_all(run: lab.Run) -> object:
    import torch

    return torch.arange(len(run.data().train))


def test_it_learns_what_there_is_to_learn(shop: lab.Run) -> None:
    rows = [row[-1] for row in customers(600)]
    assert shop.metrics["test"]["accuracy"] > max(rows.count("yes"), rows.count("no")) / 600 + 0.05


def test_identifiers_dates_and_constants_are_told_and_not_learnt(tmp_path: Path) -> None:
    rows = [
        [str(i), f"{i % 28 + 1}/3/2024", "7", str(9000 - i), str(i % 5), f"a note, number {i}", str(i % 2)]
        for i in range(300)
    ]
    header = ["Unnamed: 0", "day", "always", "order_id", "store_id", "note", "y"]
    recipe = lab.recipe_for(write_csv(tmp_path / "t.csv", rows, header), target="y")
    told = {choice.about: choice.chosen for choice in recipe.choices}
    assert told["left out"] == (
        "Unnamed: 0 (identifier), day (date), always (always 7), order_id (identifier), note (identifier or free text)"
    )
    assert told["categories"] == "store_id"  # a number in the file, and an identifier by its name
    assert recipe.data.options["categorical"] == ["store_id"]
    kept = lab.recipe_for(
        tmp_path / "t.csv", target="y", changes=["data.options.categorical=[day]", "data.options.drop=[store_id]"]
    )
    assert kept.data.options["categorical"] == ["day"]
    assert kept.data.options["drop"] == ["store_id", "Unnamed: 0", "always", "order_id", "note"]


def test_words_for_nothing_and_semicolons_are_recognised(tmp_path: Path) -> None:
    lines = ["x;kind;y", *(f"{i + 0.5 if i % 40 else 'n.a.'};{'ab'[i % 2]};{'ab'[i % 2]}" for i in range(100))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    recipe = lab.recipe_for(tmp_path / "t.csv", target="y")
    options = recipe.data.options
    assert options["delimiter"] == ";" and options["na_values"] == ["n.a."]
    told = [str(choice) for choice in recipe.choices]
    assert any("x has numbers, and 'n.a.', which count as missing" in line for line in told)
    assert any(line.startswith("beware      kind tells y in every row") for line in told)


def test_rows_without_a_target_are_left_out_and_told(tmp_path: Path) -> None:
    rows = customers(120)
    rows[3][-1] = rows[50][-1] = ""
    recipe = lab.recipe_for(write_csv(tmp_path / "t.csv", rows), target="churn")
    assert "rows without it are left out: 2" in recipe.choices[0].chosen
    data = load("table", path=tmp_path / "t.csv", **recipe.data.options)
    assert len(data.train) + len(data.validation) + len(data.test) == 118


@pytest.mark.parametrize(
    "shape, network", [((8,), "mlp"), ((12, 3), "lstm"), ((16, 16, 3), "cnn")], ids=["mlp", "lstm", "cnn"]
)
def test_the_network_follows_from_the_data(shape: tuple[int, ...], network: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((60, *shape))
    np.savez(tmp_path / "t.npz", images=x, labels=np.arange(60) % 3)
    assert lab.recipe_for(tmp_path / "t.npz", target="labels").model.name == network
    if network == "lstm":
        x[0, 3, 1] = np.nan
        np.savez(tmp_path / "t.npz", x=x, y=np.arange(60) % 3)
        assert lab.recipe_for(tmp_path / "t.npz").data.name == "series"


def test_a_hugging_face_data_set_is_recognised(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "files").mkdir()
    write_csv(tmp_path / "files/train.csv", customers(80))
    recipe = lab.recipe_for(tmp_path / "files", target="churn")
    assert recipe.data.name == "huggingface"
    assert recipe.data.options["x"] == ["age", "tenure", "spend", "plan", "city"]
    rows = {"pixels": [[float(i)] * 4 for i in range(40)], "label": [i % 2 for i in range(40)]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    assert lab.recipe_for(tmp_path / "saved").model.name == "mlp"


def test_changes_go_before_what_is_chosen(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "t.csv", customers(100))
    changes = ["method=EMP", "training.epochs=3", "model.name=tabm", "data.test=0.3", "seed=4"]
    recipe = lab.recipe_for(data, target="churn", changes=changes)
    assert (recipe.method.name, recipe.training.epochs, recipe.model.name) == ("EMP", 3, "tabm")  # type: ignore[union-attr]
    assert recipe.training.optimizer == "adam" and (recipe.data.test, recipe.seed) == (0.3, 4)


def test_options_change_the_chosen_network_and_keep_it(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "t.csv", customers(100))
    recipe = lab.recipe_for(data, target="churn", changes=["model.options.hidden=[100]"])
    assert (recipe.model.name, recipe.model.options) == ("mlp", {"hidden": [100]})


def test_a_run_takes_minutes_whatever_the_number_of_rows() -> None:
    seen = [recipe_for_data.Cost(3e6).epochs(rows, 128) * rows for rows in (10**5, 10**6, 10**7)]
    assert seen == [2 * 10**5, 2 * 10**6, 10**7]


@pytest.mark.parametrize(
    "data, target, words",
    [
        ("custmers.csv", "churn", "doesn't exist.*did you mean 'customers.csv'"),
        ("customers.csv", None, "which column is to be predicted\\? Add --target and one of customer_id, signup_date"),
        ("customers.csv", "chrun", "target='chrun'.*did you mean 'churn'"),
        ("customers.csv", "currency", "target 'currency' is always 'EUR'"),
        ("customers.csv", "customer_id", "300 different words in 300 rows"),
        ("photos", "class", "the classes of a folder of images are its folders"),
        ("photos/cat", None, "3 images, but no folders"),
        ("sheet.xlsx", None, "save the sheet as .csv"),
        (".", None, "expected a folder of images for each class"),
    ],
)
def test_data_that_can_not_be_used_are_explained(data: str, target: str | None, words: str, tmp_path: Path) -> None:
    write_csv(tmp_path / "customers.csv", customers(300))
    if data.startswith("photos"):
        write_photos(tmp_path / "photos", count=3)
    elif data == ".":
        (tmp_path / "customers.csv").unlink()
        (tmp_path / "notes.md").write_text("")
    (tmp_path / "sheet.xlsx").write_text("")
    with pytest.raises(DataError, match=words):
        lab.recipe_for(data, target=target)


def test_every_broken_image_is_in_one_message(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", count=3)
    (photos / "cat/1.png").write_bytes(b"no image")
    (photos / "owl/2.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"(?s)2 problems:.*cat/1\.png.*owl/2\.png"):
        lab.recipe_for(photos)


def test_every_uneven_row_is_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3\n4,5\n6,7,8\n")
    with pytest.raises(DataError, match="the header has 2 columns, but '3' has 1, '6,7,8' has 3"):
        load("table", path=tmp_path / "t.csv", target="b")


def test_a_target_of_a_recipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.yaml").write_text("seed: 1\n")
    assert main(["train", "r.yaml", "--target", "price"]) == 2
    assert "data.options.target=price" in capsys.readouterr().err


# 1. First contact: predictions.


def predicted(run: lab.Run, path: Path, **options: object) -> list[dict[str, str]]:
    lab.predict_files(run, [path], path.with_name("out.csv"), **options)  # type: ignore[arg-type]
    return read_csv(path.with_name("out.csv"))


def test_unknown_and_missing_values_are_flagged_by_row_and_never_the_death_of_a_file(
    shop: lab.Run, tmp_path: Path
) -> None:
    rows = customers(8, first=9000)
    rows[1][6], rows[2][5], rows[3][3], rows[4][4], rows[5][2] = "Paris", "gold", "", "much", ""
    found = predicted(shop, write_csv(tmp_path / "new.csv", rows))
    flags = {i: row["why"] for i, row in enumerate(found) if "column" in row["why"]}
    assert {i: flags[i].split(";")[0] for i in (1, 2, 3, 4)} == {
        1: "column city has an unknown category",
        2: "column plan has an unknown category",
        3: "column tenure has no number",
        4: "column spend has no number",
    }
    assert 5 not in flags and all(found[i]["abstain"] == "true" for i in flags)  # ages were missing in training, too
    assert predicted(shop, tmp_path / "new.csv", score="entropy")[3]["why"].startswith("column tenure has no number")


def test_the_columns_of_the_input_are_copied_as_they_are_written(shop: lab.Run, tmp_path: Path) -> None:
    rows = [[*row, "007", "=1+1", "me"] for row in customers(3, first=9000)]
    found = predicted(shop, write_csv(tmp_path / "new.csv", rows, [*HEADER, "code", "note", "label"]))
    for row, out in zip(rows, found, strict=True):
        own = dict(zip([*HEADER, "code"], row, strict=False))
        assert {name: out[name] for name in own} == own  # the target, too, which is no error
        assert out["note"] == "'=1+1" and out["input_label"] == "me" and out["label"] in ("yes", "no")
    lab.predict_files(shop, [tmp_path / "new.csv"], tmp_path / "out.parquet")
    import pyarrow.parquet as parquet

    assert parquet.read_table(tmp_path / "out.parquet")["note"].to_pylist() == ["=1+1"] * 3


def test_columns_of_any_type_are_copied(shop: lab.Run, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    when = datetime.datetime(2024, 2, 29, 12, 30)
    columns = {name: [value] for name, value in zip(HEADER, customers(2, first=9000)[1], strict=True)}
    others = {"when": [when], "lists": [[1, 2]], "waited": [datetime.timedelta(hours=3)], "raw": [b"x"], "none": [None]}
    columns |= {"age": [40.0], "tenure": [3], "spend": [9.5]}
    parquet.write_table(pa.table({**columns, **others}), tmp_path / "new.parquet")
    (row,) = predicted(shop, tmp_path / "new.parquet")
    assert row["when"].startswith("2024-02-29 12:30") and (row["lists"], row["waited"]) == ("[1, 2]", "3:00:00")
    lab.predict_files(shop, [tmp_path / "new.parquet"], tmp_path / "out.parquet")
    assert parquet.read_table(tmp_path / "out.parquet")["lists"].to_pylist() == [[1, 2]]


def test_columns_of_several_files_are_copied_side_by_side(shop: lab.Run, tmp_path: Path) -> None:
    first = write_csv(tmp_path / "a.csv", customers(2))
    second = write_csv(tmp_path / "b.csv", [[*row[1:], "x"] for row in customers(1)], [*HEADER[1:], "more"])
    lab.predict_files(shop, [first, second], tmp_path / "out.csv")
    found = read_csv(tmp_path / "out.csv")
    assert [(row["customer_id"], row["more"]) for row in found] == [("C00000", ""), ("C00001", ""), ("", "x")]


@pytest.mark.parametrize("score", ["entropy", "mutual_information", "familiarity", "max_probability", "doubt"])
def test_abstain_and_score_choose_how_many_and_by_what(shop: lab.Run, score: str, tmp_path: Path) -> None:
    """The share is that of validation rows, which are predicted here."""
    data = shop.data()
    rows = {tuple(row.tolist()) for row in data.validation.raw(np_rows(len(data.validation)))}
    everything = load("table", path=shop.recipe.data.path, validation=0, test=0, **shop.recipe.data.options).train
    raw = data.inputs.encode(frame_of(shop))  # type: ignore[attr-defined]
    assert len(everything) == len(raw) == 600
    lines = customers(600)
    kept = [line for line, row in zip(lines, raw.tolist(), strict=True) if in_rows(row, rows)]
    found = predicted(shop, write_csv(tmp_path / "v.csv", kept), abstain=0.25, score=score)
    plain = [row for row in found if "column" not in row["why"]]
    assert sum(row["abstain"] == "true" for row in plain) == pytest.approx(0.25 * len(kept), abs=2)
    column = {"entropy": "entropy", "mutual_information": "epistemic"}.get(score)
    if column:
        flagged = [float(row[column]) for row in plain if row["abstain"] == "true"]
        assert min(flagged) > max(float(row[column]) for row in plain if row["abstain"] == "false")


def np_rows(count: int) -> object:
    import torch

    return torch.arange(count)


def in_rows(row: list[float], rows: set[tuple[float, ...]]) -> bool:
    return any(np.allclose(row, other, equal_nan=True) for other in rows)


def frame_of(run: lab.Run) -> object:
    from bayesify.lab.data.frame import read_frame

    return read_frame(Path(str(run.recipe.data.path)), drop=["customer_id", "signup_date", "currency", "churn"])


def test_wrong_shares_and_scores_are_explained(shop: lab.Run, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "new.csv", customers(2))
    with pytest.raises(RunError, match=r"abstain=2: expected the share.*such as 0\.2"):
        predicted(shop, path, abstain=2)
    with pytest.raises(RunError, match=r"score='mutual_infromation'.*did you mean 'mutual_information'"):
        predicted(shop, path, score="mutual_infromation")


def test_coverage_works_on_what_train_chose(shop: lab.Run, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "new.csv", customers(40, first=9000))
    sizes = [
        sum(float(row["conformal_size"]) for row in predicted(shop, path, coverage=share)) for share in (0.6, 0.95)
    ]
    assert sizes[0] < sizes[1]


# 2. The lab in Python.


def test_train_takes_a_dict_a_path_a_recipe_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[lab.Recipe, Path]] = []
    start = "bayesify.lab.training.start.train_recipe"
    monkeypatch.setattr(start, lambda recipe, folder, **_: seen.append((recipe, folder)))
    (tmp_path / "r.yaml").write_text("method: IBNN\n")
    data = write_csv(tmp_path / "customers.csv", customers(80))
    for given in ({"method": "IBNN"}, tmp_path / "r.yaml", "r.yaml", lab.Recipe.of({"method": "IBNN"})):
        lab.train(given, changes=["training.epochs=4"])
    lab.train(str(data), target="churn", changes=["method=IBNN", "training.epochs=4"], progress=False)
    assert {(recipe.method.name, recipe.training.epochs) for recipe, _ in seen} == {("IBNN", 4)}  # type: ignore[union-attr]
    assert [folder.as_posix() for _, folder in seen] == [
        *("runs/digits-IBNN", "runs/r-IBNN", "runs/r-IBNN", "runs/digits-IBNN", "runs/customers-IBNN")
    ]
    with pytest.raises(RecipeError, match="int: expected a Recipe, nested values, or the path"):
        lab.train(3)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"names its own target, such as data\.options\.target=churn"):
        lab.train({"method": "IBNN"}, target="churn")


def test_predict_takes_paths_frames_dicts_and_rows(shop: lab.Run, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    path = write_csv(tmp_path / "new.csv", customers(6, first=9000))
    frame = pandas.read_csv(path)
    by_path = shop.predict(path).probs
    rows = frame.astype(object).where(frame.notna(), None)
    for same in (str(path), [path], frame, rows.to_dict("list"), rows.to_dict("records")):
        assert shop.predict(same).probs.equal(by_path)
    with pytest.raises(DataError, match="the DataFrame has no columns 'age', 'city'; it has"):
        shop.predict(frame.drop(columns=["age", "city"]))


def test_report_is_a_method_of_a_run(shop: lab.Run) -> None:
    page = shop.report()
    assert page == shop.folder / "report.html" and "<html" in page.read_text()


def test_a_loaded_run_has_a_short_repr(shop: lab.Run) -> None:
    assert repr(shop.load()) == "Trained(mlp with Rank1; columns (10,), 2 classes)"


def test_every_public_name_of_the_lab_is_itself_whatever_is_imported() -> None:
    """`lab.compare` was a function at the first look and a module at the second."""
    first = {name: getattr(lab, name) for name in lab.__all__}
    for module in pkgutil.iter_modules(lab.__path__, "bayesify.lab."):
        importlib.import_module(module.name)
    assert not [name for name in lab.__all__ if inspect.ismodule(getattr(lab, name))]
    assert {name: getattr(lab, name) for name in lab.__all__} == first


def test_every_public_name_of_the_lab_is_documented() -> None:
    text = (ROOT / "docs/lab.md").read_text(encoding="utf-8")
    assert not [name for name in lab.__all__ if not re.search(rf"^\| `(lab\.)?{name}\b", text, re.MULTILINE)]
