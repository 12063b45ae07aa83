from __future__ import annotations

import io
import sys
import wave
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foveal.data import video
from foveal.data.images import PictureError
from foveal.data.media import MediaSource
from foveal.data.video import Stills, VideoHeader, read_frames, unpack_stills, video_header
from foveal.errors import DataError
from tests.data_support import encoded, noise
from tests.video_support import film, film_frames, frame_number

NAME = "row 3, video 0"
CONTAINERS = {
    "a.mp4": "libx264",
    "a.mov": "mpeg4",
    "a.mkv": "libx264",
    "a.webm": "libvpx",
    "a.avi": "mpeg4",
    "a.ts": "libx264",
}


def find(value: Any, folder: Path | None = None) -> MediaSource:
    return MediaSource.find("video", value, str(folder) if folder else None, NAME)


def frames_of(source: MediaSource, *indices: int) -> list[np.ndarray]:
    return read_frames(unpack_stills(source.read().data, NAME), NAME, indices, lambda frame: frame)


def numbers(frames: list[np.ndarray]) -> list[int]:
    return [frame_number(frame) for frame in frames]


@pytest.mark.parametrize("name", CONTAINERS)
def test_frames_of_every_container_are_those_asked_for(tmp_path: Path, name: str) -> None:
    source = find(str(film(tmp_path / name, 30, codec=CONTAINERS[name])))
    assert source.size() == VideoHeader(30, 10.0, (48, 64))
    assert numbers(frames_of(source, 0, 7, 8, 20, 29)) == [0, 7, 8, 20, 29]


def test_a_gif_is_a_video(tmp_path: Path) -> None:
    source = find(str(film(tmp_path / "a.gif", 6, codec="gif", pixels="rgb8")))
    assert source.size() == VideoHeader(6, 10.0, (48, 64))
    assert len(frames_of(source, 0, 5)) == 2


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_a_turned_video_is_upright(tmp_path: Path, turns: int) -> None:
    source = find(str(film(tmp_path / "a.mp4", 4, rotation=90 * turns)))
    expected = np.rot90(film_frames(4)[1], turns)
    header = source.size()
    assert isinstance(header, VideoHeader) and header.size == expected.shape[:2]
    (found,) = frames_of(source, 1)
    assert np.abs(found.astype(int) - expected).mean() < 8


def test_every_form_of_a_video_gives_its_bytes(tmp_path: Path) -> None:
    data = film(tmp_path / "a.mp4").read_bytes()
    forms = ("a.mp4", tmp_path / "a.mp4", data, {"bytes": data, "path": "gone.mp4"}, {"path": "a.mp4", "bytes": None})
    for value in forms:
        assert find(value, tmp_path).read().data == data


@pytest.mark.parametrize("cut", [0.3, 0.6])
def test_a_cut_video_is_an_error_and_never_filled_up(tmp_path: Path, cut: float) -> None:
    # An AVI has its header in front, so that it opens although its end is missing.
    data = film(tmp_path / "a.avi", 60, codec="mpeg4").read_bytes()
    source = find(data[: int(len(data) * cut)])
    with pytest.raises(PictureError, match=rf"{NAME}(, frame \d+: it is damaged|: it is cut: \d+ of|: .*or damaged)"):
        frames_of(source, 0, 30, 59)


def test_a_header_that_is_a_frame_off_is_no_error(tmp_path: Path) -> None:
    source = find(str(film(tmp_path / "a.mp4", 60)))
    assert numbers(frames_of(source, 0, 60)) == [0, 59 % 32]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"not a video", "row 3, video 0: not a video in a known format"),
        ("gone.mp4", "there is no file"),
        ([], "there are no pictures in it"),
        (["gone.png"], "row 3, video 0, frame 0: there is no file"),
        ("empty", "there are no pictures in it"),
        ("sound.wav", "there are no pictures in it|not a video"),
        ("list.m3u8", "not a video in a known format"),
        ("frames.zip", "an archive is no video"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, value: Any, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with wave.open(str(tmp_path / "sound.wav"), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(bytes(1600))
    # Opened by its path it would make the library fetch what it names.
    (tmp_path / "list.m3u8").write_text("#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nhttp://127.0.0.1:9/a.ts\n")
    with zipfile.ZipFile(tmp_path / "frames.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("0.png", bytes(10_000))
    with pytest.raises(PictureError, match=message):
        video_header(find(value, tmp_path).read().data, NAME)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "is a int; a video is bytes, a path"),
        ("0.png", r"is a picture\. Write the pictures of one video as a list of their own"),
        ({"frames": ["0.png"], "fps": 0}, "its fps is 0; it must be a number"),
        ({"frames": "a.mp4"}, "its frames must be a list of pictures"),
        ("https://example.com/a.mp4", "is a web address .*the videos' paths"),
    ],
)
def test_what_is_no_video_says_what_is(tmp_path: Path, value: Any, message: str) -> None:
    film(tmp_path / "a.mp4", 2)
    with pytest.raises(DataError, match=message):
        find(value, tmp_path)


