"""Reward models: tiny classifiers, against the same model asked directly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from foveal.config.schema_reward import RewardConfig
from foveal.errors import RewardError
from foveal.reward.runner import RewardRunner
from foveal.rewards.model import find_label
from tests.reward_support import make_group, overall, score

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = {token: number for number, token in enumerate(["[PAD]", "[CLS]", "[END]", "[UNK]", *ALPHABET])}
CHAT = "{% for m in messages %}{{ m.role }} {{ m.content }}[END]{% endfor %}"
SIZES: dict[str, int] = {
    "vocab_size": len(VOCABULARY), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 512,
}  # fmt: skip


def save_tokenizer(folder: Path, *, chat: bool, padding: str | None = "[PAD]") -> Any:
    """One token a character; with a chat template, or with an encoder's form of pairs."""
    characters = Tokenizer(models.BPE(VOCABULARY, []))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if not chat:
        characters.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [END]", pair="[CLS] $A [END] $B [END]", special_tokens=[("[CLS]", 1), ("[END]", 2)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=characters, unk_token="[UNK]", pad_token=padding, eos_token="[END]",
        chat_template=CHAT if chat else None,
    ).save_pretrained(folder)  # fmt: skip
    return AutoTokenizer.from_pretrained(folder)


def save_language_classifier(folder: Path, *, padding: str | None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = Qwen2Config(
        **SIZES, num_key_value_heads=2, num_labels=1, pad_token_id=0 if padding else None, initializer_range=0.5
    )
    model = Qwen2ForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    return model, save_tokenizer(folder, chat=True, padding=padding)


def runner(folder: Path, **kwargs: Any) -> RewardRunner:
    given = {"path": str(folder), "question": "problem", **kwargs}
    config = RewardConfig(reward_function="foveal.rewards.model:RewardModel", reward_function_kwargs=given)
    return RewardRunner(config, "train")


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["[PAD]", None])
def test_a_language_models_classifier_scores_as_when_asked_directly(tmp_path: Path, padding: str | None) -> None:
    model, tokenizer = save_language_classifier(tmp_path, padding=padding)
    groups = [make_group("x", "one", "two, three or one", "three"), make_group("x", "end")]
    groups[0].prompt.row, groups[1].prompt.row = {"problem": "how many"}, {"problem": "how " * 40}
    score(runner(tmp_path, batch_size=2, max_length=60), *groups)
    texts = [f"user how many[END]assistant {response.text}[END]" for response in groups[0].responses]
    texts.append(f"user {'how ' * 40}[END]assistant end[END]")
    with torch.no_grad():
        expected = [float(model(torch.tensor([tokenizer(text)["input_ids"][-60:]])).logits[0, 0]) for text in texts]
    assert overall(groups[0]) + overall(groups[1]) == pytest.approx(expected, rel=1e-4)
    assert len(set(expected)) == 4
    cut = [response.rewards["reward_model_cut"] for group in groups for response in group.responses]
    assert cut == [0.0, 0.0, 0.0, 1.0], "the last lost its beginning, and says so"


@pytest.mark.slow
def test_an_encoders_label_is_read_as_a_probability(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(**SIZES, num_labels=2, id2label={0: "bad", 1: "good"}, initializer_range=0.5)
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer = save_tokenizer(tmp_path, chat=False)
    group = make_group("x", "one", "two three one")
    group.prompt.row = {"problem": "how many"}
    score(runner(tmp_path, label="good", probability=True), group)
    with torch.no_grad():
        expected = [
            float(model(**tokenizer("how many", response.text, return_tensors="pt")).logits.softmax(1)[0, 1])
            for response in group.responses
        ]
    assert overall(group) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_group_that_the_model_cannot_score_costs_that_group(tmp_path: Path) -> None:
    save_language_classifier(tmp_path, padding="[PAD]")
    groups = [make_group("x", "one", "two"), make_group("x", "one", "two")]
    groups[0].prompt.row, groups[1].prompt.row = {"problem": "how many"}, {"question": "how many"}
    kwargs = {"path": str(tmp_path), "question": "problem"}
    for on_error in ("score", "raise"):
        config = RewardConfig(
            reward_function="foveal.rewards.model:RewardModel",
            reward_function_kwargs=kwargs,
            on_error=on_error,  # type: ignore[arg-type]
            timeout_score=-9.0,
        )
        if on_error == "raise":
            with pytest.raises(RewardError, match="raised KeyError: 'problem', in a batch of 2 answers"):
                score(RewardRunner(config, "train"), *groups)
        else:
            metrics = score(RewardRunner(config, "train"), *groups)
            assert overall(groups[1]) == [-9.0, -9.0] and -9.0 not in overall(groups[0])
            assert metrics["reward/errors"] == 2.0


@pytest.mark.parametrize(("label", "number"), [("good", 1), (1, 1), (0, 0)])
def test_a_label_is_named_or_numbered(label: str | int, number: int) -> None:
    assert find_label(label, {0: "bad", 1: "good"}, "folder") == number


@pytest.mark.parametrize("label", [None, "fine", 2])
def test_several_labels_need_one_to_be_named(label: str | int | None) -> None:
    with pytest.raises(RewardError, match=f"has the labels bad, good; label is {label!r}, name one of them"):
        find_label(label, {0: "bad", 1: "good"}, "folder")
