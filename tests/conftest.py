"""Every test starts from the same random state, with torch on the threads that one worker has."""

import os

import pytest
import torch

# Some virtual machines announce AMX and don't have it: bfloat16 products would end the process with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# Where no accelerator is, torch.manual_seed keeps three stack traces of each call, in case there is one later.
if not torch.accelerator.is_available():
    torch.manual_seed = torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
