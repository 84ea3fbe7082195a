#!/usr/bin/env python3
"""Makes tests/fixtures/images/orientations.json: small files that say in many ways how they are turned, and what Pillow
reads from them.

Run with: python scripts/make-orientation-fixtures.py   (made with pillow 13.0.0)
"""

import base64
import io
import json
import pathlib
import struct
import zlib

from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parent.parent
ORIENTATION = 0x112
SHORT, LONG = 3, 4


def tiff(value, kind=SHORT, order="<", tag=ORIENTATION, count=1, before=(), magic=None):
    """EXIF data with one directory, whose entries are `before` and then the orientation."""
    inline = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}
    def entry(tag, kind, count, value):
        data = struct.pack(order + inline.get(kind, "I") * min(count, 2), *[value] * min(count, 2))[:4]
        return struct.pack(order + "HHI", tag, kind, count) + data.ljust(4, b"\0")
    entries = [*(entry(*it) for it in before), entry(tag, kind, count, value)]
    head = magic or (b"II*\0" if order == "<" else b"MM\0*")
    return (head + struct.pack(order + "I", 8) + struct.pack(order + "H", len(entries)) + b"".join(entries)
            + struct.pack(order + "I", 0))


def xmp(body):
    return (b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
            b'<rdf:Description rdf:about="" xmlns:tiff="http://ns.adobe.com/tiff/1.0/"' + body
            + b"</rdf:RDF></x:xmpmeta>")


def attribute(value):
    return xmp(b' tiff:Orientation="%d"/>' % value)


def element(value):
    return xmp(b"><tiff:Orientation>%d</tiff:Orientation></rdf:Description>" % value)


IMAGE = Image.new("RGB", (3, 2), (200, 60, 20))


def saved(kind, **options):
    file = io.BytesIO()
    IMAGE.save(file, kind, **options)
    return file.getvalue()


JPEG = saved("JPEG", quality=30, optimize=True)
PNG = saved("PNG", optimize=True)
WEBP = saved("WEBP", lossless=True)


def jpeg(*segments):
    """The photo with these APP1 segments after its beginning."""
    parts = b"".join(b"\xff\xe1" + struct.pack(">H", len(it) + 2) + it for it in segments)
    return JPEG[:2] + parts + JPEG[2:]


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(*chunks, after=False):
    """The photo with these chunks before or after its pixels."""
    place = len(PNG) - 12 if after else 33
    return PNG[:place] + b"".join(chunks) + PNG[place:]


def raw_profile(data, name=b"exif"):
    digits = data.hex()
    lines = [digits[at:at + 72] for at in range(0, len(digits), 72)]
    return b"\n%s\n%8d\n" % (name, len(data)) + "\n".join(lines).encode() + b"\n"


def itxt(keyword, text, compressed=False):
    data = zlib.compress(text) if compressed else text
    return chunk(b"iTXt", keyword + b"\0" + bytes([compressed, 0]) + b"en\0\0" + data)


