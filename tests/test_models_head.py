"""Chunked log-probabilities equal those from whole logits, forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any

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


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    logits[:, FORBIDDEN] = float("-inf")
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def entropy_of(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    allowed = [i for i in range(len(weight)) if i not in FORBIDDEN.tolist()]
    p = (torch.nn.functional.linear(hidden, weight, bias) / temperature)[:, allowed].softmax(-1)
    return -(p * p.log()).sum(-1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
def test_equals_whole_logits(
    with_bias: bool, temperature: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities and entropies, forward and backward, to the precision of float64."""
    for device in ("cpu", "compiled"):
        monkeypatch.setitem(head.CHUNK_ELEMENTS, device, 5 * 40)  # five tokens a chunk
    torch.manual_seed(0)
    kind: dict[str, Any] = {"dtype": torch.float64, "requires_grad": True}
    hidden, weight = torch.randn(13, 8, **kind), torch.randn(40, 8, **kind)
    bias = torch.randn(40, **kind) if with_bias else None
    targets = torch.tensor([i for i in range(15) if i not in FORBIDDEN.tolist()])
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    pulls = torch.randn(2, 13, dtype=torch.float64)

    found = head.score_tokens(
        head.Head(hidden, weight, bias),
        targets,
        temperature=temperature,
        forbidden=FORBIDDEN,
        with_entropy=True,
        compiled=compiled,
    )
    assert found.entropy is not None
    of_both = torch.autograd.grad(
        (found.logprobs * pulls[0] + found.entropy * pulls[1]).sum(), leaves, retain_graph=True
    )
    of_one = torch.autograd.grad((found.logprobs * pulls[0]).sum(), leaves)
    expected = plain(hidden, weight, bias, targets, temperature)
    entropies = entropy_of(hidden, weight, bias, temperature)

    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11)
    close(found.logprobs, expected)
    close(found.entropy, entropies)
    close(of_one, torch.autograd.grad((expected * pulls[0]).sum(), leaves, retain_graph=True))
    close(of_both, torch.autograd.grad((expected * pulls[0] + entropies * pulls[1]).sum(), leaves))
    assert (of_both[1][FORBIDDEN] == 0).all()


def test_under_autocast_products_run_in_16_bits_and_gradients_come_in_the_weights_own_type() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(13, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    targets = torch.arange(13) + 12
    with torch.autocast("cpu", torch.bfloat16):
        found = logprobs(hidden, weight, None, targets, TEMPERATURE, FORBIDDEN)
    gradients = torch.autograd.grad(found.sum(), [hidden, weight])
    rounded = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    of_rounded = logprobs(*rounded, None, targets, TEMPERATURE, FORBIDDEN)
    assert found.dtype == torch.float32 and torch.equal(found, of_rounded)
    assert [g.dtype for g in gradients] == [torch.float32, torch.float32]
    torch.testing.assert_close(gradients[1].bfloat16(), torch.autograd.grad(of_rounded.sum(), rounded)[1])


def test_a_frozen_head_gets_no_gradient_and_the_states_do() -> None:
    hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(40, 8)
    logprobs(hidden, weight, None, torch.arange(3), 1.0, FORBIDDEN).sum().backward()
    assert hidden.grad is not None and weight.grad is None


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
