"""The report opens nothing that the engine would not: the same reader, limits and deadlines."""

import ast
import os
import resource
import socket
import time
from pathlib import Path

import pytest

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.batch.report.previews import FilePreviews
from mmdeploy_llm.data.outputs.scan import read_records
from mmdeploy_llm.data.records.item import Media
from mmdeploy_llm.engine.startup.media import open_media
from mmdeploy_llm.media.image import decode
from mmdeploy_llm.media.image.thumbnail import Thumbnails
from mmdeploy_llm.media.loading.reader import open_reader
from mmdeploy_llm.values.options.config import EngineConfig

ROOT = Path(__file__).parents[2]
JPEG = b"\xff\xd8\xff"
ROOMS = ("batch", "data/files", "data/outputs", "data/records", "media")
BATCH_ROOMS = [f"mmdeploy_llm/{room}" for room in ROOMS]
OPENS_FILES = {  # files of processors/ and of these rooms that open a path, and whose path it is
    "mmdeploy_llm/batch/answers/schemas.py": "the schema that the caller names",
    "mmdeploy_llm/batch/documents/reading/asking.py": "the question that the caller names",
    "mmdeploy_llm/batch/documents/reading/folder.py": "the folder that the caller names",
    "mmdeploy_llm/batch/speech/corrected.py": "transcripts beside the sounds that the caller names",
    "mmdeploy_llm/batch/speech/run.py": "a sound that the loader has read",
    "plugins/mmdeploy_llm_plugins/whisper/ctranslate2.py": "files of the model",
    "plugins/mmdeploy_llm_plugins/whisper/ctranslate2_header.py": "files of the model",
    "plugins/mmdeploy_llm_plugins/whisper/ggml.py": "files of the model",
    "mmdeploy_llm/data/files/contents.py": "files of the input that may be the same",
    "mmdeploy_llm/data/outputs/made.py": "the output that the program names",
    "mmdeploy_llm/data/outputs/parquet.py": "parts of the output",
    "plugins/mmdeploy_llm_plugins/outputs/lance_store.py": "the output that the program names",
    "plugins/mmdeploy_llm_plugins/outputs/npy.py": "parts of the output",
    "mmdeploy_llm/data/outputs/opening/edits.py": "the edits that the caller names",
    "mmdeploy_llm/data/outputs/opening/stored.py": "the output that the program names",
    "mmdeploy_llm/media/loading/splitting.py": "bytes in memory, by a plugin's splitter",
    "mmdeploy_llm/data/outputs/exports/boxes.py": "the file or folder that the caller names",
    "mmdeploy_llm/data/outputs/exports/export.py": "the file that the caller names",
    "mmdeploy_llm/data/outputs/exports/imagefolder.py": "the folder that the caller names",
    "mmdeploy_llm/data/outputs/exports/pictures.py": "the folder that the caller names",
    "mmdeploy_llm/data/files/kinds.py": "first bytes of the files of the input",
    "mmdeploy_llm/data/files/skipped.py": "the list that the caller names",
    "mmdeploy_llm/batch/report/cards.py": "the template of this package",
    "mmdeploy_llm/batch/report/growing.py": "the page that the program names",
    "mmdeploy_llm/batch/report/live.py": "the page that the program names, and the files beside it",
    "mmdeploy_llm/batch/report/page.py": "the page that the program names",
    "mmdeploy_llm/data/outputs/sidecars/places.py": "folders of the input, through no link",
    "mmdeploy_llm/batch/progress/log.py": "the log that the caller names",
    "mmdeploy_llm/data/records/media.py": "media of an item that has been answered",
    "mmdeploy_llm/data/outputs/part_writer.py": "parts of the output",
    "mmdeploy_llm/data/outputs/parts.py": "parts of the output",
    "mmdeploy_llm/data/outputs/scan.py": "the output that is continued",
    "mmdeploy_llm/data/records/shelves.py": "parts of the output",
    "plugins/mmdeploy_llm_plugins/outputs/tars.py": "parts of the output",
    "mmdeploy_llm/data/records/configuration.py": "the configurations beside the output",
    "mmdeploy_llm/data/records/files.py": "the output and the page that the program names",
    "mmdeploy_llm/data/records/identity.py": "files of the model",
    "mmdeploy_llm/data/records/state.py": "how far the run of an output is",
    "mmdeploy_llm/data/outputs/jsonl_writer.py": "the output that the program names",
    "processors/mmdeploy_llm_processors/pdf/structure.py": "bytes in memory",
    "processors/mmdeploy_llm_processors/remote/stores.py": "objects of a store",
    "mmdeploy_llm/media/beneath.py": "media of a request",
    "mmdeploy_llm/media/local.py": "media of a request",
    "mmdeploy_llm/media/sound/clip.py": "bytes in memory",
    "mmdeploy_llm/media/sound/container.py": "bytes in memory",
    "mmdeploy_llm/media/video/container.py": "bytes in memory",
    "plugins/mmdeploy_llm_plugins/ernie/video.py": "the model's font",
    "processors/mmdeploy_llm_processors/sized/sounds.py": "sounds that the loader has read",
}


