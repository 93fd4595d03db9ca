"""Training from recipes: exact resumption, the gradients of several processes, what is logged and what is refused."""

from __future__ import annotations

import contextlib
import csv
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as by
from bayesify.lab.data import TensorExamples
from bayesify.lab.recipes import Recipe, RecipeError, TrainingPart
from bayesify.lab.runs import Run, RunError
from bayesify.lab.training import BayesianModule, NotFiniteError, ShuffledBatches, joined, train
from bayesify.lab.training.batches import mix_seeds, training_loader
from bayesify.lab.training.refuse_not_finite import require_finite_loss
from bayesify.lab.training.schedules import SCHEDULES

SMALL = {"data": {"limit": 120, "batch_size": 32}, "model": {"options": {"channels": [8, 8]}}}


def small(*overrides: str, epochs: int = 2) -> Recipe:
    return Recipe.of({**SMALL, "training": {"epochs": epochs}}, overrides)


def column(run: Run, name: str) -> list[float]:
    with run.log_file.open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


# Batches


def test_every_epoch_has_every_row_once_in_another_order() -> None:
    batches = ShuffledBatches(103, 10, seed=3)
    orders = []
    for epoch in range(3):
        batches.set_epoch(epoch)
        orders.append([row for batch in batches for row in batch])
        assert sorted(orders[-1]) == list(range(103))
    assert orders[0] != orders[1] != orders[2]


def test_ranks_share_out_each_batch() -> None:
    whole = list(ShuffledBatches(50, 8, seed=1))
    parts = [list(ShuffledBatches(50, 8, seed=1, rank=rank, world=2)) for rank in range(2)]
    for together, first, second in zip(whole, *parts, strict=False):
        assert sorted(first + second) == sorted(together) and abs(len(first) - len(second)) <= 1


def test_a_single_left_over_row_is_left_out() -> None:
    assert len(ShuffledBatches(33, 32, seed=0)) == len(list(ShuffledBatches(33, 32, seed=0))) == 1
    assert len(ShuffledBatches(1, 32, seed=0)) == 1


def test_resumed_batches_are_those_that_were_missing() -> None:
    batches = ShuffledBatches(40, 8, seed=5)
    batches.set_epoch(1)
    later = ShuffledBatches(40, 8, seed=5, start=5 + 2)
    later.set_epoch(1)
    assert list(later) == list(batches)[2:]


def test_seeds_of_different_numbers_differ() -> None:
    assert len({mix_seeds(a, b, c) for a in range(10) for b in range(10) for c in range(10)}) == 1000


# Schedules


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_start_peak_and_end_where_they_should(name: str) -> None:
    values = [SCHEDULES[name](step / 100, 0.1, 0.3) for step in range(101)]
    assert max(values) == pytest.approx(1.0) and min(values) > 0
    assert values[-1] == pytest.approx(1.0 if name == "constant" else 0.1)


def test_one_cycle_is_that_of_torch() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=101, pct_start=0.3, final_div_factor=1e9)
    for step in range(100):
        # torch counts to total_steps - 1 and rounds where the peak is, so a step apart at most
        near = [SCHEDULES["one_cycle"](max(step + d, 0) / 100, 0.0, 0.3) for d in (-1, 0, 1)]
        assert min(near) - 1e-3 <= theirs.get_last_lr()[0] <= max(near) + 1e-3
        optimizer.step()
        theirs.step()


