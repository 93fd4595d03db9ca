"""What would surprise a user in production, each seen once and not again."""

from __future__ import annotations

import copy
import os
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as by
from bayesify.integrations import transformers as integrations
from bayesify.layers import bayesian_layers


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


# The model and its draws


def test_a_draw_and_the_model_share_no_tensor() -> None:
    model, x = by.convert(_net(), by.Rank1(4)), torch.randn(6, 4)
    for network in (by.draw(model, 0), by.draw(model, None), *by.members(model)):
        expected = network(x)
        network.half()
        network.requires_grad_(False)
        assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())
        network.float()
        before = network(x)
        with torch.no_grad():
            for tensor in (*model.parameters(), model[1].running_mean):
                tensor.add_(1.0)
        assert torch.equal(network(x), before) and torch.allclose(before, expected, atol=1e-2)
        with torch.no_grad():
            for tensor in (*model.parameters(), model[1].running_mean):
                tensor.sub_(1.0)


def test_a_draw_of_tied_layers_stays_tied_where_the_model_is() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    net[1].weight = net[0].weight
    drawn = by.draw(by.convert(net, {"2": by.Rank1(2)}), 0)
    assert drawn[0].weight is drawn[1].weight


def test_predicting_needs_a_seed() -> None:
    with pytest.raises(by.BayesifyError, match=r"seed=None: expected an integer"):
        by.predict(by.convert(_net(), by.Rank1(4)), torch.randn(2, 4), seed=None)


def test_predict_leaves_a_counting_buffer_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x)

    model = by.convert(Counting(), by.MeanField())
    by.predict(model, torch.randn(2, 4))
    assert model.calls == 0


def test_a_model_that_keeps_its_activations_predicts() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.features = self.layer(x)
            return self.features

    model = by.convert(Keeping(), by.MeanField())
    kept = model(torch.randn(2, 4))
    by.predict(model, torch.randn(2, 4))
    assert model.features is kept


def test_revert_does_not_write_into_a_tied_layer() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids).mean(1))

    model, ids = by.convert(Tied(), {"head": by.Rank1(4)}).eval(), torch.randint(5, (3, 6))
    before, mean = model.embed.weight.clone(), by.draw(model, None)(ids)
    by.revert(model)
    assert torch.equal(model.embed.weight, before) and torch.allclose(model(ids), mean, atol=1e-6)


def test_an_exception_in_forward_closes_the_scope() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.layer(x)
            raise RuntimeError("no")

    model = by.convert(Failing(), by.Rank1(2))
    with pytest.raises(RuntimeError, match="no"):
        model(torch.randn(2, 4))
    with pytest.raises(by.BayesifyError, match="called outside its model"):
        model.layer(torch.randn(2, 4))


def test_a_part_of_a_converted_model_is_not_converted_alone() -> None:
    model = by.convert(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))), by.Rank1(4))
    with pytest.raises(by.ConversionError, match="part of a larger model"):
        by.convert(model[1], {"1": by.EMP(2)})
    by.convert(model, {"1.1": by.EMP(2)})
    assert {layer.scope for layer in bayesian_layers(model).values()} == {model[0].scope}


def test_a_second_conversion_keeps_the_batch_dimension() -> None:
    model = by.convert(_net(), {"0": by.Rank1(2)}, batch_dim=1)
    by.convert(model, {"3": by.Rank1(2)})
    assert model[0].scope.batch_dim == 1


# Mixtures


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 7, 8])
def test_members_with_a_single_row_use_their_statistics(rows: int) -> None:
    model = by.convert(_net(), by.Ensemble(4))
    assert torch.isfinite(model(torch.randn(rows, 4))).all()


def test_recalibrating_members_needs_rows_for_each() -> None:
    model = by.convert(_net(), by.Ensemble(4))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(by.BayesifyError, match="got 2 rows for 4 members"):
        by.recalibrate(model, [torch.randn(8, 4), torch.randn(2, 4)])
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    model = by.convert(nn.Sequential(nn.BatchNorm1d(2)), by.Ensemble(4))
    by.recalibrate(model, [torch.randn(64, 2) + 10 for _ in range(8)])
    assert torch.allclose(model[0].posterior.running_mean, torch.full((3, 2), 10.0), atol=0.5)


