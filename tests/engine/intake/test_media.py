"""MediaLoader: accepted forms, faults of plugins, the cache."""

import io
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmdeploy_llm.errors import (
    MediaError,
    MediaLimitError,
    RequestError,
    UnsupportedMediaError,
)
from mmdeploy_llm.hooks import MediaInput, MediaLimits, MediaProcessor, MediaRef
from mmdeploy_llm.media.loading.cache import ByteCache
from mmdeploy_llm.media.loading.forms import media_items, normalised
from mmdeploy_llm.media.loading.keys import num_bytes
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.media.loading.loader import MediaLoader
from mmdeploy_llm.media.loading.processed import most_bytes, processed_cache
from mmdeploy_llm.messages import MediaItem


@pytest.fixture
def make_loader(processor):
    def make(fetch=lambda ref, limits: ref.uri.encode(), limits=None, **options):
        return MediaLoader(
            media=ModelMedia(processors={"image": processor}),
            fetch=fetch,
            limits=limits or MediaLimits(),
            max_items={"image": 9},
            **options,
        )

    return make


def items(*sources):
    return media_items({"image": list(sources)})


def counts(loader, *sources):
    return [made.num_tokens for made in loader.load(items(*sources))]


def test_one_item_is_a_list_of_one_and_none_is_no_item():
    assert media_items(None) == media_items({}) == media_items({"image": None, "video": []}) == []
    (item,) = media_items({"image": "a.png"})
    assert item == MediaItem(
        kind="image", source=MediaRef(kind="image", uri="a.png", caller="generate"), options={}
    )
    (item,) = media_items({"image": Path("a.png")})
    assert item.source.uri == "a.png"
    array = np.zeros((2, 2))
    assert media_items({"image": array})[0].source is array
    with pytest.raises(MediaError, match="is None"):
        media_items({"image": [None]})


def test_video_options_stay_with_their_item():
    (item,) = media_items({"video": {"video": "a.mp4", "fps": -1, "target_frames": 8}})
    assert item.source.uri == "a.mp4"
    assert item.options == {"fps": -1, "target_frames": 8}


def test_every_form_reaches_the_processor(make_loader):
    file, read_up = io.BytesIO(b"7"), io.BytesIO(b"12")
    read_up.read()
    sources = (b"3", bytearray(b"4"), memoryview(b"5"), "6", file, MediaRef(kind="image", uri="8"))
    loader = make_loader()
    assert counts(loader, *sources, 9) == [3, 4, 5, 6, 7, 8, 9]
    assert counts(loader, file, read_up) == [7, 12]
    assert (file.tell(), read_up.tell()) == (0, 2)  # the caller's file position is restored


def test_file_objects(make_loader):
    class Broken(io.RawIOBase):
        def read(self, size=-1):
            raise OSError("disk on fire at /secret/place")

    class Pipe(io.BytesIO):
        def seekable(self):
            return False

    assert counts(make_loader(), Pipe(b"5")) == [5]
    with pytest.raises(UnsupportedMediaError, match="open it in mode 'rb'"):
        counts(make_loader(), io.StringIO("5"))
    with pytest.raises(MediaError, match="file object cannot be read") as caught:
        counts(make_loader(), Broken())
    assert "secret" not in str(caught.value)
    with pytest.raises(MediaLimitError, match="4 bytes or more, 3 are allowed"):
        counts(make_loader(limits=MediaLimits(max_bytes=3)), io.BytesIO(b"1234"))


def test_errors_say_which_item(make_loader):
    with pytest.raises(MediaError, match=r"^image 2: the image is corrupt$"):
        counts(make_loader(), b"3", b"bad", b"4")
    with pytest.raises(MediaError, match=r"^the image is corrupt$"):
        counts(make_loader(), b"bad")


def test_a_crashing_processor_is_that_items_error_and_is_named(make_loader):
    loader = make_loader()
    with pytest.raises(MediaError, match=r"FakeProcessor \(plugin .*\) failed .* KeyError"):
        counts(loader, b"crash")
    assert counts(loader, b"3") == [3]


def test_a_plugins_own_error_class_keeps_its_code(make_loader, processor):
    class Strange(MediaLimitError):
        def __init__(self, one, two):
            super().__init__(f"{one} {two}")

    def decode(source, limits):
        raise Strange("far", "too big")

    processor.decode = decode
    with pytest.raises(MediaLimitError, match="image 1: far too big") as caught:
        counts(make_loader(), b"1", b"2")
    assert caught.value.code == 413


def test_a_processor_that_returns_nonsense(make_loader, processor):
    processor.process = lambda item, options: None
    with pytest.raises(MediaError, match="no usable MediaInput"):
        counts(make_loader(), b"3")


def test_the_same_bytes_are_decoded_and_processed_once(make_loader, processor):
    loader = make_loader()
    assert counts(loader, b"3", b"3", "3", io.BytesIO(b"3"), b"4") == [3, 3, 3, 3, 4]
    assert processor.calls == [("decode", b"3"), ("process", 3), ("decode", b"4"), ("process", 4)]
    assert hits_and_misses(loader.stats["processed"]) == (3, 2)


