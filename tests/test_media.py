"""Images and sounds in messages: what parts name, and that a row of a stranger opens no file but its own images."""

from __future__ import annotations

import base64
import builtins
import os
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints.processors import data_uri, picture
from fixtures.image_messages import SOUND

from draftkit.errors import DraftkitError
from draftkit.media import (
    MAX_BYTES,
    MAX_PIXELS,
    MediaFolder,
    Medium,
    RefusedMedia,
    for_servers,
    for_templates,
    image_file,
    media_of,
    medium_of,
    text_of,
)

URI = data_uri(picture())
TEXT = {"type": "text", "text": "What is it?"}


def image_part(place: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": place}}


NAMED = {
    "openai": (image_part("a.png"), Medium("image", "a.png")),
    "its text": ({"type": "image_url", "image_url": "a.png"}, Medium("image", "a.png")),
    "responses": ({"type": "input_image", "image_url": "http://x/a.png"}, Medium("image", "http://x/a.png")),
    "processors": ({"type": "image", "image": URI}, Medium("image", URI)),
    "sound": (SOUND, Medium("audio", "UklGRg==", "wav")),
    "text": (TEXT, None),
    "empty": ({"type": "image_url", "image_url": {"url": ""}}, None),
    "nothing": ({"type": "image_url"}, None),
    "decoded": ({"type": "image", "image": b"raw"}, None),
    "sound without format": ({"type": "input_audio", "input_audio": {"data": "UklGRg=="}}, None),
    "video": ({"type": "video_url", "video_url": {"url": "a.mp4"}}, None),
    "what is new": ({"type": "smell", "smell": "rose"}, None),
    "no type": ({"image_url": {"url": "a.png"}}, None),
}


@pytest.mark.parametrize("case", NAMED)
def test_what_a_part_names(case: str) -> None:
    part, expected = NAMED[case]
    assert medium_of(part) == expected


def test_messages_for_templates_and_servers(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    parts = [TEXT, image_part("a.png"), SOUND, image_part("https://host/b.png")]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts, "name": "x"}]
    assert [medium.place for medium in media_of(messages)] == ["a.png", "UklGRg==", "https://host/b.png"]
    shown = for_templates(messages)
    assert shown[1] == {
        "role": "user", "name": "x", "content": [TEXT, {"type": "image"}, {"type": "audio"}, {"type": "image"}],
    }  # fmt: skip
    sent = for_servers(messages, MediaFolder(tmp_path))
    assert sent[0] == messages[0]
    assert sent[1]["content"] == [TEXT, image_part(URI), SOUND, image_part("https://host/b.png")]
    assert parts[1] == image_part("a.png")
    assert [text_of(parts), text_of("a"), text_of(None)] == ["What is it?", "a", ""]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Data with an image beside them, another in a folder, and one elsewhere that no row may name."""
    inside = tmp_path / "data"
    (inside / "deep er").mkdir(parents=True)
    for place in (inside / "a.png", inside / "deep er" / "b.png", tmp_path / "secret.png"):
        place.write_bytes(picture())
    (inside / "link.png").symlink_to("a.png")
    (inside / "out.png").symlink_to(tmp_path / "secret.png")
    (inside / "up").symlink_to(tmp_path)
    (inside / "ring").symlink_to(inside / "ring")
    os.mkfifo(inside / "pipe")
    (inside / "text.png").write_text("no image")
    (inside / "truncated.png").write_bytes(picture()[:-60])
    return inside


def test_files_below_the_folder_are_read(folder: Path) -> None:
    files = MediaFolder(folder)
    places = ["a.png", "./deep er/../a.png", "deep er/b.png", "link.png", str(folder / "a.png"), "up/data/a.png"]
    places += [f"file://{folder}/deep%20er/b.png", f"file://localhost{folder}/a.png", f"FILE:{folder}/a.png", URI]
    for place in places:
        image = files.image(Medium("image", place))
        assert (image.format, image.width, image.height, image.data) == ("PNG", 56, 28, picture()), place


REFUSED = {
    "above": ("../secret.png", "not below the folder"),
    "absolute": ("/etc/passwd", "not below the folder"),
    "by a link": ("out.png", "not below the folder"),
    "through a link": ("up/secret.png", "not below the folder"),
    "absent": ("../none.png", "not below the folder"),
    "address of a file": ("file:///etc/passwd", "not below the folder"),
    "escaped": ("file:///%65tc/passwd", "not below the folder"),
    "of another machine": ("file://host/a.png", "on another machine, host"),
    "links in a ring": ("ring", "cannot be read"),
    "missing": ("none.png", "cannot be read: No such file"),
    "folder": (".", "Is a directory"),
    "pipe": ("pipe", "not a file"),
    "null byte": ("a\0.png", "cannot be read"),
    "too long": ("a" * 5000, "cannot be read: File name too long"),
    "text": ("text.png", "not an image of a known format"),
    "address": ("http://host/a.png", "never fetched here"),
    "secure address": ("HTTPS://host/a.png", "never fetched here"),
    "ftp": ("ftp://host/a.png", "neither a path"),
    "object store": ("s3://bucket/a.png", "neither a path"),
    "another type": (data_uri(picture(), "text/html"), "of text/html, not of an image"),
    "a sound's type": (data_uri(picture(), "audio/wav"), "of audio/wav"),
    "no type": ("data:;base64,AAAA", "of no type"),
    "not base64": ("data:image/png,AAAA", "not a data URI in base64"),
    "damaged base64": ("data:image/png;base64,A!A=", "base64 of the data URI is damaged"),
    "empty": ("data:image/png;base64,", "not an image of a known format"),
    "vector": ("data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(), "not an image of a known format"),
    "postscript": ("data:image/eps;base64," + base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n").decode(), "known format"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_why_and_names_the_place(case: str, folder: Path) -> None:
    place, why = REFUSED[case]
    with pytest.raises(RefusedMedia, match=why) as caught:
        MediaFolder(folder).image(Medium("image", place))
    assert str(caught.value).startswith(place[:80])
    assert len(str(caught.value)) < 300


def test_rows_that_lie_in_no_folder_name_no_files() -> None:
    with pytest.raises(RefusedMedia, match="--media-root says where they are"):
        MediaFolder(None).image(Medium("image", "a.png"))
    assert MediaFolder(None).image(Medium("image", URI)).data == picture()


def test_a_type_that_is_another_than_said_is_read_as_what_it_is() -> None:
    assert MediaFolder(None).image(Medium("image", data_uri(picture(), "image/jpeg"))).data_uri == URI


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG of a few bytes with a header of any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(50_000, 50_000), (10_000, 5_001), (MAX_PIXELS, 1), (2**31 - 1, 2)])
def test_a_bomb_is_refused_by_its_header(width: int, height: int) -> None:
    with pytest.raises(RefusedMedia, match=r"pixels, more than|more than 50,000,000 pixels"):
        image_file(png_that_claims(width, height))


def test_more_bytes_than_allowed_are_not_read(tmp_path: Path) -> None:
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.write(picture())
        file.truncate(MAX_BYTES + 1)
    for place in ("large.png", "data:image/png;base64," + "A" * (MAX_BYTES // 3 * 4 + 8)):
        with pytest.raises(RefusedMedia, match="more than 64 MB"):
            MediaFolder(tmp_path).image(Medium("image", place))


@pytest.mark.parametrize(
    "place", ["truncated.png", "data:image/png;base64," + base64.b64encode(png_that_claims(90, 90)).decode()]
)
def test_a_damaged_image_is_refused_when_it_is_decoded(place: str, folder: Path) -> None:
    with pytest.raises(RefusedMedia, match="the image is damaged"):
        MediaFolder(folder).image(Medium("image", place)).pixels()


def test_transparency_and_turned_photographs_are_read_as_vllm_reads_them() -> None:
    from PIL import Image

    def written(image: Image.Image, form: str, **more: Any) -> bytes:
        file = BytesIO()
        image.save(file, form, **more)
        return file.getvalue()

    clear = image_file(written(Image.new("RGBA", (4, 2), (255, 0, 0, 0)), "PNG")).pixels()
    assert (clear.mode, clear.getpixel((0, 0))) == ("RGB", (255, 255, 255))
    keyed = image_file(written(Image.new("RGB", (4, 2), (9, 8, 7)), "PNG", transparency=(9, 8, 7))).pixels()
    assert keyed.getpixel((0, 0)) == (255, 255, 255)
    turned = Image.Exif()
    turned[0x0112] = 6
    photograph = image_file(written(Image.new("RGB", (4, 2)), "JPEG", exif=turned))
    assert ((photograph.width, photograph.height), photograph.pixels().size) == ((4, 2), (2, 4))
    assert image_file(written(Image.new("P", (3, 3)), "GIF")).pixels().mode == "RGB"


@pytest.mark.parametrize("data", ["no base64!", "A" * (MAX_BYTES // 3 * 4 + 8)])
def test_sounds_are_checked_before_they_are_sent(data: str) -> None:
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    with pytest.raises(RefusedMedia, match="the sound"):
        for_servers([{"role": "user", "content": [part]}], MediaFolder(None))


def test_without_pillow_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.split(".")[0] == "PIL":
            raise ImportError(name)
        return found(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DraftkitError, match=r"Pillow, which is not installed\n  next: pip install '.*\[vision\]'"):
        MediaFolder(None).image(Medium("image", URI))
