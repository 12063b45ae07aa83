from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from foveal.data import images
from foveal.data.images import PictureError, decode_image, locate, media_values, picture_size, to_media
from foveal.data.video import locate_video
from foveal.errors import DataError
from tests.data_support import encoded, noise


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(decode_image(data, "x"))


@pytest.mark.parametrize("value", [None, [], [None], "", [""], [{"bytes": None, "path": None}], "[]", float("nan")])
def test_ways_to_have_no_picture(value: object) -> None:
    assert media_values(value, "row 0") == []


@pytest.mark.parametrize("value", ["a.png", ["a.png"], ["a.png", None], '["a.png"]'])
def test_ways_to_have_one_picture(value: object) -> None:
    assert media_values(value, "row 0") == ["a.png"]


def test_every_form_of_a_picture_gives_its_bytes(tmp_path: Path) -> None:
    data = encoded(noise(8, 8))
    (tmp_path / "a.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    for value in (
        data,
        {"bytes": data, "path": "gone.png"},
        {"bytes": None, "path": "a.png"},
        {"bytes": text, "path": None},
        "a.png",
        text,
        f"data:image/png;base64,{text}",
    ):
        assert to_media(*locate(value, str(tmp_path), "row 0, image 0")).data == data


def test_pil_picture_keeps_its_pixels() -> None:
    picture = noise(8, 9)
    assert np.array_equal(pixels(to_media(*locate(picture, None, "x")).data), np.asarray(picture))


def test_missing_file_names_row_and_path(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match=r"row 3, image 1: there is no file .*gone\.png"):
        locate("gone.png", str(tmp_path), "row 3, image 1")


@pytest.mark.parametrize("noun", ["picture", "video"])
def test_a_name_that_begins_like_a_home_folder_is_a_name(noun: str) -> None:
    find = locate if noun == "picture" else locate_video
    with pytest.raises(PictureError, match=r"row 3.*there is no file ~nobody-has-this-name\.bin"):
        find("~nobody-has-this-name.bin", None, "row 3")


def test_an_address_of_a_file_here_is_its_path(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    assert locate(f"file://{tmp_path / 'a.png'}", None, "row 3")[0] == tmp_path / "a.png"


def test_web_address_is_refused() -> None:
    with pytest.raises(DataError, match=r"row 0, image 0 is a web address.*allow_urls=true"):
        locate("https://example.com/a.png", None, "row 0, image 0")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(kind: str, orientation: int) -> None:
    stored = noise(4, 6).resize((60, 40), Image.Resampling.BICUBIC)
    stored.getexif()[0x0112] = orientation
    data = encoded(stored, kind, exif=stored.getexif())
    upright = np.asarray(ImageOps.exif_transpose(stored), dtype=float)
    assert picture_size(data, "x") == upright.shape[:2]
    assert pixels(data).shape == upright.shape
    assert np.abs(pixels(data) - upright).mean() < 10


def test_transparency_is_laid_on_white() -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert (pixels(encoded(clear)) == 255).all()
    assert abs(int(pixels(encoded(half))[0, 0, 0]) - 127) <= 1


def test_palette_transparency_is_laid_on_white() -> None:
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((0, 0), 1)
    out = pixels(encoded(palette, transparency=0))
    assert out[1, 1].tolist() == [255, 255, 255]
    assert out[0, 0].tolist() == [40, 50, 60]


def test_sixteen_bit_grey_is_scaled_not_clipped() -> None:
    ramp = np.array([[0, 300, 32768, 65535]], dtype=np.uint16)
    assert pixels(encoded(Image.fromarray(ramp)))[0, :, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "CMYK"])
