"""`export`: a Bayesian model as a file that runs without bayesify: its draws as ordinary networks, averaged."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.conversion.drawn_network import DrawnNetwork
from bayesify.errors import BayesifyError
from bayesify.methods.distributions import entropy
from bayesify.prediction.draw_counts import methods_of, number_of_draws


class DrawnEnsemble(nn.Module):
    """S frozen draws of a classifier; gives log-probabilities, entropy and mutual information."""

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The predictive's log-probabilities, its entropy and its epistemic part."""
        log_probs = torch.stack([network(x).float().log_softmax(-1) for network in self.networks])
        mean = log_probs.logsumexp(0) - math.log(len(self.networks))
        total = entropy(mean)
        return mean, total, (total - entropy(log_probs).mean(0)).clamp_min(0)


def export(model: nn.Module, path: str | Path, example: Tensor, *, samples: int | None = None, seed: int = 0) -> None:
    """Write a classifier's predictive from S draws as `.pt2` (torch.export) or `.onnx`, with any batch size.

    >>> import bayesify as by, tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.pt2"
    >>> model = by.convert(nn.Linear(4, 3), by.BatchEnsemble(4))
    >>> by.export(model, file, torch.randn(2, 4))
    >>> log_probs, entropy, epistemic = torch.export.load(file).module()(torch.randn(7, 4))
    >>> log_probs.shape, epistemic.shape
    (torch.Size([7, 3]), torch.Size([7]))

    The outputs equal `predict` with the same samples and seed. Tensors that no draw changes are written once.

    Args:
        model: A converted classifier.
        path: The file, which ends in `.pt2` or `.onnx`.
        example: An input batch.
        samples: The number of draws, as in `predict`.
        seed: The seed of the draws.
    """
    path = Path(path)
    if path.suffix not in (".pt2", ".onnx"):
        raise BayesifyError(f"export to {path.name!r}: expected a name that ends in .pt2 or .onnx")
    if not path.parent.is_dir():
        raise BayesifyError(f"{path}: the folder {str(path.parent)!r} does not exist")
    count = number_of_draws(methods_of(model), samples)
    ensemble = DrawnEnsemble([DrawnNetwork(model).write_draw(seed, index) for index in range(count)]).eval()
    with torch.no_grad():
        output = ensemble.networks[0](example)
    if not isinstance(output, Tensor) or output.shape[-1] < 2:
        shown = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise BayesifyError(f"export is for classifiers: expected logits of 2 or more classes, not {shown}")
    shapes: dict[str, Any] = {"x": {0: torch.export.Dim("batch")}}
    rows = example if example.shape[0] > 1 else example.repeat(2, *[1] * (example.dim() - 1))
    if path.suffix == ".pt2":
        torch.export.save(torch.export.export(ensemble, (rows,), dynamic_shapes=shapes), path)
    else:
        _to_onnx(ensemble, rows, path, shapes)


def _to_onnx(ensemble: nn.Module, rows: Tensor, path: Path, shapes: dict[str, Any]) -> None:
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise BayesifyError("export to .onnx needs the packages of bayesify[export]") from error
    program = torch.onnx.export(
        copy.deepcopy(ensemble),
        (rows,),
        dynamic_shapes=shapes,
        output_names=["log_probs", "entropy", "epistemic"],
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.save(path)