def rates(epochs: int, per_epoch: int = 4, **options: object) -> dict[str, list[float]]:
    """The learning rate of each group at each step, by the optimizer that a run has."""
    network = by.convert(nn.Linear(2, 2), by.Rank1(2))
    module = BayesianModule(network, n=8, training=TrainingPart(epochs=epochs, **options))
    module._trainer = SimpleNamespace(estimated_stepping_batches=epochs * per_epoch)
    made: Any = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    found: dict[str, list[float]] = {}
    for _ in range(epochs * per_epoch):
        for group in optimizer.param_groups:
            found.setdefault(group["name"], []).append(group["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_rates_fall_in_the_steps_of_the_rank1_tables_and_as_torch_does() -> None:
    """Table 5: 0.1, times 0.2 at epochs 80, 160 and 180 of 250; here a tenth of the epochs."""
    found = rates(25, lr=0.1, posterior_lr=0.5, schedule={"steps": [8, 16, 18], "factor": 0.2})
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = torch.optim.lr_scheduler.MultiStepLR(optimizer, [8, 16, 18], 0.2)
    expected = []
    for _ in range(25):
        expected += 4 * theirs.get_last_lr()
        optimizer.step()
        theirs.step()
    assert found["base"] == pytest.approx(expected)
    assert found["posterior"] == pytest.approx([5 * rate for rate in expected])
    shares = rates(25, lr=0.1, posterior_lr=0.5, schedule={"steps": [0.32, 0.64, 0.72], "factor": 0.2})
    assert shares == found


def test_the_posteriors_rate_falls_between_two_epochs_as_in_ibnn_table_7() -> None:
    """15 epochs: the base at 1e-4, the posterior at 0.2, from epoch 6 in 4 epochs to 0.05."""
    points = {"points": [[6, 1.0], [10, 0.25]]}
    found = rates(15, lr=1e-4, posterior_lr=0.2, schedule="constant", posterior_schedule=points)
    assert set(found["base"]) == {1e-4}
    of_epoch = found["posterior"][::4]
    assert of_epoch == pytest.approx([0.2] * 7 + [0.1625, 0.125, 0.0875] + [0.05] * 5)


@pytest.mark.parametrize("schedule", [*SCHEDULES, {"steps": [0.5]}, {"points": [[0.2, 1.0], [0.8, 0.0]]}])
def test_every_schedule_may_warm_up(schedule: object) -> None:
    plain, warm = (rates(8, schedule=schedule, warmup_epochs=epochs) for epochs in (0, 2))
    rise = [min((step + 1) / 8, 1) for step in range(32)]
    for group, values in warm.items():
        assert values == pytest.approx([rate * share for rate, share in zip(plain[group], rise, strict=True)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"schedule": {"steps": [80, 160]}},
            "training: schedule lasts until epoch 160, but epochs=30; use shares below 1",
        ),
        ({"warmup_epochs": 31}, "training: warmup_epochs lasts until epoch 31, but epochs=30; use shares below 1"),
        (
            {"posterior_schedule": {"points": [[0.5, 1], [9, 0]]}},
            "training.posterior_schedule.points: expected times in order, all of them shares of training below 1, or "
            "epochs from 1 on; got [[0.5, 1], [9, 0]]",
        ),
        ({"schedule": {"steps": [1], "facto": 1}}, "training.schedule.facto: no such key; did you mean 'factor'?"),
    ],
)
def test_schedules_that_cannot_be_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError) as found:
        Recipe.of({"method": "none", "training": options})
    assert str(found.value) == message


# The objective


def module_and_batch(**options: object) -> tuple[BayesianModule, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    network = by.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), by.Rank1(2))
    module = BayesianModule(network, n=50, training=TrainingPart(**options), seed=1)
    return module, (torch.randn(16, 4), torch.randint(3, (16,)))


def test_the_gradient_edit_is_the_gradient_of_the_loss() -> None:
    grads = []
    for how in ("loss", "gradient"):
        module, batch = module_and_batch(kl=how)
        torch.manual_seed(3)
        module.loss(batch).backward()
        module.on_before_optimizer_step(torch.optim.SGD(module.parameters(), lr=1.0))
        grads.append([p.grad.clone() for p in module.network.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))


def test_the_kl_is_annealed_by_step_and_by_epoch() -> None:
    run_by = {}
    for how in ("step", "epoch"):
        module, _ = module_and_batch(anneal=0.5, anneal_by=how, epochs=4)
        module._trainer = type("T", (), {"num_training_batches": 10})()  # type: ignore[assignment]
        betas = []
        for module.batches_done in range(40):
            betas.append(module.beta)
        run_by[how] = betas
    assert run_by["step"][10] == pytest.approx(0.5) and run_by["step"][20:] == [1.0] * 20
    assert run_by["epoch"] == [0.0] * 10 + [0.5] * 10 + [1.0] * 20


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_shared_and_patched_tensors_are_trained_in_turn(optimizer: str) -> None:
    """EMP, C.2: one held fixed while the other is trained, momentum and decay included."""
    torch.manual_seed(0)
    network = by.convert(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), by.EMP(3))
    options = {"optimizer": optimizer, "epochs": 4, "lr": 0.1, "weight_decay": 0.1, "alternate": 1}
    module = BayesianModule(network, n=16, training=TrainingPart(**options))
    shared = {f"network.{name}" for name in ("0.weight", "0.bias")}
    moved: list[set[str]] = []

    class Watch(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.before = {name: p.detach().clone() for name, p in module.named_parameters()}

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            moved.append({name for name, p in module.named_parameters() if not torch.equal(p, self.before[name])})

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=4, callbacks=[Watch()], enable_model_summary=False, **quiet)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    patched = {name for name, _ in module.named_parameters()} - shared
    assert moved == [shared, patched, shared, patched]


