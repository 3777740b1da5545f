"""Files that tests make themselves: PDFs written by hand, images of every kind, and broken ones of each.

- pdf, one_page, owner_encrypted: PDFs from their objects
- picture, written: a small page in every format that Pillow writes; BOMBS: headers that claim far too much
- sabotaged, full_disk: what a worker process is started with to fail at chosen files
- command: the real command, what it said and wrote
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

import ocr

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(__file__).resolve().parent / "data"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


# ---- PDFs


def pdf(objects: Mapping[int, str | bytes], trailer: str = "/Root 1 0 R", header: bytes = b"%PDF-1.7\n") -> bytes:
    """A PDF of these objects with a right cross-reference table."""
    out = bytearray(header)
    places = {}
    for number, body in objects.items():
        places[number] = len(out)
        out += b"%d 0 obj\n" % number + (body.encode("latin-1") if isinstance(body, str) else body) + b"\nendobj\n"
    size = max(objects) + 1
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % size
    for number in range(1, size):
        out += b"%010d 00000 n \n" % places[number] if number in places else b"0000000000 65535 f \n"
    out += b"trailer\n<< /Size %d %s >>\nstartxref\n%d\n%%%%EOF\n" % (size, trailer.encode("latin-1"), start)
    return bytes(out)


def stream(data: bytes, more: str = "") -> bytes:
    return b"<< /Length %d %s >>\nstream\n" % (len(data), more.encode()) + data + b"\nendstream"


FONT = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"


def one_page(
    text: str = "A page of text",
    *,
    box: str = "0 0 300 400",
    page: str = "",
    root: str = "",
    pages: int = 1,
    **more: Any,
) -> bytes:
    """A PDF of `pages` pages that show a line of text each. `page` and `root` go into those dictionaries."""
    kids = range(10, 10 + 2 * pages, 2)
    objects: dict[int, str | bytes] = {
        1: f"<< /Type /Catalog /Pages 2 0 R {root} >>",
        2: f"<< /Type /Pages /Count {pages} /Kids [{' '.join(f'{kid} 0 R' for kid in kids)}] >>",
        3: FONT,
    }
    for number, kid in enumerate(kids, 1):
        objects[kid] = (
            f"<< /Type /Page /Parent 2 0 R /MediaBox [{box}] /Contents {kid + 1} 0 R "
            f"/Resources << /Font << /F1 3 0 R >> >> {page} >>"
        )
        line = text if pages == 1 else f"{text} {number}"
        objects[kid + 1] = stream(f"BT /F1 20 Tf 20 200 Td ({line}) Tj ET".encode("latin-1"))
    return pdf(objects | more.pop("objects", {}), **more)


PADDING = bytes.fromhex("28bf4e5e4e758a4164004e56fffa01082e2e00b6d0683e802f0ca9fe6453697a")


def rc4(key: bytes, data: bytes) -> bytes:
    state = list(range(256))
    j = 0
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) % 256
        state[i], state[j] = state[j], state[i]
    out = bytearray()
    i = j = 0
    for byte in data:
        i = (i + 1) % 256
        j = (j + state[i]) % 256
        state[i], state[j] = state[j], state[i]
        out.append(byte ^ state[(state[i] + state[j]) % 256])
    return bytes(out)


def encrypted(user: bytes = b"", owner: bytes = b"owner") -> bytes:
    """A PDF encrypted with 40-bit RC4: with an empty user password every reader opens it."""
    identity, rights = b"0123456789abcdef", -4
    of_owner = rc4(hashlib.md5((owner + PADDING)[:32]).digest()[:5], (user + PADDING)[:32])
    key = hashlib.md5((user + PADDING)[:32] + of_owner + struct.pack("<i", rights) + identity).digest()[:5]
    line = rc4(hashlib.md5(key + b"\x0b\0\0\0\0").digest()[:10], b"BT /F1 20 Tf 20 200 Td (Behind a lock) Tj ET")
    crypt = f"<< /Filter /Standard /V 1 /R 2 /P {rights} /O <{of_owner.hex()}> /U <{rc4(key, PADDING).hex()}> >>"
    ids = f"[<{identity.hex()}> <{identity.hex()}>]"
    return one_page(objects={11: stream(line), 4: crypt}, trailer=f"/Root 1 0 R /Encrypt 4 0 R /ID {ids}")


# ---- images


def picture(size: tuple[int, int] = (240, 180), mode: str = "RGB") -> Image.Image:
    """A small page with a coloured ground, lines and a word; another for another size."""
    image = Image.new("RGB", size, (250, 248, 240))
    draw = ImageDraw.Draw(image)
    for y in range(20, size[1] - 10, 14):
        draw.line((12, y, size[0] - 12 - y % 40, y), (20, 20, 90), 2)
    draw.text((14, 3), f"{size[0]} x {size[1]}", (150, 0, 0))
    return image if mode == "RGB" else image.convert(mode)


def encode(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


# Every format that Pillow both writes and reads, with a mode it takes.
WRITTEN = {
    "AVIF": "RGB",
    "BLP": "P",
    "BMP": "RGB",
    "DDS": "RGBA",
    "DIB": "RGB",
    "GIF": "P",
    "ICNS": "RGBA",
    "ICO": "RGBA",
    "IM": "RGB",
    "JPEG": "RGB",
    "JPEG2000": "RGB",
    "MPO": "RGB",
    "MSP": "1",
    "PCX": "RGB",
    "PNG": "RGB",
    "PPM": "RGB",
    "QOI": "RGB",
    "SGI": "RGB",
    "SPIDER": "F",
    "TGA": "RGB",
    "TIFF": "RGB",
    "WEBP": "RGB",
    "XBM": "1",
}


def written(format: str, size: tuple[int, int] = (240, 180)) -> bytes:
    """The small page as a file of a format."""
    image = picture(size, WRITTEN[format]) if WRITTEN[format] != "F" else picture(size, "L").convert("F")
    return encode(image, format)


def png_chunk(kind: bytes, data: bytes, crc: int | None = None) -> bytes:
    sum_ = zlib.crc32(kind + data) if crc is None else crc
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", sum_)


def png(width: int, height: int, data: bytes = b"", depth: int = 8, colour: int = 2, crc: int | None = None) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = png_chunk(b"IHDR", header, crc) + png_chunk(b"IDAT", zlib.compress(data)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def with_bytes(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def jpeg_sized(width: int, height: int) -> bytes:
    """A JPEG whose frame header claims this size."""
    data = written("JPEG")
    at = data.index(b"\xff\xc0") + 5
    return with_bytes(data, at, struct.pack(">HH", height, width))


def tiff_sized(width: int, height: int) -> bytes:
    """A TIFF whose tags claim this size."""
    data = written("TIFF")
    (ifd,) = struct.unpack("<I", data[4:8])
    for tag, value in ((256, width), (257, height)):
        at = data.index(struct.pack("<H", tag), ifd)
        data = with_bytes(data, at, struct.pack("<HHII", tag, 4, 1, value))
    return data


BIG = 60_000
BOMBS: dict[str, bytes] = {
    "bomb.png": png(BIG, BIG),
    "bomb.jpg": jpeg_sized(BIG, BIG),
    "bomb.gif": with_bytes(written("GIF"), 6, struct.pack("<HH", BIG, BIG)),
    "bomb.bmp": with_bytes(written("BMP"), 18, struct.pack("<ii", BIG, BIG)),
    "bomb.tif": tiff_sized(BIG, BIG),
    "bomb.ppm": b"P6 60000 60000 255\n" + bytes(64),
    "bomb.pbm": b"P4 600000 600000\n" + bytes(64),
    "bomb.tga": with_bytes(written("TGA"), 12, struct.pack("<HH", BIG, BIG)),
    "bomb.psd": b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, BIG, BIG, 8, 3) + bytes(80),
    "bomb.qoi": b"qoif" + struct.pack(">II", BIG, BIG) + b"\3\0" + bytes(64),
    "bomb.sgi": with_bytes(written("SGI"), 6, struct.pack(">HH", BIG, BIG)),
    "bomb.pcx": with_bytes(written("PCX"), 4, struct.pack("<HHHH", 0, 0, BIG, BIG)),
    "bomb.jp2": written("JPEG2000").replace(struct.pack(">II", 180, 240), struct.pack(">II", BIG, BIG)),
    "bomb.webp": b"RIFF\x40\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + (b"\x5f\xea\0" * 2) + bytes(44),
    "bomb.ras": b"\x59\xa6\x6a\x95" + struct.pack(">IIIIIII", BIG, BIG, 24, 0, 1, 0, 0) + bytes(64),
    "bomb.dds": with_bytes(written("DDS"), 12, struct.pack("<II", BIG, BIG)),
    "bomb.fits": b"".join(
        line.ljust(80).encode()
        for line in ("SIMPLE  = T", "BITPIX  = 8", "NAXIS   = 2", f"NAXIS1  = {BIG}", f"NAXIS2  = {BIG}", "END")
    ).ljust(2880)
    + bytes(64),
    "bomb.xbm": b"#define a_width 600000\n#define a_height 600000\nstatic char a_bits[] = {\n0x00 };\n",
    "bomb.ico": b"\0\0\1\0\1\0" + bytes(4) + struct.pack("<HHII", 1, 32, len(png(BIG, BIG)), 22) + png(BIG, BIG),
}


# ---- workers that fail


def sabotaged() -> None:
    """Starts a worker that hangs on drawing a file named hang-*, and is killed at one named kill-*."""
    ocr.start_worker()
    draw = ocr.picture_of

    def picture_of(document: ocr.Document, number: int, dpi: int) -> ocr.Picture:
        if document.source.name.startswith("hang-"):
            time.sleep(3600)
        if document.source.name.startswith("kill-"):
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(document, number, dpi)

    ocr.picture_of = picture_of


def full_disk() -> None:
    """Starts a worker for which the disk is full when it comes to the third page of a document."""
    ocr.start_worker()
    write = ocr.write_atomic

    def write_atomic(path: Path, data: str | bytes) -> None:
        if path.name.startswith("0003"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    ocr.write_atomic = write_atomic


# ---- the command, as a person runs it


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str
    run: dict[str, Any]  # run.json

    def said(self, name: str) -> list[str]:
        """The lines on standard error about a file."""
        return [line for line in self.err.splitlines() if name in line]

    def document(self, name: str) -> dict[str, Any]:
        """run.json's record of a file."""
        (record,) = (d for d in self.run["documents"] if d["source"].rpartition("/")[2] == name)
        return record


def command(*words: str | Path, out: Path, url: str, timeout: float = 240, **options: Any) -> Outcome:
    """`python ocr.py WORDS --out OUT --url URL`; it may not print a traceback."""
    # Without the test pages that go before a run: tests count requests.
    line = [sys.executable, ROOT / "ocr.py", *words, "--out", out, "--url", url, "--workers", "2", "--no-check"]
    done = subprocess.run(line, capture_output=True, timeout=timeout, **options)
    stdout, stderr = done.stdout.decode("utf-8"), done.stderr.decode("utf-8")
    assert "Traceback" not in stderr, stderr
    return Outcome(done.returncode, stdout, stderr, ocr.read_json(out / "run.json"))
