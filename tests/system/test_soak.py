"""Three models of one pool under a long mixed stream: texts, images, videos, broken files, aborts,
time limits, readers who leave. Every request is accounted for, every answer is exact, and neither
memory nor threads nor open files grow.

`pytest tests/system/test_soak.py --soak-requests 2000000` runs it for hours. What is counted is
requests, not seconds: caches fill and leaks grow with them, however slow the machine is.
"""

import ctypes
import gc
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest

from mmdeploy_llm import ModelPool, SamplingParams
from mmdeploy_llm.media.loading import processed
from mmdeploy_llm.testing.media.samples import image_bytes, pixels, png_header

FAMILIES = {"text": "mistral", "vl": "qwen2_5_vl", "moe": "ernie4_5_vl_moe"}
NUM_TOKENS = 12
NUM_CLIENTS = 6
WAYS = ("whole", "whole", "deltas", "slow", "abort", "leave", "timeout")
LIBC = ctypes.CDLL(None)
GROWTH = 20 * 2**20  # bytes that a process may gain: its heap fragments slower and slower
PATIENCE = 3600  # seconds, after which a request hangs
NUM_WINDOWS = 6
SHARE = 0.1  # of the requests are those of a window
OPTIONS = {
    "block_size": 16,
    "max_model_len": 512,
    "num_gpu_blocks_override": 80,  # few: long requests preempt each other
    "max_num_seqs": 8,
    "encoder_cache_memory": 2**16,
    "limit_mm_per_prompt": {"image": 2, "video": 1},
    "num_threads": 1,
    "use_warmup": False,
    "quiet": True,
}


@dataclass(frozen=True)
class Case:
    """make: returns the prompt anew, with media of the same pixels in other bytes. expected: its
    greedy tokens; None for a prompt that is wrong, whose error has the code."""

    kind: str
    make: object
    expected: list | None
    code: int = 200


def good_cases(reference, make_picture, make_clip):
    """Texts, and for a model of media one and two images, and a clip."""
    texts = ("a", "There are two of them; a red circle", "The quick brown fox " * 12)
    for text in texts:
        yield Case("text", lambda text=text: text, reference.generate(text))
    if not reference.has_images:
        return
    image, video = reference.image_text(), reference.video_text()
    for number, (width, height) in enumerate(((70, 90), (150, 60), (112, 112))):
        picture = make_picture(number, width, height)
        text = f"A {image} B"
        yield Case("image", with_image(text, picture), reference.generate(text, [picture]))
    pair = [make_picture(seed, 84, 60) for seed in (7, 8)]
    text = f"{image}{image} which is larger?"
    two = {"prompt": text, "multimodal_data": {"image": pair}}
    yield Case("image", lambda: two, reference.generate(text, pair))
    clip = make_clip(1, 4, 70, 90, range(4))
    text = f"User: {video} what moves?"
    moving = {"prompt": text, "multimodal_data": {"video": clip.item}}
    yield Case("video", lambda: moving, reference.generate(text, videos=[clip]))


def with_image(text, picture):
    """Makes prompts with the picture as a PNG that no cache has met: of other bytes each time."""
    begin = image_bytes(np.asarray(picture), "PNG")

    def make():
        return {"prompt": text, "multimodal_data": {"image": begin + os.urandom(16)}}

    return make


