"""Rewards and the look at rows on the CPUs of two Ray nodes of this machine: as on one, wherever it runs."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foveal.cluster.machines import Machine, joined, machines
from foveal.config import load_config
from foveal.data import measure as measuring
from foveal.data import survey as surveying
from foveal.data.processing import Processing, load_processing
from foveal.data.survey import Survey, survey
from foveal.errors import RewardError
from foveal.quickstart.tiny import build_tiny
from foveal.reward.loading import parse_spec
from foveal.reward.places import dealt
from foveal.reward.runner import RewardRunner
from foveal.track import console
from foveal.types import Group, Media
from tests.cluster_support import import_this_checkout
from tests.data_support import builder_of, encoded, noise, picture_rows, write_lines
from tests.reward_support import make_group, make_runner, overall, write

ray: Any = pytest.importorskip("ray")
from foveal.reward.host import HostActor, file_digest  # noqa: E402

SCORED = """
import os, time
REWARD_TYPE = "sequential"
def compute_score(one):
    time.sleep(0.02)
    if one["response"] == "hang" and not HERE():
        time.sleep(600)
    if one["response"] == "exit" and not HERE():
        os._exit(7)
    return {"overall": float(one["response_length"]), "there": not HERE()}
def HERE():  # the first process starts before any host
    return os.environ.get("FOVEAL_TEST_RUN") == str(os.getppid())
