"""Random groups for a tiny model: text, one picture, several pictures, ragged answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from foveal.types import Group, Prompt, Response


def random_groups(model: Any, pictures: list[int], *, answers: int = 3, longest: int = 7, seed: int = 0) -> list[Group]:
    """One group per entry of `pictures`, with that many pictures of different sizes in its prompt.

    Token ids start at 10: the ones below stand for pictures and turns in the tiny tokenizers.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for index, count in enumerate(pictures):
        ids, features = _prompt(model, count, rng)
        responses = []
        for _ in range(answers):
            length = int(rng.integers(1, longest + 1))
            responses.append(
                Response(
                    token_ids=rng.integers(10, 200, size=length),
                    logprobs=rng.normal(-5, 0.3, size=length).astype(np.float32),
                    finish_reason="stop",
                    rewards={"overall": float(rng.normal())},
                )
            )
        prompt = Prompt(f"train-0-{index}", ids, ids, [], {}, index, None, features)
        groups.append(Group(prompt, responses))
    return groups


def _prompt(model: Any, count: int, rng: np.random.Generator) -> tuple[list[int], dict[str, torch.Tensor]]:
    ids = rng.integers(10, 200, size=int(rng.integers(2, 6))).tolist()
    if not count:
        return ids, {}
    config = model.config
    vision = config.vision_config
    grids = []
    for _ in range(count):
        height, width = (2 * int(n) for n in rng.integers(1, 4, size=2))
        grids.append([1, height, width])
        ids += [config.vision_start_token_id, *[config.image_token_id] * (height * width // 4)]
        ids += [config.vision_end_token_id, int(rng.integers(10, 200))]
    patches = sum(h * w for _, h, w in grids)
    size = 3 * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.from_numpy(rng.normal(size=(patches, size)).astype(np.float32))
    return ids, {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


def naive_logprobs(
    model: Any, group: Group, response: Response, forbidden: list[int], temperature: float
) -> torch.Tensor:
    """(L,) by a plain sdpa forward of prompt and answer alone, logits and all."""
    prompt = group.prompt
    ids = torch.tensor([[*prompt.expanded_ids, *response.token_ids.tolist()]])
    extra: dict[str, torch.Tensor] = dict(prompt.features or {})
    if extra:
        extra["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    logits = model(input_ids=ids, **extra).logits[0].float() / temperature
    logits[:, forbidden] = -1e30
    start = len(prompt.expanded_ids)
    return logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
