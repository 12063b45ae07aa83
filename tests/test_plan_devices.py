"""`foveal plan` for several GPUs: what is spread over them, engines apart from trainers, phases with offload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foveal.cli import main
from foveal.errors import ConfigError
from foveal.plan.cures import find_cures
from foveal.plan.gpus import find_gpu
from foveal.plan.memory import Phase, actor_sizes
from foveal.plan.seconds import of_width
from foveal.plan.splits import better_split, possible_splits
from tests.test_plan import BF16, FEW, LORA, SEVEN, Plan, arguments, plan

GIB = 2**30
TP1 = "worker.rollout.tensor_parallel_size=1"
FIXED = "worker.actor.token_budget=8192"
AHEAD = "trainer.async_rollout=true"
LAYER, STEP = (f"worker.actor.fsdp.gather_weights={by}" for by in ("layer", "step"))
ON_HOST = "worker.actor.fsdp.enable_cpu_offload=true"


def of(gpus: int, *overrides: str) -> list[str]:
    return [f"trainer.n_gpus_per_node={gpus}", TP1, FIXED, *overrides]


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("7B")
    (folder / "config.json").write_text(json.dumps(SEVEN))
    return folder


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("1.5B")
    (folder / "config.json").write_text(json.dumps(FEW))
    return folder


def phase(planned: Plan, name: str) -> Phase:
    return next(found for found in planned.memory.phases if found.name == name)


# -- what is spread --------------------------------------------------------------------------------------------------


def test_two_gpus_halve_weights_gradients_and_states(seven: Path) -> None:
    one, two = (phase(plan(seven, BF16, *of(gpus, LAYER)), "update_actor").parts for gpus in (1, 2))
    for part in ("actor weights", "actor optimizer"):
        assert two[part] == one[part] / 2, part
    assert two["gradients"] == 8_292_166_656 * 2 / 2
    sizes = actor_sizes(plan(seven, BF16).config)
    # two layers and the output layer in bf16, and a layer's and the output layer's gradients in fp32
    assert two["gathered"] == 2 * (2 * sizes.layer + sizes.embedding) + 4 * (sizes.layer + sizes.embedding)
    assert phase(plan(seven, BF16, *of(2, LAYER)), "old").parts["gathered"] == 2 * (2 * sizes.layer + sizes.embedding)


def test_weights_that_are_not_sharded_again_stay_whole_and_are_gathered_once(seven: Path) -> None:
    without = "worker.actor.fsdp.enable_full_shard=false"
    full, kept = (plan(seven, BF16, *of(2, more)) for more in (LAYER, without))
    grown = phase(kept, "update_actor").parts["gathered"] - phase(full, "update_actor").parts["gathered"]
    assert 0.8 * 2 * 8_292_166_656 < grown < 2 * 8_292_166_656
    assert phase(kept, "old").parts["gathered"] == 2 * 8_292_166_656
    for name in ("old", "update_actor"):
        assert kept.seconds.phases[name] < full.seconds.phases[name], name


@pytest.mark.parametrize(
    ("gpu", "more", "once"),
    [("141", "", True), ("80", "", False), ("80", STEP, True), ("141", LAYER, False), ("141", ON_HOST, False)],
)
def test_weights_stay_gathered_for_a_step_where_they_take_little_of_the_memory(
    seven: Path, gpu: str, more: str, once: bool
) -> None:
    """16.6 GB are 11 % of an H200's memory and 20 % of an H100's."""
    planned = plan(seven, BF16, *of(2, *filter(None, [more])), gpu=gpu)
    assert (phase(planned, "old").parts["gathered"] == 2 * 8_292_166_656) is once
    assert (phase(planned, "update_actor").parts["gathered"] > 2 * 8_292_166_656) is once


def test_auto_leaves_room_for_weights_that_stay_gathered(seven: Path) -> None:
    auto = "worker.actor.token_budget=auto"
    layer, step = (plan(seven, BF16, *of(2, by, auto), gpu="80").memory.budgets["actor"] for by in (LAYER, STEP))
    assert step[0] < layer[0] and step[1] < layer[1]


def test_gathering_layer_by_layer_is_a_cure(seven: Path) -> None:
    """Weights that stay take 14 GiB of 80."""
    more = ["worker.rollout.gpu_memory_utilization=0.4", "worker.actor.optim.strategy=adamw_8bit"]
    once = plan(seven, BF16, *of(2, *more, STEP, "worker.actor.token_budget=32768"), gpu="80", cures=True)
    assert not once.memory.fits and once.cures[0].arguments == [LAYER]


def test_narrower_models_reach_a_lower_part_of_the_peak() -> None:
    rates = [of_width(width) for width in (1024, 2048, 3584, 8192)]
    assert rates == sorted(rates) and rates[1] == pytest.approx(0.845, abs=0.01)
    assert rates[2] == rates[3] == 1


def test_a_hybrid_shards_over_the_gpus_of_a_copy_alone(seven: Path) -> None:
    hybrid, two = plan(seven, BF16, *of(4, "worker.actor.fsdp.fsdp_size=2")), plan(seven, BF16, *of(2))
    for part in ("actor weights", "actor optimizer", "gathered"):
        assert phase(hybrid, "update_actor").parts[part] == phase(two, "update_actor").parts[part]
    assert hybrid.seconds.phases["update_actor"] < two.seconds.phases["update_actor"]


def test_a_tower_that_is_not_trained_is_whole_on_each_gpu(seven: Path) -> None:
    frozen = plan(seven, BF16, *of(4, "worker.actor.model.freeze_vision_tower=true"))
    sizes = actor_sizes(frozen.config)
    assert sizes.whole == sizes.tower > 600_000_000
    assert frozen.memory.phases[1].parts["actor weights"] == 2 * ((sizes.parameters - sizes.tower) / 4 + sizes.tower)
    # the reference's is never trained
    trained = plan(seven, BF16, *of(4))
    assert trained.memory.phases[1].parts["reference"] == 2 * ((sizes.parameters - sizes.tower) / 4 + sizes.tower)


def test_gpus_that_share_sequences_share_activations_but_not_the_pictures(few: Path, seven: Path) -> None:
    shared = "worker.actor.ulysses_size=2"
    text, halved = (plan(few, BF16, *of(2, *more)) for more in ([], [shared]))
    activations = [phase(planned, "update_actor").parts["activations"] for planned in (text, halved)]
    assert activations[1] == pytest.approx(activations[0] / 2, rel=0.15)
    seeing = [phase(plan(seven, BF16, *of(2, *more)), "update_actor").parts for more in ([], [shared])]
    assert seeing[1]["activations"] > 0.55 * seeing[0]["activations"]
    # passes of both work on the groups of both
    assert halved.seconds.phases["update_actor"] == pytest.approx(text.seconds.phases["update_actor"], rel=0.25)


def test_sharded_weights_on_the_host_take_no_device_memory(seven: Path) -> None:
    planned = plan(seven, BF16, *of(2, ON_HOST))
    parts = phase(planned, "update_actor").parts
    assert "actor weights" not in parts and "actor optimizer" not in parts and not parts.get("gradients")
    assert planned.memory.host["weights and states (fsdp.enable_cpu_offload)"] == 8 * 8_292_166_656 / 2
    assert planned.seconds.step > plan(seven, BF16, *of(2)).seconds.step


def test_the_trainers_own_module_gathers_all_weights_to_sample(seven: Path) -> None:
    gathered = phase(plan(seven, BF16, *of(2, "worker.rollout.name=transformers")), "gen").parts["gathered"]
    assert gathered == 2 * 8_292_166_656


def test_an_engine_over_two_gpus_has_half_of_the_weights_on_each(seven: Path) -> None:
    two = "worker.rollout.tensor_parallel_size=2"
    alone, spread = plan(seven, BF16, *of(2)), plan(seven, BF16, *of(2), two)
    assert phase(spread, "gen").parts["engine weights"] == phase(alone, "gen").parts["engine weights"] / 2
    assert spread.memory.engine is not None and alone.memory.engine is not None
    assert spread.memory.engine.cache_tokens > 2 * alone.memory.engine.cache_tokens


# -- offload ---------------------------------------------------------------------------------------------------------


def test_each_phase_fetches_what_it_needs(few: Path) -> None:
    """As `Worker._fetch` does: weights for the passes, states for the update alone, the reference for its own pass."""
    keys = ["worker.actor.offload.offload_params=true", "worker.actor.offload.offload_optimizer=true"]
    keys += ["worker.ref.offload.offload_params=true", "algorithm.adv_estimator=gae", "algorithm.use_kl_loss=true"]
    keys += ["worker.critic.offload.offload_params=true", "worker.critic.offload.offload_optimizer=true"]
    planned = plan(few, BF16, FIXED, *keys, "algorithm.old_logprobs=recompute")
    held = {"actor weights", "actor optimizer", "reference", "critic weights", "critic optimizer"}
    found = {each.name: held & each.parts.keys() for each in planned.memory.phases}
    assert found == {
        "gen": set(),
        "hand over": {"actor weights"},
        "old": {"actor weights"},
        "ref": {"actor weights", "reference"},
        "values": {"actor weights", "reference", "critic weights"},
        "update_critic": held - {"actor optimizer"},
        "update_actor": held,
        "save_checkpoint": held,
    }


def test_sharded_weights_on_the_host_are_handed_over_a_bucket_at_a_time(seven: Path) -> None:
    """Beside vLLM's weights there are two buckets of 512 MiB; each GPU's half comes over the bus."""
    near, away = plan(seven, BF16, *of(2)), plan(seven, BF16, *of(2, ON_HOST))
    handing = phase(away, "hand over")
    assert handing.parts["gathered"] == GIB and "actor weights" not in handing.parts
    assert handing.parts["engine weights"] == 2 * 8_292_166_656
    took, takes = (planned.seconds.phases["hand over"] for planned in (near, away))
    assert takes - took == pytest.approx(2 * 8_292_166_656 / 2 / 25e9)
    assert "hand over" not in [each.name for each in near.memory.phases]


# -- engines on GPUs of their own ------------------------------------------------------------------------------------


def test_trainers_hold_no_engine_and_engines_nothing_else(seven: Path) -> None:
    planned = plan(seven, BF16, *of(4, "cluster.rollout_devices=1", "worker.rollout.gpu_memory_utilization=0.9"))
    for each in planned.memory.phases:
        parts = {name.split()[0] for name in each.parts}
        assert ("engine" in parts) == (each.name == "gen") == (each.side == "engines"), each.name
        assert each.side == "trainers" or parts == {"engine"}
    assert planned.memory.fits
    three = plan(seven, BF16, *of(3))
    assert (
        phase(planned, "save_checkpoint").parts["actor weights"] == phase(three, "update_actor").parts["actor weights"]
    )


def test_nothing_is_offloaded_where_no_engine_shares_the_device(seven: Path) -> None:
    keys = ["worker.actor.offload.offload_params=true", "worker.actor.offload.offload_optimizer=true"]
    planned = plan(seven, BF16, *of(2, "cluster.rollout_devices=1", *keys))
    assert "offloaded" not in planned.memory.host and "offload" not in planned.seconds.phases
    assert "actor optimizer" in phase(planned, "old").parts


def test_a_step_ahead_takes_the_longer_side_and_the_other_idles(seven: Path) -> None:
    apart = of(2, "cluster.rollout_devices=1")
    turns, ahead = plan(seven, BF16, *apart).seconds, plan(seven, BF16, *apart, AHEAD).seconds
    sampling, handing = ahead.phases["gen"], ahead.phases["hand over"]
    assert turns.step == pytest.approx(sampling + handing + ahead.training)
    assert ahead.step == pytest.approx(max(sampling, ahead.training) + handing)
    assert ahead.idle == pytest.approx(
        {"trainer": max(sampling - ahead.training, 0), "engine": max(ahead.training - sampling, 0)}
    )
    assert turns.idle == pytest.approx({"trainer": sampling, "engine": ahead.training})
    assert plan(seven, BF16, *of(2)).seconds.idle == {}


def test_a_better_split_is_what_the_plan_of_it_says(seven: Path) -> None:
    given = [BF16, *of(8, AHEAD)]
    planned = plan(seven, *given, "cluster.rollout_devices=7")
    split = better_split(planned.config, planned.gpu, planned.lengths, planned.seconds.step)
    assert split is not None
    better = plan(seven, *given, f"cluster.rollout_devices={split.rollout_devices}")
    assert better.memory.fits and better.seconds.step == split.step < planned.seconds.step
    assert better_split(better.config, better.gpu, better.lengths, better.seconds.step) is None


def test_splits_are_those_that_the_devices_can_have(seven: Path) -> None:
    two = "worker.rollout.tensor_parallel_size=2"
    assert possible_splits(plan(seven, *of(8, "cluster.rollout_devices=2"), two).config) == [1, 4, 6]
    assert possible_splits(plan(seven, *of(8)).config) == []


def test_too_few_trainers_are_cured_by_another_split(seven: Path) -> None:
    """141 GB of fp32 weights and states on each of 2 GPUs, or on fewer GPUs of an engine less on each of 6."""
    planned = plan(seven, *of(8, "cluster.rollout_devices=6", AHEAD), gpu="80")
    assert not phase(planned, "update_actor").fits
    cures = find_cures(planned.config, planned.gpu, planned.lengths, planned.memory)
    first = [cure.arguments for cure in cures if len(cure.arguments) == 1 and "rollout_devices" in cure.arguments[0]]
    assert first
    assert plan(seven, *of(8, AHEAD), *first[0], gpu="80").memory.fits


# -- the command -----------------------------------------------------------------------------------------------------


def test_both_sides_are_told_apart_in_the_terminal(seven: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(seven, BF16, *of(8, "cluster.rollout_devices=7", AHEAD), "--gpu", "h200")
    assert main(["plan", *given]) == 0
    text = capsys.readouterr().out
    for said in (
        "8 GPUs, of which 1 train and 7 sample",
        "GiB of one that trains",
        "GiB of one that samples",
        "goes on beside training",
        "the 7 GPUs that sample are idle for ",
        " instead of 7: a step of ",
        "worker.rollout.gpu_memory_utilization may be 0.9",
    ):
        assert said in text, text
    assert main(["plan", *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["gpu"]["of_trainers"], found["gpu"]["of_engines"]) == (1, 7)
    assert found["idle_seconds"]["engine"] > 0 == found["idle_seconds"]["trainer"]
    assert found["better_split"]["step_seconds"] < found["seconds"]["step"]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (["trainer.async_rollout=true"], "cluster.rollout_devices is 0; set it to some of the 8 devices"),
        (["cluster.rollout_devices=8"], "none is left to train; set it to 7 at most"),
        (["worker.rollout.tensor_parallel_size=3"], "8 devices do not fall into groups of 3"),
    ],
)
def test_gpus_that_cannot_be_divided_so_are_refused_as_in_a_run(
    seven: Path, capsys: pytest.CaptureFixture[str], keys: list[str], line: str
) -> None:
    assert main(["plan", *arguments(seven, *of(8), *keys), "--gpu", "80"]) == 1
    assert line in capsys.readouterr().err


def test_no_plan_needs_ray(seven: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("foveal.cluster.topology.find_spec", lambda name: None)
    assert main(["plan", *arguments(seven, LORA, *of(2)), "--gpu", "80"]) == 0
    assert "fits on 2 × h100-80" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4090", "4090-24"),
        ("RTX 4090", "4090-24"),
        ("NVIDIA H100 80GB", "h100-80"),
        ("A800", "a800-80"),
        ("h20", "h20-96"),
        ("A100 40 GB", "a100-40"),
        ("80GB", "h100-80"),
    ],
)
def test_a_gpu_may_be_called_as_on_its_box(text: str, name: str) -> None:
    assert find_gpu(text).name == name


def test_an_ambiguous_gpu_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="of which there are a100-40 and a100-80"):
        find_gpu("a100")
    with pytest.raises(ConfigError, match=r"how many there are is trainer\.n_gpus_per_node"):
        find_gpu("2x24")