@pytest.fixture
def folder(tmp_path, picture):
    """A root with a good picture and whatever else may stand where a picture is expected."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "good.png").write_bytes(picture())
    (tmp_path / "outside.png").write_bytes(picture())
    (root / "link.png").symlink_to(tmp_path / "outside.png")
    (root / "folder.png").mkdir()
    (root / "device.png").symlink_to("/dev/zero")
    (root / "wide.png").write_bytes(picture(640, 640))
    for kind in ("png", "mp4"):
        os.mkfifo(root / f"fifo.{kind}")
        with (root / f"huge.{kind}").open("wb") as file:
            file.write(JPEG)
            file.truncate(2**40)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "socket.png"))
    return root


@pytest.fixture
def previews():
    """Options of LLM -> FilePreviews as the program makes them."""

    def make(**options):
        config = EngineConfig(model="shapes-vl", **options)
        return FilePreviews(lambda: open_reader(config), lambda: open_media(config))

    return make


def kind_of(name):
    return "video" if name.endswith(".mp4") else "image"


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


HOSTILE = (
    *("fifo.png", "fifo.mp4", "huge.png", "huge.mp4", "device.png", "folder.png", "socket.png"),
    *("link.png", "../outside.png", "absent.png"),
)


def test_no_preview_of_what_the_engine_refuses(folder, previews):
    make = previews(allowed_media_root=folder, max_image_pixels=500_000)
    assert make(Media(kind="image", name=str(folder / "good.png")))[0].startswith(JPEG)
    begin, before = time.monotonic(), peak_bytes()
    for name in HOSTILE:
        assert make(Media(kind=kind_of(name), name=str(folder / name))) == (), name
    assert make(Media(kind="image", name="/dev/zero")) == ()
    assert time.monotonic() - begin < 60
    assert peak_bytes() - before < 2**30


def test_the_limits_on_bytes_and_pixels_hold(folder, previews, picture):
    wide = Media(kind="image", name=str(folder / "wide.png"))
    assert previews()(wide)
    assert previews(max_image_pixels=640 * 640 - 1)(wide) == ()
    size = (folder / "wide.png").stat().st_size
    assert previews(max_media_bytes=size)(wide)
    assert previews(max_media_bytes=size - 1)(wide) == ()


@pytest.mark.full
def test_the_deadline_and_the_isolation_hold(folder, previews, monkeypatch):
    good = Media(kind="image", name=str(folder / "good.png"))
    apart, decode_apart = [], decode.decode_apart
    monkeypatch.setattr(
        decode, "decode_apart", lambda *args: apart.append(args) or decode_apart(*args)
    )
    assert previews(media_isolation="process")(good)
    assert len(apart) == 1
    monkeypatch.setattr(Thumbnails, "decode", lambda *args: time.sleep(600))
    begin = time.monotonic()
    assert previews(media_timeout=0.1)(good) == ()
    assert time.monotonic() - begin < 60


@pytest.mark.full
def test_a_whole_batch(folder, tmp_path):
    """`run_batch` with a report: one picture for the one file that the model got."""
    page, out = tmp_path / "page.html", tmp_path / "out.jsonl"
    names = ("good.png", "fifo.png", "link.png", "device.png", "../outside.png", "huge.png")
    part = {"type": "text", "text": "?"}
    rows = [
        {
            "id": name,
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": str(folder / name)}, part],
                }
            ],
        }
        for name in names
    ]
    with LLM("shapes-vl", num_threads=1, kv_cache_memory=2**24, allowed_media_root=folder) as llm:
        llm.run_batch(
            rows, out, sampling_params=SamplingParams(max_tokens=2), report=page, use_tqdm=False
        )
        is_ok = {record.id: record.is_ok for record in read_records(out)}
    assert is_ok == {name: name == "good.png" for name in names}
    text = page.read_text()
    assert text.count("<img ") == text.count("data:image/jpeg") == 1
    assert text.count("no preview") == len(names) - 1


@pytest.mark.full
def test_media_are_opened_in_one_place():
    """A new call that opens a path must say whose path it is."""
    opens = {"open", "read_bytes", "read_text", "truetype", "fdopen"}
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in (
            *BATCH_ROOMS,
            "processors/mmdeploy_llm_processors",
            "plugins/mmdeploy_llm_plugins",
        )
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", None)) in opens
    }
    assert found == set(OPENS_FILES)
