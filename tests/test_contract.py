"""Every promise on cases that cover all methods and architectures."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from pathlib import Path

import pytest
import torch
from cases import (
    ARCHITECTURES,
    Architecture,
    compiled_cases,
    converted,
    covering_cases,
    every_case,
    every_method,
    one_case_each,
)
from draws import watched_calls
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

import bayesify as by
from bayesify.conversion.drawn_network import DrawnNetwork
from bayesify.layers import bayesian_layers
from bayesify.methods.base import Method
from bayesify.prediction.plan import Plan


def freeze_statistics(model: nn.Module) -> None:
    """Batch norms as in evaluation, so that a row's output is its own."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.arange(len(x)) % 3) + by.kl(model) / 100


@one_case_each
def test_base_tensors_keep_their_names_and_bits(method: Method, architecture: Architecture) -> None:
    torch.manual_seed(0)
    plain = architecture.make().state_dict()
    state = converted(method, architecture).state_dict()
    assert [name for name in state if "posterior" not in name] == list(plain)
    assert all(torch.equal(state[name], plain[name]) for name in plain)


@one_case_each
def test_pickle_and_deepcopy_give_the_same_function(method: Method, architecture: Architecture) -> None:
    model, x = converted(method, architecture).eval(), architecture.batch(4)
    expected = by.predict(model, x, samples=3).log_probs
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(by.predict(other, x, samples=3).log_probs, expected)
        assert other(x).shape == (4, 3)  # its own scope works


@compiled_cases
@torch._dynamo.config.patch(allow_rnn=True)  # without it dynamo breaks at every nn.LSTM, converted or not
def test_no_graph_breaks_and_fresh_noise(method: Method, architecture: Architecture) -> None:
    model, x = converted(method, architecture), architecture.batch(6)
    for mode in (True, False):
        model.train(mode)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        outputs = torch.stack([compiled(x) for _ in range(12)])
        assert outputs.unique(dim=0).shape[0] > 1


@every_case
def test_rows_equal_a_loop_over_folded_networks(method: Method, architecture: Architecture) -> None:
    """Row i of a training call is the plain network with row i's draw folded into its weights, to 1e-10."""
    if getattr(method, "estimator", None) == "local":
        pytest.skip("local noise is on activations, so no weight holds it")
    model = converted(method, architecture).double().train()
    freeze_statistics(model)
    for rows in (1, 2, 7):  # fewer than there are components, and more
        x = architecture.batch(rows).double()
        with torch.no_grad(), watched_calls(model) as call:
            y = model(x)
        for row in {0, 1, rows // 2, rows - 1} & {*range(rows)}:
            with torch.no_grad():
                expected = call.network(model, row)(x[row : row + 1])
            assert torch.allclose(expected, y[row : row + 1], rtol=1e-10, atol=1e-10)


@one_case_each
def test_stochastic_in_eval_and_no_grad(method: Method, architecture: Architecture) -> None:
    model, x = converted(method, architecture).eval(), architecture.batch(4)
    with torch.no_grad():
        outputs = torch.stack([model(x) for _ in range(12)])
    assert outputs.unique(dim=0).shape[0] > 1


@one_case_each
def test_one_draw_is_shared_by_the_batch_in_eval(method: Method, architecture: Architecture) -> None:
    model = converted(method, architecture).eval()
    x = architecture.batch(1).expand(5, *architecture.shape)
    y = model(x)
    assert torch.allclose(y, y[:1].expand_as(y), atol=1e-5)


@covering_cases
def test_batches_of_any_size_give_every_trainable_parameter_a_gradient(
    method: Method, architecture: Architecture
) -> None:
    model = converted(method, architecture).train()
    posterior = [p for name, p in model.named_parameters() if "posterior" in name]
    for rows in (6, 7, 3, 1):
        if rows == 1:
            freeze_statistics(model)
        model.zero_grad()
        loss = loss_of(model, architecture.batch(rows))
        loss.backward()
        assert torch.isfinite(loss)
        assert [name for name, p in model.named_parameters() if p.grad is None] == []
        assert not posterior or any(p.grad.abs().sum() > 0 for p in posterior)


@one_case_each
def test_half_precision_keeps_its_dtype(method: Method, architecture: Architecture) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that noise is below the resolution is another test
        model = by.convert(architecture.make().to(torch.bfloat16), method)
    assert all(
        p.dtype == torch.float32 for layer in bayesian_layers(model).values() for p in layer.posterior.parameters()
    )
    x = architecture.batch(4).to(torch.bfloat16)
    assert model.train()(x).dtype == model.eval()(x).dtype == torch.bfloat16
    assert by.draw(model, 0)(x).dtype == torch.bfloat16


@one_case_each
def test_save_and_load_are_bit_exact(method: Method, architecture: Architecture, tmp_path: Path) -> None:
    model, x = converted(method, architecture), architecture.batch(4)
    model(x)  # statistics move
    by.save(model, tmp_path / "model.safetensors")
    torch.manual_seed(1)
    other = by.load(architecture.make(), tmp_path / "model.safetensors")
    assert list(other.state_dict()) == list(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True))
    assert torch.equal(by.predict(other, x, 3).log_probs, by.predict(model, x, 3).log_probs)
    layers = zip(bayesian_layers(model).values(), bayesian_layers(other).values(), strict=True)
    assert all(a.method == b.method for a, b in layers)


