"""Each view in a real browser: what its script draws, and that no text from a run is run."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn

from foveal.view import runs as view_runs
from foveal.view.app import make_app
from foveal.view.export import export
from foveal.view.runs import open_runs
from tests.view_support import group, response, write_log, write_part, write_run

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

EVIL = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    write_log(root / EVIL.replace("/", "_"), {1: {"reward/overall": 0.3, f"reward/{EVIL}": 1.0}}, {"key": EVIL})
    second = root / EVIL.replace("/", "_")
    write_part(second, "val", 1, [group(0, [response(EVIL), response("7")], prompt=EVIL)])
    return [write_run(root / "first"), second]


@pytest.fixture(scope="module")
def address(runs: list[Path]) -> Iterator[str]:
    with served(runs) as at:
        yield at


@pytest.fixture(scope="module")
def odd_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One that has written nothing yet, and one of a single step with a long name and answers of all lengths."""
    root = tmp_path_factory.mktemp("odd")
    write_log(root / "new", {})
    long = root / "qwen2_5_vl_7b_geo3k_grpo_with_a_very_long_name_2026_11_30_lr1e-6_n8_second_try"
    metrics = {"reward/overall": 0.3, "timing_s/gen": 2.0, "timing_s/step": 3.0, "alarm/cut_off": 1.0}
    write_log(long, {1: metrics}, {"path": "/a/long/path" * 20})
    with open(long / "experiment_log.jsonl", "a") as file:
        file.write('{"step": 2, "rew')
    answers = [response(text, 0.5) for text in ("x" * 3000, "图中的柱子高八格。" * 40, "")]
    write_part(long, "val", 1, [group(0, answers, prompt="y" * 2000)])
    with served([root / "new", long]) as at:
        yield at