def test_the_bound_is_the_same_in_evaluation() -> None:
    model = by.convert(nn.Linear(4, 3), by.BatchEnsemble(4, mean_std=0.5))
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    for bound in ("average", "mixture"):
        values = [
            by.elbo(model.train(mode), x, y, n=9, mixture="replicate", bound=bound).log_likelihood
            for mode in (True, False)
        ]
        assert torch.allclose(*values, atol=1e-6)
    assert not model.scope.of_thread.per_row


def test_the_mean_of_learned_mixing_has_its_probabilities() -> None:
    layer = by.convert(nn.LayerNorm(3), by.EMP(3, learn_mixing=True, jitter=0.5))
    with torch.no_grad():
        layer.posterior.logits.copy_(torch.tensor([9.0, 0.0, 0.0]))
    p = layer.posterior.logits.softmax(0)
    copies = torch.cat([layer.weight.unsqueeze(0), layer.posterior.weight])
    assert torch.allclose(by.draw(layer, None).weight, p @ copies, atol=1e-6)


# Rows


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.table(torch.arange(8)))


def test_check_finds_rows_that_are_not_of_the_batch() -> None:
    model = by.convert(Positions(), {"*": by.Ensemble(4)})
    with pytest.raises(by.RowError, match="layer 'table' has 8 rows that no row of the batch changes"):
        by.check(model, torch.randn(4, 8, 4))


def test_labels_are_ids_of_one_dimension() -> None:
    for method in (by.Rank1(3), by.IBNN(3), by.MCDropout(0.2), by.MeanField(), by.Ensemble(3)):
        model = by.convert(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2)), {"*": method})
        ids = torch.tensor([1, 2, 2, 5])
        assert model(ids).shape == (4, 2)
        assert by.check(model, ids) == {"0": 1, "1": 1}


def test_padding_gets_no_gradient() -> None:
    for method in (by.Rank1(4), by.MeanField(), by.EMP(2, reach="row")):
        model = by.convert(nn.Sequential(nn.Embedding(7, 3, padding_idx=2)), {"0": method})
        for mode in (True, False):
            model.zero_grad()
            model.train(mode)(torch.tensor([[1, 2], [2, 3]])).sum().backward()
            assert model[0].weight.grad[2].abs().sum() == 0
        assert method.ties_components is False or model[0].weight.grad[1].abs().sum() > 0


def test_an_empty_batch_gives_an_empty_output() -> None:
    for method in (by.Rank1(4), by.MeanField(), by.Ensemble(3)):
        model = by.convert(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), method)
        assert model(torch.randn(0, 4)).shape == (0, 3)


class TimeMajor(nn.Module):
    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.first, self.drop, self.head, self.pooled = nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3), pooled

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.drop(self.first(x)))
        return y.mean(0) if self.pooled else y


@pytest.mark.parametrize("pooled", [True, False])
def test_the_batch_dimension_holds_in_prediction(pooled: bool) -> None:
    """Batches are cut and joined along it, and a row's mask does not depend on its place."""
    model = by.convert(TimeMajor(pooled), by.Rank1(2), batch_dim=1, keep_dropout=True)
    x = torch.randn(5, 6, 4)
    whole, parts = by.predict(model, x, 4), by.predict(model, x, 4, batch_size=4)
    assert whole.probs.shape == ((6, 3) if pooled else (5, 6, 3))
    assert torch.allclose(whole.probs, parts.probs, atol=1e-6)
    with pytest.raises(by.BayesifyError, match="batch_dim > 0"):
        by.elbo(model, x, torch.zeros(6).long(), n=3, samples=2)


# Dropout


