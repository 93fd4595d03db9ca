"""A LightningModule that trains any family as its paper says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

import bayesify as by
from bayesify.lab.recipes import RegulariserPart, TrainingPart
from bayesify.lab.training.batches import mixed
from bayesify.lab.training.finite import require_finite
from bayesify.lab.training.schedules import SCHEDULES
from bayesify.layers import bayesian_layers
from bayesify.likelihood import Likelihood

Prepare = Callable[[Tensor], Tensor]


class BayesianModule(L.LightningModule):
    """Trains a Bayesian (or plain) network on batches (x, y), for n training examples.

    >>> import bayesify as by
    >>> module = BayesianModule(by.convert(nn.Linear(4, 3), by.Rank1(4)), n=60)
    >>> round(float(module.loss((torch.randn(8, 4), torch.zeros(8).long())).detach())) >= 0
    True

    `training` has the options of a recipe's training part. `prepare` turns raw inputs into the network's, after
    `augment` in training. `strange(x)` gives unfamiliar inputs for the regulariser, from a raw batch. With a `seed`,
    the noise of a step is a function of it, the step and the rank: a run resumes exactly, and ranks differ.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        n: int,
        likelihood: Likelihood | None = None,
        training: TrainingPart | None = None,
        prepare: Prepare | None = None,
        augment: Sequence[Prepare] = (),
        strange: Prepare | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.network, self.n, self.seed = network, n, seed
        self.likelihood: Likelihood = likelihood or by.Categorical()
        self.options = training or TrainingPart()
        self.prepare_inputs, self.augment, self.strange = prepare, tuple(augment), strange
        self.bayesian = bool(bayesian_layers(network))
        self.batches_done = 0
        self.beta_now = 0.0
        self._check_options()
        # In a list, so that the compiled network is no second submodule of the same tensors.
        # Not dynamic: an epoch has two sizes of batches at most, and inductor fails on some uneven ones left open.
        self._called: list[Any] = [torch.compile(network, dynamic=False) if self.options.compile else network]

    # A step

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch; its parts are logged apart."""
        if self.seed is not None:
            _seed(mixed(self.seed, 1 + self.global_rank, self.batches_done))
        loss = self.loss(batch)
        self.batches_done += 1
        return loss * self._share_of_step(batch_idx)

    def _share_of_step(self, batch_idx: int) -> float:
        """Lightning divides by the batches of a full step; an epoch's last step may have fewer."""
        accumulate, batches = self.options.accumulate, int(self.trainer.num_training_batches) if self._trainer else 0
        rest = batches % accumulate
        return accumulate / rest if rest and batch_idx >= batches - rest else 1.0

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """-log-likelihood + beta·KL/n + the regulariser, per example."""
        raw, y = batch
        self.beta_now = self.beta
        for step in self.augment:
            raw = step(raw)
        x = self._prepared(raw)
        loss, parts = self._objective(x, y) if self.bayesian else self._plain(x, y)
        if self.options.regulariser is not None:
            parts["regulariser"] = self._regulariser(self.options.regulariser, raw)
            loss = loss + parts["regulariser"]
        require_finite(loss, self.network, x, self.batches_done)
        self._note({"loss": loss, **parts})
        return loss

    def _objective(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        options = self.options
        out = by.elbo(
            self._called[0],
            x,
            y,
            n=self.n,
            likelihood=self.likelihood,
            beta=self.beta_now if options.kl == "loss" else 0.0,
            samples=options.samples,
            mixture=options.mixture,
            bound=options.bound,
        )
        return out.loss, {"log_likelihood": out.log_likelihood, "kl": out.kl, "beta": torch.tensor(self.beta_now)}

    def _plain(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        log_likelihood = self.likelihood.log_prob(self._called[0](x), y).mean()
        return -log_likelihood, {"log_likelihood": log_likelihood}

    def _regulariser(self, part: RegulariserPart, raw: Tensor) -> Tensor:
        assert self.strange is not None
        return by.uncertainty_loss(
            self.network, self._formed(self.strange(raw)), alpha=part.alpha, gamma=part.gamma, draws=part.draws
        )

    def _prepared(self, raw: Tensor) -> Tensor:
        return self._formed(raw if self.prepare_inputs is None else self.prepare_inputs(raw))

    def _formed(self, x: Tensor) -> Tensor:
        """In the precision and memory layout of the network."""
        if self.dtype == torch.float64:
            x = x.double()
        return x.contiguous(memory_format=torch.channels_last) if self.options.channels_last and x.dim() == 4 else x

    @property
    def beta(self) -> float:
        """The KL's weight at this step."""
        options = self.options
        if not self.bayesian or options.kl == "none":
            return 0.0
        length = max(self._length, 1)
        done = self.batches_done / length
        if options.anneal_by == "epoch":
            done = int(done * options.epochs + 1e-9) / options.epochs
        return options.kl_weight * by.anneal(done, over=options.anneal)

    @property
    def _length(self) -> int:
        """The batches of the whole training."""
        trainer = self._trainer
        return int(trainer.num_training_batches * self.options.epochs) if trainer is not None else 0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradient edit: after backward and unscaling, before clipping and the step."""
        if self.bayesian and self.options.kl == "gradient" and self.beta_now > 0:
            by.add_kl_grad_(self.network, n=self.n, beta=self.beta_now)

    # Validation

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The negative log predictive density (and accuracy) with a few draws."""
        raw, y = batch
        x = self._prepared(raw)
        if self.bayesian:
            p = by.predict(self.network, x, self.options.validation_samples, likelihood=self.likelihood)
        else:
            p = self.likelihood.predictive(self.network(x).unsqueeze(0))
        if isinstance(self.likelihood, by.Gaussian):
            values = {"val_nll": -p.log_prob(y).mean(), "val_mse": (p.mean - y).square().mean()}
        else:
            values = {
                "val_nll": -p.log_probs.gather(1, y.unsqueeze(1)).mean(),
                "val_accuracy": (p.label == y).float().mean(),
            }
        self.log_dict(values, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(y), prog_bar=True)

    # The optimizer

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Two groups, base and posterior, each with its own rate and schedule."""
        groups = self._groups()
        optimizer = _optimizer(self.options, groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [self._factor(group["name"]) for group in groups])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _groups(self) -> list[dict[str, Any]]:
        options = self.options
        if self.bayesian:
            groups = by.parameter_groups(
                self.network, lr=options.lr, posterior_lr=options.posterior_lr, weight_decay=options.weight_decay
            )
        else:
            trained = [p for p in self.network.parameters() if p.requires_grad]
            groups = [{"name": "base", "params": trained, "lr": options.lr, "weight_decay": options.weight_decay}]
        learnt = list(self.likelihood.parameters())
        if learnt:
            groups.append({"name": "likelihood", "params": learnt, "lr": options.lr, "weight_decay": 0.0})
        return groups

    def _factor(self, group: str) -> Callable[[int], float]:
        options, posterior = self.options, group == "posterior"
        name = options.posterior_schedule if posterior and options.posterior_schedule else options.schedule
        final = options.posterior_final if posterior and options.posterior_final is not None else options.final
        steps = max(int(self.trainer.estimated_stepping_batches), 1)
        return lambda step: SCHEDULES[name](min(step / steps, 1.0), final, options.warmup)

    # What a checkpoint holds beside Lightning's own

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Where in the data training stands, and whether it has ended before its time."""
        checkpoint["batches_done"] = self.batches_done
        checkpoint["stopped"] = bool(self.trainer.should_stop)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on from there."""
        self.batches_done = int(checkpoint["batches_done"])

    def _note(self, parts: dict[str, Tensor]) -> None:
        if self._trainer is None:
            return
        self.log_dict({name: part.detach() for name, part in parts.items()}, prog_bar=True)
        rates = {group.get("name"): group["lr"] for group in self.trainer.optimizers[0].param_groups}
        names = {"base": "lr", "covered": "lr", "posterior": "posterior_lr"}
        self.log_dict({names[group]: rate for group, rate in rates.items() if group in names})

    def _check_options(self) -> None:
        if self.options.regulariser is not None and self.strange is None:
            raise by.BayesifyError("training.regulariser needs strange=…, which gives unfamiliar inputs")
        if self.options.regulariser is not None and not self.bayesian:
            raise by.BayesifyError("training.regulariser needs a Bayesian network: one draw has no mutual information")
        if self.options.regulariser is not None and not isinstance(self.likelihood, by.Categorical):
            raise by.BayesifyError("training.regulariser needs classes: it is of the draws' mutual information")


def _seed(number: int) -> None:
    """`torch.manual_seed`, which without CUDA would note down where it was called, at a cost."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


def _optimizer(options: TrainingPart, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if options.optimizer == "sgd":
        nesterov = options.nesterov and options.momentum > 0
        return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, nesterov=nesterov)
    kind = torch.optim.Adam if options.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=options.lr)
