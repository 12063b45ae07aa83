"""Every key is documented, and its default is allowed."""

from __future__ import annotations

import pytest

from foveal.config.keys import Key, known_keys
from foveal.config.schema_data import ADVANTAGE_ESTIMATORS, GROUP_ESTIMATORS
from foveal.config.schema_worker import POLICY_LOSSES


@pytest.mark.parametrize("key", known_keys().values(), ids=lambda key: key.name)
def test_every_key_is_described_and_its_default_allowed(key: Key) -> None:
    assert key.description.endswith((".", ")")) and key.allowed
    assert key.accepts(key.default)


def test_the_names_of_the_schema_are_those_that_are_registered() -> None:
    from foveal.algorithm.registry import ADVANTAGES, LOSSES

    assert set(LOSSES) == set(POLICY_LOSSES)
    assert set(ADVANTAGES) == set(ADVANTAGE_ESTIMATORS)
    assert {name for name, estimator in ADVANTAGES.items() if estimator.needs_group} == set(GROUP_ESTIMATORS)