def test_a_dropout_used_twice_is_kept_alive_in_both_places() -> None:
    drop = nn.Dropout(0.5)
    net = nn.Sequential(nn.Linear(4, 50), drop, nn.Linear(50, 50), drop)
    plain = by.draw(by.convert(copy.deepcopy(net), {"0": by.MeanField()}), 0)
    drawn = by.draw(by.convert(net, {"0": by.MeanField()}, keep_dropout=True), 0)
    assert (drawn(torch.randn(3, 4)) == 0).float().mean() > 0.3
    assert not (plain(torch.randn(3, 4)) == 0).any()


def test_a_pattern_leaves_dropout_modules_as_they_are() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    model = by.convert(net, {"*": by.MCDropout(0.1)})
    assert type(model[1]) is nn.Dropout
    with pytest.raises(by.ConversionError, match=r"use convert.*keep_dropout=True"):
        by.convert(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5)), {nn.Dropout: by.Rank1(4)})
    total = nn.Sequential(nn.Linear(4, 5), nn.Dropout(1.0))
    with pytest.raises(by.ConversionError, match=r"dropout with p=1.0, which drops everything"):
        by.convert(total, by.Rank1(4), keep_dropout=True)
    assert type(total[0]) is nn.Linear


def test_revert_to_a_draw_keeps_its_masks() -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    model, x = by.convert(net, by.Rank1(2), keep_dropout=True).eval(), torch.randn(4, 6)
    drawn = by.draw(model, 3)(x)
    assert torch.allclose(by.revert(copy.deepcopy(model), 3)(x), drawn, atol=1e-6)
    assert type(by.revert(model)[1]) is nn.Dropout


# Precision


def test_double_precision_is_kept() -> None:
    x = torch.randn(3, 4).double()
    for method in (by.EMP(3), by.Ensemble(3)):
        net = _net().double().eval()
        expected = net(x)
        member = by.members(by.convert(net, {"*": method}))[0]
        assert torch.allclose(member(x), expected, rtol=1e-14, atol=1e-14)


# Calls of all kinds


def test_a_call_of_ones_own_is_followed_exactly() -> None:
    model, x = by.convert(_net(), {"3": by.MeanField(init_log_std=(-1.0, -1.0))}), torch.randn(5, 4)
    plain = by.predict(model, x, 4, draws=True).draws
    doubled = by.predict(model, x, 4, draws=True, call=lambda net, b: torch.from_numpy(2 * net(b).numpy())).draws
    assert torch.allclose(doubled, 2 * plain, atol=1e-5)


def test_inference_mode_and_graphs_predict() -> None:
    model, x = by.convert(_net(), {"3": by.Rank1(2)}), torch.randn(5, 4)
    expected = by.predict(model, x, 4).log_probs
    with torch.inference_mode():
        assert torch.allclose(by.predict(model, x + 0, 4).log_probs, expected)

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.head(self.body(x)[edges[0]] + self.body(x)[edges[1]])

    edges = torch.tensor([[0, 3, 4], [1, 2, 0]])
    graph = by.convert(Graph(), {"head": by.Rank1(2)})
    assert by.predict(graph, {"x": x, "edges": edges}, 4).probs.shape == (3, 3)


# Forms of batches and outputs


def test_outputs_and_batches_of_other_libraries() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": torch.zeros(()), "logits": self.layer(x)}

    model, x, y = by.convert(Named(), by.Rank1(2)), torch.randn(6, 4), torch.zeros(6).long()
    assert by.predict(model, UserDict(x=x), 2, batch_size=4).probs.shape == (6, 3)
    assert by.check(model, {"x": x}) == {"layer": 1}
    by.elbo(model, {"x": x}, y, n=6).loss.backward()
    by.recalibrate(model, [{"x": x}])
    pairs = [((x[:3], x[:3]), y[:3]), ((x[3:], x[3:]), y[3:])]
    both = by.predict(model, pairs, 2, call=lambda net, batch: net(batch[0][0] + batch[0][1])["logits"])
    assert both.probs.shape == (6, 3)


