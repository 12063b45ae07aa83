"""Soft overlong punishment."""

from __future__ import annotations

import pytest

from foveal.reward.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0), (10**9, -1.0)],
)
def test_penalty_falls_over_the_buffer(length: int, expected: float) -> None:
    assert overlong_penalty(length, 100, 20, 1.0) == pytest.approx(expected)


def test_factor_is_the_full_penalty() -> None:
    assert overlong_penalty(90, 100, 20, 3) == -1.5
    assert overlong_penalty(100, 100, 20, 0.0) == 0.0


def test_no_buffer_means_no_penalty() -> None:
    assert overlong_penalty(100, 100, 0, 1.0) == 0.0


def test_buffer_as_long_as_the_answer_may_be_starts_at_the_first_token() -> None:
    assert [overlong_penalty(length, 4, 4, 1.0) for length in (0, 1, 4)] == [0.0, -0.25, -1.0]