@pytest.mark.parametrize(("method", "kind"), [(by.MeanField(), "drawn"), (None, "shared")])
def test_there_must_be_both_to_train_in_turn(method: by.Method | None, kind: str) -> None:
    network = nn.Linear(4, 3) if method is None else by.convert(nn.Linear(4, 3), method)
    with pytest.raises(by.BayesifyError, match=f"this network has only {kind} ones"):
        BayesianModule(network, n=16, training=TrainingPart(alternate=1))


def test_two_halves_give_the_gradient_of_the_whole() -> None:
    """What distributed training relies on: the mean of the ranks' gradients is that of the joined batch."""
    module, (x, y) = module_and_batch()
    halves = []
    for rank in range(2):
        module.zero_grad()
        torch.manual_seed(rank)
        module.loss((x[rank::2], y[rank::2])).backward()
        halves.append([p.grad.clone() for p in module.network.parameters()])
    module.zero_grad()
    total = by.kl(module.network) / 50
    for rank in range(2):
        torch.manual_seed(rank)
        total = total + F.cross_entropy(module.network(x[rank::2]), y[rank::2]) / 2
    total.backward()
    for p, a, b in zip(module.network.parameters(), *halves, strict=True):
        assert torch.allclose(p.grad, (a + b) / 2, atol=1e-6)


def test_a_loss_that_is_not_finite_names_the_layer_and_the_step() -> None:
    module, (x, y) = module_and_batch()
    with torch.no_grad():
        module.network[2].weight[0, 0] = math.nan
    with pytest.raises(NotFiniteError, match=r"at step 0: 2\.weight is not finite.*training\.lr"):
        module.loss((x, y))


# Runs


METHODS = {
    "Rank1": [],
    "IBNN": [],
    "ECMP": ["method.components=3"],
    "MeanField": ["method.estimator=flipout", "training.lr=0.01"],
    "LowRankEnsemble": ["method.components=4"],
    "deep_ensemble": ["method.members=2"],
    "none": [],
}


@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_method_trains_and_is_evaluated(method: str, tmp_path: Path) -> None:
    run = train(small(f"method.name={method}", *METHODS[method]), tmp_path / "run", progress=False)
    assert run.facts["status"] == "finished" and run.facts["versions"]["torch"]
    assert 0 < run.metrics["test"]["accuracy"] <= 1 and run.metrics["test"]["nll"] > 0
    again = run.load()
    assert again.recipe == run.recipe


def test_the_parts_of_the_loss_are_logged(tmp_path: Path) -> None:
    run = train(small("training.regulariser.alpha=1.0"), tmp_path / "run", progress=False)
    parts = {name: column(run, name) for name in ("loss", "log_likelihood", "kl", "beta", "regulariser")}
    n = run.facts["rows"]
    for loss, likelihood, kl, beta, extra in zip(*parts.values(), strict=True):
        assert loss == pytest.approx(-likelihood + beta * kl / n + extra, rel=1e-4)
    assert len(column(run, "val_nll")) == 2 and list((run.folder / "tensorboard").iterdir())


def test_training_again_gives_the_same_model(tmp_path: Path) -> None:
    files = [train(small(), tmp_path / name, progress=False).model_file.read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]


def test_options_reach_the_trainer(tmp_path: Path) -> None:
    overrides = ["training.precision=bf16-mixed", "training.clip=0.5", "training.accumulate=2", "training.patience=1"]
    run = train(small(*overrides, "data.augment=[pad_crop, {cutout: {size: 2}}]"), tmp_path / "run", progress=False)
    assert run.metrics["test"]["nll"] > 0