@covering_cases
def test_prediction_depends_on_the_seed_alone(method: Method, architecture: Architecture) -> None:
    """The same seed is the same function whatever the batching, and nothing of the model or the RNG changes."""
    model, x = converted(method, architecture), architecture.batch(7)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    random_state = torch.random.get_rng_state()
    expected = by.predict(model, x, samples=5, seed=3)
    for part in (2, 7):
        assert torch.allclose(by.predict(model, x, 5, seed=3, batch_size=part).log_probs, expected.log_probs, atol=1e-5)
    backwards = by.predict(model, x.flip(0), 5, seed=3).log_probs.flip(0)
    assert torch.allclose(backwards, expected.log_probs, atol=1e-5)
    by_hand = torch.stack([by.draw(model, 3, index=i)(x).log_softmax(-1) for i in range(5)])
    assert torch.allclose(by_hand.logsumexp(0) - torch.tensor(5.0).log(), expected.log_probs, atol=1e-5)
    one, *others = (by.predict(model, x, 7, seed=seed, draws=True).draws for seed in range(3, 8))
    # Where few copies are chosen from, two seeds may choose the same.
    assert not all(torch.equal(one, other) for other in others) or method.noisy is False
    assert model.training and torch.equal(torch.random.get_rng_state(), random_state)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


@every_case
@torch.no_grad()
def test_vectorized_draws_equal_draws_one_by_one(method: Method, architecture: Architecture) -> None:
    model, x, draws = converted(method, architecture), architecture.batch(3), range(2, 7)
    loop = torch.stack([by.draw(model, 3, index=index)(x) for index in draws])
    plan = Plan(model, 3, None)
    tensors = plan._tensors(draws)
    assert torch.allclose(torch.cat(list(plan._one_by_one(x, tensors, draws))), loop, atol=1e-6)
    found = plan._vectorized(x, tensors)
    if found is None:
        # torch can't batch the kernels of an LSTM, and of attention, whose weights differ between draws.
        assert architecture in (ARCHITECTURES["recurrent"], ARCHITECTURES["attention"])
        found = torch.cat(list(plan.outputs(x, draws)))  # what failed left nothing behind
    assert torch.allclose(found, loop, atol=1e-6)


@covering_cases
def test_nothing_waits_for_numbers_of_the_device(method: Method, architecture: Architecture) -> None:
    """On the meta device there are none: whatever asks for one, as a device of its own would wait for it, raises."""
    model = converted(method, architecture).to("meta")
    x, y = architecture.batch(6).to("meta"), torch.zeros(6, dtype=torch.long, device="meta")
    by.elbo(model.train(), x, y, n=100).loss.backward()
    by.elbo(model, x, y, n=100, mixture="replicate", samples=2).loss.backward()
    by.uncertainty_loss(model, by.uniform_noise(x)).backward()
    by.add_kl_grad_(model, n=100, shared_std=1.0)
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())
    assert by.kl(model).is_meta and model.eval()(x).is_meta
    for rows in (6, 2):  # one by one, and vectorized
        assert by.predict(model, x[:rows], samples=5).probs.shape == (rows, 3)
    for network in (by.draw(model, 0), by.draw(model, None), *by.members(model)):
        assert network(x).is_meta