@dataclass
class Output:
    """As transformers have it: a loss where there are labels, and logits."""

    logits: Tensor
    loss: Tensor | None = None


class EndsInOne(nn.Module):
    """A classifier in the style of transformers; as T5's, it insists on rows that end."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.score = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
        if not bool((input_ids == 1).sum(1).eq(1).all()):
            raise ValueError("all rows must have one end")
        kept = attention_mask.unsqueeze(-1)
        logits = self.score((self.table(input_ids) * kept).sum(1) / kept.sum(1))
        return Output(logits, None if labels is None else nn.functional.cross_entropy(logits, labels))


def test_a_classifier_in_the_style_of_transformers_is_used_as_it_is(tmp_path: Path) -> None:
    ids = torch.randint(2, 20, (6, 5))
    ids[:, 3] = 1
    batch = {"input_ids": ids, "attention_mask": (torch.arange(5) < 4).long().expand(6, 5)}
    model = by.convert(EndsInOne(), {"*": by.MeanField()})
    assert by.check(model, batch) == {"table": 1, "score": 1}
    p = by.predict(model, batch, samples=4)
    labelled = {**batch, "labels": torch.zeros(6).long()}
    assert torch.equal(by.predict(model, [labelled], samples=4).probs, p.probs)
    outputs = [by.draw(model, 0, index=index)(**batch).logits.softmax(1) for index in range(4)]
    assert torch.allclose(torch.stack(outputs).mean(0), p.probs, atol=1e-6)
    by.save(model, tmp_path / "m")
    assert torch.equal(by.predict(by.load(EndsInOne(), tmp_path / "m"), batch, samples=4).probs, p.probs)


def test_check_says_where_nothing_is_drawn() -> None:
    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    with pytest.raises(by.BayesifyError, match="reaches no Bayesian layer"):
        by.check(by.convert(Merged(), {"unused": by.MeanField()}), torch.randn(4, 4))
    assert by.check(by.convert(Merged(), {"*": by.MeanField()}), torch.randn(4, 4)) == {"used": 1}


def test_check_of_ids_still_finds_rows_that_meet() -> None:
    class Meets(EndsInOne):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
            x = self.table(input_ids).mean(1)
            return Output(self.score(x + x.roll(1, 0)))

    model = by.convert(Meets(), {"score": by.Rank1(2)})
    with pytest.raises(by.RowError, match="'score'"):
        by.check(model, {"input_ids": torch.randint(2, 20, (6, 5)), "attention_mask": torch.ones(6, 5).long()})


def test_check_names_a_layer_whose_one_row_is_repeated_for_the_batch() -> None:
    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.score = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.score(x + self.places(torch.ones(1, 3)).repeat(len(x), 1))

    x = torch.randn(6, 4)
    model = by.convert(Repeats(), by.Rank1(2)).train()
    with pytest.raises(by.RowError, match=r"'places' gets one row for all.*convert\(model, {'places': None"):
        by.check(model, x)
    assert model.score.training and not model.score.scope.of_thread.per_row
    assert by.check(by.convert(Repeats(), {"places": None, "*": by.Rank1(2)}), x) == {"score": 1}


class ReadsItsWeight(nn.Module):
    """Never calls the layer inside: it reads the layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(x, self.inner.weight, self.inner.bias).relu())


@pytest.mark.parametrize("methods", [by.Rank1(4), {"*": by.MeanField()}, {"inner": by.EMP(3), "*": by.Rank1(2)}])
def test_a_layer_whose_weight_is_read_by_others_is_left_out_with_an_example(methods: object) -> None:
    x = torch.randn(5, 4)
    model = by.convert(ReadsItsWeight(), methods, example=x)
    assert list(bayesian_layers(model)) == ["head"] and by.check(model, x) == {"head": 1}
    notes = {row.name: row.note for row in by.summary(model).rows}
    assert "reads its weight without calling it" in notes["inner"] and notes["head"] == ""