def hits_and_misses(stats):
    return stats.num_hits, stats.num_misses


def test_the_same_url_is_fetched_once(make_loader):
    """A path is read each time: this is fast, and the file may have changed."""
    fetched = []

    def fetch(ref, limits):
        fetched.append(ref.uri)
        return b"3"

    loader = make_loader(fetch=fetch)
    url, path = "https://example.org/a.png", "a.png"
    assert counts(loader, url, path, url, path, "file:///a.png", "file:///a.png") == [3] * 6
    assert fetched == [url, path, path, "file:///a.png", "file:///a.png"]
    assert hits_and_misses(loader.stats["fetched"]) == (1, 1)


def test_items_grow_old():
    now, made = [0.0], []
    cache = ByteCache(1000, len, max_age=60.0, clock=lambda: now[0])

    def make():
        made.append(1)
        return b"abc"

    for moment in (0.0, 60.0, 61.0, 100.0):
        now[0] = moment
        assert cache.get_or_make("k", make) == b"abc"
    assert len(made) == 2
    assert cache.stats.num_bytes == 3
    cache.clear()
    assert cache.stats.num_bytes == 0


def test_a_failure_is_not_remembered(make_loader, processor):
    loader = make_loader()
    for _ in range(2):
        with pytest.raises(RequestError):
            counts(loader, b"bad")
    assert processor.calls == [("decode", b"bad")] * 2


def test_loaded_objects_are_found_by_their_digest(make_loader, processor):
    class Decoded:
        def __init__(self, values):
            self.digest = values.tobytes().hex()

    processor.decode = lambda source, limits: Decoded(source)
    processor.process = lambda item, options: (
        processor.calls.append(item)
        or MediaInput(kind="image", tensors={}, num_tokens=1, key=item.digest)
    )
    counts(make_loader(), np.zeros(3), np.zeros(3), np.ones(3))
    assert len(processor.calls) == 2


def test_a_processor_with_one_key_for_all_does_not_mix_up_what_is_cached(make_loader, processor):
    """The key names what the encoder and the prefix cache keep: one for two pictures would answer
    about the wrong one."""
    processor.process = lambda item, options: MediaInput(
        kind="image", tensors={}, num_tokens=item, key="always this"
    )
    loader = make_loader()
    made = loader.load([*items(b"3", b"4", b"3"), replace(items(b"3")[0], options={"size": 2})])
    keys = [item.key for item in made]
    assert keys[0] == keys[2]
    assert len({keys[0], keys[1], keys[3]}) == 3


def test_equal_items_at_once_are_made_once():
    cache, calls, begun, go_on = (
        ByteCache(1000, num_bytes),
        [],
        threading.Event(),
        threading.Event(),
    )

    def make():
        calls.append(1)
        begun.set()
        assert go_on.wait(60)
        return MediaInput(kind="image", tensors={}, num_tokens=1, key="k")

    results = []
    threads = [
        threading.Thread(target=lambda: results.append(cache.get_or_make("k", make)))
        for _ in range(5)
    ]
    threads[0].start()
    assert begun.wait(60)
    for thread in threads[1:]:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len({id(result) for result in results}) == 1
    assert hits_and_misses(cache.stats) == (4, 1)


def test_an_error_of_two_files_with_one_content_names_each_file_alone(make_loader, processor):
    """They are decoded once, and what is raised there reaches both."""
    begun, go_on, found = threading.Event(), threading.Event(), {}

    def decode(source, limits):
        begun.set()
        assert go_on.wait(60)
        raise MediaError("it is cut off")

    processor.decode = decode
    loader = make_loader(fetch=lambda ref, limits: b"3")

    def load(name):
        with pytest.raises(MediaError) as caught:
            loader.load(items(name))
        found[name] = str(caught.value)

    threads = [threading.Thread(target=load, args=(f"{n}.png",)) for n in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    go_on.set()
    for thread in threads:
        thread.join()
    assert found == {f"{n}.png": f"it is cut off (image file '{n}.png')" for n in range(4)}


def test_pysec_2026_4361_the_cache_is_bounded_in_bytes(make_loader, processor):
    loader = make_loader(cache_bytes=250)  # two items of 100 bytes
    counts(loader, b"1", b"2", b"1", b"3")  # 2 is the oldest when 3 comes
    assert loader.stats["processed"].num_bytes == 200
    processor.calls.clear()
    counts(loader, b"1", b"3")
    assert processor.calls == []
    counts(loader, b"2")
    assert processor.calls == [("decode", b"2"), ("process", 2)]
    processor.nbytes = 251
    counts(loader, b"9")
    assert loader.stats["processed"].num_bytes == 200  # an item larger than the cache is not kept


def test_counting_peeks_where_the_processor_can(make_loader, processor):
    assert [made.num_tokens for made in make_loader().count(items(b"5"))] == [5]
    assert processor.calls == [("decode", b"5")]
    processor.peek = lambda source, limits: 6
    assert [made.num_tokens for made in make_loader().count(items(b"5"))] == [6]
    assert len(processor.calls) == 1


def test_a_processor_needs_nothing_but_its_contract(make_loader):
    assert {"decode", "process", "count_tokens"} == MediaProcessor.__abstractmethods__


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ({"data": "UklG"}, "'UklG' and None"),
        ({"data": "data:audio/wav;base64,UklG", "format": "wav"}, "without data:, and the name"),
        ({"data": b"RIFF", "format": "wav"}, "and 'wav'"),
    ],
)
def test_base64_in_another_form_than_openais_says_what_is_meant(source, found):
    """It was taken for a dict with an array, or for base64 that is damaged."""
    item = MediaItem(kind="audio", source=source, options={})
    with pytest.raises(MediaError, match=f"base64 as 'data'.*{found}"):
        normalised(item, "LLM.chat")