@pytest.mark.slow
def test_a_compiled_network_takes_an_uneven_last_batch(tmp_path: Path) -> None:
    overrides = ["training.compile=true", "method.name=LowRankEnsemble", "method.components=5", "data.batch_size=50"]
    overrides.append("model={name: mlp, options: {hidden: [20]}}")
    run = train(small(*overrides, epochs=2), tmp_path / "run", progress=False)  # 120 rows: 50, 50, 20
    assert run.metrics["test"]["nll"] > 0


def test_regression_learns_the_noise(tmp_path: Path) -> None:
    rows = ["a,b,y", *(f"{i / 50},{(i * 7) % 11},{3 * i / 50 + (i % 5) / 5}" for i in range(200))]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    recipe = Recipe.of(
        {
            "data": {
                "name": "table",
                "path": str(tmp_path / "table.csv"),
                "options": {"target": "y"},
                "batch_size": 20,
            },
            "model": {"name": "mlp", "options": {"hidden": [20]}},
            "method": {"name": "MeanField", "estimator": "shared"},
            "training": {"epochs": 30, "lr": 0.02},
        }
    )
    run = train(recipe, tmp_path / "run", progress=False)
    assert run.metrics["test"]["rmse"] < 1.0  # the target's own sd is 3.5
    assert run.load().likelihood.log_precision > 0


@pytest.mark.parametrize("method", ["Ensemble", "swag"])
def test_channels_last_networks_with_copies_of_kernels_train_and_load(method: str, tmp_path: Path) -> None:
    training = {"epochs": 1, "lr": 0.01, "channels_last": True}
    recipe = Recipe.of(
        {
            "method": method,
            "data": {"limit": 100, "batch_size": 8},
            "model": {"name": "resnet8"},
            "training": training,
            "evaluation": {"samples": 2},
        }
    )
    model = train(recipe, tmp_path / "run", progress=False).load().model
    kernels = [p for p in model.parameters() if p.dim() == 4 and p.shape[1] > 1 and p.shape[2] > 1]
    assert kernels and all(p.is_contiguous(memory_format=torch.channels_last) for p in kernels)


def test_a_network_that_learnt_nothing_is_named(tmp_path: Path) -> None:
    training = {"epochs": 1, "lr": 1e-9}
    recipe = Recipe.of({"method": "none", "data": {"limit": 200}, "training": training})
    with pytest.warns(UserWarning, match=r"run: the network has learnt nothing.*NLL is 2\.\d+; .* gives 2\.[23]"):
        train(recipe, tmp_path / "run", progress=False)


def test_the_base_can_stay_as_it_is(tmp_path: Path) -> None:
    plain = train(small("method.name=none"), tmp_path / "plain", progress=False)
    weights = f"model.weights={plain.model_file}"
    run = train(small(weights, "training.freeze_base=true", "training.recalibrate=3"), tmp_path / "run", progress=False)
    before, after = (dict(r.load().model.named_parameters()) for r in (plain, run))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    train(small(epochs=1), tmp_path / "run", progress=False)
    with pytest.raises(RunError, match="already holds a run"):
        train(small(epochs=1), tmp_path / "run", progress=False)


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", Recipe.of({"training": {"epochs": 1}, "data": {"limit": 60}}))
    with run.lock(), pytest.raises(RunError, match="another process is training this run"):
        train(run.recipe, run.folder, resume=True, progress=False)
    assert train(run.recipe, run.folder, resume=True, progress=False).facts["status"] == "finished"


def test_a_run_resumes_with_its_own_recipe_only(tmp_path: Path) -> None:
    train(small(epochs=1), tmp_path / "run", progress=False)
    with pytest.raises(RunError, match="resumed with its own"):
        train(small(epochs=2), tmp_path / "run", resume=True, progress=False)


def test_joined_networks_are_the_members_with_their_batch_statistics() -> None:
    def network() -> nn.Module:
        net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 36, 2))
        net(torch.randn(20, 1, 8, 8) * 3 + 1)
        return net.eval()

    nets, x = [network() for _ in range(3)], torch.randn(5, 1, 8, 8)
    outputs = [net(x) for net in nets]
    model = joined(nets).eval()
    for member, output in zip(by.members(model), outputs, strict=True):
        assert torch.allclose(member(x), output, atol=1e-6)
    probs = torch.stack([output.softmax(-1) for output in outputs]).mean(0)
    assert torch.allclose(by.predict(model, x).probs, probs, atol=1e-6)