def test_a_layer_whose_weight_is_read_by_others_is_named_by_check() -> None:
    model = by.convert(ReadsItsWeight(), by.Rank1(4))
    with pytest.raises(by.BayesifyError, match=r"layer 'inner': not called, although its weight.*example=batch"):
        by.check(model, torch.randn(5, 4))
    with pytest.raises(by.ConversionError, match="no chosen layer is called on the example"):
        by.convert(ReadsItsWeight(), {"inner": by.Rank1(4)}, example=torch.randn(5, 4))


def test_an_example_changes_nothing_where_layers_are_called() -> None:
    net, x = _net(), torch.randn(5, 4)
    before = copy.deepcopy(net.state_dict())
    model = by.convert(net.train(), by.MeanField(), example=x)
    assert list(bayesian_layers(model)) == ["0", "1", "3"] and model.training
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    unused = by.convert(nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)}), by.Rank1(2))
    assert list(bayesian_layers(unused)) == ["a", "b"]


def test_a_part_with_a_parameter_of_its_own_is_selected_by_name() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.layer = nn.Parameter(torch.zeros(1, 4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + self.token)

    model = by.convert(nn.ModuleDict({"encoder": Encoder(), "head": nn.Linear(4, 3)}), {"encoder": by.Rank1(4)})
    assert list(bayesian_layers(model)) == ["encoder.layer"]
    notes = {row.name: row.note for row in by.summary(model).rows}
    assert notes["encoder"].startswith("token: parameters of a module that contains other layers")


def test_a_module_named_posterior_saves_and_loads(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.ModuleDict({"body": nn.ModuleDict({"posterior": nn.Linear(3, 3)}), "head": nn.Linear(3, 2)})

    model = by.convert(make(), {"head": by.Rank1(2)})
    by.save(model, tmp_path / "model.safetensors")
    other = by.load(make(), tmp_path / "model.safetensors")
    assert torch.equal(other.body.posterior.weight, model.body.posterior.weight)
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask


# Autograd


def test_gradients_of_gradients_and_functional_gradients_work() -> None:
    model = by.convert(nn.Sequential(nn.Conv2d(2, 9, 3), nn.Tanh()), by.Rank1(2))
    x = torch.randn(3, 2, 5, 5, requires_grad=True)
    values = []
    for way in ("eager", "compiled"):
        network = torch.compile(model, backend="eager") if way == "compiled" else model
        torch.manual_seed(3)
        (grad,) = torch.autograd.grad(network(x).square().sum(), x, create_graph=True)
        values.append(torch.autograd.grad(grad.square().sum(), model[0].posterior.out_loc)[0])
    assert torch.allclose(*values, rtol=1e-3, atol=1e-4)
    functional = torch.func.grad(lambda t: torch.func.functional_call(model, {}, (t,)).sum(), has_aux=False)
    assert functional(x.detach()).shape == x.shape


def test_a_subclass_of_a_transformer_layer_is_stochastic_in_eval() -> None:
    class Mine(nn.TransformerEncoderLayer):
        pass

    model = by.convert(Mine(8, 2, 16, batch_first=True), by.MeanField(init_log_std=(-1.0, -1.0))).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        assert not torch.equal(model(x), model(x))


# Options


@pytest.mark.parametrize(
    ("net", "methods", "message"),
    [
        (lambda: nn.Sequential(nn.Bilinear(3, 4, 2)), by.Rank1(), "Bilinear has two inputs"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), by.Rank1(), "call the model once with a batch"),
        (lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 2))), by.Rank1(), "scripted module"),
        (lambda: nn.DataParallel(_net()), by.Rank1(), "DataParallel wraps the network"),
        (_net, {"2": by.Rank1()}, r"matches only modules without parameters \(ReLU\)"),
        (_net, {"3": None}, "nothing would be converted"),
        (_net, {"*": by.MeanField(), "3": by.Rank1()}, "'3': earlier keys already take all layers it matches"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_can_not_be_converted_says_why(net: object, methods: object, message: str) -> None:
    with pytest.raises(by.ConversionError, match=message):
        by.convert(net(), methods)


def test_alpha_dropout_is_not_left_dead_in_silence() -> None:
    with pytest.raises(by.ConversionError, match="AlphaDropout, which keep_dropout does not support"):
        by.convert(nn.Sequential(nn.Linear(3, 3), nn.AlphaDropout(0.2)), by.Rank1(2), keep_dropout=True)


def test_summary_counts_what_is_known_of_lazy_layers() -> None:
    model = by.convert(nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3)), by.Rank1(2))
    assert by.summary(model).base == 12 and "call the model once" in str(by.summary(model))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: by.Rank1(prior="lognormal"), "divergence is infinite or undefined"),
        (lambda: by.Rank1(posterior="cauchy", prior="normal"), "divergence is infinite or undefined"),
        (lambda: by.Rank1(posterior="lognormal", prior_mean=0), r"prior_mean=0\): expected a number > 0"),
        (lambda: by.Rank1(prior_mean=float("nan")), "prior_mean=nan"),
        (lambda: by.MeanField(init_log_std=3), r"init_log_std=3\): expected \(low, high\)"),
        (lambda: by.MeanField(init_log_std=(0, float("nan"))), r"expected \(low, high\)"),
        (lambda: by.IBNN(bias_noise="yes"), "bias_noise='yes'.: expected True or False"),
        (lambda: by.convert(_net(), {3: by.Rank1(2)}), "3: expected a pattern, a layer type or a predicate"),
    ],
)
def test_wrong_options_are_named(make: object, message: str) -> None:
    with pytest.raises(by.BayesifyError, match=message):
        make()


