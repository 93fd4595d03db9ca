"""The demo: its images, its networks, what it counts, what it writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import demo
import demo_report
import pytest
import scipy.stats
import torch
from demo_report import PLAIN, RANK1, Column, Fold, Table
from other_images import LETTERS, letters, other_images, photographs
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch import Tensor


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    found = load_digits()
    return torch.from_numpy(found.images / 16).float()[:, None], torch.from_numpy(found.target)


@pytest.fixture(scope="module")
def folds(digits: tuple[Tensor, Tensor]) -> list[Fold]:
    """Two of the five folds with two members and an epoch each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "EPOCHS", 1)
        patch.setattr(demo, "MEMBERS", 2)
        return [demo.one_fold(*digits, fold) for fold in range(2)]


def test_other_images_are_like_digits_in_everything_but_what_they_show(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    for images, names in other_images(x, y).values():
        assert images.shape[1:] == x.shape[1:] and len(images) == len(names) >= 200
        assert torch.equal(16 * images, (16 * images).round()) and images.min() == 0 and images.max() == 1
    drawn, names = letters()
    assert {name[-1] for name in names} == set(LETTERS) and not set(LETTERS) & set("BDGIOQSZ")
    assert abs(drawn.mean() - x.mean()) < 0.05  # as much ink
    assert (drawn[..., [0, 7]].mean() - x[..., [0, 7]].mean()).abs() < 0.05  # and as wide
    assert all(
        torch.equal(again, once)
        for again, once in zip(photographs(), photographs(), strict=True)
        if not isinstance(again, list)
    )


def test_the_folds_test_every_digit_once(digits: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = digits
    numbered = torch.arange(len(x)).float()[:, None, None, None].expand_as(x)
    seen: list[tuple[Tensor, Tensor]] = []

    def untrained(data: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor]) -> dict[str, demo.Model]:
        seen.append((data[0], validation[0]))
        return {RANK1: demo.Model([], lambda x: None)}  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(demo, "train", untrained)
    tests = [demo.one_fold(numbered, y, fold).images["test"] for fold in range(demo.FOLDS)]
    assert torch.equal(torch.cat(tests)[:, 0, 0, 0].sort().values, torch.arange(1797.0))
    for test, (data, validation) in zip(tests, seen, strict=True):
        rows = torch.cat([test, data, validation])[:, 0, 0, 0]
        assert len(rows) == len(rows.unique()) == 1797


def test_the_plain_network_is_as_good_as_a_support_vector_machine_and_sure_of_nonsense(
    digits: tuple[Tensor, Tensor],
) -> None:
    x, y = digits
    test, train = torch.arange(len(x)) % demo.FOLDS == 0, torch.arange(len(x)) % demo.FOLDS != 0
    torch.manual_seed(0)
    plain = demo.fit(demo.network(), x[train], y[train])
    machine = SVC(gamma=0.001 * 16**2).fit(x[train].flatten(1).numpy(), y[train].numpy())  # scikit-learn's example
    right = (demo.average([plain], x[test]).label == y[test]).float().mean()
    assert right > machine.score(x[test].flatten(1).numpy(), y[test].numpy()) - 0.015 and right > 0.97
    others = other_images(x[test], y[test])
    assert (demo.average([plain], others["letters"][0]).confidence > 0.9).float().mean() > 0.25


def test_each_asks_by_its_own_threshold(folds: list[Fold]) -> None:
    fold = folds[0]
    for model, score in ((PLAIN, "entropy"), ("ensemble of 2", "epistemic"), (RANK1, "doubt")):
        p = fold.predictions[model]
        limit = fold.threshold(model, score)
        assert sum(value > limit for value in getattr(p["validation"], score).tolist()) == 15  # 5% of 300
        found = fold.asking(model, score)
        asks = [value > limit for value in getattr(p["test"], score).tolist()]
        wrong = [label != truth for label, truth in zip(p["test"].label.tolist(), fold.labels.tolist(), strict=True)]
        assert found["asked"] == pytest.approx(100 * sum(asks) / len(asks))
        assert found["wrong"] == pytest.approx(
            100 * sum(w and not a for w, a in zip(wrong, asks, strict=True)) / len(asks)
        )
        answered = [value <= limit for value in getattr(p["letters"], score).tolist()]
        assert found["letters"] == pytest.approx(100 * sum(answered) / len(answered))


def test_only_what_a_paired_test_would_mark_is_marked() -> None:
    values = {
        "first": [0.3, 0.5, 0.4],
        "clear": [0.2, 0.41, 0.3],
        "chance": [0.29, 0.35, 0.39],
        "worse": [0.4, 0.6, 0.51],
    }
    column = Column("nll", "NLL", min, 2)
    table = Table("", [column], {name: [{"nll": value} for value in some] for name, some in values.items()})
    marks = {name: {"✓", "✗"} & set(table.cell(name, column)) for name in values}
    assert marks == {"first": set(), "clear": {"✓"}, "chance": set(), "worse": {"✗"}}
    for name in ("clear", "chance", "worse"):
        assert (scipy.stats.ttest_rel(values[name], values["first"]).pvalue < 0.05) == bool(marks[name])


def test_it_ends_with_a_picture_and_a_page(
    folds: list[Fold], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "old.html").touch()
    demo_report.write(folds, tmp_path / "demo")
    printed = capsys.readouterr().out
    end = "".join(printed.rstrip().splitlines()[-3:])  # a long path is wrapped
    assert end.endswith("report.html.") and "Rank1, with familiarity" in printed
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {"demo.png", "report.html"}
    with Image.open(tmp_path / "demo" / "demo.png") as image:
        assert image.width > 1500 and len(image.convert("RGB").getcolors(10**6)) > 50
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert page.count("<img") == 16 and "http" not in page
    for model in folds[0].predictions:
        assert f'<th scope="row">{model}' in page


def test_the_words_follow_the_numbers(folds: list[Fold]) -> None:
    quality, asking = demo_report.quality_table(folds).short, demo_report.asking_table(folds).short
    same = dict.fromkeys(quality.rows, quality.rows[PLAIN])
    worse = [{**values, "ece": values["ece"] + 9 + 0.1 * i} for i, values in enumerate(same[PLAIN])]
    better = [{**values, "nll": values["nll"] + 9 + 0.1 * i} for i, values in enumerate(same[PLAIN])]
    said = [
        list(demo_report.sentences(replace(quality, rows=rows), asking))[-1].partition("beyond chance: ")[2]
        for rows in (same, {**same, RANK1: worse}, {**same, "temperature scaling": better})
    ]
    assert said == ["no difference.", "ECE worse than all.", "NLL better than temperature scaling."]
