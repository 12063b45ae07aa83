"""Drawing tokens: the right distribution, repeatably, and never a forbidden id."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foveal.rollout.sampler import answer_uniforms, sample

NONE = torch.tensor([], dtype=torch.int64)


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def test_draws_follow_the_distribution() -> None:
    draws = 20_000
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    uniforms = torch.from_numpy(answer_uniforms(0, "row", 0, draws))
    ids, _ = sample(logits.expand(draws, -1), uniforms, 0.7, 1.0, -1, torch.tensor([3]))
    masked = logits.index_fill(-1, torch.tensor([3]), -torch.inf)
    expected = (masked / 0.7).softmax(-1)[0].numpy() * draws
    counts = np.bincount(ids.numpy(), minlength=12)
    keep = expected > 0
    chi_square = ((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    assert counts[3] == 0
    assert chi_square < 29.6  # the 99.9 % point at 10 degrees of freedom


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 3), (1.0 - 2.0**-53, 4), (1.0, 4)])
def test_edges_of_the_unit_interval_draw_possible_ids_only(uniform: float, expected: int) -> None:
    logits = torch.full((4, 9), -torch.inf)
    logits[:, 2:6] = torch.tensor([0.3, -2.0, 5.0, 1.0])
    ids, logprobs = sample(logits, torch.full((4,), uniform, dtype=torch.float64), 1.0, 1.0, -1, torch.tensor([2, 5]))
    assert ids.tolist() == [expected] * 4
    assert torch.isfinite(logprobs).all()


def test_logprobs_are_those_of_the_masked_tempered_distribution() -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(2))
    ids, logprobs = sample(logits, torch.linspace(0, 0.999, 50).double(), 1.7, 1.0, -1, torch.tensor([4, 9]))
    logits[:, [4, 9]] = -torch.inf
    expected = (logits / 1.7).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)


def test_logits_are_left_as_they_are() -> None:
    logits = torch.randn(2, 8)
    before = logits.clone()
    sample(logits, torch.rand(2).double(), 0.5, 0.5, 3, torch.tensor([1]))
    assert torch.equal(logits, before)


def test_temperature_zero_is_greedy_with_logprobs_at_temperature_one() -> None:
    ids, logprobs = sample(logits_of(0.2, 0.5, 0.3), torch.zeros(1).double(), 0.0, 1.0, -1, torch.tensor([1]))
    assert ids.tolist() == [2]
    assert logprobs.item() == pytest.approx(np.log(0.6), abs=1e-6)


def naive_probabilities(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """The definition, one row: sort, keep k, renormalise, keep until the sum reaches p, renormalise."""
    p = np.exp(logits.astype(np.float64) / temperature)
    order = np.argsort(-p)
    kept = order[:top_k] if top_k > 0 else order
    q = p[kept] / p[kept].sum()
    count = int(np.searchsorted(q.cumsum(), top_p - 1e-12)) + 1
    result = np.zeros_like(p)
    result[kept[:count]] = q[:count] / q[:count].sum()
    return result


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, -1), (1.0, 4), (0.7, 5), (1e-9, -1), (0.999, 100)])
def test_top_p_and_top_k_equal_the_naive_definition(top_p: float, top_k: int) -> None:
    logits = torch.randn(1, 16, generator=torch.Generator().manual_seed(3))
    uniforms = torch.linspace(0, 1, 4001, dtype=torch.float64)[:-1]
    ids, logprobs = sample(logits.expand(4000, -1), uniforms, 0.9, top_p, top_k, NONE)
    expected = naive_probabilities(logits[0].numpy(), 0.9, top_p, top_k)
    frequencies = np.bincount(ids.numpy(), minlength=16) / 4000
    np.testing.assert_allclose(frequencies, expected, atol=1e-3)
    np.testing.assert_allclose(logprobs.exp().numpy(), expected[ids.numpy()], rtol=1e-4)


def test_top_p_keeps_the_id_that_reaches_the_sum() -> None:
    uniforms = torch.linspace(0, 0.999, 100).double()
    ids, _ = sample(logits_of(0.5, 0.3, 0.2).expand(100, -1), uniforms, 1.0, 0.6, -1, NONE)
    assert set(ids.tolist()) == {0, 1}


def test_uniforms_depend_on_seed_uid_and_answer_and_not_on_the_count() -> None:
    first = answer_uniforms(1, "train-0-7", 2, 6)
    assert np.array_equal(first, answer_uniforms(1, "train-0-7", 2, 100)[:6])
    for other in [(2, "train-0-7", 2), (1, "train-0-8", 2), (1, "train-0-7", 3)]:
        assert not np.intersect1d(first, answer_uniforms(*other, 6)).size


def test_uniforms_stay_the_same_from_release_to_release() -> None:
    assert answer_uniforms(0, "train-0-0", 0, 2).tolist() == [0.507152235109507, 0.38496704268202064]