def rounds(cache, num_items, num_rounds, size=10):
    """Asks for items in turn; returns how many were made in each round."""
    made = []
    for _ in range(num_rounds):
        before = cache.stats.num_misses
        for key in range(num_items):
            cache.get_or_make(str(key), lambda: b"x" * size)
        made.append(cache.stats.num_misses - before)
    return made


def test_a_cache_grows_where_items_come_again(caplog):
    caplog.set_level("INFO")
    cache = ByteCache(100, len, most=lambda kept: 900)
    assert rounds(cache, 80, 4) == [80, 70, 0, 0]
    assert cache.stats.max_bytes == 800
    assert "come again" in caplog.text
    once = ByteCache(100, len, most=lambda kept: 900)
    assert rounds(once, 80, 1) == [80]
    assert once.stats.max_bytes == 100  # nothing came again


def test_a_large_item_that_comes_again_is_kept():
    cache = ByteCache(100, len, most=lambda kept: 900)
    assert rounds(cache, 1, 3, size=500) == [1, 1, 0]
    assert rounds(ByteCache(100, len, most=lambda kept: 400), 1, 3, size=500) == [1, 1, 1]


def test_a_round_without_room_for_all_finds_some():
    cache = ByteCache(400, len)
    *_, last = rounds(cache, 80, 12)
    assert last < 60  # of 80; the least recently used one is always the one to come next
    assert cache.stats.num_bytes <= 400
    few = [cache.get_or_make(f"other {n}", lambda: b"x" * 10) for _ in range(12) for n in range(45)]
    assert len(few) == 540
    before = cache.stats.num_misses
    for n in range(30):  # of others: it adapts
        cache.get_or_make(f"other {n}", lambda: b"x" * 10)
    assert cache.stats.num_misses - before < 15


def test_the_media_of_a_run_take_a_share_of_the_memory(monkeypatch):
    monkeypatch.setattr("mmdeploy_llm.media.loading.processed.free_ram", lambda: 800)
    assert most_bytes(0) == most_bytes(80) - 10 == 100
    monkeypatch.setattr("mmdeploy_llm.media.loading.processed.free_ram", lambda: 2**50)
    assert most_bytes(0) == 2 * 2**30
    assert processed_cache(7).stats.max_bytes == 7
    assert processed_cache(None).stats.max_bytes == 64 * 2**20


class Frames(MediaProcessor):
    """Makes a video of its frames, one token for each byte of them."""

    kind, token, markers = "video", "<|video_pad|>", ("<|video_pad|>",)

    def decode(self, source, limits):
        return [bytes(frame) for frame in source]

    def process(self, item, options):
        return MediaInput(kind="video", tensors={}, num_tokens=len(b"".join(item)), key=str(item))

    def count_tokens(self, item, options):
        return len(b"".join(item))


@pytest.fixture
def load_frames():
    """load_frames(frames, **limits) -> the tokens of a video of a list of frames; the file NAME has
    the bytes of its name, but for "gone"."""

    def fetch(ref, limits):
        if ref.uri == "gone":
            raise MediaError("there is no such file")
        return ref.uri.encode()

    def load(frames, **limits):
        loader = MediaLoader(
            media=ModelMedia(processors={"video": Frames()}),
            fetch=fetch,
            limits=MediaLimits(**limits),
            max_items={},
        )
        (made,) = loader.load(media_items({"video": [frames]}))
        return made.num_tokens

    return load


def test_frames_of_a_video_may_be_files(load_frames):
    assert load_frames(["12", Path("3"), b"4567"]) == 7
    with pytest.raises(MediaError, match=r"no such file \(image file 'gone'\)"):
        load_frames(["1", "gone"])
    with pytest.raises(MediaLimitError, match="has 3 frames, 2 are allowed"):
        load_frames(["1", "gone", "3"], max_frames=2)
    with pytest.raises(MediaLimitError, match="the list of frames has 6 bytes or more, 5"):
        load_frames(["123", "456", "gone"], max_bytes=5)
