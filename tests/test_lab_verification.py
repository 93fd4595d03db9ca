"""Face verification against scikit-learn and brute force; features are averages over draws; ORL's faces load."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor, nn

import bayesify as by
from bayesify.lab import analyses
from bayesify.lab.analyses import AnalysisError, mean_features, verification
from bayesify.lab.data import DataError, load

FACES = Path(os.environ.get("BAYESIFY_DATA", "/nowhere")) / "orl_faces.npz"


def faces(people: int = 20, each: int = 4, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    whose = torch.arange(people).repeat_interleave(each)
    return torch.randn(people, 8)[whose] + noise * torch.randn(len(whose), 8), whose


def test_the_protocol_is_that_of_lfw() -> None:
    """Ten folds of other people, all equal pairs and as many different ones, thresholds from the other nine folds."""
    features, whose = faces()
    found = verification(features, whose, seed=3)
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(20, generator=generator).tensor_split(10)
    unit = (features / features.norm(dim=1, keepdim=True)).double()
    distances, truths = [], []
    for part in order:
        rows = [i for i in range(len(whose)) if int(whose[i]) in part.tolist()]
        pairs = [(i, j) for a, i in enumerate(rows) for j in rows[a + 1 :]]
        equal = [(i, j) for i, j in pairs if whose[i] == whose[j]]
        other = [(i, j) for i, j in pairs if whose[i] != whose[j]]
        chosen = [other[k] for k in torch.randperm(len(other), generator=generator)[: len(equal)].tolist()]
        assert len(equal) == len(chosen) == 2 * 6  # two people with four faces each
        distances.append(np.array([float((unit[i] - unit[j]).square().sum()) for i, j in equal + chosen]))
        truths.append(np.array([True] * len(equal) + [False] * len(chosen)))
    distance, truth = np.concatenate(distances), np.concatenate(truths)
    assert found.auroc == pytest.approx(sk.roc_auc_score(truth, -distance), abs=1e-6)
    far, near, _ = sk.roc_curve(truth, -distance, drop_intermediate=False)
    assert found.false_accepts == pytest.approx(far) and found.true_accepts == pytest.approx(near)
    for fold, (own, right) in enumerate(zip(distances, truths, strict=True)):
        others = [each for each in range(10) if each != fold]
        d, t = np.concatenate([distances[i] for i in others]), np.concatenate([truths[i] for i in others])
        best = max(((d <= threshold) == t).mean() for threshold in d)
        threshold = found.thresholds[fold]
        assert ((d <= threshold) == t).mean() == pytest.approx(best)
        assert found.accuracies[fold] == pytest.approx(((own <= threshold) == right).mean())
    assert 0.5 < found.accuracy < 1


def test_features_without_information_verify_nothing(tmp_path: Path) -> None:
    whose = torch.arange(60).repeat_interleave(6)
    found = verification(torch.randn(360, 5), whose)
    assert found.accuracy == pytest.approx(0.5, abs=0.06) and found.auroc == pytest.approx(0.5, abs=0.06)
    found.to_csv(tmp_path / "roc.csv")
    found.figure().savefig(tmp_path / "roc.png")
    assert (tmp_path / "roc.csv").read_text().splitlines()[0] == "false_accepts,true_accepts"


@pytest.mark.parametrize("method", [by.MeanField(), by.LowRankEnsemble(4, std=0.5), None], ids=str)
def test_features_are_averages_over_draws(method: by.Method | None) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6), nn.ReLU(), nn.Linear(6, 3))
    model = net if method is None else by.convert(net, method)
    x = torch.randn(7, 1, 8, 8)
    drawn = [net.eval()] if method is None else by.members(model, 8, seed=5)
    with torch.no_grad():
        expected = torch.stack([each[:5](x) for each in drawn]).mean(0)
    assert torch.allclose(mean_features(model, x, 8, seed=5, batch_size=3), expected, atol=1e-5)
    earlier = mean_features(model, x, 8, layer="3")
    assert earlier.shape == (7, 144)


def test_what_cannot_be_verified_is_refused() -> None:
    features, whose = faces(people=6)
    with pytest.raises(
        AnalysisError, match="folds=10: expected an integer >= 2, with two identities for each; there are 6"
    ):
        verification(features, whose)
    with pytest.raises(AnalysisError, match=r"identities of shape \(3,\): expected \(N, D\) and \(N,\)"):
        verification(features, whose[:3])
    with pytest.raises(AnalysisError, match="a fold has no pair of equal identity"):
        verification(features, torch.arange(24), folds=2)
    with pytest.raises(AnalysisError, match="no layer 'head'; its Linear layers are 0"):
        mean_features(nn.Sequential(nn.Linear(3, 2)), torch.randn(2, 3), layer="head")
    with pytest.raises(AnalysisError, match="has no Linear layer"):
        mean_features(nn.Sequential(nn.Conv1d(1, 1, 1)), torch.randn(2, 1, 3))


def archive(folder: Path) -> Path:
    generator = np.random.default_rng(0)
    images, labels = generator.integers(0, 256, (40, 112, 92), dtype=np.uint8), np.repeat(np.arange(8), 5)
    np.savez(folder / "orl_faces.npz", images=images, labels=labels.astype(np.uint8))
    return folder / "orl_faces.npz"


def test_some_people_are_for_training_and_others_for_verification(tmp_path: Path) -> None:
    path = archive(tmp_path)
    some, others = (load("orl_faces", path=path, people=people, size=(28, 23)) for people in ((0, 6), (6, 8)))
    assert (some.targets.names[0], others.targets.names) == ("person 0", ("person 6", "person 7"))
    assert sum(len(part) for part in (some.train, some.validation, some.test)) == 30
    assert some.inputs.shape == (1, 28, 23) and set(others.train.targets.tolist()) <= {0, 1}
    assert load("orl_faces", path=tmp_path, people=(0, 8)).inputs.shape == (1, 112, 92)


@pytest.mark.parametrize("people", [(0, 9), (3, 3), (0,), ("a", "b")])
def test_people_that_are_not_there_are_named(people: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected the first person and the one after the last, from 0 to 8"):
        load("orl_faces", path=archive(tmp_path), people=people)


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "orl_faces.npz", x=np.zeros(3))
    with pytest.raises(DataError, match="has no images and no labels"):
        load("orl_faces", path=tmp_path)


@pytest.mark.skipif(not FACES.is_file(), reason="ORL's faces are not in $BAYESIFY_DATA")
def test_pixels_of_real_faces_verify_better_than_chance() -> None:
    data = load("orl_faces", people=(20, 40), size=(28, 23), validation=0, test=1)
    x = data.inputs.prepare(data.train.raw(torch.arange(len(data.train))))
    found = verification(x.flatten(1), data.train.targets)
    assert found.accuracy > 0.75 and found.auroc > 0.85
    assert isinstance(found, analyses.Chart)