def test_a_list_of_pictures_is_a_video(tmp_path: Path) -> None:
    for number in range(3):
        noise(20, 30, number).save(tmp_path / f"{number}.png")
    data = encoded(noise(20, 30, 3))
    source = find({"frames": ["0.png", "1.png", "2.png", {"bytes": data}], "fps": 4}, tmp_path)
    assert source.size() == VideoHeader(4, 4, (20, 30))
    assert source.files == [tmp_path / f"{number}.png" for number in range(3)]
    medium = source.read()
    assert video_header(medium.data, NAME) == source.size()
    for found, number in zip(frames_of(source, 0, 2, 3), (0, 2, 3), strict=True):
        assert np.array_equal(found, np.asarray(noise(20, 30, number)))


def test_a_folder_of_pictures_is_a_video_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "clip"
    folder.mkdir()
    for number in (0, 2, 10):
        noise(20, 30, number).save(folder / f"frame_{number}.jpg")
    (folder / "notes.txt").write_text("no picture")
    source = find("clip", tmp_path)
    assert isinstance(source.place, Stills)
    assert [path.name for path in source.place.frames if isinstance(path, Path)] == [
        "frame_0.jpg",
        "frame_2.jpg",
        "frame_10.jpg",
    ]
    assert folder in source.files  # a picture that is added changes it


def test_pictures_of_one_video_must_be_of_one_size(tmp_path: Path) -> None:
    source = find([{"bytes": encoded(noise(20, 30))}, {"bytes": encoded(noise(20, 31))}])
    with pytest.raises(PictureError, match=r"video 0, frame 1: 31x20, but frame 0 is 30x20"):
        frames_of(source, 0, 1)


def test_endless_videos_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = film(tmp_path / "a.mp4", 6)
    monkeypatch.setattr(video, "MAX_FRAMES", 5)
    with pytest.raises(PictureError, match="6 frames are more than the limit of 5"):
        find(str(path)).size()
    monkeypatch.undo()
    monkeypatch.setattr(video, "MAX_PIXELS", 100)
    with pytest.raises(PictureError, match="frames of 64x48 are more than 100 pixels"):
        find(str(path)).size()


def test_the_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = film(tmp_path / "a.mp4", 2)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DataError, match=r"needs the package av: `pip install 'foveal\[video\]'`"):
        find(str(path)).size()
    frames = [{"bytes": encoded(noise(8, 8))}]
    assert find(frames).size() == VideoHeader(1, None, (8, 8))


def test_frames_are_reduced_as_they_come(tmp_path: Path) -> None:
    source = find(str(film(tmp_path / "a.mp4", 30)))
    seen: list[int] = []
    read_frames(source.read().data, NAME, [0, 10, 10, 29], lambda frame: seen.append(1) or frame)  # type: ignore[func-returns-value]
    assert len(seen) == 3


@pytest.mark.parametrize("damage", ["encrypted", "fps"])
def test_an_archive_that_is_none_of_ours_is_named(damage: str) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.comment = b'{"fps": ["2"]}' if damage == "fps" else b'{"fps": 2}'
        archive.writestr(zipfile.ZipInfo("0"), encoded(noise(20, 20)))
    data = bytearray(buffer.getvalue())
    if damage == "encrypted":
        data[6] |= 1
        data[data.index(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(PictureError, match="an archive is no video"):
        video_header(bytes(data), NAME)
