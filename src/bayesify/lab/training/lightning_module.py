"""`BayesianModule`: a LightningModule that trains any method the way its paper does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

import bayesify as by
from bayesify.lab.recipes import RegulariserPart, TrainingPart
from bayesify.lab.training.batches import mix_seeds
from bayesify.lab.training.refuse_not_finite import (
    require_finite_gradients,
    require_finite_loss,
    require_finite_prediction,
    require_finite_state,
)
from bayesify.lab.training.schedules import factor
from bayesify.layers import bayesian_layers
from bayesify.methods.draw_design import seed_torch
from bayesify.prediction.likelihood import Likelihood

Prepare = Callable[[Tensor], Tensor]
SHARED = ("base", "likelihood")
"""The groups of tensors that all draws share; the others are drawn."""


class BayesianModule(L.LightningModule):
    """A LightningModule that trains a Bayesian or plain network on batches (x, y).

    >>> import bayesify as by
    >>> module = BayesianModule(by.convert(nn.Linear(4, 3), by.Rank1(4)), n=60)
    >>> round(float(module.loss((torch.randn(8, 4), torch.zeros(8).long())).detach())) >= 0
    True

    Args:
        network: The network, converted or plain.
        n: The number of training examples, by which the KL is divided.
        likelihood: What the outputs mean; `by.Categorical()` by default.
        training: The options of a recipe's `training` part.
        prepare: Prepares raw inputs for the network; by default batches are taken as they are.
        augment: Augmentations of raw training batches, before `prepare`.
        ood_inputs: From a raw batch to prepared out-of-distribution inputs, for `training.regulariser`.
        seed: If given, the noise of a step is a function of seed, step and rank, so that a run resumes exactly.
        strange: The former name of `ood_inputs`.
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
        ood_inputs: Prepare | None = None,
        seed: int | None = None,
        strange: Prepare | None = None,
    ) -> None:
        super().__init__()
        if strange is not None:
            warnings.warn("BayesianModule(strange=…) is now called ood_inputs=…", DeprecationWarning, stacklevel=2)
        self.network, self.n, self.seed = network, n, seed
        self.likelihood: Likelihood = likelihood or by.Categorical()
        self.options = training or TrainingPart()
        self.prepare_inputs, self.augment, self.ood_inputs = prepare, tuple(augment), ood_inputs or strange
        self.bayesian = bool(bayesian_layers(network))
        self.batches_done = 0
        self.beta_now = 0.0
        self.answers = 1
        """Pixels or labels of each row, by which the objective is divided, so that it does not grow with them."""
        self.logged: dict[str, Any] = {}
        """The terms of the last batch's loss, and the learning rates."""
        self._check_options()
        # In a list, so that the compiled network does not become a second submodule with the same tensors.
        # Not dynamic: an epoch has at most two batch sizes, and inductor fails on some dynamic ones.
        self._callable: list[Any] = [torch.compile(network, dynamic=False) if self.options.compile else network]

    # A step

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch; its terms are logged separately."""
        if self.seed is not None:
            seed_torch(mix_seeds(self.seed, 1 + self.global_rank, self.batches_done))
        loss = self.loss(batch)
        self.batches_done += 1
        return loss * self._accumulation_factor(batch_idx)

    def _accumulation_factor(self, batch_idx: int) -> float:
        """Lightning divides by the batches of a full accumulated step; the last one of an epoch may have fewer."""
        accumulate, batches = self.options.accumulate, int(self.trainer.num_training_batches) if self._trainer else 0
        rest = batches % accumulate
        return accumulate / rest if rest and batch_idx >= batches - rest else 1.0

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss per example: -log-likelihood + beta·KL/n + regulariser."""
        raw, y = batch
        self.beta_now = self.beta
        for step in self.augment:
            raw = step(raw)
        x = self._prepare(raw)
        loss, parts = self._objective(x, y) if self.bayesian else self._plain(x, y)
        self.answers = 1 if y.is_floating_point() else max(y[0].numel(), 1)
        loss = loss / self.answers
        if self.options.regulariser is not None:
            parts["regulariser"] = self._regulariser(self.options.regulariser, raw)
            loss = loss + parts["regulariser"]
        require_finite_loss(loss, self.network, x, self.batches_done)
        self._log_terms({"loss": loss, **parts})
        return loss

    def _objective(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        options = self.options
        out = by.elbo(
            self._callable[0],
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
        log_likelihood = self.likelihood.log_prob(self._callable[0](x), y).mean()
        return -log_likelihood, {"log_likelihood": log_likelihood}

    def _regulariser(self, part: RegulariserPart, raw: Tensor) -> Tensor:
        assert self.ood_inputs is not None
        return by.uncertainty_loss(
            self.network,
            self._to_network_format(self.ood_inputs(raw)),
            alpha=part.alpha,
            gamma=part.gamma,
            draws=part.draws,
        )

    def _prepare(self, raw: Tensor) -> Tensor:
        return self._to_network_format(raw if self.prepare_inputs is None else self.prepare_inputs(raw))

    def _to_network_format(self, x: Tensor) -> Tensor:
        """A batch in the precision and memory layout of the network."""
        if self.dtype == torch.float64:
            x = x.double()
        return x.contiguous(memory_format=torch.channels_last) if self.options.channels_last and x.dim() == 4 else x

    @property
    def beta(self) -> float:
        """The weight of the KL at this step."""
        options = self.options
        if not self.bayesian or options.kl == "none":
            return 0.0
        length = max(self._total_batches, 1)
        done = self.batches_done / length
        if options.anneal_by == "epoch":
            done = int(done * options.epochs + 1e-9) / options.epochs
        return options.kl_weight * by.anneal(done, over=options.anneal)

    @property
    def _total_batches(self) -> int:
        """The number of batches in all epochs."""
        trainer = self._trainer
        return int(trainer.num_training_batches * self.options.epochs) if trainer is not None else 0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the gradient of the KL: after backward and unscaling, before clipping and the step."""
        if self.bayesian and self.options.kl == "gradient" and self.beta_now > 0:
            by.add_kl_grad_(self.network, n=self.n, beta=self.beta_now / self.answers)
        if self.options.precision != "16-mixed":  # where such steps are left out, and the scale of the loss is lowered
            require_finite_gradients(self.network, self.batches_done)
        if self.options.alternate is not None:
            self._hold_fixed(optimizer, shared=self.current_epoch // self.options.alternate % 2 == 1)

    def _hold_fixed(self, optimizer: torch.optim.Optimizer, shared: bool) -> None:
        """Let the step leave out the shared tensors, or all others (EMP, C.2): without a gradient nothing moves."""
        for group in optimizer.param_groups:
            for p in group["params"] if (group["name"] in SHARED) == shared else ():
                p.grad = None

    # Validation

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the NLL, and the accuracy or squared error, with a few draws."""
        raw, y = batch
        x = self._prepare(raw)
        if self.bayesian:
            p = by.predict(self.network, x, self.options.validation_samples, likelihood=self.likelihood)
        else:
            p = self.likelihood.predictive(self.network(x).unsqueeze(0))
        if isinstance(self.likelihood, by.Gaussian):
            values = {"val_nll": -p.log_prob(y).mean(), "val_mse": (p.mean - y).square().mean()}
        else:
            is_binary = isinstance(self.likelihood, by.Bernoulli)
            own = p.log_probs.where(y == 1, p.log_not_probs) if is_binary else p.log_probs.gather(-1, y.unsqueeze(-1))
            values = {"val_nll": -own.mean(), "val_accuracy": (p.label == y).float().mean()}
        require_finite_prediction(values["val_nll"], self.network, x, self.batches_done)
        self.log_dict(values, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(y), prog_bar=True)

    # The optimizer

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Parameter groups for base and posterior, each with its own learning rate and schedule."""
        optimizer = make_optimizer(self)
        factors = [self._factor(group["name"]) for group in optimizer.param_groups]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The trained parameters in groups, each with its own learning rate."""
        options = self.options
        if self.bayesian:
            rest = options.weight_decay if options.decay == "all" else 0.0
            groups = by.parameter_groups(
                self.network,
                lr=options.lr,
                posterior_lr=options.posterior_lr,
                weight_decay=options.weight_decay,
                posterior_weight_decay=rest,
                covered_weight_decay=rest,
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
        schedule = options.posterior_schedule if posterior and options.posterior_schedule else options.schedule
        final = options.posterior_final if posterior and options.posterior_final is not None else options.final
        steps = max(int(self.trainer.estimated_stepping_batches), 1)
        rise = options.warmup_epochs * steps / options.epochs

        def at(step: int) -> float:
            share = min(step / steps, 1.0)
            value = factor(schedule, share, options.epochs, final=final, warmup=options.warmup)
            return value * min((step + 1) / rise, 1.0) if rise else value

        return at

    # Checkpoints and logs

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save how many batches are done, and whether training has stopped early; nothing if a number is not finite."""
        require_finite_state(self, self.network, self.batches_done)
        checkpoint["batches_done"] = self.batches_done
        checkpoint["stopped"] = bool(self.trainer.should_stop)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue after the batches that are done."""
        self.batches_done = int(checkpoint["batches_done"])

    def _log_terms(self, parts: dict[str, Tensor]) -> None:
        if self._trainer is None:
            return
        terms = {name: part.detach() for name, part in parts.items()}
        names = {"base": "lr", "covered": "lr", "posterior": "posterior_lr"}
        groups = self.trainer.optimizers[0].param_groups
        rates = {names[group["name"]]: group["lr"] for group in groups if group.get("name") in names}
        self.log_dict(terms, prog_bar=True)
        self.log_dict(rates)
        self.logged = {**terms, **rates}

    def _check_options(self) -> None:
        names = {group["name"] for group in self.parameter_groups()} if self.options.alternate is not None else set()
        if names and (names <= set(SHARED) or "base" not in names):
            raise by.BayesifyError(
                "training.alternate trains shared tensors and drawn ones in turn, but this network has only "
                f"{'drawn' if 'base' not in names else 'shared'} ones; leave it out"
            )
        if self.options.regulariser is not None and self.ood_inputs is None:
            raise by.BayesifyError("training.regulariser needs ood_inputs=…, a function that returns such inputs")
        if self.options.regulariser is not None and not self.bayesian:
            raise by.BayesifyError("training.regulariser needs a Bayesian network: one draw has no mutual information")
        if self.options.regulariser is not None and not isinstance(self.likelihood, by.Categorical):
            raise by.BayesifyError("training.regulariser needs classes: it uses the mutual information of draws")


def make_optimizer(module: BayesianModule) -> torch.optim.Optimizer:
    """A new optimizer of a module's parameters."""
    options, groups = module.options, module.parameter_groups()
    if options.optimizer == "sgd":
        nesterov = options.nesterov and options.momentum > 0
        return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, nesterov=nesterov)
    kind = torch.optim.Adam if options.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=options.lr)
