"""Pictures of strangers: what is read, and that all else is an error in bounded memory."""

from __future__ import annotations

import base64
import http.server
import io
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from infinilm.errors import RequestError
from infinilm.images import MediaRules, open_image

RULES = MediaRules(max_bytes=1 << 20, max_source_pixels=1 << 20)
PICTURE = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png() -> bytes:
    return encoded(Image.fromarray(PICTURE))


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def test_all_ways_to_pass_a_picture(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    sources = [PICTURE, Image.fromarray(PICTURE), png(), bytearray(png()), data_url(png()), tmp_path / "a.png"]
    for source in sources:
        np.testing.assert_array_equal(open_image(source, "it", RULES), PICTURE)
    np.testing.assert_array_equal(open_image(str(tmp_path / "a.png"), "it", RULES, may_be_path=True), PICTURE)


def test_transparent_pictures_lie_over_white() -> None:
    clear = np.dstack([PICTURE, np.zeros((5, 7), np.uint8)])
    for source in (clear, Image.fromarray(clear), encoded(Image.fromarray(clear))):
        assert (open_image(source, "it", RULES) == 255).all()
    palette = Image.new("P", (2, 2), 0)
    palette.info["transparency"] = 0
    assert (open_image(palette, "it", RULES) == 255).all()


def test_grey_and_other_modes_become_rgb() -> None:
    grey = PICTURE[..., 0]
    for source in (grey, encoded(Image.fromarray(grey))):
        np.testing.assert_array_equal(open_image(source, "it", RULES), np.repeat(grey[..., None], 3, axis=2))
    cmyk = Image.fromarray(PICTURE).convert("CMYK")
    np.testing.assert_array_equal(open_image(cmyk, "it", RULES), np.asarray(cmyk.convert("RGB")))


def test_a_picture_is_turned_as_its_exif_data_say() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    shown = open_image(encoded(Image.fromarray(PICTURE), exif=exif), "it", RULES)
    np.testing.assert_array_equal(shown, np.rot90(PICTURE, -1))


def bomb() -> bytes:
    """A PNG of 50,000 x 50,000 pixels in a few bytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    head = (50000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def _animated() -> bytes:
    frames = [Image.new("L", (4, 4), shade) for shade in (0, 99, 200)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (bomb(), "2500000000 pixels|50000 x 50000"),
        (png()[:-30], "no picture that can be read"),
        (png()[:20], "no picture that can be read"),
        (b"", "no picture that can be read"),
        (b"<svg/>", "no picture that can be read"),
        (bytes(2 << 20), "more than 1048576 bytes"),
        (_animated(), "animated"),
        (encoded(Image.fromarray(np.arange(12, dtype=np.uint16).reshape(3, 4) * 5000)), "8 bits"),
        (np.zeros((3, 4), np.float32), "float32"),
        (np.zeros((0, 4, 3), np.uint8), "uint8"),
        (np.zeros((3, 4, 2), np.uint8), "uint8"),
        (np.zeros((2000, 2000, 3), np.uint8), "2000 x 2000 pixels"),
        (None, "NoneType"),
        (7, "int"),
        ("picture.png", "begins with 'data:"),
        ("data:image/png,abc", "base64"),
        ("data:image/png;base64,a*b=", "base64"),
        (data_url(bytes(2 << 20)), "bytes"),
        ("file:///etc/passwd", "--allowed-media-path"),
        ("https://example.com/a.png", "--allowed-media-hosts"),
        (Path("/nothing/here.png"), "no file"),
        (Path("/dev/zero"), "dev/zero"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_names_it(source: Any, told: str) -> None:
    with pytest.raises(RequestError, match=f"picture 3.*({told})"):
        open_image(source, "picture 3", RULES)


def test_files_below_the_allowed_folder_alone(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out.png"
    inside.mkdir()
    (inside / "a b.png").write_bytes(png())
    outside.write_bytes(png())
    (inside / "link.png").symlink_to(outside)
    rules = MediaRules(allowed_path=inside)
    np.testing.assert_array_equal(open_image(f"file://{inside}/a%20b.png", "it", rules), PICTURE)
    for address in (f"file://{outside}", f"file://{inside}/../out.png", f"file://{inside}/link.png"):
        with pytest.raises(RequestError, match="not below"):
            open_image(address, "it", rules)
    with pytest.raises(RequestError, match="file:///folder"):
        open_image(f"file://elsewhere{inside}/a.png", "it", rules)


@pytest.fixture
def host() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/away":
                self.send_response(302)
                self.send_header("Location", "http://localhost:1/a.png")
                self.end_headers()
                return
            content = png() if self.path == "/a.png" else bytes(2 << 20)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_pictures_of_allowed_hosts_alone_are_fetched(host: str) -> None:
    rules = MediaRules(allowed_hosts=("127.0.0.1",), max_bytes=1 << 20)
    np.testing.assert_array_equal(open_image(f"{host}/a.png", "it", rules), PICTURE)
    with pytest.raises(RequestError, match="'localhost' are not fetched"):
        open_image(f"{host}/away", "it", rules)
    with pytest.raises(RequestError, match="more than"):
        open_image(f"{host}/large", "it", rules)
    with pytest.raises(RequestError, match="cannot be fetched"):
        open_image("http://127.0.0.1:1/a.png", "it", rules)
