"""Where the finished trials are: see benchmarks/store.py."""

from __future__ import annotations

from benchmarks.defaults.trial import Trial
from benchmarks.store import Store

STORE = Store.named(Trial, "defaults")
