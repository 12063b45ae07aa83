"""Groups that online filtering left over for the next step, as a file of a checkpoint.

Only answers are stored: prompts are built again from their rows, and columns filled again by the passes of the step. A
safetensors file: token ids and log-probabilities as arrays `GROUP.ANSWER.NAME`, all else as JSON in its header.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from foveal.errors import CheckpointError
from foveal.types import Group, Prompt, Response

FILE = "surplus.safetensors"
_ENTRY = "groups"


def dump_groups(groups: list[Group]) -> bytes:
    """The content of the file."""
    arrays = {
        f"{i}.{j}.{name}": np.ascontiguousarray(values)
        for i, group in enumerate(groups)
        for j, response in enumerate(group.responses)
        for name, values in (("token_ids", response.token_ids), ("logprobs", response.logprobs))
    }
    entries = [{"uid": group.prompt.uid, "answers": [_entry(r) for r in group.responses]} for group in groups]
    content: bytes = save(arrays, metadata={_ENTRY: json.dumps(entries)})
    return content


def read_groups(path: Path, build: Callable[[str], Prompt]) -> list[Group]:
    """The groups that `dump_groups` was given, without columns.

    Args:
        build: makes a prompt from its uid.

    Raises:
        CheckpointError: the file is damaged.
        DataError: a prompt's row cannot be read any more.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
            entries = json.loads((file.metadata() or {})[_ENTRY])
        answers = [
            [_response(f"{i}.{j}.", entry, arrays) for j, entry in enumerate(group["answers"])]
            for i, group in enumerate(entries)
        ]
        uids = [group["uid"] for group in entries]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}). Use another checkpoint of the run.") from error
    return [Group(build(uid), responses) for uid, responses in zip(uids, answers, strict=True)]


def _entry(response: Response) -> dict[str, Any]:
    return {
        "finish_reason": response.finish_reason,
        "text": response.text,
        "rewards": {name: float(value) for name, value in response.rewards.items()},
        "weight_spans": response.weight_spans,
        "role": response.role,
    }


def _response(prefix: str, entry: dict[str, Any], arrays: dict[str, np.ndarray]) -> Response:
    return Response(
        token_ids=arrays[f"{prefix}token_ids"],
        logprobs=arrays[f"{prefix}logprobs"],
        finish_reason=entry["finish_reason"],
        text=entry["text"],
        rewards=entry["rewards"],
        weight_spans=[(first, version) for first, version in entry["weight_spans"]],
        role=entry["role"],
    )
