"""Run an oracle on random cases until one fails, and then on smaller and smaller ones that still fail."""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import hypothesis
import torch
from hypothesis import HealthCheck, Phase

import bayesify as by
from bayesify.batches import call_with
from bayesify.prediction import plan
from fuzz.case import Case
from fuzz.oracles import ORACLES, NotApplicable
from fuzz.refusals import is_true
from fuzz.strategies import cases

CORPUS = Path(__file__).parent / "corpus"


@dataclass
class Statistics:
    """How many cases were tried, and what bayesify refused."""

    tried: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    not_applicable: int = 0

    @property
    def refused_share(self) -> float:
        return sum(self.refused.values()) / max(self.tried, 1)

    def add(self, other: Statistics) -> None:
        """Count what another run tried."""
        self.tried += other.tried
        self.refused += other.refused
        self.not_applicable += other.not_applicable

    def __str__(self) -> str:
        text = f"{self.tried} cases, {self.refused_share:.0%} refused"
        return text + "".join(f"\n  {count:4d}  {reason}" for reason, count in self.refused.most_common(8))


class Fault(AssertionError):
    """An oracle failed, on the smallest case that was found."""

    def __init__(self, oracle: str, case: Case, reason: str) -> None:
        super().__init__(oracle, case, reason)  # what pickle calls it with
        self.oracle, self.case, self.reason = oracle, case, reason

    def __str__(self) -> str:
        return f"oracle {self.oracle!r} failed: {self.reason}\non the case\n{self.case.to_json()}"


def run_case(oracle: str, case: Case, statistics: Statistics | None = None) -> None:
    """Run one oracle on one case; raises unless it holds or bayesify refuses the case."""
    statistics = statistics or Statistics()
    statistics.tried += 1
    torch.manual_seed(case.seed)
    try:
        with patch.object(plan, "FIRST_PART", 0):  # small networks share what comes before their drawn layers, too
            ORACLES[oracle](case)
    except NotApplicable:
        statistics.not_applicable += 1
    except (by.BayesifyError, RuntimeError, UserWarning) as error:
        is_said = isinstance(error, (by.BayesifyError, UserWarning)) or hasattr(error, "__notes__")
        if is_said and is_true(error, case):
            statistics.refused[_kind_of(error)] += 1
        elif not isinstance(error, by.BayesifyError) and _fails_itself(case):
            statistics.not_applicable += 1
        else:
            raise


def _fails_itself(case: Case) -> bool:
    """Whether the plain network does not take its batch, such as one that views what is not contiguous."""
    try:
        call_with(case.network().eval(), case.batch())
    except RuntimeError:
        return True
    return False


def _kind_of(refusal: Exception) -> str:
    """A refusal without names and numbers."""
    words = [word for word in str(refusal).split() if word.strip("(),:;.").isalpha()]
    return f"{type(refusal).__name__}: {' '.join(words[:12])}"


def fuzz(oracle: str, examples: int, seed: int, seconds: float = float("inf")) -> Statistics:
    """Run one oracle on random cases; raises a `Fault` with the smallest case that fails.

    Args:
        oracle: The name of the oracle.
        examples: How many cases to try.
        seed: Decides the cases.
        seconds: After how long to stop, at the latest.

    Returns:
        What was tried and refused.
    """
    statistics, end, failed = Statistics(), time.monotonic() + seconds, []

    def test(case: Case) -> None:
        if time.monotonic() > end and not failed:
            return
        try:
            run_case(oracle, case, statistics)
        except Exception as error:  # whatever is raised is a fault: it is kept, and hypothesis looks for a smaller case
            failed.append((case, error))
            raise

    settings = hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=hypothesis.errors.HypothesisWarning)
            hypothesis.seed(seed)(settings(hypothesis.given(cases())(test)))()
    except Exception as error:
        if not failed:
            raise
        case, reason = failed[-1]
        raise Fault(oracle, case, f"{type(reason).__name__}: {reason}") from error
    return statistics


def read_case(path: Path) -> Case:
    """A case of the corpus."""
    fields = json.loads(path.read_text())
    fields.pop("about", None)
    return Case(**fields)
