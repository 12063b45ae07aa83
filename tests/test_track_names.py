"""Metric names made legal for a tracker."""

from __future__ import annotations

import re

import pytest

from foveal.track.backends.mlflow import Mlflow
from foveal.track.names import LegalNames

ODD = ["reward/mean@1", "reward/mean 1", "reward/acc(strict)", "reward/a,b", "reward//lead//twice", "reward/准确率"]


@pytest.fixture
def names() -> LegalNames:
    return LegalNames(Mlflow.illegal, Mlflow.folders)


def test_a_legal_name_stays(names: LegalNames) -> None:
    assert names("critic/score/mean") == "critic/score/mean"


def test_names_that_clean_to_the_same_stay_apart(names: LegalNames) -> None:
    assert len({names(name) for name in ["a_1", "a@1", "a#1", "a?1", "/a_1", "a_1."]}) == 6


def test_odd_names_stay_recognisable(names: LegalNames) -> None:
    legal = [names(name) for name in ODD]
    assert [re.sub("_[0-9a-f]{4}$", "", name) for name in legal] == [
        "reward/mean_1",
        "reward/mean 1",
        "reward/acc_strict_",
        "reward/a_b",
        "reward/lead/twice",
        "reward/准确率",
    ]


def test_the_same_name_is_the_same_in_every_process() -> None:
    first, second = LegalNames(Mlflow.illegal), LegalNames(Mlflow.illegal)
    second("a#1")
    assert first("a@1") == first("a@1") == second("a@1")


@pytest.mark.parametrize("order", [["a", "a/b"], ["a/b", "a"]])
def test_a_metric_is_never_also_a_folder(names: LegalNames, order: list[str]) -> None:
    first, second = (names(name) for name in order)
    assert not first.startswith(f"{second}/") and not second.startswith(f"{first}/")


def test_names_without_any_legal_part_and_endless_ones(names: LegalNames) -> None:
    assert names("//").startswith("metric_")
    assert len(names("x" * 1000)) <= 250
