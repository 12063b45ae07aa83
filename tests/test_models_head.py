"""Chunked log-probabilities equal those from whole logits, forward and backward."""

from __future__ import annotations

import pytest
import torch

from foveal.models import head

TEMPERATURE = 0.7
FORBIDDEN = torch.tensor([3, 11])


def logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    forbidden: torch.Tensor,
) -> torch.Tensor:
    scored = head.score_tokens(head.Head(hidden, weight, bias), targets, temperature=temperature, forbidden=forbidden)
    return scored.logprobs


def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias) / TEMPERATURE
    logits[:, FORBIDDEN] = float("-inf")
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_whole_logits(with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head.CHUNK_ELEMENTS, "cpu", 5 * 40)  # five tokens a chunk
    torch.manual_seed(0)
    hidden, weight = torch.randn(13, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    bias = torch.randn(40, requires_grad=True) if with_bias else None
    targets = torch.tensor([i for i in range(15) if i not in FORBIDDEN.tolist()])
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    pull = torch.randn(13)

    found = logprobs(hidden, weight, bias, targets, TEMPERATURE, FORBIDDEN)
    found_grads = torch.autograd.grad((found * pull).sum(), leaves)
    expected = plain(hidden, weight, bias, targets)
    expected_grads = torch.autograd.grad((expected * pull).sum(), leaves)

    assert torch.allclose(found, expected, atol=1e-5)
    assert all(torch.allclose(f, e, atol=1e-5) for f, e in zip(found_grads, expected_grads, strict=True))
    assert (found_grads[1][FORBIDDEN] == 0).all()


def test_a_forbidden_target_is_impossible_but_finite() -> None:
    hidden, weight = torch.randn(1, 4), torch.randn(20, 4)
    logprob = logprobs(hidden, weight, None, torch.tensor([3]), 1.0, torch.tensor([3]))
    assert logprob.isfinite().all() and logprob < -1e20


def test_no_tokens_give_no_numbers() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    scored = head.score_tokens(
        head.Head(torch.zeros(0, 4), torch.randn(20, 4), None), none, temperature=1.0, forbidden=none, with_entropy=True
    )
    assert scored.logprobs.shape == (0,) and scored.entropy is not None and scored.entropy.shape == (0,)


def test_entropy_and_exact_kl_equal_those_of_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head.CHUNK_ELEMENTS, "cpu", 4 * 40)
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    other_hidden, other_weight = torch.randn(9, 8), torch.randn(40, 8)
    targets = torch.tensor([i for i in range(11) if i not in FORBIDDEN.tolist()][:9])
    scored = head.score_tokens(
        head.Head(hidden, weight, None),
        targets,
        temperature=TEMPERATURE,
        forbidden=FORBIDDEN,
        with_entropy=True,
        reference=head.Head(other_hidden, other_weight, None),
    )
    assert scored.entropy is not None and scored.kl is not None
    allowed = [i for i in range(40) if i not in FORBIDDEN.tolist()]
    p = (hidden @ weight.T / TEMPERATURE)[:, allowed].softmax(-1)
    q = (other_hidden @ other_weight.T / TEMPERATURE)[:, allowed].softmax(-1)
    entropy, kl = -(p * p.log()).sum(-1), (p * (p / q).log()).sum(-1)
    assert torch.allclose(scored.entropy, entropy, atol=1e-5) and torch.allclose(scored.kl, kl, atol=1e-4)
    found = torch.autograd.grad((scored.entropy + 2 * scored.kl).sum(), [hidden, weight])
    expected = torch.autograd.grad((entropy + 2 * kl).sum(), [hidden, weight])
    assert all(torch.allclose(f, e, atol=1e-4) for f, e in zip(found, expected, strict=True))


def test_logits_of_the_batch_are_never_held_whole() -> None:
    """The largest tensor saved for the backward pass is far below tokens × vocabulary."""
    hidden = torch.randn(4096, 8, requires_grad=True)
    weight = torch.randn(16384, 8, requires_grad=True)
    targets = torch.zeros(4096, dtype=torch.int64)
    largest = 0

    def pack(x: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logprobs(hidden, weight, None, targets, 1.0, FORBIDDEN)
    assert largest <= weight.numel()
