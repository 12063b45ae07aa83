"""What an answer is like, whatever it says: its form, its length, its language, its repetitions.

Meant as one of several functions (`worker.reward.functions`), beside one that knows what is right.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import Any

from foveal.reward.overlong import overlong_penalty
from foveal.rewards.reading import well_formed

REWARD_NAME = "shape"
REWARD_TYPE = "sequential"

SCRIPTS = {
    "LATIN": ("LATIN",),
    "CHINESE": ("CJK",),
    "JAPANESE": ("CJK", "HIRAGANA", "KATAKANA"),
    "KOREAN": ("HANGUL",),
    "CYRILLIC": ("CYRILLIC",),
    "ARABIC": ("ARABIC",),
}
FORMULA = re.compile(r"\$[^$]*\$|\\boxed\{[^{}]*\}|\\[A-Za-z]+|</?\w+>")


def form(reward_input: dict[str, Any], form: str = "think_answer") -> dict[str, float]:
    """`overall`: 1 where the whole response matches `form` (`reading.FORMATS`, or a regular expression)."""
    return {"overall": float(well_formed(reward_input["response"], form))}


def length(
    reward_input: dict[str, Any], max_response_length: int, buffer: int, penalty: float = 1.0
) -> dict[str, float]:
    """`overall`: DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), from 0 down to −penalty.

    Args:
        max_response_length: `data.max_response_length`, in tokens.
        buffer: the last so many tokens, over which it falls.
    """
    return {"overall": overlong_penalty(reward_input["response_length"], max_response_length, buffer, penalty)}


def language(reward_input: dict[str, Any], script: str | None = None) -> dict[str, float]:
    """`overall`: the share of letters that are of the wanted script; formulas and tags don't count.

    After DeepSeek-R1's language consistency reward (arXiv 2501.12948, section 2.3.2), with letters for words.

    Args:
        script: LATIN, CHINESE, JAPANESE, KOREAN, CYRILLIC or ARABIC; None: the one that the prompt mostly has.
    """
    wanted = SCRIPTS.get((script or _main_script(reward_input.get("prompt", ""))).upper())
    if wanted is None:
        raise ValueError(f"script={script!r}; allowed: {', '.join(SCRIPTS)}")
    found = _scripts(reward_input["response"])
    total = found.total()
    return {"overall": sum(found[one] for one in wanted) / total if total else 1.0}


def repetition(reward_input: dict[str, Any], n: int = 4, penalty: float = 1.0, free: float = 0.2) -> dict[str, float]:
    """`overall`: −penalty × the share of runs of `n` words that were there before, as far as it is above `free`.

    In text without blanks characters stand for words.

    Args:
        free: share that costs nothing; the rest is stretched to 0 … 1.
    """
    share = repeated(reward_input["response"], n)
    beyond = max(0.0, share - free) / (1 - free)
    return {"overall": -penalty * beyond if beyond else 0.0, "repeated": share}


def repeated(text: str, n: int) -> float:
    """Share of the runs of `n` words of a text that it has had before; 0 for a text shorter than that."""
    words: list[str] = re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+", text)
    runs = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _main_script(text: str) -> str:
    found = _scripts(text)
    if found["HIRAGANA"] + found["KATAKANA"]:
        return "JAPANESE"
    most = max(found, key=lambda one: found[one], default="LATIN")
    return next((name for name, scripts in SCRIPTS.items() if most in scripts), "LATIN")


def _scripts(text: str) -> Counter[str]:
    """Letters by the first word of their Unicode name: LATIN, CJK, HANGUL …"""
    return Counter(
        unicodedata.name(character, "OTHER").split()[0] for character in FORMULA.sub(" ", text) if character.isalpha()
    )
