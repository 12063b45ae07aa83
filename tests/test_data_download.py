from __future__ import annotations

from pathlib import Path

import pytest

from foveal.data import download
from foveal.data.download import fetch
from foveal.data.images import PictureError
from foveal.data.processing import Processing, load_processing
from foveal.data.source import load_rows
from foveal.data.video import Stills
from foveal.errors import DataError
from foveal.quickstart.tiny import build_tiny
from tests.data_support import builder_of, encoded, noise, write_lines
from tests.hub_support import hub_of

PICTURE = encoded(noise(56, 56))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def processing(tmp_path_factory: pytest.TempPathFactory) -> Processing:
    folder = build_tiny(tmp_path_factory.mktemp("model"), "qwen2_5_vl")
    return load_processing(str(folder), min_pixels=3136, max_pixels=200_000)


@pytest.fixture
def served(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "a.png").write_bytes(PICTURE)
    write_lines(folder / "rows.jsonl", [{"prompt": "q", "answer": "a"}])
    return folder


@pytest.mark.parametrize("form", ["plain", "dict"])
def test_pictures_at_allowed_addresses_are_downloaded_once(
    processing: Processing, tmp_path: Path, served: Path, form: str
) -> None:
    with hub_of(served) as server:
        address = f"{server.url}/files/a.png"
        image = address if form == "plain" else {"bytes": None, "path": address}
        rows = [{"prompt": "<image>q", "answer": "a", "images": [image]}]
        builder = builder_of(processing, write_lines(tmp_path / "r.jsonl", rows), allow_urls=True)
        prompts = [builder.build(0, f"train-{epoch}-0") for epoch in range(2)]
        assert [prompt.media[0].data for prompt in prompts] == [PICTURE, PICTURE]
        assert server.asked == ["/files/a.png"]


def test_a_picture_that_cannot_be_downloaded_is_an_unreadable_one(
    processing: Processing, tmp_path: Path, served: Path
) -> None:
    with hub_of(served) as server:
        rows = [{"prompt": "<image>q", "answer": "a", "images": [f"{server.url}/files/gone.png"]}]
        builder = builder_of(processing, write_lines(tmp_path / "r.jsonl", rows), allow_urls=True)
        with pytest.raises(PictureError, match=r"row 0, image 0: cannot download .*gone\.png: .*404"):
            builder.draft(0)


@pytest.mark.parametrize("form", ["list", "dict"])
def test_frames_at_allowed_addresses_are_downloaded(
    processing: Processing, tmp_path: Path, served: Path, form: str
) -> None:
    with hub_of(served) as server:
        frames = [f"{server.url}/files/a.png"] * 2
        row = {"prompt": "<video>q", "answer": "a", "videos": [frames if form == "list" else {"frames": frames}]}
        builder = builder_of(processing, write_lines(tmp_path / "r.jsonl", [row]), allow_urls=True)
        [video] = builder.draft(0).media
        assert isinstance(video.place, Stills)
        assert [frame.read_bytes() for frame in video.place.frames if isinstance(frame, Path)] == [PICTURE, PICTURE]


def test_addresses_are_refused_by_default(processing: Processing, tmp_path: Path, served: Path) -> None:
    with hub_of(served) as server:
        rows = [{"prompt": "<image>q", "answer": "a", "images": [f"{server.url}/files/a.png"]}]
        builder = builder_of(processing, write_lines(tmp_path / "r.jsonl", rows))
        with pytest.raises(DataError, match=r"row 0, image 0 is a web address .*data\.allow_urls=true"):
            builder.draft(0)
        with pytest.raises(DataError, match=r"rows\.jsonl@train is a web address.*data\.allow_urls=true"):
            load_rows(f"{server.url}/files/rows.jsonl@train")
        assert server.asked == []


def test_rows_at_an_allowed_address(served: Path) -> None:
    with hub_of(served) as server:
        rows = load_rows(f"{server.url}/files/rows.jsonl?raw=1@train[:1]", allow_urls=True)
        assert list(rows) == [{"prompt": "q", "answer": "a"}]


def test_a_file_beyond_the_limit_is_refused_and_not_kept(served: Path, tmp_path: Path) -> None:
    with hub_of(served) as server:
        with pytest.raises(DataError, match="more than 10 bytes"):
            fetch(f"{server.url}/files/a.png", 10)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "ATTEMPTS", 1)
    with pytest.raises(DataError, match=r"cannot download http://127\.0\.0\.1:9/a\.png"):
        fetch("http://127.0.0.1:9/a.png")


def test_spaces_and_other_letters_in_an_address_are_encoded(served: Path) -> None:
    (served / "%E5%9B%BE%201.png").write_bytes(PICTURE)
    with hub_of(served) as server:
        assert fetch(f"{server.url}/files/图 1.png").read_bytes() == PICTURE
        assert server.asked == ["/files/%E5%9B%BE%201.png"]


@pytest.mark.parametrize("address", ["http://127.0.0.1:port/a.png", "http://[::1/a.png"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(DataError, match=r"cannot download http://"):
        fetch(address)


def test_failed_downloads_leave_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "ATTEMPTS", 1)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(DataError):
            fetch("http://127.0.0.1:9/a.png")
    assert len(list(Path("/proc/self/fd").iterdir())) == opened


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/proc/cache")
    with pytest.raises(DataError, match=r"cannot keep downloaded files in /proc/cache/.*Set HF_HOME"):
        fetch("http://127.0.0.1:9/a.png")