def test_dropout_spares_the_input_and_norms_without_weights() -> None:
    model = by.convert(_net(), by.MCDropout(0.1))
    assert list(bayesian_layers(model)) == ["3"]
    assert "leaves the input layer shared" in {row.name: row.note for row in by.summary(model).rows}["0"]
    assert list(bayesian_layers(by.convert(nn.Linear(3, 2), by.MCDropout(0.1)))) == [""]
    with pytest.raises(by.ConversionError, match="no input factor to drop"):
        by.convert(nn.Sequential(nn.BatchNorm2d(4, affine=False)), {"0": by.MCDropout()})
    with pytest.raises(by.ConversionError, match=r"matches dropout modules only; use convert.*keep_dropout=True"):
        by.convert(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2)), {"1": by.MCDropout(0.1)})


def test_a_pair_of_tensors_is_one_batch() -> None:
    model, x = by.convert(_net(), by.Rank1(2)), torch.randn(5, 4)
    expected = by.predict(model, x, 2).log_probs
    assert torch.equal(by.predict(model, (x, torch.zeros(5)), 2).log_probs, expected)


def test_export_refuses_what_has_no_classes(tmp_path: Path) -> None:
    with pytest.raises(by.BayesifyError, match=r"expected logits of 2 or more classes, not \(2, 1\)"):
        by.export(by.convert(nn.Linear(4, 1), by.Rank1(2)), tmp_path / "model.pt2", torch.randn(2, 4))


def test_one_patch_may_be_named_alone() -> None:
    assert by.EMP(3, patches="norm").patches == ("norm",)


def test_random_copies_work_without_data() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    model = by.convert(net, {"*": by.EMP(3, init_copies="random")})
    assert model[0].posterior.weight.shape == (2, 5, 4)


def test_cross_entropy_is_what_the_loop_in_the_readme_minimises() -> None:
    model = by.convert(_net(), by.IBNN(4))
    x, y = torch.randn(16, 4), torch.randint(3, (16,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + by.kl(model) / 1000
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


# Packages that are not there


def test_the_callback_for_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrations, "MISSING", ImportError("No module named 'transformers'"))
    with pytest.raises(by.BayesifyError, match=r"No module named 'transformers'.*'bayesify\[transformers\]'"):
        integrations.KLCallback()