# Interruptions: a process of its own, ended from outside.

SLOW = """
import sys, time
from pathlib import Path
from bayesify.lab.recipes import Recipe
from bayesify.lab.training import BayesianModule, train
step = BayesianModule.training_step
def slow(self, batch, index):
    time.sleep(float(sys.argv[3]))
    return step(self, batch, index)
BayesianModule.training_step = slow
recipe = Recipe.read(sys.argv[1])
train(recipe, sys.argv[2], resume=Path(sys.argv[2]).exists(), progress=False)
"""


def start(recipe: Path, folder: Path, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW, str(recipe), str(folder), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        if path.exists() or process.poll() is not None:
            return
        time.sleep(0.1)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_killed_run_resumes_to_the_same_end(how: signal.Signals, tmp_path: Path) -> None:
    recipe = small("training.checkpoint_steps=4", "data.batch_size=8", epochs=2)  # 15 batches in an epoch
    recipe.write(tmp_path / "recipe.yaml")
    whole = train(recipe, tmp_path / "whole", progress=False)
    process = start(tmp_path / "recipe.yaml", tmp_path / "cut", 0.1)
    wait_for(tmp_path / "cut" / "checkpoint.ckpt", process)
    time.sleep(0.5)
    process.send_signal(how)
    said, _ = process.communicate()
    assert process.returncode != 0 and not (tmp_path / "cut" / "model.safetensors").exists()
    assert how == signal.SIGKILL or "--resume" in said
    resumed = train(recipe, tmp_path / "cut", resume=True, progress=False)
    assert resumed.metrics == whole.metrics
    assert resumed.model_file.read_bytes() == whole.model_file.read_bytes()
    assert column(resumed, "loss") == column(whole, "loss")


@pytest.mark.slow
def test_two_processes_train_a_recipe_together(tmp_path: Path) -> None:
    """Lightning's DDP on two CPU processes, started by the command line."""
    data = {"name": "digits", "limit": 200, "batch_size": 50, "validation": 0.4, "test": 0.4}
    network, training = {"name": "cnn", "options": {"pool": "flatten"}}, {"lr": 0.05, "posterior_lr": 0.25}
    recipe = {"data": data, "model": network, "method": "Rank1", "training": training}
    Recipe.of(recipe).write(tmp_path / "recipe.yaml")
    changes = ["training.epochs=2", "training.accelerator=cpu", "--devices", "2"]
    command = [sys.executable, "-m", "bayesify", "train", "recipe.yaml", *changes, "--out", "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = Run.open(tmp_path / "run")
    assert run.recipe.training.devices == 2 and run.facts["status"] == "finished"
    assert run.metrics["test"]["accuracy"] > 0.25 and len(column(run, "val_nll")) == 2


def test_training_sees_every_row_each_epoch_in_a_new_order() -> None:
    """Through Lightning, which must tell the batches which epoch it is."""
    seen: list[list[int]] = []

    class Spy(BayesianModule):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 0:
                seen.append([])
            seen[-1] += batch[0][:, 0].int().tolist()
            return super().training_step(batch, batch_idx)

    rows = TensorExamples(torch.arange(50.0)[:, None].expand(50, 4), torch.zeros(50).long())
    module = Spy(by.convert(nn.Linear(4, 3), by.Rank1(2)), n=50)
    trainer = L.Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu"
    )
    trainer.fit(module, training_loader(rows, ShuffledBatches(50, 16, seed=0)))
    assert [sorted(epoch) for epoch in seen] == [list(range(50))] * 2 and seen[0] != seen[1]


# What a review found


def test_ood_inputs_do_not_change_the_running_statistics() -> None:
    for method in (by.Rank1(2), by.ECMP(3), by.Ensemble(2)):
        network = by.convert(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3)), method
        )
        before = {name: buffer.clone() for name, buffer in network.named_buffers()}
        by.uncertainty_loss(network, 50 + torch.randn(8, 1, 4, 4)).backward()
        after = dict(network.named_buffers())
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before), method
        network(torch.randn(8, 1, 4, 4))
        assert any(not torch.equal(before[name], buffer) for name, buffer in network.named_buffers())


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_a_short_last_step_is_weighed_like_the_others(how: str) -> None:
    """Five batches, four to a step: the last step has one, and the gradient of one."""
    module, _ = module_and_batch(kl=how, accumulate=4)
    module._trainer = type("T", (), {"num_training_batches": 5})()  # type: ignore[assignment]
    assert [module._accumulation_factor(index) for index in range(5)] == [1.0, 1.0, 1.0, 1.0, 4.0]


