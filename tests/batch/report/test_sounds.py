"""A sound has a player on its card: a clip of its beginning, in the page or in a file beside it."""

import io
import re

import av
import pytest

from mmdeploy_llm.batch.report.cards import CardMaker
from mmdeploy_llm.batch.report.kept import read_kept
from mmdeploy_llm.batch.report.live import LiveReport
from mmdeploy_llm.batch.report.page import EMBEDDED_CARDS, ReportHead, write_report
from mmdeploy_llm.batch.report.pictures import EmbeddedPictures
from mmdeploy_llm.data.outputs.scan import RecordIndex
from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.data.records.item import Media
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.sound.clip import RATE, SECONDS, Clips
from tests.media.sound_files import noise, wav16

CLIP = b"ID3\4 a clip"


def record(name, kind="audio", **values):
    media = (Media(kind=kind, name=str(name)),)
    return Record(id=str(name), path=str(name), text="a dog barks", media=media, **values)


def written(path, records, make):
    index = RecordIndex()
    for number, own in enumerate(records):
        index.add(own, number, 0)
    head = ReportHead(model="m", created="today", version="1")
    write_report(path, records, head, index, make, num_shown=len(records), use_tqdm=False)
    return path.read_text()


def test_a_clip_is_the_beginning_of_a_sound_and_small():
    maker, limits = Clips(), MediaLimits(isolation="thread")
    blob = wav16(noise(seconds=SECONDS + 3, channels=2))
    (clip,) = maker.previews(maker.decode(blob, limits), {})
    with av.open(io.BytesIO(clip)) as file:
        num_samples = sum(frame.samples for frame in file.decode(audio=0))
    assert num_samples == round(SECONDS * RATE)
    assert len(clip) < 50_000
    short = maker.previews(maker.decode(wav16(noise(seconds=0.01)), limits), {})[0]
    assert short.startswith(b"ID3")
    assert len(short) < 2_000


def test_a_card_has_a_player_that_the_page_allows(tmp_path):
    html = written(tmp_path / "a.html", [record(tmp_path / "a.wav")], lambda media: (CLIP,))
    assert re.search(r'<audio controls preload="none" [^>]*src="data:audio/mpeg;base64,', html)
    assert "media-src data:;" in html
    assert "<img" not in html
    assert "no preview" not in html


def test_another_kind_says_what_it_is(tmp_path):
    html = written(tmp_path / "a.html", [record("a.sketch", "sketch")], lambda media: ())
    assert "sketch: no preview" in html


@pytest.fixture
def large(tmp_path):
    """A report whose clips are files beside it."""
    for number in range(2):
        (tmp_path / f"{number}.wav").write_bytes(b"sound")
    records = [record(tmp_path / f"{number}.wav") for number in range(EMBEDDED_CARDS + 1)]
    html = written(tmp_path / "a.html", records, lambda media: (CLIP,))
    return tmp_path, html


@pytest.mark.full
def test_clips_of_a_large_report_are_files_that_a_live_page_serves(large):
    folder, html = large
    names = {path.name for path in (folder / "a_files").rglob("*.mp3")}
    assert len(names) == 2
    assert all(name in html for name in names)
    assert "media-src data: &#39;self&#39; file:;" in html
    live = LiveReport(folder / "a.html", dict)
    try:
        import http.client

        host = live.url.split("/")[2]
        served = http.client.HTTPConnection(host, timeout=10)
        name = sorted(names)[0]
        served.request("GET", f"/a_files/pictures/{name[:2]}/{name}", headers={"Host": host})
        answer = served.getresponse()
        assert (answer.status, answer.read()) == (200, CLIP)
        assert answer.headers["Content-Type"] == "audio/mpeg"
        served.close()
    finally:
        live.close()


def test_a_resumed_run_keeps_cards_with_players(tmp_path):
    own = record(tmp_path / "a.wav", item_digest="d", config_digest="c")
    written(tmp_path / "a.html", [own], lambda media: (CLIP,))
    with Folder.open(tmp_path) as parent:
        kept = dict(read_kept(parent, "a.html", "a_files"))
    assert "<audio" in kept[CardMaker().key(own)].html
    assert EmbeddedPictures(lambda media: ()).have(kept[CardMaker().key(own)].html)
