"""What a reward function gets for an answer, pictures in particular."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from foveal.config.schema_reward import RewardConfig
from foveal.errors import RewardError
from foveal.reward.runner import RewardRunner
from foveal.types import Group, Media
from tests.reward_support import make_group, make_runner, overall, score, write


class Tokenizer:
    """Ids are characters; those below 32 are special tokens."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(one) for one in token_ids if one >= 32 or not skip_special_tokens)


def picture(colour: str, size: tuple[int, int] = (3, 2)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def picture_group(*colours: str) -> Group:
    group = make_group("x", "a", "b")
    group.prompt.media = [
        Media("image", picture(colour), f"row 0, image {number}") for number, colour in enumerate(colours)
    ]
    return group


def test_everything_about_an_answer_is_there(tmp_path: Path) -> None:
    source = """
    REWARD_TYPE = "sequential"
    def compute_score(one):
        images = one.pop("images")
        assert images == []
        assert one == {
            "response": "ab", "response_length": 3, "ground_truth": 4, "prompt": "Hi", "finish_reason": "length",
            "row": {"problem": "Hi", "data_source": "geo", "level": 3}, "data_source": "geo", "step": 5,
            "uid": "train-0-0",
        }, one
        return 1.0
    """
    path = write(tmp_path / "r.py", source)
    group = make_group(4, "ab")
    group.prompt.token_ids = [1, ord("H"), ord("i"), 2]
    group.prompt.row = {"problem": "Hi", "data_source": "geo", "level": np.int64(3)}
    group.responses[0].finish_reason = "length"
    runner = RewardRunner(RewardConfig(reward_function=f"{path}:compute_score"), "train", Tokenizer())
    runner.step = 5
    score(runner, group)
    assert overall(group) == [1.0]


def test_prompt_keeps_special_tokens_where_answers_keep_them(tmp_path: Path) -> None:
    source = "def compute_score(inputs): return [len(inputs[0]['prompt'])]"
    path = write(tmp_path / "r.py", source)
    group = make_group(4, "ab")
    group.prompt.token_ids = [1, ord("H"), 2]
    config = RewardConfig(reward_function=f"{path}:compute_score", skip_special_tokens=False)
    score(RewardRunner(config, "train", Tokenizer()), group)
    assert overall(group) == [3.0]


@pytest.mark.parametrize("kind", ["batch", "sequential"])
def test_pictures_arrive_when_they_are_opened(tmp_path: Path, kind: str) -> None:
    source = f"""
    REWARD_TYPE = {kind!r}
    def score(one):
        assert [image.name for image in one["images"]] == ["row 0, image 0", "row 0, image 1"]
        opened = [image.open() for image in one["images"]]
        assert all(image.mode == "RGB" and image.size == (3, 2) for image in opened)
        return opened[1].getpixel((0, 0))[0]
    def compute_score(given):
        return [score(one) for one in given] if isinstance(given, list) else score(given)
    """
    groups = [picture_group("blue", "red"), picture_group("red", "blue")]
    score(make_runner(tmp_path, source), *groups)
    assert [overall(group) for group in groups] == [[255.0, 255.0], [0.0, 0.0]]


def test_pictures_that_nobody_looks_at_are_not_sent(tmp_path: Path) -> None:
    source = """
    import pickle, sys
    def compute_score(inputs):
        before = [image._data is None for one in inputs for image in one["images"]]
        return [all(before) and 'PIL' not in sys.modules] * len(inputs)
    """
    score(make_runner(tmp_path, source), group := picture_group("blue"))
    assert overall(group) == [1.0, 1.0]


def test_decoding_a_picture_does_not_bring_torch(tmp_path: Path) -> None:
    source = """
    import sys
    def compute_score(inputs):
        inputs[0]["images"][0].open()
        return [float("torch" not in sys.modules)] * len(inputs)
    """
    score(make_runner(tmp_path, source), group := picture_group("blue"))
    assert overall(group) == [1.0, 1.0]


def test_pictures_go_to_processes_of_the_functions_own(tmp_path: Path) -> None:
    source = """
    from concurrent.futures import ThreadPoolExecutor
    import pickle
    def red(image): return pickle.loads(pickle.dumps(image)).open().getpixel((0, 0))[0]
    def compute_score(inputs):
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(red, [one["images"][0] for one in inputs]))
    """
    score(make_runner(tmp_path, source), group := picture_group("red"))
    assert overall(group) == [255.0, 255.0]


def test_a_picture_kept_beyond_its_call_says_so(tmp_path: Path) -> None:
    source = """
    kept = []
    def compute_score(inputs):
        kept.append(inputs[0]["images"][0])
        kept[0].data if len(kept) > 1 else None
        return [1.0] * len(inputs)
    """
    with make_runner(tmp_path, source) as runner:
        runner.submit(picture_group("red"))
        runner.finish()
        runner.submit(picture_group("red"))
        with pytest.raises(RewardError, match="belongs to a call that is over"):
            runner.finish()


def test_a_batch_function_gets_the_order_that_finish_is_given(tmp_path: Path) -> None:
    source = "def compute_score(inputs): return [i + 10 * (one['response'] == 'b') for i, one in enumerate(inputs)]"
    groups = [make_group("x", "a"), make_group("y", "b", "b")]
    with make_runner(tmp_path, source) as runner:
        runner.submit(groups[1])
        runner.submit(groups[0])
        runner.finish(groups)
    assert [overall(group) for group in groups] == [[0.0], [11.0, 12.0]]


COLUMNS: dict[str, Any] = {"path": Path("a"), "text": "half \ud83d", "bytes": b"\x00", "none": None}


def test_odd_columns_arrive(tmp_path: Path) -> None:
    source = "def compute_score(inputs): return [len(inputs[0]['row'])]"
    group = make_group("x", "a")
    group.prompt.row = COLUMNS
    score(make_runner(tmp_path, source), group)
    assert overall(group) == [4.0]


def test_what_a_function_changes_it_changes_for_one_answer_alone(tmp_path: Path) -> None:
    source = """
        def compute_score(inputs):
            for one in inputs:
                one["row"]["seen"] = one["row"].get("seen", 0) + 1
            return [one["ground_truth"].pop() + one["row"]["seen"] for one in inputs]
        """
    group = make_group([1, 2], "a", "b", "c")
    score(make_runner(tmp_path, source), group)
    assert overall(group) == [3.0, 3.0, 3.0]
