"""Pictures, and corpora of them in every format."""

import io
import json
import tarfile

import pytest
from PIL import Image

from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.rows.formats.formats import open_rows


@pytest.fixture
def pngs():
    """Four different pictures."""
    found = []
    for colour in ((200, 30, 30), (30, 200, 30), (30, 30, 200), (240, 240, 10)):
        buffer = io.BytesIO()
        Image.new("RGB", (40, 28), colour).save(buffer, "PNG")
        found.append(buffer.getvalue())
    return found


@pytest.fixture
def write_tar(tmp_path):
    """write_tar(name, {member: bytes, text or TarInfo}) -> path of a tar."""

    def write(name, members, mode="w", folder=tmp_path):
        path = folder / name
        with tarfile.open(path, mode) as tar:
            for member, data in members.items():
                if isinstance(data, tarfile.TarInfo):
                    tar.addfile(data)
                    continue
                if isinstance(data, dict):
                    data = json.dumps(data)
                data = data.encode() if isinstance(data, str) else data
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return path

    return write


@pytest.fixture
def read():
    """read(path or pattern) -> the rows."""

    def rows(given, *, max_bytes=2**28, **options):
        opened = open_rows(str(given), max_bytes)
        return list(opened.read(Selection(**options)))

    return rows