def bad_cases(reference):
    """Prompts that are wrong, each in its own way."""
    yield Case("bad", lambda: {"prompt": "x " * 2000}, None, 400)
    yield Case("bad", lambda: {"prompt": "a", "tmeout": 3}, None, 400)
    yield Case("bad", lambda: {"prompt": "a", "timeout": -1}, None, 400)
    if not reference.has_images:
        return
    text = reference.image_text()
    whole = image_bytes(pixels(80, 80, seed=1), "PNG")
    files = {
        "cut off": (whole[: len(whole) // 2], 400),
        "huge": (png_header(30_000, 30_000), 413),
        "not there": ("/nowhere/at/all.png", 400),
        "no image": (b"\0" * 300, 415),
    }
    for blob, code in files.values():
        prompt = {"prompt": text, "multimodal_data": {"image": blob}}
        yield Case("bad", lambda prompt=prompt: prompt, None, code)
    yield Case("bad", lambda: {"prompt": text}, None, 400)
    three = {"prompt": text * 3, "multimodal_data": {"image": [whole] * 3}}
    yield Case("bad", lambda: three, None, 413)


class Stream:
    """The clients of a pool. Counts what they send and what becomes of it, under its lock."""

    def __init__(self, pool, cases):
        self._pool, self._cases = pool, cases
        self._lock = threading.Lock()
        self.sent, self.ended, self.wrong = Counter(), Counter(), []

    def ask(self, choose):
        """Sends one request, and reads it in one of the ways."""
        name = choose.choice(sorted(FAMILIES))
        case, way = choose.choice(self._cases[name]), choose.choice(WAYS)
        timeout = choose.random() / 20 if way == "timeout" else None
        params = SamplingParams(temperature=0, max_tokens=choose.randint(1, NUM_TOKENS))
        with self._lock:
            self.sent[case.kind, way] += 1
        priority = choose.randrange(3)
        handle = self._pool[name].submit(case.make(), params, priority=priority, timeout=timeout)
        if way == "leave":
            handle.release()
            assert handle.wait(PATIENCE)
        elif way == "abort":
            time.sleep(choose.random() / 50)
            handle.abort()
        ids = []
        for delta in handle if way in ("deltas", "slow") else ():
            ids += delta.outputs.token_ids
            time.sleep(choose.random() / 50 if way == "slow" else 0)
        fault = None
        if way != "leave":
            output = handle.result(PATIENCE)
            fault = fault_of(output, case, way, params.max_tokens)
            if way in ("deltas", "slow") and ids != list(output.outputs.token_ids):
                fault = f"its deltas have {ids}"
        with self._lock:
            self.ended[case.kind, way] += 1
            if fault is not None:
                self.wrong.append((name, case, way, fault))


def fault_of(output, case, way, count):
    """Says what is wrong with the output of a case; None when nothing is."""
    ids = list(output.outputs.token_ids)
    is_cut = output.error_code == 408 or output.outputs.finish_reason == "abort"
    if is_cut and way not in ("abort", "timeout"):
        return f"nobody ended it: {output.error_msg}"
    if case.expected is None:
        is_right = is_cut or output.error_code == case.code
        return None if is_right else f"{output.error_code} {output.error_msg}"
    wanted = case.expected[:count]
    if is_cut:
        return None if ids == wanted[: len(ids)] else f"it begins with {ids}, not {wanted}"
    return None if output.is_ok and ids == wanted else f"{output.error_msg}: {ids}, not {wanted}"


@dataclass(frozen=True)
class Footprint:
    """Counts what the process holds: bytes of memory, threads, open files, Python objects."""

    memory: int
    threads: int
    files: int
    objects: int


def footprint():
    gc.collect()
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)  # what the heap keeps free is no leak
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files = len(os.listdir("/proc/self/fd"))
    return Footprint(resident, threading.active_count(), files, len(gc.get_objects()))


def run(stream, num_requests, seed):
    """Runs all clients until they have sent so many requests."""
    sent, failures = count(), []

    def work(number):
        choose = random.Random(1000 * seed + number)
        try:
            while next(sent) < num_requests:
                stream.ask(choose)
        except BaseException as error:
            failures.append(error)

    clients = [threading.Thread(target=work, args=(number,)) for number in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert failures == []


def growing(found, num_requests):
    """Returns what leaks between the last of these footprints, each taken after so many requests
    more. A leak grows in every window; what fills up or comes and goes does not."""
    first, *_, last = found
    steps = [after.objects - before.objects for before, after in pairwise(found)]
    return [
        name
        for name, is_growing in {
            "memory": last.memory > first.memory + GROWTH,
            "threads": last.threads > max(each.threads for each in found[:-1]),
            "files": last.files > first.files + 4,
            "objects": min(steps) > num_requests / 20,
        }.items()
        if is_growing
    ]


def footprints(*objects, **others):
    base = {"memory": 2**29, "threads": 16, "files": 8}
    return [Footprint(**{**base, **others}, objects=each) for each in objects]


def test_a_leak_is_told_from_caches_that_fill():
    steady = footprints(60_000, 60_150, 60_090, 60_110)
    assert growing(steady, 400) == []
    assert growing(footprints(60_000, 63_000, 64_000, 64_010), 400) == []  # a cache, late
    assert growing(footprints(60_000, 60_030, 60_060, 60_085), 400) == ["objects"]
    assert growing([*steady, *footprints(60_000, memory=2**29 + 2**26)], 400) == ["memory"]
    assert growing([*steady, *footprints(60_000, threads=17, files=13)], 400) == [
        "threads",
        "files",
    ]


@pytest.mark.long
def test_of_three_models(
    pytestconfig, tiny_folder, reference_of, make_picture, make_clip, monkeypatch
):
    if not Path("/proc/self/statm").exists():
        pytest.skip("the size of a process is read from /proc, which is Linux's")
    for name in ("FIRST_BYTES", "MOST_BYTES"):  # so that it is full before footprints are taken
        monkeypatch.setattr(processed, name, 2**20)
    num_requests = pytestconfig.getoption("soak_requests")
    window = int(num_requests * SHARE)
    references = {name: reference_of(family) for name, family in FAMILIES.items()}
    cases = {
        name: [*good_cases(reference, make_picture, make_clip), *bad_cases(reference)]
        for name, reference in references.items()
    }
    with ModelPool() as pool:
        for name, family in FAMILIES.items():
            pool.install(name, str(tiny_folder(family)), **OPTIONS)
            pool.start(name)
        stream = Stream(pool, cases)
        # Caches fill, and the heap reaches its shape.
        run(stream, num_requests - NUM_WINDOWS * window, seed=0)
        found = [footprint()]
        for seed in range(1, NUM_WINDOWS + 1):
            run(stream, window, seed)
            found.append(footprint())
        for name in FAMILIES:
            stats = pool[name].stats()
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            final = pool[name].submit("a", SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
            assert list(final.result(60).outputs.token_ids) == references[name].generate("a")
    print(f"{stream.sent.total()} requests", *found, sep="\n")
    assert stream.wrong == []
    assert stream.sent == stream.ended
    assert {way for _, way in stream.sent} == set(WAYS)
    assert growing(found[NUM_WINDOWS // 2 :], window) == [], found
