"""A reward model: any sequence classifier of transformers, in a reward process of its own.

worker:
  reward:
    reward_function: foveal.rewards.model:RewardModel
    reward_function_kwargs: {path: Skywork/Skywork-Reward-V2-Qwen3-0.6B, question: problem, device: cuda:0}

Answers are scored a group at a time while others are generated. Training and validation each have a process, and so a
copy of the model; on a device that also trains, its memory comes on top of the run's.
"""

from __future__ import annotations

from typing import Any

from foveal.errors import RewardError


class RewardModel:
    """Scores the text of question and answer.

    The two are put into the tokenizer's chat template; without one, into the tokenizer as a pair. A text beyond
    `max_length` loses its beginning, and has `reward_model_cut` 1.

    Args:
        path: folder or hub id.
        question: column that holds the question, text or chat messages; without it the prompt as the model saw it.
        device: as torch names it.
        batch_size: texts in a pass; 1 where the model and its tokenizer do not agree on a padding token.
        max_length: tokens of a text.
        label: name or number of the label whose output is the score; needed where there is more than one.
        probability: the score is a probability (sigmoid of one label, softmax of several), not the raw output.
        dtype: of the weights, as torch names it; "auto" is that of the file.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        RewardError: the model has no such label, or several and none is named.
    """

    REWARD_TYPE = "batch"
    REWARD_SPLIT = "group"

    def __init__(
        self,
        path: str,
        *,
        question: str | None = None,
        device: str = "cpu",
        batch_size: int = 8,
        max_length: int = 4096,
        label: str | int | None = None,
        probability: bool = False,
        dtype: str = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        self._tokenizer.truncation_side = "left"
        model = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, trust_remote_code=trust_remote_code
        )
        self._model = model.eval().to(device)
        self._label = find_label(label, self._model.config.id2label, path)
        self._question, self._probability = question, probability
        # A classifier made of a language model reads the last token that is not its padding token. Without one, or with
        # another than the tokenizer's, texts go through it one by one, as when it is asked directly.
        padding = self._model.config.pad_token_id
        self._pads = padding is not None and padding == self._tokenizer.pad_token_id
        self._batch_size = batch_size if self._pads else 1
        self._max_length = min(max_length, self._tokenizer.model_max_length)

    def __call__(self, inputs: list[dict[str, Any]]) -> list[dict[str, float]]:
        """`overall` and `reward_model_cut` of each answer."""
        scores: list[dict[str, float]] = []
        for first in range(0, len(inputs), self._batch_size):
            scores += self._score(inputs[first : first + self._batch_size])
        return scores

    def _score(self, inputs: list[dict[str, Any]]) -> list[dict[str, float]]:
        import torch

        questions = [one["row"][self._question] if self._question else one["prompt"] for one in inputs]
        batch, cut = self._tokenise(questions, [one["response"] for one in inputs])
        padded = self._tokenizer.pad(batch, return_tensors="pt") if self._pads else batch.convert_to_tensors("pt")
        padded = padded.to(self._model.device)
        with torch.inference_mode():
            logits = self._model(**padded).logits.float()  # (answers, labels)
        if self._probability:
            logits = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(1)
        values = logits[:, self._label].tolist()
        return [
            {"overall": value, "reward_model_cut": float(is_cut)} for value, is_cut in zip(values, cut, strict=True)
        ]

    def _tokenise(self, questions: list[Any], answers: list[str]) -> tuple[Any, list[bool]]:
        """The texts' token ids, each at most `max_length`, and which of them were cut."""
        if self._tokenizer.chat_template:
            chats = [
                [*_messages(question), {"role": "assistant", "content": answer}]
                for question, answer in zip(questions, answers, strict=True)
            ]
            texts: list[list[str]] = [
                [str(self._tokenizer.apply_chat_template(chat, tokenize=False)) for chat in chats]
            ]
        else:
            texts = [[str(question) for question in questions], answers]
        special = not self._tokenizer.chat_template  # a template has put them in
        whole = self._tokenizer(*texts, add_special_tokens=special)
        cut = [len(ids) > self._max_length for ids in whole["input_ids"]]
        if any(cut):
            whole = self._tokenizer(
                *texts, add_special_tokens=special, truncation="longest_first", max_length=self._max_length
            )
        return whole, cut


def _messages(question: Any) -> list[dict[str, Any]]:
    return question if isinstance(question, list) else [{"role": "user", "content": question}]


def find_label(label: str | int | None, names: dict[int, str], path: str) -> int:
    """The number of the label to read."""
    if label is None and len(names) == 1:
        return 0
    number = next((number for number, name in names.items() if label in (number, name)), None)
    if number is None:
        raise RewardError(f"{path} has the labels {', '.join(names.values())}; label is {label!r}, name one of them")
    return int(number)