def test_other_modes_become_rgb(mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    white = Image.new("RGB", (8, 8), "white").convert(mode)
    assert (pixels(encoded(white, kind)) >= 254).all()


def test_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert pixels(data)[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize(("kind", "options"), [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("BMP", {})])
def test_cut_file_is_an_error_and_never_padded(kind: str, options: dict) -> None:
    data = encoded(noise(64, 64), kind, **options)[:-200]
    assert picture_size(data, "x") == (64, 64)
    with pytest.raises(PictureError, match=r"row 2, image 0 \(cut\): .*truncated"):
        decode_image(data, "row 2, image 0 (cut)")


def test_text_is_no_picture() -> None:
    with pytest.raises(PictureError, match="not a picture"):
        picture_size(b"hello", "x")


def test_too_many_pixels_are_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    with pytest.raises(PictureError, match="20x10 is more than the limit of 100 pixels"):
        picture_size(encoded(noise(10, 20)), "x")


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_large_picture_is_brought_to_the_models_size(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    smooth = noise(6, 9).resize((900, 600), Image.Resampling.BICUBIC)
    data = encoded(smooth, kind)
    monkeypatch.setattr(images, "SHRINK_ABOVE", 1000)
    asked = []

    def target(size: tuple[int, int]) -> tuple[int, int]:
        asked.append(size)
        return 56, 84

    out = decode_image(data, "x", target)
    assert asked == [(600, 900)]
    assert out.size == (84, 56)
    plain = np.asarray(smooth.resize((84, 56), Image.Resampling.BICUBIC), dtype=float)
    assert np.abs(np.asarray(out, dtype=float) - plain).mean() < 3


def test_large_turned_picture_is_upright(monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    monkeypatch.setattr(images, "SHRINK_ABOVE", 1000)
    out = decode_image(encoded(noise(60, 90), "JPEG", exif=exif), "x", lambda size: (size[0] // 3, size[1] // 3))
    assert out.size == (20, 30)


def test_broken_base64_is_unreadable() -> None:
    with pytest.raises(PictureError, match="row 3, image 0: not valid base64"):
        locate("iVBORw0KGgo" * 10 + "A", None, "row 3, image 0")


def test_a_text_that_is_too_long_for_a_path_says_how_base64_begins() -> None:
    with pytest.raises(PictureError, match=r"is no path: File name too long.*data:image/png;base64,"):
        locate("x" * 1000, None, "row 3, image 0")


def test_a_dict_that_holds_no_picture_is_an_error_and_not_no_picture() -> None:
    values = media_values([{"url": "a.png"}, {"bytes": None, "path": None}], "row 0")
    assert values == [{"url": "a.png"}]
    with pytest.raises(DataError, match="row 0, image 0 is a dict; a picture is bytes"):
        locate(values[0], None, "row 0, image 0")


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_an_animation_is_said_once(kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(images, "_said_animated", False)
    data = encoded(noise(8, 8), kind, save_all=True, append_images=[noise(8, 8, 1), noise(8, 8, 2)])
    for _ in range(3):
        decode_image(data, "row 3, image 0")
    assert capsys.readouterr().out.count("row 3, image 0: an animation") == 1


def test_numbers_without_a_range_are_refused() -> None:
    for pixels_of in (np.full((4, 4), 70_000, np.int32), np.ones((4, 4), np.float32)):
        with pytest.raises(PictureError, match=r"row 0, image 0: .*no defined range"):
            decode_image(encoded(Image.fromarray(pixels_of), "TIFF"), "row 0, image 0")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "CMYK", "I;16", "L"])
def test_large_pictures_of_every_mode_look_as_small_ones_do(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    smooth = noise(6, 9).resize((90, 60), Image.Resampling.BICUBIC)
    if mode == "I;16":
        picture = Image.fromarray(np.asarray(smooth.convert("L")).astype(np.uint16) * 257)
    else:
        picture = smooth.convert(mode)
    data = encoded(picture, "TIFF" if mode == "CMYK" else "PNG")
    plain = decode_image(data, "x").resize((30, 20), Image.Resampling.BICUBIC)
    monkeypatch.setattr(images, "SHRINK_ABOVE", 100)
    shrunk = decode_image(data, "x", lambda size: (20, 30))
    assert np.abs(np.asarray(shrunk, dtype=float) - np.asarray(plain, dtype=float)).mean() < 3


def test_a_rule_that_would_change_its_own_result_shrinks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "SHRINK_ABOVE", 100)
    assert decode_image(encoded(noise(30, 40)), "x", lambda size: None).size == (40, 30)


def test_postscript_is_no_picture() -> None:
    """For it Pillow starts Ghostscript, on whatever stands in the file."""
    with pytest.raises(PictureError, match="not a picture in a known format"):
        decode_image(encoded(noise(8, 8), "EPS"), "x")


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
def test_damaged_exif_leaves_the_picture_as_it_is_stored(kind: str) -> None:
    data = encoded(noise(40, 60), kind, exif=b"Exif\0\0garbage")
    assert picture_size(data, "p") == (40, 60)
    assert decode_image(data, "p").size == (60, 40)