@contextmanager
def served(runs: list[Path]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(make_app(open_runs(runs)), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture(params=[("light", 1280), ("dark", 390)], ids=["light, wide", "dark, narrow"])
def page(browser: sync_api.Browser, request: pytest.FixtureRequest) -> Iterator[sync_api.Page]:
    """A page that may complain of nothing."""
    scheme, width = request.param
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    opened = context.new_page()
    complaints: list[str] = []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    yield opened
    fits = opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    title = opened.title()
    context.close()
    assert complaints == []
    assert fits, "the page is wider than the window"
    assert title != "taken"


def test_curves_are_drawn(page: sync_api.Page, address: str) -> None:
    page.goto(f"{address}/")
    page.wait_for_selector("#curves canvas")
    assert page.locator("#curves .chart").count() == 3
    drawn = page.evaluate(
        """() => { const c = document.querySelector("#curves canvas");
        return c.getContext("2d").getImageData(0, 0, c.width, c.height).data.some((value) => value > 0); }"""
    )
    assert drawn
    page.select_option("#smooth", "5")
    assert page.locator("#curves .chart").count() == 3


def test_pointing_at_a_step_shows_its_values(page: sync_api.Page, address: str) -> None:
    page.goto(f"{address}/?m=reward/overall")
    page.wait_for_selector("#curves canvas")
    assert page.locator("#curves .u-value").all_inner_texts() == ["", "", ""]
    page.hover("#curves .u-over", position={"x": 2, "y": 30})
    assert page.locator("#curves .u-value").all_inner_texts() == ["1", "0.1", "0.3"]


def test_a_metric_with_markup_in_its_name_is_text(page: sync_api.Page, address: str) -> None:
    page.goto(f"{address}/")
    page.click("summary:text('Choose other curves')")
    page.uncheck("input[value='reward/overall']")
    page.check("input[value*='script']")
    page.click("button:text('Show these')")
    page.wait_for_selector("#curves canvas")
    assert EVIL.split("/")[0] in page.inner_text("#curves")


def test_times_are_drawn(page: sync_api.Page, address: str) -> None:
    page.goto(f"{address}/time")
    page.wait_for_selector("#times canvas")
    assert "writing answers" in page.inner_text("#times")


def test_settings(page: sync_api.Page, address: str) -> None:
    page.goto(f"{address}/settings")
    assert EVIL in page.inner_text("main")


def test_samples_are_filtered_by_the_form(page: sync_api.Page, address: str) -> None:
    page.goto(f"{address}/runs/0/samples")
    page.select_option("select[name=split]", "train")
    page.fill("input[name=reward_from]", "0.9")
    page.click("form button")
    page.wait_for_url("**/samples?**")
    assert page.locator("article").count() == 2
    assert page.url.endswith("/samples?split=train&sort=newest&threshold=0.5&reward_from=0.9")
    loaded = page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    assert loaded


def test_samples_are_searched_by_the_form(page: sync_api.Page, address: str) -> None:
    page.goto(f"{address}/runs/0/samples")
    page.fill("input[name=text]", "3 HIGH")
    page.press("input[name=text]", "Enter")
    page.wait_for_url("**/samples?**")
    assert page.locator("article").count() == 2
    assert "text=3+HIGH" in page.url and page.input_value("input[name=text]") == "3 HIGH"


def test_a_groups_tokens_change_colour(page: sync_api.Page, address: str) -> None:
    page.goto(f"{address}/runs/0/train/5/0")
    page.select_option("select[name=colour]", "gap")
    page.wait_for_url("**colour=gap**")
    assert page.locator(".tokens .t3").count() > 4


def test_the_answers_of_a_group_stand_side_by_side(page: sync_api.Page, address: str) -> None:
    page.goto(f"{address}/runs/0/samples?split=train")
    page.click("a:text('All answers to this prompt') >> nth=0")
    page.wait_for_selector("article")
    boxes = [one.bounding_box() for one in page.locator("article").all()]
    assert len(boxes) == 4
    assert (boxes[0]["y"] == boxes[1]["y"]) == (page.viewport_size["width"] > 1000)
    assert page.locator("article b").all_inner_texts() == ["-0.500", "-0.167", "+0.167", "+0.500"]


def test_a_prompt_is_followed_from_one_of_its_answers(page: sync_api.Page, address: str) -> None:
    page.goto(f"{address}/runs/0/samples?split=val&step_from=5")
    page.click("a:text('This prompt through the run') >> nth=0")
    page.wait_for_selector("table.follow")
    steps = page.locator("table.follow tbody td:first-child").all_inner_texts()
    assert steps == ["0", "5"]


@pytest.mark.parametrize("place", ["", "time", "settings", "runs/0/samples", "runs/1/samples", "runs/1/val/1/0"])
def test_odd_runs_fit(page: sync_api.Page, odd_address: str, place: str) -> None:
    page.goto(f"{odd_address}/{place}")
    page.wait_for_load_state("networkidle")
    assert page.inner_text("main")


def test_a_lone_step_is_no_line_of_a_hundred(page: sync_api.Page, odd_address: str) -> None:
    page.goto(f"{odd_address}/")
    page.wait_for_selector("#curves canvas")
    page.hover("#curves .u-over")
    assert page.locator("#curves .u-value >> nth=0").inner_text() == "1"
    box = page.locator("#curves .u-cursor-pt >> nth=1").bounding_box()
    over = page.locator("#curves .u-over").bounding_box()
    assert abs(box["x"] + box["width"] / 2 - over["x"] - over["width"] / 2) < 3


def test_untrusted_answers(page: sync_api.Page, address: str) -> None:
    for place in ("samples", "val/1/0", "follow/val/0"):
        page.goto(f"{address}/runs/1/{place}")
        assert EVIL in page.inner_text("main")


def test_the_page_grows_with_the_run(
    browser: sync_api.Browser, address: str, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_runs, "FRESH_SECONDS", 0.0)
    page = browser.new_page()
    page.clock.install()
    page.goto(f"{address}/?m=reward/overall")
    page.wait_for_selector("#curves canvas")
    with open(runs[0] / "experiment_log.jsonl", "a") as file:
        file.write('{"step": 6, "reward": {"overall": 0.9}, "actor": {"grad_norm": 1.0}}\n')
    page.clock.run_for(6000)
    page.wait_for_selector("#summary td:text('6 of 100')")
    page.close()


def test_the_exported_file_draws_without_a_server(page: sync_api.Page, runs: list[Path], tmp_path: Path) -> None:
    export(open_runs(runs), tmp_path / "page.html")
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_selector("#curves canvas")
    page.wait_for_selector("#times canvas")
    assert page.locator("article").count() == 8
    assert EVIL in page.inner_text("#samples")
