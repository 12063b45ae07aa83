"""Loss and gradients under every pair of options equal those of a plain forward for each sample.

All combinations would be thousands; here every two values of two options meet in some row of a plan.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForImageTextToText

from foveal.config.schema_model import FsdpConfig, ModelConfig
from foveal.models.compiling import compile_layers
from foveal.models.loading import empty_model, load_model
from foveal.models.parts import freeze_parts
from foveal.models.recompute import set_checkpointing
from foveal.models.ulysses import Ulysses
from foveal.quickstart.tiny import build_tiny
from foveal.train.layout import PromptLayouts
from foveal.train.peers import Peers, spread
from foveal.train.scorer import TokenScorer
from foveal.train.scoring import Packer
from foveal.types import Group
from tests.double_precision import DoublePrecision
from tests.named_tensors_support import tiny_config
from tests.random_groups import random_groups
from tests.sharding_support import CPU, in_processes

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3", "llama")
FORBIDDEN, TEMPERATURE, BUDGET = [201, 202], 0.8, 40  # tokens of a micro-batch: groups are cut
OPTIONS: dict[str, tuple[Any, ...]] = {
    "family": FAMILIES,
    "pictures": ((0, 0, 0), (1, 1, 1), (1, 0, 2)),
    "shared": (True, False),
    "checkpointing": (False, "selective", True),
    "compiled": (False, True),
    "offload": (False, True),
    "frozen": (None, "vision_tower", "language_model"),
    "layout": ("one process", "sharded", "ulysses"),
}


class Row(NamedTuple):
    """A combination of options."""

    family: str
    pictures: tuple[int, ...]
    shared: bool
    checkpointing: Any
    compiled: bool
    offload: bool
    frozen: str | None
    layout: str

    def makes_sense(self) -> bool:
        text = self.family in ("qwen3", "llama")
        return not (text and (any(self.pictures) or self.frozen))

    @property
    def limit(self) -> float:
        # a compiler traces float32: what keeps float64 everywhere works by dispatch
        return 1e-5 if self.compiled else 1e-9


def pairs_of(row: Row) -> set[Any]:
    return set(itertools.combinations(enumerate(row), 2))


@lru_cache
def plan() -> list[Row]:
    """Greedily the row that meets most pairs that have not met yet, until none is left that can."""
    rows = [row for values in itertools.product(*OPTIONS.values()) if (row := Row(*values)).makes_sense()]
    missing = set().union(*map(pairs_of, rows))
    chosen: list[Row] = []
    while missing:
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        chosen.append(best)
    return chosen


def groups_of(model: Any, row: Row) -> list[Group]:
    """Groups whose answers' losses have weights of their own."""
    groups = random_groups(model, list(row.pictures), seed=3)
    for group in groups:
        for response in group.responses:
            response.columns["pull"] = response.logprobs  # any numbers would do
    return groups


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def precise(row: Row) -> Any:
    return nullcontext() if row.compiled else DoublePrecision()


def loaded(folder: Path, row: Row) -> Any:
    model: Any = load_model(str(folder / row.family), dtype=dtype_of(row), device=CPU)
    freeze(model, row)
    return model


def dtype_of(row: Row) -> torch.dtype:
    return torch.float32 if row.compiled else torch.float64


def freeze(model: Any, row: Row) -> None:
    if row.frozen:
        freeze_parts(model, ModelConfig(**{f"freeze_{row.frozen}": True}))


