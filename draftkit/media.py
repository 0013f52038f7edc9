"""Images and sounds in messages, as OpenAI's parts have them, and the files that such parts name.

Rows come from logs, so what a part names is not believed: files lie below one folder, symbolic links resolved, and are
bounded in bytes and pixels; nothing is fetched from the network. An address is only passed on to a server.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

from draftkit.errors import DraftkitError, FormatError
from draftkit.version import with_extra

if TYPE_CHECKING:
    from PIL.Image import Image

Modality = Literal["image", "audio"]
MAX_BYTES = 64 * 2**20
MAX_PIXELS = 50_000_000
MAX_SIDE = 65_535  # pixels, which JPEG ends at
# What Pillow decodes by itself: PostScript runs another program, and rare formats are old code. With the MIME types.
FORMATS = {
    "PNG": "image/png", "JPEG": "image/jpeg", "MPO": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif",
    "BMP": "image/bmp", "TIFF": "image/tiff",
}  # fmt: skip
DATA_URI = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(;[\w.+=-]+)*?(?P<base64>;base64)?,", re.ASCII | re.IGNORECASE)
SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:", re.ASCII | re.IGNORECASE)
# What each kind of part keeps its image in, and in which key of that, where it is an object: OpenAI's two interfaces,
# and what processors of transformers take.
IMAGE_PARTS = {"image_url": "image_url", "input_image": "image_url", "image": "image"}
SHOWN = 80  # letters of a place


class RefusedMedia(FormatError):
    """An image or a sound that cannot be used, with the reason."""


@dataclass(frozen=True, order=True, slots=True)
class MediaSpan:
    """Consecutive tokens of a sample that stand for a part: `length` from `start` on. `index` numbers the parts of the
    `modality` in the conversation, from 0; one that is cut into tiles has several spans."""

    start: int
    length: int
    modality: Modality
    index: int


@dataclass(frozen=True)
class Medium:
    """An image or a sound as a message names it. `place`: a path, an address or a data URI; of a sound its base64."""

    modality: Modality
    place: str
    format: str | None = None

    @property
    def is_remote(self) -> bool:
        """Whether it lies on the network, from where it is never fetched here."""
        return self.place[:8].lower().startswith(("http://", "https://"))

    @property
    def is_here(self) -> bool:
        """Whether it is an image that is read here, by whatever has its pixels."""
        return self.modality == "image" and not self.is_remote

    @property
    def shown(self) -> str:
        """The place as messages name it, at most `SHOWN` letters of it."""
        return self.place if len(self.place) <= SHOWN else f"{self.place[:SHOWN]}…"


@dataclass(frozen=True)
class FiledMedium:
    """An image that was read: its place as the row names it, and the digest of the file's bytes."""

    place: str
    sha256: str


@dataclass(frozen=True)
class ShownImages:
    """The images of a prompt, and the tokens of it that stand for them."""

    files: tuple[ImageFile, ...]
    spans: tuple[MediaSpan, ...]


def medium_of(part: Mapping[str, Any]) -> Medium | None:
    """What a part of a message names; None for one that is text, of another kind, or without anything in it."""
    kind = part.get("type")
    if kind == "input_audio":
        sound = part.get("input_audio")
        data, form = (sound.get("data"), sound.get("format")) if isinstance(sound, Mapping) else (None, None)
        return Medium("audio", data, form) if isinstance(data, str) and data and isinstance(form, str) else None
    if not isinstance(kind, str) or kind not in IMAGE_PARTS:
        return None
    held = part.get(IMAGE_PARTS[kind])
    place = held.get("url") if isinstance(held, Mapping) else held
    return Medium("image", place) if isinstance(place, str) and place else None


def openai_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part that names a medium, in the words of OpenAI's chat completions."""
    kind = part["type"]
    if kind in ("image_url", "input_audio") and isinstance(part[kind], Mapping):
        return {"type": kind, kind: dict(part[kind])}
    found = medium_of(part)
    assert found is not None
    return {"type": "image_url", "image_url": {"url": found.place}}


