"""Check what is in a checkpoint before training continues from it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.lab.training.lightning_module import BayesianModule, make_optimizer

KEYS = {
    "batches_done": int,
    "global_step": int,
    "epoch": int,
    "stopped": bool,
    "state_dict": dict,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "pytorch-lightning_version": str,
}
"""The entries of a checkpoint and their types."""
RECIPE_KEY = "recipe_hash"


def fault_of(saved: Any, module: BayesianModule, batches: int, recipe_hash: str, can_stop: bool = False) -> str | None:
    """What is wrong with the contents of a checkpoint.

    Args:
        saved: What was read from the file.
        module: The module that is to continue from it.
        batches: The number of batches in an epoch.
        recipe_hash: That of the run's recipe. A checkpoint of an earlier version has none, which is no fault.
        can_stop: Whether training may have stopped early though the recipe has no patience, by a user's callback.

    Returns:
        The first fault in words, or None.
    """
    for key, kind in KEYS.items():
        value = saved.get(key) if isinstance(saved, dict) else None
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            return f"it has no {key!r} of type {kind.__name__}"
    if saved.get(RECIPE_KEY, recipe_hash) != recipe_hash:
        return "it was written for another recipe.yaml than the one in its folder, such as one with another seed"
    if saved["stopped"] and module.options.patience is None and not can_stop:
        return "it says that training has stopped early, and the recipe has no training.patience"
    return (
        _fault_of_tensors(saved["state_dict"], module)
        or _fault_of_counts(saved, module, batches)
        or _fault_of_optimizer(saved, module)
        or _fault_of_scheduler(saved, module)
        or _fault_of_lightning(saved)
    )


def _fault_of_tensors(found: Mapping[str, Any], module: BayesianModule) -> str | None:
    expected = module.state_dict()
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    for name in sorted(expected.keys() | found.keys(), key=str):
        ours, theirs = expected.get(name), found.get(name)
        if _form(ours) != _form(theirs):
            return f"{name} is {_form(theirs)} in it, but {_form(ours)} in the recipe's network"
        if name in trained and isinstance(theirs, Tensor) and not bool(torch.isfinite(theirs).all()):
            return f"{name} is NaN or infinite in it"
    return None


def _form(value: Any) -> str:
    """The type, shape and place of a tensor in words."""
    if not isinstance(value, Tensor):
        return "missing" if value is None else type(value).__name__
    kind = str(value.dtype).removeprefix("torch.")
    place = "" if value.device.type == "cpu" and value.layout == torch.strided else f" ({value.device}, {value.layout})"
    return f"{kind} of shape {tuple(value.shape)}{place}"


def _fault_of_counts(saved: Mapping[str, Any], module: BayesianModule, batches: int) -> str | None:
    """Compare the numbers of batches, epochs and steps with each other and with the recipe."""
    done, total, accumulate = saved["batches_done"], batches * module.options.epochs, module.options.accumulate
    if not 0 < done <= total:
        return f"it says that {done} batches are done, and the recipe has {total}"
    epochs, rest = divmod(done, batches)
    steps = epochs * math.ceil(batches / accumulate) + rest // accumulate
    begun = math.ceil(done / batches)
    loop = ("loops", "fit_loop")
    expected = {
        ("global_step",): steps,
        ("epoch",): begun - 1,
        (*loop, "epoch_progress", "current", "ready"): begun,
        (*loop, "epoch_progress", "current", "processed"): epochs,
        (*loop, "epoch_loop.batch_progress", "total", "ready"): done,
        (*loop, "epoch_loop.batch_progress", "current", "ready"): done - (begun - 1) * batches,
        (*loop, "epoch_loop.batch_progress", "is_last_batch"): rest == 0,
        (*loop, "epoch_loop.automatic_optimization.optim_progress", "optimizer", "step", "total", "completed"): steps,
    }
    for path, number in expected.items():
        value: Any = saved
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if type(value) is not type(number) or value != number:
            return f"{' / '.join(path)} is {value!r:.50} in it, but {number} after {done} batches"
    return None


def _fault_of_optimizer(saved: Mapping[str, Any], module: BayesianModule) -> str | None:
    """Compare the state of the optimizer with that of a new one."""
    optimizer = make_optimizer(module)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state, groups = _entries(saved["optimizer_states"], "state", "param_groups") or (None, None)
    if not isinstance(state, dict) or not isinstance(groups, list):
        return "its optimizer_states are not those of one optimizer"
    new_groups = optimizer.state_dict()["param_groups"]
    if len(groups) != len(new_groups) or not all(map(_is_same_group, groups, new_groups)):
        return "the parameter groups of its optimizer are not those of the recipe"
    keeps_state = module.options.optimizer != "sgd" or module.options.momentum > 0
    if not state and keeps_state and parameters:
        return "its optimizer has no state"
    for number, values in state.items():
        p = parameters[number] if type(number) is int and 0 <= number < len(parameters) else None
        if p is None or not isinstance(values, dict) or not all(_fits(value, p) for value in values.values()):
            return f"the state of its optimizer for parameter {number!r:.20} does not fit the network"
    return None


def _entries(states: list[Any], *keys: str) -> list[Any] | None:
    """The entries of the only dictionary in a list, or None if it is not one or lacks some."""
    if len(states) != 1 or not isinstance(states[0], dict) or not all(key in states[0] for key in keys):
        return None
    return [states[0][key] for key in keys]


def _is_same_group(found: Any, new: Mapping[str, Any]) -> bool:
    """Whether a parameter group has the options of a new one, other than the current learning rate."""
    if not isinstance(found, dict) or not {"params", "name", "lr", "initial_lr", "weight_decay"} <= found.keys():
        return False
    same = all(found[key] == value for key, value in new.items() if key in found and key not in ("lr", "initial_lr"))
    return same and found["initial_lr"] == new["lr"] and isinstance(found["lr"], float)


def _fits(value: Any, p: nn.Parameter) -> bool:
    """Whether a value can be a part of an optimizer's state for a parameter."""
    if not isinstance(value, Tensor):
        return value is None or isinstance(value, (int, float))
    return value.is_floating_point() and value.shape in (p.shape, ()) and value.device.type == "cpu"


def _fault_of_scheduler(saved: Mapping[str, Any], module: BayesianModule) -> str | None:
    """Compare the state of the schedule with that of a new one: torch would take any other entry for an attribute."""
    optimizer = make_optimizer(module)
    new = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0).state_dict()
    found = _entries(saved["lr_schedulers"], "last_epoch", "base_lrs", "_last_lr", "lr_lambdas")
    if found is None or any(type(value) is not type(new.get(key)) for key, value in saved["lr_schedulers"][0].items()):
        return "its lr_schedulers are not those of one schedule"
    last, rates, last_rates, lambdas = found
    if last != saved["global_step"] or rates != new["base_lrs"] or lambdas != new["lr_lambdas"]:
        return "its schedule of learning rates is not that of the recipe after as many steps"
    if len(last_rates) != len(rates) or not all(isinstance(rate, float) for rate in last_rates):
        return "its schedule has other learning rates than the optimizer"
    return None


def _fault_of_lightning(saved: Mapping[str, Any]) -> str | None:
    if not re.fullmatch(r"\d+(\.\w+){1,4}", saved["pytorch-lightning_version"], re.ASCII):
        return f"pytorch-lightning_version is {saved['pytorch-lightning_version']!r:.50}"
    if not all(isinstance(key, str) and isinstance(value, dict) for key, value in saved["callbacks"].items()):
        return "its callbacks are not dictionaries"
    return None
