"""bayesify inside other people's training loops."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from .errors import BayesifyError
from .objective import add_kl_grad_, anneal, kl, parameter_groups

MISSING: ImportError | None = None
try:
    from transformers import TrainerCallback
except ImportError as error:  # raised where a callback is made
    TrainerCallback, MISSING = object, error


class KLCallback(TrainerCallback):  # type: ignore[misc]
    """Adds beta · kl / n to what the `Trainer` of transformers minimises: `Trainer(…, callbacks=[KLCallback()])`.

    n is the number of training examples unless given; give it where the loss is a mean over something else, as over the
    tokens of a language model. The weight grows from 0 to `beta` over the share `anneal` of the training's steps.
    `shared_std` is that of `by.kl`. The Trainer's log gets `kl` and `beta`, the weight so far.

    The gradient is put where backward will add to it, before the first batch of each step. So it counts once however
    many batches a step accumulates, and is clipped together with the likelihood's, whose balance clipping keeps.
    """

    def __init__(
        self, n: int | None = None, *, beta: float = 1.0, anneal: float = 2 / 3, shared_std: float | None = None
    ) -> None:
        if MISSING is not None:
            message = f"KLCallback needs transformers ({MISSING}): pip install 'bayesify[transformers]'"
            raise BayesifyError(message) from MISSING
        if not 0 <= anneal <= 1:
            raise BayesifyError(f"KLCallback(anneal={anneal!r}): expected a share of the training from 0 to 1")
        self.n, self.beta, self.anneal, self.shared_std = n, beta, anneal, shared_std
        self.examples, self.weight = 0, 0.0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, train_dataloader: Any, **_: Any
    ) -> None:
        if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
            raise BayesifyError("KLCallback adds to whole gradients, which DeepSpeed and FSDP cut in pieces; use DDP")
        self.examples = _examples(train_dataloader) if self.n is None else self.n
        _warn_of_decay(model, optimizer)

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any) -> None:
        self.weight = anneal(state.global_step, over=self.anneal * state.max_steps, end=self.beta)
        scaler = getattr(optimizer, "scaler", None)  # of float16: what backward adds will be so much larger
        scale = 1.0 if scaler is None else scaler.get_scale()
        add_kl_grad_(model, n=self.examples, beta=self.weight * scale, shared_std=self.shared_std)

    def on_log(self, args: Any, state: Any, control: Any, *, model: nn.Module, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs:  # of training; evaluations are logged too
            found = {"kl": kl(model, shared_std=self.shared_std).item(), "beta": self.weight}
            logs.update(found)
            state.log_history[-1].update(found)


def _examples(loader: Any) -> int:
    try:
        return len(loader.dataset)
    except TypeError as error:
        raise BayesifyError(
            "the training data has no length; give the number of its examples: KLCallback(n=…)"
        ) from error


def _warn_of_decay(model: nn.Module, optimizer: Any) -> None:
    """The Trainer's own optimizer decays posterior tensors too, which have a prior already."""
    posterior = {id(p) for g in parameter_groups(model, lr=0.0) if g["name"] == "posterior" for p in g["params"]}
    decayed = {id(p) for g in optimizer.param_groups if g.get("weight_decay") for p in g["params"]}
    if posterior & decayed:
        warnings.warn(
            "the optimizer decays the weights of the posterior towards 0, beside the prior in the KL; give the Trainer "
            "optimizers=(torch.optim.AdamW(by.parameter_groups(model, lr=…, weight_decay=…)), None)",
            stacklevel=2,
        )