def parts_of(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The parts of messages whose content is no plain text, in their order."""
    contents = (message.get("content") for message in messages)
    return [part for content in contents if isinstance(content, list | tuple) for part in content]


def media_of(messages: Iterable[Mapping[str, Any]]) -> list[Medium]:
    """The images and sounds of messages, in their order."""
    return [medium for part in parts_of(messages) if (medium := medium_of(part)) is not None]


def text_of(content: object) -> str:
    """The text of a message's content, that of its parts joined line by line as vLLM joins it."""
    if isinstance(content, list | tuple):
        return "\n".join(str(part["text"]) for part in content if part.get("type") == "text")
    return "" if content is None else str(content)


def _changed(
    messages: Iterable[Mapping[str, Any]], change: Callable[[Mapping[str, Any], Medium], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The messages, with each part that names a medium replaced by what `change` makes of both."""
    changed = [dict(message) for message in messages]
    for message in changed:
        if isinstance(message.get("content"), list | tuple):
            media = [(part, medium_of(part)) for part in message["content"]]
            message["content"] = [part if medium is None else change(part, medium) for part, medium in media]
    return changed


def for_templates(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates know them, where a part says no more than what kind of medium stands there."""
    return _changed(messages, lambda _, medium: {"type": medium.modality})


@dataclass(frozen=True)
class ImageFile:
    """The bytes of an image whose header has been read: its `format` as Pillow names it and its size in pixels."""

    data: bytes
    format: str
    width: int
    height: int

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def data_uri(self) -> str:
        """The image as servers take it."""
        return f"data:{FORMATS[self.format]};base64,{base64.b64encode(self.data).decode()}"

    def pixels(self) -> Image:
        """The decoded image in RGB, turned as its EXIF data say and without transparency on white, as vLLM reads it.

        Raises `RefusedMedia` for one that is damaged.
        """
        from PIL import Image, ImageOps

        try:
            with _opened(self.data) as image:
                image.load()
                upright: Image.Image = image
                with suppress(Exception):  # EXIF data that cannot be read turn nothing
                    upright = ImageOps.exif_transpose(image)
                if upright.mode == "RGB" and "transparency" not in upright.info:
                    return upright.copy()
                if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
                    above = upright.convert("RGBA")
                    whole = Image.new("RGB", above.size, (255, 255, 255))
                    whole.paste(above, mask=above.getchannel("A"))
                    return whole
                return upright.convert("RGB")
        except Exception as error:  # damaged files fail in many types, within any of Pillow's decoders
            raise RefusedMedia(f"the image is damaged: {_first_line(error)}") from error


@dataclass(frozen=True)
class MediaFolder:
    """The folder below which the files of images lie, None where no file may be read. Relative paths begin there."""

    folder: Path | None

    def image(self, medium: Medium) -> ImageFile:
        """The image that a part names, with its header read.

        Raises `RefusedMedia` for an address, for a file that lies elsewhere or cannot be read, and for what is no image
        of a known format within the bounds; `DraftkitError` where Pillow is not installed.
        """
        require_pillow()
        try:
            return image_file(self._bytes(medium))
        except RefusedMedia as error:
            error.args = (f"{medium.shown}: {error}",)
            raise

    def _bytes(self, medium: Medium) -> bytes:
        place = medium.place
        if medium.is_remote:
            raise RefusedMedia("an address is never fetched here, only passed on to a server")
        if place[:5].lower() == "data:":
            return _embedded(place)
        if place[:5].lower() == "file:":
            address = urlsplit(place)
            if address.netloc not in ("", "localhost"):
                raise RefusedMedia(f"the file is on another machine, {address.netloc}")
            place = unquote(address.path)
        elif SCHEME.match(place):
            raise RefusedMedia("neither a path nor an http address nor a data URI")
        return self._file(place)

    def _file(self, name: str) -> bytes:
        if self.folder is None:
            raise RefusedMedia("rows that lie in no folder name no files; --media-root says where they are")
        try:
            root = self.folder.resolve(strict=True)
            path = (root / name).resolve()
            if not path.is_relative_to(root):
                raise RefusedMedia("the file is not below the folder of the data; --media-root names another")
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise RefusedMedia("not a file")
                return _bounded(file.read(MAX_BYTES + 1))
        except (OSError, ValueError, RuntimeError) as error:  # a missing file, a name with a null byte, links in a ring
            reason = error.strerror if isinstance(error, OSError) and error.strerror else _first_line(error)
            raise RefusedMedia(f"the file cannot be read: {reason}") from error


def _embedded(uri: str) -> bytes:
    """The bytes of an image in a data URI."""
    head = DATA_URI.match(uri[:200])
    if head is None or head["base64"] is None:
        raise RefusedMedia("not a data URI in base64, as data:image/png;base64,…")
    if not (head["type"] or "").lower().startswith("image/"):
        raise RefusedMedia(f"the data URI is of {head['type'] or 'no type'}, not of an image")
    if (len(uri) - head.end()) // 4 * 3 > MAX_BYTES + 3:
        raise RefusedMedia(TOO_LARGE)
    try:
        return _bounded(base64.b64decode(uri[head.end() :], validate=True))
    except (binascii.Error, ValueError) as error:
        raise RefusedMedia(f"the base64 of the data URI is damaged: {error}") from error


TOO_LARGE = f"the image has more than {MAX_BYTES >> 20} MB"


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_BYTES:
        raise RefusedMedia(TOO_LARGE)
    return data


def image_file(data: bytes) -> ImageFile:
    """The image in bytes, of which only the header is read. Raises `RefusedMedia`."""
    try:
        with _opened(data) as image:
            width, height, form = image.width, image.height, str(image.format)
    except Exception as error:  # what is no image fails in many types
        if type(error).__name__ == "DecompressionBombError":  # Pillow's, of more than twice its own bound
            raise RefusedMedia(f"the image has more than {MAX_PIXELS:,} pixels") from error
        raise RefusedMedia(f"not an image of a known format ({', '.join(sorted(FORMATS))})") from error
    if width * height > MAX_PIXELS or not 0 < min(width, height) <= max(width, height) <= MAX_SIDE:
        raise RefusedMedia(f"the image has {width:,} × {height:,} pixels, more than {MAX_PIXELS:,}")
    return ImageFile(data, form, width, height)


def _opened(data: bytes) -> Image:
    """The image in bytes, not yet decoded; Pillow's own bound on pixels is above ours."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Image.init()  # else it knows the most common formats alone
        return Image.open(BytesIO(data), formats=[name for name in FORMATS if name in Image.OPEN])


def require_pillow() -> None:
    """Raise `DraftkitError` where Pillow, which reads images, is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise DraftkitError("images are read with Pillow, which is not installed", hint=with_extra("vision")) from error


def for_servers(messages: Sequence[Mapping[str, Any]], folder: MediaFolder) -> list[dict[str, Any]]:
    """Messages as servers of OpenAI's interface take them: images in files become data URIs, after they were checked;
    addresses and sounds are passed on. Raises as `MediaFolder.image`."""

    def change(part: Mapping[str, Any], medium: Medium) -> dict[str, Any]:
        said = openai_part(part)
        if medium.modality == "audio":
            _check_sound(medium)
        elif not medium.is_remote:
            said["image_url"]["url"] = folder.image(medium).data_uri
        return said

    return _changed(messages, change)


def _check_sound(sound: Medium) -> None:
    """Raise `RefusedMedia` for a sound that is too large, or no base64."""
    if len(sound.place) // 4 * 3 > MAX_BYTES:
        raise RefusedMedia(f"the sound has more than {MAX_BYTES >> 20} MB")
    try:
        base64.b64decode(sound.place, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RefusedMedia(f"the base64 of the sound is damaged: {error}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0]
