"""Reads pictures of strangers: as [height, width, 3] uint8, in bounded memory, or an error that says what is wrong.

Pillow decodes pictures. One that its EXIF data turn is turned, one that is transparent lies over white, and all other
modes are converted to RGB as transformers does it. The formats are those of web pages. A picture of several frames, or
with more than 8 bits a channel, is refused, since it could be read in several ways.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt

from infinilm.errors import ConfigError, RequestError
from infinilm.extras import how_to_install
from infinilm.files import read_bytes

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["ImageArray", "MediaRules", "hash_of_pixels", "open_image", "shrink"]

ImageArray = npt.NDArray[np.uint8]  # [height, width, 3]

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_EIGHT_BITS = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV", "LAB"})
_DATA_URL = re.compile(r"data:(?P<type>[^;,]*)(?P<parameters>(?:;[^,;]*)*),", re.ASCII)
_FETCH_SECONDS = 20


@dataclass(frozen=True, slots=True)
class MediaRules:
    """What pictures may be, and where addresses in messages may lead.

    Attributes
    ----------
    allowed_path : Path or None
        Addresses `file:` may name files below this folder; None: none may.
    allowed_hosts : tuple of str
        Addresses `https:` and `http:` may name these hosts, and no others.
    max_bytes : int
        Bytes of a picture as it comes.
    max_source_pixels : int
        Pixels of a picture before it is resized: decoding takes three or four bytes for each.
    max_images : int
        Pictures of one prompt.
    """

    allowed_path: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    max_bytes: int = 32 << 20
    max_source_pixels: int = 100 << 20
    max_images: int = 64


def open_image(source: Any, name: str, rules: MediaRules, *, may_be_path: bool = False) -> ImageArray:
    """Read a picture.

    Parameters
    ----------
    source : PIL.Image.Image, array of uint8, bytes, Path, or str
        An array is [height, width], [height, width, 3] or [height, width, 4]. A str is an address: `data:`, or what
        the rules allow.
    name : str
        Names the picture in errors.
    rules : MediaRules
    may_be_path : bool
        A str that is no address is the path of a file.

    Returns
    -------
    numpy.ndarray
        [height, width, 3] uint8.

    Raises
    ------
    RequestError
        It cannot be read, or is not allowed.
    ConfigError
        Pillow is not installed.
    """
    with _pillow() as pil:
        if isinstance(source, (str, os.PathLike)):
            source = _content(source, name, rules, may_be_path)
        if isinstance(source, (bytes, bytearray, memoryview)):
            return _decode(pil, bytes(source), name, rules)
        if isinstance(source, pil.Image):
            _check_size(source.size, name, rules)
            return _as_rgb(pil, source, name)
        array = np.asarray(source) if hasattr(source, "__array__") else None
        if array is None or array.dtype != np.uint8 or not _is_picture(array.shape):
            got = type(source).__name__ if array is None else f"{array.dtype} {list(array.shape)}"
            raise RequestError(
                f"{name}: expected a picture of Pillow, an array of uint8 [height, width, 3], bytes, a path or an "
                f"address such as 'data:image/png;base64,...'; got {got}"
            )
        _check_size((array.shape[1], array.shape[0]), name, rules)
        if array.ndim == 3 and array.shape[2] == 3:
            return np.ascontiguousarray(array)
        return _as_rgb(pil, pil.fromarray(array), name)


def shrink(image: ImageArray, longest: int) -> ImageArray:
    """A picture [height, width, 3] whose longer side has so many pixels at most, in the same ratio."""
    height, width = image.shape[:2]
    factor = longest / max(height, width)
    if factor >= 1:
        return image
    with _pillow() as pil:
        size = (max(1, round(width * factor)), max(1, round(height * factor)))
        return np.asarray(pil.fromarray(image).resize(size, resample=pil.Resampling.BICUBIC))


def _is_picture(shape: tuple[int, ...]) -> bool:
    return min(shape, default=0) > 0 and (len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4)))


@contextmanager
def _pillow() -> Iterator[Any]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(f"pictures are read by Pillow, which is not installed: {how_to_install('vision')}") from error
    yield Image


def _content(source: str | os.PathLike[str], name: str, rules: MediaRules, may_be_path: bool) -> bytes:
    """The bytes that a path or an address stands for."""
    if not isinstance(source, str):
        return _file(Path(source), name, rules)
    if match := _DATA_URL.match(source):
        return _decoded(source, match, name, rules)
    scheme = source[:8].partition(":")[0].lower()
    if scheme == "file":
        return _file(_allowed_file(source, name, rules), name, rules)
    if scheme in ("http", "https"):
        return _fetched(source, name, rules)
    if may_be_path:
        return _file(Path(source).expanduser(), name, rules)
    raise RequestError(f"{name}: expected an address that begins with 'data:image/...;base64,', got {source[:40]!r}")


def _decoded(source: str, match: re.Match[str], name: str, rules: MediaRules) -> bytes:
    if not match["parameters"].endswith(";base64"):
        raise RequestError(f"{name}: a data: address of a picture has base64 behind it, as in 'data:image/png;base64,'")
    encoded = source[match.end() :]
    if len(encoded) // 4 * 3 > rules.max_bytes + 3:
        raise RequestError(f"{name} has more than {rules.max_bytes} bytes: send a smaller picture")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{name}: what follows 'base64,' is not valid base64: {error}") from None


def _allowed_file(source: str, name: str, rules: MediaRules) -> Path:
    parts = urlsplit(source)
    path = Path(unquote(parts.path))
    root = rules.allowed_path
    if root is None:
        raise RequestError(f"{name}: addresses file: are not read here; --allowed-media-path names a folder of such")
    if parts.netloc not in ("", "localhost") or not path.is_absolute():
        raise RequestError(f"{name}: expected an address such as 'file:///folder/picture.png', got {source[:80]!r}")
    resolved = path.resolve()
    if not resolved.is_relative_to(root.resolve()):  # links were followed
        raise RequestError(f"{name}: {path} is not below the folder that --allowed-media-path names")
    return resolved


def _file(path: Path, name: str, rules: MediaRules) -> bytes:
    try:
        return read_bytes(path, limit=rules.max_bytes)
    except FileNotFoundError:
        raise RequestError(f"{name}: there is no file {str(path)!r}") from None
    except ConfigError as error:
        raise RequestError(f"{name}: {error}") from None


def _fetched(source: str, name: str, rules: MediaRules) -> bytes:
    """Fetch a picture of an allowed host; every redirection is checked as the address was."""
    import urllib.error
    import urllib.request

    def check(address: str) -> None:
        host = (urlsplit(address).hostname or "").lower()
        if host not in rules.allowed_hosts or urlsplit(address).scheme not in ("http", "https"):
            allowed = f"those of {', '.join(rules.allowed_hosts)} are" if rules.allowed_hosts else "none is"
            raise RequestError(
                f"{name}: pictures of the host {host[:80]!r} are not fetched ({allowed}); send it as "
                "'data:image/...;base64,', or name the host in --allowed-media-hosts"
            )

    class Redirections(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
            check(newurl)
            return super().redirect_request(req, fp, code, msg, headers, newurl)

    check(source)
    try:
        opener = urllib.request.build_opener(Redirections(), urllib.request.ProxyHandler({}))
        with opener.open(source, timeout=_FETCH_SECONDS) as response:
            content: bytes = response.read(rules.max_bytes + 1)
    except RequestError:
        raise
    except (OSError, ValueError) as error:  # URLError is an OSError
        raise RequestError(f"{name}: {source[:200]} cannot be fetched: {error}") from None
    if len(content) > rules.max_bytes:
        raise RequestError(f"{name} has more than {rules.max_bytes} bytes: send a smaller picture")
    return content


def _check_size(size: tuple[int, int], name: str, rules: MediaRules) -> None:
    if size[0] * size[1] > rules.max_source_pixels:
        raise RequestError(
            f"{name} has {size[0]} x {size[1]} pixels; {rules.max_source_pixels} may there be: send a smaller one"
        )


def hash_of_pixels(image: ImageArray) -> str:
    """SHA-256 of a picture's height, width and RGB values: the same for all files that show the same."""
    height, width, _ = image.shape
    return hashlib.sha256(f"{height} {width} ".encode() + np.ascontiguousarray(image).tobytes()).hexdigest()