def computed(folder: Path, row: Row, rank: int | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients as the trainer computes them; in several processes, this one's part of both."""
    sharded = row.layout == "sharded"
    build = empty_model if sharded else load_model
    model: Any = build(str(folder / row.family), dtype=dtype_of(row), device=CPU)
    freeze(model, row)
    set_checkpointing(model, row.checkpointing)
    ulysses = Ulysses(dist.group.WORLD, model) if row.layout == "ulysses" else None  # type: ignore[arg-type]
    scorer = TokenScorer(
        model,
        forbidden_ids=FORBIDDEN,
        temperature=TEMPERATURE,
        autocast=None,
        offload=row.offload,
        ulysses=ulysses,
    )
    peers: Peers | None = spread(scorer, str(folder / row.family), FsdpConfig(), CPU) if sharded else None
    if row.compiled:
        compile_layers(model, vision=not row.checkpointing or row.frozen == "vision_tower", backend="eager")
    groups = groups_of(model, row)
    if sharded:  # the second process has one group, without a picture in the mixed rows
        groups = groups[1:2] if rank else [groups[0], groups[2]]
    packer = Packer(BUDGET, row.shared, PromptLayouts(model, lambda p: p.features or {}), CPU, peers=peers)
    scorer.train()
    total = 0.0
    with precise(row):
        micro_batches = packer.split(groups)
        for number, parts in enumerate(micro_batches, start=1):
            if peers:
                peers.before_backward(last=number == len(micro_batches))
            pack = packer.build(parts)
            scores = scorer(pack, with_entropy=True)
            loss = (scores.logprobs * pack.column("pull")).sum() + scores.entropy.sum()
            if loss.requires_grad:
                loss.backward()
            total += float(loss.detach())
    return total, gradients_of(model)


def expected(folder: Path, row: Row) -> tuple[float, dict[str, torch.Tensor]]:
    """The same by transformers' own attention over prompt and answer, sample by sample, with all logits."""
    model = loaded(folder, row)
    model.set_attn_implementation("sdpa")
    total = 0.0
    with precise(row):
        for group in groups_of(model, row):
            for response in group.responses:
                ids = torch.tensor([[*group.prompt.expanded_ids, *response.token_ids.tolist()]])
                extra: dict[str, torch.Tensor] = dict(group.prompt.features or {})
                if extra:
                    extra["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
                logits = model(input_ids=ids, **extra).logits[0, len(group.prompt.expanded_ids) - 1 : -1] / TEMPERATURE
                logits = logits.index_fill(1, torch.tensor(FORBIDDEN), -1e30)
                logprobs = logits.log_softmax(-1)
                chosen = logprobs.gather(1, torch.from_numpy(response.token_ids)[:, None])[:, 0]
                pull = torch.from_numpy(response.columns["pull"])
                loss = (chosen * pull).sum() - (logprobs.exp() * logprobs).sum()
                if loss.requires_grad:
                    loss.backward()
                total += float(loss.detach())
    return total, gradients_of(model)


def in_two(rank: int, folder: Path, rows: list[Row]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    found = []
    for row in rows:
        torch._dynamo.reset()
        found.append(computed(folder, row, rank))
    return found


def build_moe(folder: Path) -> None:
    config: Any = tiny_config("qwen3_vl_moe")
    config.text_config.vocab_size = 264
    config.vision_start_token_id, config.vision_end_token_id, config.video_token_id = 2, 3, 5
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pairwise")
    for family in FAMILIES:
        if family == "qwen3_vl_moe":
            build_moe(root / family)
        else:
            build_tiny(root / family, family)  # type: ignore[arg-type]
    return root


@pytest.fixture(scope="module")
def together(folder: Path) -> dict[Row, list[tuple[float, dict[str, torch.Tensor]]]]:
    rows = [row for row in plan() if row.layout != "one process"]
    (folder / "processes").mkdir()
    return dict(zip(rows, zip(*in_processes(in_two, folder / "processes", folder, rows), strict=True), strict=True))


def check(row: Row, found: tuple[float, dict[str, torch.Tensor]], plain: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert found[0] == pytest.approx(plain[0], rel=row.limit)
    for name, gradient in plain[1].items():
        if gradient.norm() > 0:
            assert (found[1][name] - gradient).norm() <= row.limit * gradient.norm(), name
    for name in found[1].keys() - plain[1].keys():
        assert not found[1][name].any(), name


def test_every_pair_of_options_that_makes_sense_is_in_the_plan() -> None:
    assert len(plan()) < 40
    all_rows = [Row(*values) for values in itertools.product(*OPTIONS.values())]
    for (a, first), (b, second) in itertools.combinations(enumerate(OPTIONS.values()), 2):
        for x, y in itertools.product(first, second):
            in_plan = any(row[a] == x and row[b] == y for row in plan())
            assert in_plan == any(row[a] == x and row[b] == y and row.makes_sense() for row in all_rows)


@pytest.mark.slow
@pytest.mark.parametrize("row", plan(), ids=lambda row: "-".join(str(value).replace(" ", "") for value in row))
def test_loss_and_gradients_are_the_plain_ones(
    row: Row, folder: Path, together: dict[Row, list[tuple[float, dict[str, torch.Tensor]]]]
) -> None:
    torch._dynamo.reset()
    plain = expected(folder, row)
    if row.layout == "one process":
        check(row, computed(folder, row), plain)
        return
    parts = together[row]
    loss, gradients = sum(part[0] for part in parts), parts[0][1]
    if row.layout == "ulysses":  # each has the whole loss, and its part of the gradient
        assert parts[0][0] == pytest.approx(parts[1][0], rel=row.limit)
        loss, gradients = parts[0][0], {name: parts[0][1][name] + parts[1][1][name] for name in gradients}
    check(row, (loss, gradients), plain)
