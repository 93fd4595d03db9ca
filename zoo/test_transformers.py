"""Networks of transformers as they are, and in the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from networks import CLASSES, CONFIGS, ROWS
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import bayesify as by
from bayesify.integrations.transformers import KLCallback
from bayesify.methods.base import Method

LABELS = torch.arange(ROWS) % CLASSES
N = 12


def classifier(kind: str) -> nn.Module:
    torch.manual_seed(0)
    auto = transformers.AutoModelForImageClassification if kind == "vit" else None
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    return (auto or transformers.AutoModelForSequenceClassification).from_config(config)


def batch_of(kind: str) -> dict[str, Tensor]:
    if kind == "vit":
        return {"pixel_values": torch.randn(ROWS, 3, 32, 32)}
    ids = torch.randint(2, 50, (ROWS, 6))
    ids[:, -1] = 1  # the end that T5 asks for
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids).index_put_((torch.tensor(1), torch.tensor(0)), torch.tensor(0)),
    }


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("method", [by.Rank1(2), by.MeanField(), by.ECMP(2)], ids=str)
def test_a_classifier_is_used_as_it_is(kind: str, method: Method, tmp_path: Path) -> None:
    model, batch = by.convert(classifier(kind), method), batch_of(kind)
    by.check(model, batch)
    model.train()
    model(**batch, labels=LABELS).loss.backward()
    p = by.predict(model, batch, samples=4)
    assert p.probs.shape == (ROWS, CLASSES)
    encoded = transformers.BatchEncoding({**batch, "labels": LABELS})
    torch.testing.assert_close(by.predict(model, [encoded], samples=4).probs, p.probs)
    draws = [by.draw(model, 0, index=index)(**batch).logits.softmax(1) for index in range(4)]
    torch.testing.assert_close(torch.stack(draws).mean(0), p.probs)
    assert str(method) in str(by.summary(model))
    by.save(model, tmp_path / "m")
    again = by.load(classifier(kind), tmp_path / "m")
    assert torch.equal(by.predict(again, batch, samples=4).probs, p.probs)


def examples(count: int = N) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"input_ids": torch.randint(2, 50, (6,)), "labels": torch.tensor(i % CLASSES)} for i in range(count)]


def bayesian() -> nn.Module:
    return by.convert(classifier("bert"), by.MeanField())


def trainer(model: nn.Module, folder: Path, callbacks: list[TrainerCallback], **options: Any) -> Trainer:
    options = {"per_device_train_batch_size": 4, "max_steps": 1, "save_strategy": "no", **options}
    args = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], logging_steps=1, disable_tqdm=True, seed=3, **options
    )
    groups = by.parameter_groups(model, lr=0.01, posterior_lr=0.1, weight_decay=0.1)
    optimizer = torch.optim.SGD(groups)
    return Trainer(model, args, train_dataset=examples(), callbacks=callbacks, optimizers=(optimizer, None))


class Gradients(TrainerCallback):
    """Keeps what the optimizer is about to use in the last step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        self.seen = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradients(folder: Path, *callbacks: TrainerCallback, **options: Any) -> dict[str, Tensor]:
    kept = Gradients()
    trainer(bayesian(), folder, [*callbacks, kept], **options).train()
    return kept.seen


def kl_gradients() -> dict[str, Tensor]:
    model = bayesian()
    by.kl(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("accumulated", [1, 3])
def test_the_gradient_is_that_of_the_kl_over_n_once_a_step(tmp_path: Path, accumulated: int) -> None:
    options = {"gradient_accumulation_steps": accumulated, "max_grad_norm": 0.0}
    plain = gradients(tmp_path, **options)
    ours = gradients(tmp_path, KLCallback(anneal=0), **options)
    for name, expected in kl_gradients().items():
        torch.testing.assert_close(ours[name] - plain.get(name, 0), expected / N, rtol=1e-3, atol=1e-5)


def test_clipping_keeps_the_balance_of_likelihood_and_kl(tmp_path: Path) -> None:
    whole = gradients(tmp_path, KLCallback(anneal=0), max_grad_norm=0.0)
    clipped = gradients(tmp_path, KLCallback(anneal=0), max_grad_norm=1e-2)
    norm = torch.stack([grad.norm() for grad in whole.values()]).norm()
    assert norm > 1e-2
    for name, grad in whole.items():
        torch.testing.assert_close(clipped[name], grad * (1e-2 / norm), rtol=1e-3, atol=1e-7)


def test_a_gradient_scaler_scales_the_kl_too() -> None:
    model = bayesian()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # where accelerate keeps it
    callback = KLCallback(N, anneal=0)
    control, state = transformers.TrainerControl(), transformers.TrainerState(max_steps=1)
    callback.on_train_begin(None, state, control, model=model, optimizer=optimizer, train_dataloader=None)
    callback.on_step_begin(None, state, control, model=model, optimizer=optimizer)
    likelihood = sum(p.sum() for p in model.parameters())
    optimizer.scaler.scale(likelihood).backward()
    optimizer.scaler.unscale_(optimizer)
    for name, expected in kl_gradients().items():
        torch.testing.assert_close(model.get_parameter(name).grad, 1 + expected / N, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_beta_grows_over_a_share_of_the_training_and_is_logged(tmp_path: Path, beta: float) -> None:
    run = trainer(bayesian(), tmp_path, [KLCallback(beta=beta, anneal=0.5)], max_steps=8)
    run.train()
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert [entry["beta"] for entry in logged] == [beta * share for share in (0, 0.25, 0.5, 0.75, 1, 1, 1, 1)]
    assert logged[-1]["kl"] == pytest.approx(by.kl(run.model).item(), rel=1e-5)


def test_posterior_tensors_have_their_own_learning_rate(tmp_path: Path) -> None:
    run = trainer(bayesian(), tmp_path, [KLCallback()])
    run.train()
    names = {group["name"]: group["initial_lr"] for group in run.optimizer.param_groups}
    assert names == {"base": 0.01, "covered": 0.01, "posterior": 0.1}


def test_training_is_resumed_to_the_bit(tmp_path: Path) -> None:
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole, again = (trainer(bayesian(), tmp_path, [KLCallback()], **options) for _ in range(2))
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.state.global_step == 6
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], tensor, rtol=0, atol=0)


def test_what_would_go_wrong_silently_is_said(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(examples())

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=1, save_strategy="no")
    with pytest.raises(by.BayesifyError, match=r"no length; give the number of its examples: KLCallback\(n=…\)"):
        Trainer(bayesian(), args, train_dataset=Stream(), callbacks=[KLCallback()]).train()
    Trainer(bayesian(), args, train_dataset=Stream(), callbacks=[KLCallback(N)]).train()
    args.weight_decay = 0.1
    with pytest.warns(UserWarning, match=r"decays posterior tensors.*by\.parameter_groups"):
        Trainer(bayesian(), args, train_dataset=examples(), callbacks=[KLCallback()]).train()
    with pytest.raises(by.BayesifyError, match="no Bayesian layer"):
        Trainer(classifier("bert"), args, train_dataset=examples(), callbacks=[KLCallback()]).train()
    with pytest.raises(by.BayesifyError, match=r"anneal=2.*from 0 to 1"):
        KLCallback(anneal=2)