def _decode(pil: Any, content: bytes, name: str, rules: MediaRules) -> ImageArray:
    if len(content) > rules.max_bytes:
        raise RequestError(f"{name} has more than {rules.max_bytes} bytes: send a smaller picture")
    try:
        with pil.open(io.BytesIO(content), formats=_FORMATS) as image:
            _check_size(image.size, name, rules)
            if getattr(image, "n_frames", 1) > 1:
                raise RequestError(f"{name} is animated; send one of its {image.n_frames} frames as a picture")
            image.load()
            return _as_rgb(pil, image, name)
    except RequestError:
        raise
    except Exception as error:  # decoders raise anything on damaged files
        raise RequestError(
            f"{name} is no picture that can be read ({', '.join(_FORMATS)}): {type(error).__name__}: {error!s:.200}"
        ) from None


def _as_rgb(pil: Any, image: Image.Image, name: str) -> ImageArray:
    from PIL import ImageOps

    if image.mode not in _EIGHT_BITS:
        raise RequestError(
            f"{name} has pixels of the mode {image.mode!r}; expected 8 bits a channel: convert it to RGB"
        )
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        over = image.convert("RGBA")
        image = pil.new("RGBA", over.size, "white")
        image.alpha_composite(over)
    return np.array(image.convert("RGB"))
