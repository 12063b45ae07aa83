"""Videos in vLLM: the engine's log-probabilities are the trainer's, for prompts with text, pictures and videos."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from foveal.quickstart.tiny import Family
from foveal.types import Sampling
from tests.vllm_support import Side

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Side:
    family: Family = request.param
    # Fewer tokens a step than the longest prompt has, and than a video has that fills it.
    small = (
        "data.max_prompt_length=512",
        "worker.rollout.max_model_len=768",
        "worker.rollout.max_num_batched_tokens=64",
    )
    return Side(tmp_path_factory.mktemp("model") / family, family, *small)


def test_text_pictures_and_videos_are_sampled_together_as_the_trainer_scores_them(side: Side) -> None:
    prompts = [
        side.prompt(0, 0, videos=1),
        side.prompt(1, 1, videos=2),
        side.prompt(2, 2),
        side.prompt(3, 0),
        side.prompt(4, 0, videos=1, frames=60),
    ]
    assert len(prompts[-1].expanded_ids) > 64
    side.engine.submit(prompts, Sampling(n=3, max_tokens=16, seed=1), 0)
    groups = list(side.engine.collect())
    assert len(groups) == len(prompts)
    assert side.gap(groups) < 1e-4


def test_without_the_trainers_positions_long_videos_would_differ(side: Side) -> None:
    if side.processing.model_type == "qwen3_vl":
        pytest.skip("each frame stands by itself there, so that both rules give the same")
    (model,) = side.engine.core.collective_rpc(lambda worker: worker.get_model())
    ours = model.get_mrope_input_positions
    model.get_mrope_input_positions = ours._own
    try:
        side.engine.submit([side.prompt(9, 0, videos=1)], Sampling(n=3, max_tokens=16, seed=1), 0)
        gap = side.gap(list(side.engine.collect()))
    finally:
        model.get_mrope_input_positions = ours
    assert gap > 1e-3