"""


class Nodes:
    """Two nodes, the second of which can leave and come back."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        self.second = self.cluster.add_node(num_cpus=1)

    def renew(self) -> None:
        self.cluster.remove_node(self.second)
        self.second = self.cluster.add_node(num_cpus=1)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        import_this_checkout(patch)
        started = Nodes()
        patch.setenv("RAY_ADDRESS", started.cluster.address)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("FOVEAL_TEST_RUN", str(os.getpid()))
        with joined(load_config(["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "worker.rollout.n=2"])):
            yield started
        assert not ray.is_initialized()
        started.cluster.shutdown()


def answers(*texts: str) -> list[Group]:
    return [make_group("x", *(f"{text}{'.' * n}" if text == "a" else text for n in range(4))) for text in texts]


def there(groups: list[Group]) -> int:
    return sum(response.rewards.get("there", 0.0) == 1.0 for group in groups for response in group.responses)


def until_there(runner: RewardRunner, media: list[Media] | None = None) -> list[Group]:
    """Scores until some of it is done over there, where a process must start first; returns the last groups."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for group in (groups := answers(*["a"] * 10)):
            group.prompt.media = media or []
            runner.submit(group)
        runner.finish(groups)
        if there(groups):
            return groups
    raise AssertionError("nothing was scored over there")


@pytest.mark.usefixtures("nodes")
def test_a_sequential_function_runs_on_both_nodes_and_gives_the_same(tmp_path: Path) -> None:
    wanted = [[2.0, 3.0, 4.0, 5.0]] * 30
    with make_runner(tmp_path, SCORED, num_cpus=3) as runner:
        until_there(runner)
        for group in (groups := answers(*["a"] * 30)):
            runner.submit(group)
        metrics = runner.finish(groups)
        assert [overall(group) for group in groups] == wanted
        assert 0 < there(groups) < 120
        assert metrics["reward/restarts"] == 0.0


@pytest.mark.usefixtures("nodes")
def test_pictures_follow_when_they_are_looked_at(tmp_path: Path) -> None:
    source = """
    import os, time
    REWARD_TYPE = "sequential"
    def compute_score(one):
        time.sleep(0.05)
        sizes = [len(image.data) for image in one["images"]]
        return {"overall": sizes[1] - sizes[0], "there": os.environ.get("FOVEAL_TEST_RUN") != str(os.getppid())}
    """
    data = [encoded(noise(8, 8)), encoded(noise(64, 64))]
    with make_runner(tmp_path, source, num_cpus=2) as runner:
        groups = until_there(runner, [Media("image", one, "picture") for one in data])
    assert {score for group in groups for score in overall(group)} == {float(len(data[1]) - len(data[0]))}


@pytest.mark.usefixtures("nodes")
def test_what_hangs_or_dies_over_there_is_ended_and_replaced_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = {"num_cpus": 2, "time_limit": 1.0, "timeout_score": 9.0, "on_error": "score", "max_error_rate": 1.0}
    with make_runner(tmp_path, SCORED, **keys) as runner:
        until_there(runner)
        for text, counted in (("hang", "timeouts"), ("exit", "errors")):
            for group in (bad := answers(*[text] * 20)):
                runner.submit(group)
            for group in (good := answers(*["a"] * 20)):
                runner.submit(group)
            metrics = runner.finish([*bad, *good])
            lost = sum(len(response.rewards) == 1 for group in bad for response in group.responses)
            assert lost == metrics[f"reward/{counted}"] > 0
            assert metrics["reward/restarts"] > 0
            assert [overall(group) for group in good] == [[2.0, 3.0, 4.0, 5.0]] * 20
            until_there(runner)  # a fresh process goes on there
    assert "ended its process with exit code 7" in "".join(capfd.readouterr())


def test_a_machine_that_leaves_loses_no_answer(nodes: Nodes, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with make_runner(tmp_path, SCORED.replace("0.02", "0.2"), num_cpus=2) as runner:
        until_there(runner)
        for group in (groups := answers(*["a"] * 10)):
            runner.submit(group)
        nodes.renew()
        metrics = runner.finish(groups)
    assert [overall(group) for group in groups] == [[2.0, 3.0, 4.0, 5.0]] * 10
    assert metrics["reward/restarts"] == 1.0
    assert "scoring goes on here instead of on" in capfd.readouterr().out


@pytest.mark.usefixtures("nodes")
def test_a_function_that_the_other_machine_cannot_load_runs_here(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with make_runner(
        tmp_path,
        f"import os\nif os.environ.get('FOVEAL_TEST_RUN') != str(os.getppid()): import nowhere\n{SCORED}",
        num_cpus=2,
    ) as runner:
        for group in (groups := answers(*["a"] * 10)):
            runner.submit(group)
        runner.finish(groups)
    assert there(groups) == 0
    assert "No module named 'nowhere'" in capfd.readouterr().out


@pytest.mark.usefixtures("nodes")
def test_other_work_has_all_cpus_over_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    monkeypatch.setattr("foveal.reward.host._APPEARING", 0.5)

    class Busy:
        pass

    strategy = NodeAffinitySchedulingStrategy(machines()[1].node, soft=False)
    busy = ray.remote(Busy).options(num_cpus=1, scheduling_strategy=strategy).remote()
    ray.get(busy.__ray_ready__.remote())
    with make_runner(tmp_path, SCORED, num_cpus=2) as runner:
        for group in (groups := answers(*["a"] * 5)):
            runner.submit(group)
        runner.finish(groups)
    ray.kill(busy)
    assert [overall(group) for group in groups] == [[2.0, 3.0, 4.0, 5.0]] * 5
    assert there(groups) == 0
    assert "no CPU is free there" in capfd.readouterr().out


def test_nothing_of_it_hangs_when_a_run_ends_early(nodes: Nodes, tmp_path: Path) -> None:
    runner = make_runner(tmp_path, SCORED, num_cpus=2, time_limit=600)
    runner.start()
    for group in answers(*["a"] * 20, "hang", *["a"] * 20):
        runner.submit(group)
    time.sleep(1)
    begin = time.monotonic()
    runner.close()
    assert time.monotonic() - begin < 15


def test_runs_of_one_machine_do_not_join_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(devices: int) -> bool:
        raise AssertionError("joined")

    monkeypatch.setattr("foveal.cluster.ray_cluster.connect", connect)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    one = ["trainer.nnodes=1", "trainer.n_gpus_per_node=1", "worker.rollout.n=2"]
    with joined(load_config(one)):
        pass
    several = load_config([*one, "trainer.n_gpus_per_node=2"])
    with pytest.raises(AssertionError, match="joined"), joined(several):
        pass
    monkeypatch.delenv("RAY_ADDRESS")
    with joined(several):
        pass


def test_another_file_under_the_same_path_is_not_used(tmp_path: Path) -> None:
    spec = parse_spec(f"{write(tmp_path / 'reward.py', SCORED)}:compute_score", {})
    actor = HostActor(os.getcwd(), [], {})
    console.divert(None)
    found = actor.load(spec, file_digest(spec)[::-1], None)
    assert isinstance(found, RewardError) and "not the same" in str(found)


def test_processes_are_dealt_by_cpus() -> None:
    found = [Machine("a", "a", 2), Machine("b", "b", 4), Machine("c", "c", 0)]
    assert [place and place.name for place in dealt(found, 6)] == [None, "b", "b", "b", None, "b"]
    assert dealt([], 3) == [None, None, None]
    assert [place and place.name for place in dealt([Machine("a", "a", 0), found[1]], 3)] == [None, "b", "b"]


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processing(tmp_path_factory: pytest.TempPathFactory) -> Processing:
    return load_processing(str(build_tiny(tmp_path_factory.mktemp("model"), "qwen2_5_vl")), max_pixels=200_704)


@pytest.fixture
def from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows but the first few go to the cluster, and no lengths are known."""
    monkeypatch.setattr(surveying, "KEPT_FROM_SECONDS", 1e9)
    monkeypatch.setattr(measuring, "TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(measuring, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(measuring, "CHUNK", 2)


def rows_in(folder: Path) -> str:
    """Twenty rows: one too long, one without its picture, one with a damaged one."""
    rows = picture_rows(folder, 20)
    rows[7]["prompt"] += " word" * 500
    (folder / "11.jpg").unlink()
    (folder / "14.jpg").write_bytes(b"no picture")
    (folder / "f.jinja").write_text("{{ content }} Go.")
    return write_lines(folder / "rows.jsonl", rows)


def looked_at(processing: Processing, folder: Path, workers: int = 16) -> Survey:
    options = {"max_prompt_length": 256, "filter_overlong_prompts_workers": workers}
    options |= {"format_prompt": str(folder / "f.jinja"), "image_dir": str(folder)}
    return survey(builder_of(processing, str(folder / "rows.jsonl"), **options), "train")


@pytest.mark.usefixtures("nodes", "from_the_start")
def test_rows_are_the_same_on_a_cluster(
    processing: Processing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_in(tmp_path)
    here: list[int] = []
    wanted = looked_at(processing, tmp_path, workers=1)
    monkeypatch.setattr(surveying, "KEPT_FROM_SECONDS", -1.0)
    draft = measuring.PromptBuilder.draft
    monkeypatch.setattr(measuring.PromptBuilder, "draft", lambda self, row: here.append(row) or draft(self, row))
    found = looked_at(processing, tmp_path)
    assert found == wanted
    assert len(found.usable) == 17 and len(found.too_long) == 1 and len(found.unreadable) == 2
    assert {0, 1} <= set(here) <= {0, 1, 11, 14}  # the unreadable ones were looked at again
    here.clear()
    assert looked_at(processing, tmp_path) == wanted
    assert set(here) == {11, 14}


@pytest.mark.usefixtures("nodes", "from_the_start")
def test_pictures_that_another_machine_does_not_see_lose_no_row(
    processing: Processing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rows_in(tmp_path)
    hidden = tmp_path / "hidden"  # which this process alone looks into
    hidden.mkdir()
    for picture in tmp_path.glob("*.jpg"):
        picture.rename(hidden / picture.name)
    draft = measuring.PromptBuilder.draft

    def seeing(self: measuring.PromptBuilder, row: int) -> Any:
        builder = copy.copy(self)
        builder.data = self.data.model_copy(update={"image_dir": str(hidden)})
        return draft(builder, row)

    monkeypatch.setattr(measuring.PromptBuilder, "draft", seeing)
    wanted = looked_at(processing, tmp_path, workers=1)
    assert len(wanted.usable) == 17
    assert looked_at(processing, tmp_path) == wanted
    assert "other machines do not see all pictures" in capfd.readouterr().out
