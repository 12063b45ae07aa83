"""Ragged batches and the token rewards made from scores."""

from __future__ import annotations

import pytest
import torch

from foveal.algorithm import LossBatch, StepBatch, mean_per_response, rewards_per_token


def test_score_stands_on_the_last_token():
    rewards = rewards_per_token(torch.tensor([1.0, 2.0]), torch.tensor([3, 1]), torch.ones(4, dtype=torch.bool))
    assert rewards.tolist() == [0.0, 0.0, 1.0, 2.0]


def test_score_stands_on_the_last_token_that_the_model_wrote():
    mask = torch.tensor([True, True, False, False, False])
    rewards = rewards_per_token(torch.tensor([1.0, 2.0]), torch.tensor([3, 2]), mask)
    assert rewards.tolist() == [0.0, 1.0, 0.0, 0.0, 2.0]


def test_kl_is_taken_from_every_written_token():
    mask = torch.tensor([True, False, True])
    kl = torch.tensor([0.5, 9.0, 0.25])
    rewards = rewards_per_token(torch.tensor([1.0]), torch.tensor([3]), mask, kl, kl_coef=2.0)
    assert rewards.tolist() == [-1.0, 0.0, 0.5]


def test_empty_responses_have_no_token_rewards():
    rewards = rewards_per_token(torch.tensor([5.0, 1.0, 7.0]), torch.tensor([0, 2, 0]), torch.ones(2, dtype=torch.bool))
    assert rewards.tolist() == [0.0, 1.0]


def test_sequence_names_each_tokens_response():
    rewards = torch.zeros(3)
    batch = StepBatch(torch.zeros(3), torch.zeros(3).long(), torch.tensor([2, 0, 1]), rewards, rewards.bool())
    assert batch.sequence.tolist() == [0, 0, 2]


def test_mean_per_response_ignores_masked_out_tokens_even_nan():
    values = torch.tensor([1.0, float("nan"), 3.0, 5.0])
    mask = torch.tensor([True, False, True, False])
    assert mean_per_response(values, torch.tensor([3, 0, 1]), mask).tolist() == [2.0, 0.0, 0.0]


def test_step_batch_refuses_lengths_that_do_not_sum_to_the_tokens():
    with pytest.raises(ValueError, match=r"token_rewards has shape \(4,\), but must have \(3,\)"):
        StepBatch(torch.zeros(2), torch.zeros(2).long(), torch.tensor([1, 2]), torch.zeros(4), torch.ones(4).bool())


def test_loss_batch_refuses_tensors_of_different_sizes():
    with pytest.raises(ValueError, match=r"advantages has shape \(2,\), but must have \(3,\)"):
        LossBatch(torch.zeros(3), torch.zeros(3), torch.zeros(2), torch.tensor([3]), torch.ones(3).bool())
