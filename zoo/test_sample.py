"""A sample of networks that nobody here wrote, under six methods."""

from __future__ import annotations

import functools

import pytest
from networks import SAMPLE, with_batch
from outcomes import METHODS, passed

from bayesify.methods.base import Method

made = functools.cache(with_batch)


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_it_is_converted_trains_predicts_is_saved_loaded_and_reverted(name: str, method: Method) -> None:
    _, size, x = made(name)
    (converted, _, _), _ = passed(name, size, x, method)
    assert converted > 0