@one_case_each
def test_threads_do_not_meet(method: Method, architecture: Architecture) -> None:
    model, x = converted(method, architecture), architecture.batch(3)
    expected = [by.predict(model, x, 3, seed=seed).log_probs for seed in range(4)]
    found: list[Tensor | None] = [None] * 4

    def run(seed: int) -> None:
        found[seed] = by.predict(model, x, 3, seed=seed).log_probs

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@covering_cases
def test_gradient_edit_equals_autograd(method: Method, architecture: Architecture) -> None:
    model = converted(method, architecture).double()
    (by.kl(model, shared_std=2.0) * 0.7 / 50).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    by.add_kl_grad_(model, n=50, beta=0.7, shared_std=2.0)
    by.add_kl_grad_(model, n=50, beta=0.7, shared_std=2.0)  # once on nothing, once on top of a gradient
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, grad in expected.items():
        assert torch.allclose(found.get(name, torch.zeros_like(grad)), 2 * grad, rtol=1e-6, atol=1e-9), name


@every_method
def test_a_network_of_double_precision_is_trained_and_predicts(method: Method) -> None:
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4)).double()
    model, x = by.convert(plain, method), torch.randn(6, 3, 3, 3, dtype=torch.float64)
    output = model(x)
    output.sum().backward()
    by.add_kl_grad_(model, n=10)
    assert output.dtype == torch.float64 and by.draw(model, 0)(x).dtype == torch.float64
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())
    assert by.predict(model, x, samples=2).probs.isfinite().all()


@covering_cases
def test_revert_gives_the_plain_network_back(method: Method, architecture: Architecture) -> None:
    model, x = converted(method, architecture).eval(), architecture.batch(3)
    drawn, mean = by.draw(model, 5, index=2)(x), by.draw(model, None)(x)
    plain = by.revert(copy.deepcopy(model), 5, index=2)
    assert {type(m) for m in plain.modules()} == {type(m) for m in architecture.make().modules()}
    assert torch.allclose(plain(x), drawn, atol=1e-6)
    assert torch.allclose(by.revert(model)(x), mean, atol=1e-6)
    assert not plain._forward_pre_hooks and not plain._forward_hooks


@one_case_each
def test_check_follows_rows_through_every_layer(method: Method, architecture: Architecture) -> None:
    model = converted(method, architecture)
    found = by.check(model, architecture.batch(5))
    assert set(found) == set(bayesian_layers(model)) and set(found.values()) == {1}


@one_case_each
def test_summary_accounts_for_every_parameter(method: Method, architecture: Architecture) -> None:
    model = converted(method, architecture)
    found = by.summary(model)
    assert found.base == sum(p.numel() for p in architecture.make().parameters())
    assert found.base + found.added == sum(p.numel() for p in model.parameters())
    assert all(row.note for row in found.rows if row.method == "-")


@covering_cases
def test_every_prediction_knows_its_standard_error(method: Method, architecture: Architecture) -> None:
    """After complete blocks it is that of their means; in batches too; and there is none where draws are points."""
    model, x = converted(method, architecture), architecture.batch(5)
    blocks = DrawnNetwork(model).blocks
    count = 4 * blocks.length
    p = by.predict(model, x, count, draws=True)
    groups = p.draws.float().softmax(-1).reshape(4, -1, blocks.groups, *p.probs.shape).mean(1)
    expected = (groups.var(0).sum(0) / 4).sqrt() / blocks.groups * (not blocks.points)
    assert torch.allclose(p.standard_error, expected, atol=1e-5)
    assert torch.allclose(by.predict(model, x, count, batch_size=2).margin(), p.margin(), atol=1e-5)
    assert by.predict(model, x, 7).standard_error.isfinite().all()