def webp(flags, *chunks):
    """The photo as an extended file with these chunks."""
    body = b"WEBP" + riff(b"VP8X", struct.pack("<I", flags) + b"\2\0\0\1\0\0") + WEBP[12:]
    body += b"".join(riff(*it) for it in chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def riff(name, data):
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


PREFIX = b"Exif\0\0"
XAP = b"http://ns.adobe.com/xap/1.0/\0"
PROFILE = b"Raw profile type exif"
ADOBE = b"XML:com.adobe.xmp"
EXIF, XMP = 8, 4
LONG_BEFORE = [(0x100, LONG, 1, 7), (0x10f, SHORT, 1, 9)]

files = {}
for value in range(10):
    files[f"jpeg exif {value}"] = jpeg(PREFIX + tiff(value))
for kind in [1, 2, 3, 4, 6, 8, 9, 99]:
    for order in "<>":
        files[f"jpeg type {kind} {order}"] = jpeg(PREFIX + tiff(6, kind, order))
files |= {
    "jpeg two values": jpeg(PREFIX + tiff(6, count=2)),
    "jpeg entries before": jpeg(PREFIX + tiff(6, before=LONG_BEFORE)),
    "jpeg orientation twice": jpeg(PREFIX + tiff(6, before=[(ORIENTATION, SHORT, 1, 3)])),
    "jpeg prefix twice": jpeg(PREFIX + PREFIX + tiff(6)),
    "jpeg cut exif": jpeg(PREFIX + tiff(6)[:18]),
    "jpeg empty exif, xmp": jpeg(PREFIX, XAP + attribute(8)),
    "jpeg other tag, xmp": jpeg(PREFIX + tiff(6, tag=0x111), XAP + attribute(8)),
    "jpeg exif 1, xmp": jpeg(PREFIX + tiff(1), XAP + attribute(8)),
    "jpeg xmp, exif": jpeg(XAP + attribute(1), PREFIX + tiff(6)),
    "jpeg xmp attribute": jpeg(XAP + attribute(8)),
    "jpeg xmp element": jpeg(XAP + element(3)),
    "jpeg xmp twice": jpeg(XAP + attribute(3), XAP + attribute(5)),
    "jpeg xmp 9": jpeg(XAP + attribute(9)),
    "jpeg xmp other quotes": jpeg(XAP + xmp(b" tiff:Orientation='6'/>")),
    "jpeg xmp second of two": jpeg(XAP + xmp(b' tiff:Orientation="x" tiff:Orientation="6"/>')),
    "jpeg extended xmp": jpeg(b"http://ns.adobe.com/xmp/extension/\0" + attribute(6)),
    "png plain": png(),
    "png exif": png(chunk(b"eXIf", tiff(6))),
    "png exif big": png(chunk(b"eXIf", tiff(6, LONG, ">"))),
    "png exif prefix": png(chunk(b"eXIf", PREFIX + tiff(6))),
    "png exif after": png(chunk(b"eXIf", tiff(5)), after=True),
    "png exif after prefix": png(chunk(b"eXIf", PREFIX + tiff(5)), after=True),
    "png profile ztxt": png(chunk(b"zTXt", PROFILE + b"\0\0" + zlib.compress(raw_profile(PREFIX + tiff(6))))),
    "png profile text": png(chunk(b"tEXt", PROFILE + b"\0" + raw_profile(PREFIX + tiff(7)))),
    "png profile itxt": png(itxt(PROFILE, raw_profile(PREFIX + tiff(7)), compressed=True)),
    "png profile without prefix": png(chunk(b"tEXt", PROFILE + b"\0" + raw_profile(tiff(2)))),
    "png profile after": png(chunk(b"tEXt", PROFILE + b"\0" + raw_profile(PREFIX + tiff(4))), after=True),
    "png exif and profile": png(chunk(b"tEXt", PROFILE + b"\0" + raw_profile(tiff(4))), chunk(b"eXIf", tiff(3))),
    "png exif without, profile": png(
        chunk(b"tEXt", PROFILE + b"\0" + raw_profile(tiff(4))), chunk(b"eXIf", tiff(3, tag=0x111))),
    "png xmp": png(itxt(ADOBE, attribute(8))),
    "png xmp element, compressed": png(itxt(ADOBE, element(6), compressed=True)),
    "png xmp after": png(itxt(ADOBE, attribute(8)), after=True),
    "png xmp ztxt": png(chunk(b"zTXt", ADOBE + b"\0\0" + zlib.compress(attribute(3)))),
    "png exif 1, xmp": png(itxt(ADOBE, attribute(8)), chunk(b"eXIf", tiff(1))),
    "png other keyword": png(itxt(b"XML:com.adobe.xml", attribute(8))),
    "webp plain": webp(0),
    "webp exif": webp(EXIF, (b"EXIF", tiff(6))),
    "webp exif big": webp(EXIF, (b"EXIF", tiff(8, LONG, ">"))),
    "webp exif prefix": webp(EXIF, (b"EXIF", PREFIX + tiff(6))),
    "webp exif without its flag": webp(0, (b"EXIF", tiff(6))),
    "webp exif twice": webp(EXIF, (b"EXIF", tiff(6)), (b"EXIF", tiff(3))),
    "webp xmp": webp(XMP, (b"XMP ", attribute(8))),
    "webp xmp element": webp(XMP, (b"XMP ", element(7))),
    "webp xmp without its flag": webp(EXIF, (b"EXIF", tiff(6, tag=0x111)), (b"XMP ", attribute(8))),
    "webp exif 1, xmp": webp(EXIF | XMP, (b"EXIF", tiff(1)), (b"XMP ", attribute(8))),
    "webp exif without, xmp": webp(EXIF | XMP, (b"EXIF", tiff(6, tag=0x111)), (b"XMP ", attribute(8))),
}


def read(file):
    """What Pillow reads; 1 if it turns nothing."""
    image = Image.open(io.BytesIO(file))
    image.load()
    value = image.getexif().get(ORIENTATION, 1)
    return value if value in range(1, 9) else 1


cases = [{"case": case, "file": base64.b64encode(file).decode(), "orientation": read(file)}
         for case, file in files.items()]
path = ROOT / "tests/fixtures/images/orientations.json"
path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