def test_the_edit_has_the_weight_that_was_logged() -> None:
    module, batch = module_and_batch(kl="gradient", anneal=1.0, epochs=1)
    module._trainer = type("T", (), {"num_training_batches": 10})()  # type: ignore[assignment]
    module._log_terms = lambda parts: None  # type: ignore[method-assign]
    module.batches_done = 4
    module.loss(batch)
    module.batches_done = 5
    assert module.beta_now == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.bound=mixture"], "training.mixture='replicate'"),
        (["training.patience=1", "data.validation=0"], "training.patience needs validation rows"),
        (["method.name=none", "training.regulariser.alpha=1"], "needs a Bayesian network"),
        (["method.name=none", "training.freeze_base=true"], "need a Bayesian method"),
        (["method.name=MCDropout", "training.freeze_base=true"], "nothing to train"),
        (["method.name=deep_ensemble", "model.weights=a.pt"], "start from different weights"),
        (
            ["training.devices=2", "training.accelerator=cpu", "data.batch_size=33"],
            "can't be divided evenly among 2 devices",
        ),
        (["training.devices=2", "training.accelerator=cpu", "data.batch_size=2"], "need batches of at least 4 rows"),
        (["training.accelerator=gpu"], "training can't use"),
        (["model={name: lenet}"], r"lenet needs images \(C, 28, 28\)"),
    ],
)
def test_what_cannot_be_is_refused_before_there_is_a_folder(overrides: list[str], message: str, tmp_path: Path) -> None:
    if "gpu" in overrides[0] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(by.BayesifyError, match=message):
        train(small(*overrides), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.accumulate=4", "training.checkpoint_steps=3", "data.batch_size=8"],
        ["training.patience=1", "training.lr=3.0", "training.schedule=constant", "method.name=none"],
    ],
    ids=["accumulate", "patience"],
)
def test_a_crash_anywhere_resumes_to_the_same_end(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small(*overrides, epochs=4)
    whole = train(recipe, tmp_path / "whole", progress=False)
    step = BayesianModule.training_step

    def crash(self: BayesianModule, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.batches_done == 9:
            raise MemoryError
        return step(self, batch, batch_idx)

    monkeypatch.setattr(BayesianModule, "training_step", crash)
    with contextlib.suppress(MemoryError):
        train(recipe, tmp_path / "cut", progress=False)
    monkeypatch.setattr(BayesianModule, "training_step", step)
    resumed = train(recipe, tmp_path / "cut", resume=True, progress=False)
    assert resumed.model_file.read_bytes() == whole.model_file.read_bytes()


def test_a_run_that_stopped_early_does_not_train_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small("training.patience=1", "training.lr=3.0", "training.schedule=constant", "method.name=none", epochs=8)
    whole = train(recipe, tmp_path / "whole", progress=False)
    assert len(column(whole, "val_nll")) < 8

    def crash(run: Run) -> None:
        raise MemoryError

    monkeypatch.setattr("bayesify.lab.training.train_recipe.evaluate", crash)
    with pytest.raises(MemoryError):
        train(recipe, tmp_path / "cut", progress=False)
    (tmp_path / "cut" / "model.safetensors").unlink()
    monkeypatch.undo()
    resumed = train(recipe, tmp_path / "cut", resume=True, progress=False)
    assert resumed.model_file.read_bytes() == whole.model_file.read_bytes()


def test_a_prediction_that_is_not_finite_is_not_blamed_on_the_loss() -> None:
    class Scaled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x) * float("inf")
            return out

    model, x = by.convert(Scaled(nn.Linear(4, 3)), by.Rank1(2)), torch.randn(5, 4)
    with pytest.raises(NotFiniteError, match="so the cause is the preparation of inputs, or the scaling of outputs"):
        by.predict(model, x, 2)
    with pytest.raises(NotFiniteError, match="so the cause is in the loss itself: see its targets"):
        require_finite_loss(torch.tensor(torch.inf), by.convert(nn.Linear(4, 3), by.Rank1(2)), x, 3)
