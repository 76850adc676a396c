"""That a model sees the first page of a TIFF alone is said once, wherever the image comes from."""

import io
import struct
import time

import pytest
from PIL import Image

from mmdeploy_llm.media.image.tiff import MAX_DIRECTORIES, pages_of
from mmdeploy_llm.media.loading.notices import PageNotice
from mmdeploy_llm.messages import MediaItem, MediaRef


def tiff(count):
    pages = [Image.new("L", (8, 8), 9 * number) for number in range(count)]
    out = io.BytesIO()
    pages[0].save(out, "TIFF", save_all=True, append_images=pages[1:])
    return out.getvalue()


def item(source, kind="image"):
    return MediaItem(kind=kind, source=source, options={})


def test_the_first_image_of_several_pages_is_told(caplog):
    notice, several = PageNotice(), tiff(2)
    for blob in (tiff(1), b"", b"II*\0", b"\x89PNG", several[:20], several[:4] + b"\xff" * 40):
        notice.see(item(blob), blob)
    notice.see(item(several, "tiff"), several)
    assert caplog.text == ""
    for name in ("scan.tif", "other.tif"):
        notice.see(item(MediaRef(kind="image", uri=name)), several)
    assert caplog.text.count("several pages, of which the first is used") == 1
    assert "'scan.tif'" in caplog.text


@pytest.mark.full
def test_a_list_of_directories_without_an_end_is_left():
    size = 6  # no entries, and the place of the next one
    count = MAX_DIRECTORIES + 10
    places = [8 + size * number for number in range(count)]
    nexts = [struct.pack("<HI", 0, place) for place in (*places[1:], 0)]
    blob = b"II*\0" + struct.pack("<I", 8) + b"".join(nexts)
    begin = time.monotonic()
    found = sum(1 for _ in pages_of(lambda place, size: blob[place : place + size]))
    assert found == MAX_DIRECTORIES + 1  # and the one that says that there are more
    assert time.monotonic() - begin < 60
