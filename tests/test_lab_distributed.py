"""Two processes over gloo: their gradient is that of one process on the joined batch with the same draws."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.lab.recipes import TrainingPart
from bayesify.lab.training import BayesianModule

METHODS = {
    "Rank1": "by.Rank1(4)",
    "IBNN": "by.IBNN(4)",
    "ECMP": "by.ECMP(3)",
    "MeanField": "by.MeanField(estimator='flipout')",
    "LowRankEnsemble": "by.LowRankEnsemble(4)",
    "Ensemble": "by.Ensemble(2)",
}

RANK = """
import os, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import bayesify as by
from test_lab_distributed import batch, module_of

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
for name in sys.argv[3:]:
    module = module_of(name)
    network = module.network
    module._callable = [DistributedDataParallel(network)]  # what Lightning's strategy does for the whole module
    x, y = batch()
    torch.manual_seed(rank)
    module.loss((x[rank::2], y[rank::2])).backward()
    module.on_before_optimizer_step(None)
    torch.save([p.grad for p in network.parameters()], f"{folder}/{name}-{rank}.pt")
dist.barrier()
os._exit(0)  # on a busy machine gloo's threads may abort a process that takes its group down
"""


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(16, 2, 6, 6, generator=generator), torch.randint(3, (16,), generator=generator)


def module_of(name: str) -> BayesianModule:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    method = eval(METHODS[name], {"by": by})
    how = "gradient" if name in ("MeanField", "LowRankEnsemble") else "loss"
    return BayesianModule(by.convert(network, method), n=100, training=TrainingPart(kl=how))


@pytest.fixture(scope="module")
def grads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gloo")
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, "-c", RANK, str(rank), str(folder), *METHODS] for rank in range(2)]
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    return folder


@pytest.mark.parametrize("name", METHODS)
def test_two_ranks_have_the_gradient_of_one_process(name: str, grads: Path) -> None:
    ranks = [torch.load(grads / f"{name}-{rank}.pt", weights_only=True) for rank in range(2)]
    module = module_of(name)
    x, y = batch()
    log_likelihood = torch.zeros(())
    for rank in range(2):
        torch.manual_seed(rank)
        log_likelihood = log_likelihood + by.Categorical().log_prob(module.network(x[rank::2]), y[rank::2]).sum()
    (by.kl(module.network) / 100 - log_likelihood / len(y)).backward()
    for one, two, p in zip(*ranks, module.network.parameters(), strict=True):
        assert torch.equal(one, two) and torch.allclose(one, p.grad, atol=1e-6)


def test_ranks_draw_different_noise() -> None:
    """A step of the same batch on two ranks, from the same state: other noise, so another loss."""

    class OnRank(BayesianModule):
        global_rank = 0

    losses = []
    for rank in (0, 0, 1):
        module = module_of("Rank1")
        module.__class__, module.seed = OnRank, 5
        OnRank.global_rank = rank
        losses.append(float(module.training_step(batch(), 0).detach()))
    assert losses[0] == losses[1] != losses[2]
