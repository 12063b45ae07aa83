"""Soft overlong punishment: a reward that falls before the length limit is reached."""

from __future__ import annotations


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """What is added to the score of an answer of this length; DAPO, arXiv 2503.14476, eq. 13.

    0 up to max_length − buffer, then a straight line down to −factor at max_length, and −factor beyond.

    Args:
        length: of the answer, in tokens, the end token included. max_length: `data.max_response_length`.
        buffer: the last so many tokens before max_length, at most max_length; 0 means no punishment.
        factor: size of the full punishment, 1 in the paper.
    """
    if buffer <= 0:
        return 0.0
    beyond = min(max(length - (max_length - buffer), 0), buffer)
    return -factor * beyond / buffer if beyond else 0.0
