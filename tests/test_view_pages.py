"""The pages as the server writes them: what is there, and that text from a run stays text."""

from __future__ import annotations

import os
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from foveal.view import runs as view_runs
from foveal.view.app import make_app
from foveal.view.runs import open_runs
from tests.view_support import group, picture, response, write_log, write_part, write_run

EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


@pytest.fixture(autouse=True)
def _always_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_runs, "FRESH_SECONDS", 0.0)


def client(*folders: Path) -> TestClient:
    return TestClient(make_app(open_runs(list(folders))), base_url="http://127.0.0.1:7007")


class Page(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [found for name, found in self.elements if name == tag and wanted.items() <= found.items()]


def page(at: TestClient, address: str) -> Page:
    answer = at.get(address)
    assert answer.status_code == 200, answer.text
    return Page(answer.text)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first")


def test_the_first_page_names_the_run_and_its_alarms(run: Path) -> None:
    text = page(client(run), "/").text
    assert "5 of 100" in text
    assert "steps 2 to 3" in text and "cut off at the length limit" in text


def test_curves_of_runs_with_different_metrics(run: Path, tmp_path: Path) -> None:
    write_log(tmp_path / "second", {1: {"reward/overall": 0.7, "actor/kl_loss": 0.01}})
    at = client(run, tmp_path / "second")
    charts = at.get("/curves.json?m=reward/overall&m=actor/kl_loss&m=nothing").json()["charts"]
    assert [chart["name"] for chart in charts] == ["reward/overall", "actor/kl_loss"]
    assert [series["x"] for series in charts[0]["series"]] == [[1, 2, 3, 4, 5], [1]]
    assert [series["y"] for series in charts[1]["series"]] == [[], [0.01]]


def test_times_are_stacked_with_what_is_left_over(run: Path) -> None:
    (times,) = client(run).get("/time.json").json()["times"]
    assert times["x"] == [1, 2, 3, 4, 5]
    assert {part["name"]: part["y"][0] for part in times["parts"]} == {
        "writing answers": 2.0,
        "training the model": 3.0,
        "everything else in the step": 1.0,
    }


def test_settings_that_differ_come_first(run: Path, tmp_path: Path) -> None:
    write_log(tmp_path / "second", {}, {"trainer": {"max_steps": 100}, "worker": {"n": 4}})
    found = page(client(run, tmp_path / "second"), "/settings").text
    differing, _, same = found.partition("settings that are the same")
    assert "worker.n" in differing and "not there" in differing
    assert "trainer.max_steps" in same and "trainer.max_steps" not in differing


def test_samples_show_pictures_scores_and_links(run: Path) -> None:
    found = page(client(run), "/runs/0/samples?split=train&sort=lowest+reward")
    assert len(found.all("article")) == 8
    pictures = {one["src"] for one in found.all("img")}
    assert len(pictures) == 2
    assert "8 of 14 answers" in found.text and "ended by itself" in found.text
    assert found.all("a", href="/runs/0/train/5/0") and found.all("a", href="/runs/0/follow/train/7")


def test_a_text_is_searched_for_shown_as_text_and_kept_on_the_next_page(tmp_path: Path) -> None:
    answers = [response(EVIL if number < 60 else "8") for number in range(70)]
    write_part(tmp_path / "run", "val", 1, [group(0, answers)])
    found = page(client(tmp_path / "run"), f"/runs/0/samples?{urlencode({'text': EVIL})}")
    assert len(found.all("article")) == 50 and "60 of 70 answers" in found.text
    assert found.all("input", name="text")[0]["value"] == EVIL
    assert not found.all("img", src="x")
    (later,) = [link["href"] for link in found.all("a", class_="button") if "page=1" in str(link["href"])]
    assert len(page(client(tmp_path / "run"), str(later)).all("article")) == 10


def test_the_answers_of_a_group_side_by_side(run: Path) -> None:
    found = page(client(run), "/runs/0/train/5/2")
    assert len(found.all("article")) == 4
    assert len(found.all("article", class_="column chosen")) == 1
    assert "+0.500" in found.text and "-0.500" in found.text


def shades(found: Page) -> list[str | None]:
    """Of each token of the answers."""
    return [one.get("class") for one in found.all("span") if (one.get("title") or "").startswith("token ")]


@pytest.mark.parametrize("colour", ["probability", "entropy"])
def test_tokens_are_the_darker_the_more_there_is_to_see(run: Path, colour: str) -> None:
    found = shades(page(client(run), f"/runs/0/train/5/0?colour={colour}&alone=yes"))
    assert found[0] == "t0" and found[-1] in ("t6", "t7") and found == sorted(found, key=str)


def test_tokens_are_coloured_by_the_gap_between_engine_and_trainer(run: Path) -> None:
    assert set(shades(page(client(run), "/runs/0/train/5/0?colour=gap"))) == {"t3"}  # 0.02 everywhere
    assert set(shades(page(client(run), "/runs/0/train/5/0?colour=none"))) == {None}


def test_only_what_was_measured_can_be_chosen(run: Path) -> None:
    chosen = [one["value"] for one in page(client(run), "/runs/0/val/0/0").all("option")]
    assert chosen == ["probability", "none"]


def test_letters_of_several_tokens_are_whole(tmp_path: Path) -> None:
    write_log(tmp_path / "run", {})
    write_part(tmp_path / "run", "val", 0, [group(0, [response("柱子高8格")])])
    assert "柱子高8格" in page(client(tmp_path / "run"), "/runs/0/val/0/0").text.replace("\n", "")


def test_long_answers_are_cut_where_others_stand_beside_them(tmp_path: Path) -> None:
    write_log(tmp_path / "run", {})
    write_part(tmp_path / "run", "train", 1, [group(0, [response("8 green " * 3000), response("7")])])
    at = client(tmp_path / "run")
    beside, alone = (page(at, f"/runs/0/train/1/0{query}") for query in ("", "?alone=yes"))
    assert "the first 2,000 of" in beside.text and "the first" not in alone.text


def test_one_prompt_through_the_run(run: Path) -> None:
    found = page(client(run), "/runs/0/follow/val/1")
    assert found.text.index("1 red") < found.text.index("6 red")


def test_pages_of_fifty(tmp_path: Path) -> None:
    write_log(tmp_path / "run", {})
    write_part(tmp_path / "run", "val", 0, [group(row, [response("8")]) for row in range(60)])
    at = client(tmp_path / "run")
    first, second = page(at, "/runs/0/samples"), page(at, "/runs/0/samples?page=1")
    assert (len(first.all("article")), len(second.all("article"))) == (50, 10)
    assert first.all("a", href="/runs/0/samples?page=1") and second.all("a", href="/runs/0/samples?page=0")
    assert len(page(at, "/runs/0/samples?page=99999999999").all("article")) == 50  # what is no page number is the first


def test_text_from_a_run_stays_text(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_log(
        folder,
        {1: {f"reward/{EVIL}": 1.0, f"alarm/{EVIL}": 1.0, "reward/overall": 1.0}},
        {EVIL: EVIL, "trainer": {"max_steps": 9}},
    )
    answer = response(EVIL, rewards={"overall": 1.0, EVIL: 0.5})
    one = group(0, [answer], prompt=EVIL)
    one.prompt.answer = EVIL
    one.prompt.media[0].name = EVIL
    write_part(folder, "val", 1, [one])
    at = client(folder)
    for address in ("/", "/settings", "/runs/0/samples", "/runs/0/val/1/0", "/runs/0/follow/val/0", "/time"):
        found = page(at, address)
        assert all(one.get("src", "").startswith("/static/") for one in found.all("script")), address
        assert all(one["src"].startswith("/runs/0/images/") for one in found.all("img")), address
        assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes), address
    assert EVIL in page(at, "/runs/0/samples").text


def test_what_the_reader_asks_for_stays_text_too(run: Path) -> None:
    query = {"m": EVIL, "colour": EVIL, "page": EVIL, "threshold": EVIL}
    for address in ("/", "/runs/0/samples", "/runs/0/train/5/0", f"/{EVIL}"):
        assert "<script>alert" not in client(run).get(address, params=query).text


def test_the_page_follows_a_run_that_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_log(folder, {1: {"reward/overall": 0.1}})
    at = client(folder)
    before = at.get("/curves.json?m=reward/overall").json()
    assert at.get(f"/curves.json?m=reward/overall&since={before['version']}").json() == {"version": before["version"]}
    with open(folder / "experiment_log.jsonl", "a") as file:
        file.write('{"step": 2, "reward": {"overall": 0.2}}\n{"step": 3, "rew')
    after = at.get(f"/curves.json?m=reward/overall&since={before['version']}").json()
    assert after["charts"][0]["series"][0]["x"] == [1, 2]
    with open(folder / "experiment_log.jsonl", "a") as file:
        file.write('ard": {"overall": 0.3}}\n')
    assert at.get("/curves.json?m=reward/overall").json()["charts"][0]["series"][0]["x"] == [1, 2, 3]
    write_part(folder, "val", 3, [group(0, [response("8")])])
    assert at.get("/runs/0/samples.json").json()["answers"] == 1


def test_a_run_without_samples_says_why(tmp_path: Path) -> None:
    write_log(tmp_path / "old", {1: {"reward/overall": 0.1}})
    assert "has kept no samples" in page(client(tmp_path / "old"), "/runs/0/samples").text


def test_a_folder_with_nothing_in_it_yet(tmp_path: Path) -> None:
    write_log(tmp_path / "new", {})
    at = client(tmp_path / "new")
    assert "Nothing has been logged yet" in page(at, "/").text
    assert at.get("/time").status_code == at.get("/settings").status_code == 200


@pytest.mark.parametrize("line", ["[1]", '{"step": NaN}', '{"step": 1, "a": {"b": Infinity}}', "\x00", '{"step": "x"}'])
def test_broken_lines_of_a_log_are_passed_over(tmp_path: Path, line: str) -> None:
    write_log(tmp_path / "run", {1: {"reward/overall": 0.1}})
    with open(tmp_path / "run/experiment_log.jsonl", "a") as file:
        file.write(f"{line}\n")
    at = client(tmp_path / "run")
    assert at.get("/").status_code == 200
    assert at.get("/curves.json?m=reward/overall&m=a/b").json()["charts"][0]["series"][0]["y"] == [0.1]


def test_each_damaged_file_is_named_on_the_page_which_goes_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with open(run / "experiment_log.jsonl", "a") as file:
        file.write('{"step": 6, "rew\n\n{"step": 7, "reward": {"overall": 0.7}}\n')
    at = client(run)
    text = page(at, "/").text
    assert "damaged, and left out: experiment_log.jsonl (line 7)" in text and "7 of 100" in text
    (run / "experiment_config.json").write_text("{")
    assert "experiment_config.json" in page(at, "/settings").text
    part = run / "samples/answers/val-00000005.parquet"
    part.write_bytes(part.read_bytes()[:-50])
    found = page(at, "/runs/0/samples")
    assert f"samples/answers/{part.name}" in found.text and "11 of 11 answers" in found.text


def test_a_missing_picture_is_named_in_its_place(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    missing = min((run / "samples/images").iterdir())
    missing.unlink()
    found = page(client(run), "/runs/0/samples")
    assert f"missing: samples/images/{missing.name}" in found.text and len(found.all("article")) == 14
    assert found.all("img")


def test_answers_that_cannot_be_read_are_not_called_removed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    part = run / "samples/answers/train-00000005.parquet"
    at = client(run)
    assert at.get("/runs/0/train/5/0").status_code == 200
    with pq.ParquetFile(part) as file:
        columns = (file.metadata.row_group(0).column(n) for n in range(file.metadata.num_columns))
        place = next(c.data_page_offset for c in columns if c.path_in_schema == "response")
    data = bytearray(part.read_bytes())
    data[place : place + 30] = bytes(30)
    part.write_bytes(data)
    answer = at.get("/runs/0/train/5/0")
    assert answer.status_code == 404 and "samples/answers/train-00000005.parquet is damaged" in answer.text


def test_tokens_whose_text_is_lost_name_the_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert "tokens.jsonl" not in page(client(run), "/runs/0/val/0/0").text
    (run / "samples/tokens.jsonl").write_text('{"id": 1, "te\n{"id": 1e999, "text": ""}\n')
    assert "samples/tokens.jsonl lacks the text" in page(client(run), "/runs/0/val/0/0").text


@pytest.mark.parametrize(
    "line",
    ['{"step": 1, "timing_s": {"gen": NaN, "step": 1}}', '{"step": 1, "reward": {"overall": 1%s}}' % ("0" * 400),
     '{"step": 1, "timing_s": {"\\ud800": 1}, "reward": {"\\ud800": 1}}'],
)  # fmt: skip
def test_odd_numbers_and_names_of_a_log_break_no_page(tmp_path: Path, line: str) -> None:
    run = write_run(tmp_path / "run", **{"odd": "\ud800"})
    with open(run / "experiment_log.jsonl", "a") as file:
        file.write(f"{line}\n")
    at = client(run)
    for address in ("/", "/curves.json?m=reward/overall", "/time", "/time.json", "/settings"):
        assert at.get(address).status_code == 200, address


def test_a_run_is_live_until_its_last_step_or_a_long_silence(run: Path, tmp_path: Path) -> None:
    write_log(tmp_path / "run", {1: {"reward/overall": 0.1}}, {"trainer": {"max_steps": 2}})
    (one,) = open_runs([tmp_path / "run"])
    one.read_on()
    assert one.is_live
    os.utime(tmp_path / "run/experiment_log.jsonl", (time.time() - 3600,) * 2)
    assert not one.is_live
    write_log(tmp_path / "run", {2: {"reward/overall": 0.1}}, {"trainer": {"max_steps": 2}})
    one.read_on()
    assert not one.is_live


@pytest.mark.parametrize(
    "address",
    ["/runs/9/samples", "/runs/0/val/3/0", "/runs/0/val/0/99", "/runs/0/other/0/0", "/runs/0/follow/other/0", "/x"],
)
def test_what_is_not_there_is_a_page_that_says_so(run: Path, address: str) -> None:
    answer = client(run).get(address)
    assert answer.status_code == 404 and "There is no such page" in answer.text


@pytest.mark.parametrize(
    "name",
    [
        "../../experiment_config.json",
        "..%2f..%2fexperiment_config.json",
        "%2e%2e/%2e%2e/experiment_config.json",
        "/etc/passwd",
        "0" * 32 + ".svg",
        "0" * 32 + ".png%00.txt",
        "0" * 32 + ".png",
    ],
)
def test_no_other_file_is_served(run: Path, name: str) -> None:
    assert client(run).get(f"/runs/0/images/{name}").status_code == 404
    assert client(run).get(f"/static/{name}").status_code == 404


def test_a_picture_is_served_and_a_link_to_elsewhere_is_not(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    at = client(folder)
    address = page(at, "/runs/0/samples").all("img")[0]["src"]
    answer = at.get(address or "")
    assert answer.headers["content-type"] == "image/png" and answer.content == picture()
    (tmp_path / "secret").write_text("secret")
    (folder / "samples/images" / ("a" * 32 + ".png")).symlink_to(tmp_path / "secret")
    assert at.get("/runs/0/images/" + "a" * 32 + ".png").status_code == 404


def guarded(answer: Any) -> bool:
    policy = answer.headers["content-security-policy"]
    return "default-src 'none'" in policy and "unsafe" not in policy and answer.headers["referrer-policy"] != ""


def test_every_answer_has_a_policy_that_runs_no_foreign_script(run: Path) -> None:
    at = client(run)
    image = page(at, "/runs/0/samples").all("img")[0]["src"]
    for address in ("/", "/curves.json", "/static/view.js", "/nothing", image):
        assert guarded(at.get(address or ""))
    assert guarded(at.post("/"))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_only_reading(run: Path, method: str) -> None:
    assert client(run).request(method, "/").status_code == 405


@pytest.mark.parametrize(
    ("host", "header", "status"),
    [
        ("127.0.0.1", "127.0.0.1:7007", 200),
        ("127.0.0.1", "LOCALHOST:7007", 200),
        ("127.0.0.1", "[::1]:7007", 200),
        ("127.0.0.1", "evil.example", 421),
        ("127.0.0.1", "localhost.evil.example:7007", 421),
        ("127.0.0.1", "192.168.1.5:7007", 421),
        ("127.0.0.1", "", 421),
        ("0.0.0.0", "192.168.1.5:7007", 200),
        ("0.0.0.0", "evil.example:7007", 421),
        ("gpu-box", "gpu-box:7007", 200),
    ],
)
def test_only_names_of_this_machine_are_served(run: Path, host: str, header: str, status: int) -> None:
    at = TestClient(make_app(open_runs([run]), host), base_url="http://127.0.0.1:7007")
    assert at.get("/", headers={"Host": header}).status_code == status


def test_a_page_that_fails_says_so_and_is_guarded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = open_runs([run])
    monkeypatch.setattr(runs[0], "read_on", lambda: 1 / 0)
    at = TestClient(make_app(runs), base_url="http://127.0.0.1", raise_server_exceptions=False)
    answer = at.get("/")
    assert answer.status_code == 500 and "could not be made" in answer.text and guarded(answer)
