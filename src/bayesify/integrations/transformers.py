"""bayesify inside the `Trainer` of transformers."""

import warnings
from typing import Any

from torch import nn

from bayesify.errors import BayesifyError
from bayesify.training.objective import add_kl_grad_, anneal, kl, parameter_groups

MISSING: ImportError | None = None
try:
    from transformers import TrainerCallback
except ImportError as error:  # raised when a callback is created
    TrainerCallback, MISSING = object, error


class KLCallback(TrainerCallback):  # type: ignore[misc]
    """Adds beta · kl / n to what the `Trainer` of transformers minimises: `Trainer(…, callbacks=[KLCallback()])`.

    n is by default the number of training examples; give it if the loss is a mean over something else, such as the
    tokens of a language model. The weight grows from 0 to `beta` over the fraction `anneal` of the training steps.
    `shared_std` is that of `by.kl`. The Trainer's log gets `kl` and `beta`, the current weight.

    The gradient is written to `.grad` before the first batch of each step, and backward adds to it. So it counts once
    however many batches a step accumulates, and clipping keeps its proportion to the likelihood's gradient.
    """

    def __init__(
        self, n: int | None = None, *, beta: float = 1.0, anneal: float = 2 / 3, shared_std: float | None = None
    ) -> None:
        if MISSING is not None:
            message = f"KLCallback needs transformers ({MISSING}): pip install 'bayesify[transformers]'"
            raise BayesifyError(message) from MISSING
        if not 0 <= anneal <= 1:
            raise BayesifyError(f"KLCallback(anneal={anneal!r}): expected a fraction of the training, from 0 to 1")
        self.n, self.beta, self.anneal, self.shared_std = n, beta, anneal, shared_std
        self.examples, self.weight = 0, 0.0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, train_dataloader: Any, **_: Any
    ) -> None:
        if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
            raise BayesifyError("KLCallback needs unsharded gradients, but DeepSpeed and FSDP shard them; use DDP")
        self.examples = _examples(train_dataloader) if self.n is None else self.n
        _warn_of_decay(model, optimizer)

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any) -> None:
        self.weight = anneal(state.global_step, over=self.anneal * state.max_steps, end=self.beta)
        scaler = getattr(optimizer, "scaler", None)  # with float16, backward adds gradients times this scale
        scale = 1.0 if scaler is None else scaler.get_scale()
        add_kl_grad_(model, n=self.examples, beta=self.weight * scale, shared_std=self.shared_std)

    def on_log(self, args: Any, state: Any, control: Any, *, model: nn.Module, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs:  # the log of training, not of an evaluation
            found = {"kl": kl(model, shared_std=self.shared_std).item(), "beta": self.weight}
            logs.update(found)
            state.log_history[-1].update(found)


def _examples(loader: Any) -> int:
    try:
        return len(loader.dataset)
    except TypeError as error:
        message = "the training data has no length; give the number of its examples: KLCallback(n=…)"
        raise BayesifyError(message) from error


def _warn_of_decay(model: nn.Module, optimizer: Any) -> None:
    """Warn if the optimizer decays posterior tensors, which have a prior already, as the Trainer's own one does."""
    posterior = {id(p) for g in parameter_groups(model, lr=0.0) if g["name"] == "posterior" for p in g["params"]}
    decayed = {id(p) for g in optimizer.param_groups if g.get("weight_decay") for p in g["params"]}
    if posterior & decayed:
        warnings.warn(
            "the optimizer decays posterior tensors towards 0, which have a prior in the KL already; give the Trainer "
            "optimizers=(torch.optim.AdamW(by.parameter_groups(model, lr=…, weight_decay=…)), None)",
            stacklevel=2,
        )
