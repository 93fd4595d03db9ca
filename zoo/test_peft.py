"""A Bayesian LoRA: only the adapter's matrices are drawn, and they come back with it."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from networks import CLASSES
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_transformers import LABELS, batch_of, classifier, trainer
from torch import nn

import bayesify as by
from bayesify.integrations.transformers import KLCallback
from bayesify.layers import bayesian_layers

TARGETS = {"bert": ["query", "value"], "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}


def adapted(kind: str) -> nn.Module:
    config = LoraConfig(
        task_type="SEQ_CLS", r=4, lora_dropout=0.1, target_modules=TARGETS[kind], fan_in_fan_out=kind == "gpt2"
    )
    return get_peft_model(classifier(kind), config)


def bayesian(kind: str = "bert") -> nn.Module:
    return by.convert(adapted(kind), {"*lora_*": by.MeanField(prior_std=0.2, init_log_std=(-2.0, -1.0)), "*": None})


def moved(model: nn.Module) -> nn.Module:
    """As after some training."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p) * p.requires_grad)
    return model


@pytest.mark.parametrize("kind", TARGETS)
def test_only_the_adapter_is_bayesian_and_trained(kind: str) -> None:
    model, batch = bayesian(kind), batch_of(kind)
    matrices = {name for name, module in model.named_modules() if name.endswith(("lora_A.default", "lora_B.default"))}
    assert set(bayesian_layers(model)) == matrices and len(matrices) == 4 * len(TARGETS[kind])
    by.check(model, batch)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(by.parameter_groups(model, lr=0.1))
    for _ in range(2):  # B begins with zeros, so A has no gradient in the first step
        optimizer.zero_grad()
        model.train()(**batch, labels=LABELS).loss.backward()
        by.add_kl_grad_(model, n=100)
        optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    head = {name for name in before if "modules_to_save" in name}
    assert head and changed == {name for name in before if "lora_" in name} | head
    assert float(by.predict(moved(model), batch).epistemic.min()) > 1e-5


LOAD = """
import sys
sys.path.insert(0, {zoo!r})
import conftest, torch
from peft import PeftModel
from test_peft import batch_of, by, classifier
model = by.load(PeftModel.from_pretrained(classifier({kind!r}), {folder!r}), {folder!r} + "/posterior.safetensors")
torch.save(by.predict(model, torch.load({folder!r} + "/batch.pt"), seed=5).probs, {folder!r} + "/probs.pt")
"""


@pytest.mark.parametrize("kind", TARGETS)
def test_it_is_saved_beside_the_adapter_and_loaded_in_another_process(kind: str, tmp_path: Path) -> None:
    model, batch = moved(bayesian(kind)), batch_of(kind)
    model.save_pretrained(tmp_path)
    by.save(model, tmp_path / "posterior.safetensors", frozen=False)
    assert all("lora_" in name or "modules_to_save" in name for name in load_file(tmp_path / "posterior.safetensors"))
    torch.save(batch, tmp_path / "batch.pt")
    code = LOAD.format(zoo=str(Path(__file__).parent), folder=str(tmp_path), kind=kind)
    subprocess.run([sys.executable, "-c", code], check=True)
    assert torch.equal(torch.load(tmp_path / "probs.pt"), by.predict(model, batch, seed=5).probs)


def test_peft_alone_gives_the_mean_and_predict_says_that_it_is_plain(tmp_path: Path) -> None:
    model, batch = moved(bayesian()), batch_of("bert")
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(classifier("bert"), tmp_path).eval()
    torch.testing.assert_close(again(**batch).logits, by.draw(model, None)(**batch).logits)
    with pytest.raises(by.BayesifyError, match=r"no Bayesian layer: use by\.convert"):
        by.predict(again, batch)


def test_the_adapter_of_a_converted_model_is_loaded_with_its_posterior(tmp_path: Path) -> None:
    model, batch, other = moved(bayesian()), batch_of("bert"), bayesian()
    model.save_pretrained(tmp_path)
    other.load_adapter(tmp_path, "default", is_trainable=True)
    assert torch.equal(by.predict(other, batch).probs, by.predict(model, batch).probs)


def test_an_adapter_of_another_name_is_refused(tmp_path: Path) -> None:
    model = bayesian()
    model.save_pretrained(tmp_path)
    by.save(model, tmp_path / "posterior.safetensors", frozen=False)
    named = PeftModel.from_pretrained(classifier("bert"), tmp_path, adapter_name="other")
    with pytest.raises(by.CheckpointError, match=r"lora_A.default', this network has none"):
        by.load(named, tmp_path / "posterior.safetensors")


def test_the_trainer_resumes_it_to_the_bit(tmp_path: Path) -> None:
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole, again = (trainer(bayesian(), tmp_path, [KLCallback()], **options) for _ in range(2))
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], tensor, rtol=0, atol=0)


def test_a_draw_is_merged_into_the_base() -> None:
    model, batch = moved(bayesian()), batch_of("bert")
    drawn = by.draw(model, 1)
    expected = drawn(**batch).logits
    torch.testing.assert_close(drawn.merge_and_unload()(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    assert expected.shape[1] == CLASSES


def test_check_finds_that_a_merged_adapter_is_not_drawn() -> None:
    model, batch = moved(bayesian()), batch_of("bert")
    merged = copy.deepcopy(model)
    merged.merge_adapter()
    by.check(model, batch)
    with pytest.raises(by.BayesifyError, match="reaches no Bayesian layer"):
        by.check(merged, batch)
