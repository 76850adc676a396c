"""The benchmark of photos: what it writes, and where it says the time went."""

import sys
import threading

import pytest
from PIL import Image

from mmdeploy_llm import LLM, SamplingParams


@pytest.fixture(scope="module")
def camera(load_benchmark):
    return load_benchmark("camera")


def test_photos_are_as_cameras_write_them(camera, tmp_path):
    paths = camera.write_photos(tmp_path / "photos", 5, 96, 64)
    found = []
    for path in paths:
        with Image.open(path) as image:
            assert (image.format, image.size) == ("JPEG", (96, 64))
            found.append(image.getexif()[camera.ORIENTATION])
    assert found == [1, 6, 1, 1, 6]
    before = [path.read_bytes() for path in paths]
    assert len(set(before)) == 5
    paths[2].unlink()
    again = camera.write_photos(tmp_path / "photos", 5, 96, 64)
    assert [path.read_bytes() for path in again] == before


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="clocks of threads are Linux's")
def test_the_parts_of_a_batch(load_benchmark, camera, tmp_path):
    camera.write_photos(tmp_path / "photos", 3, 320, 240)
    meter_of = load_benchmark("peers/photo_meter").Meter
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(model="shapes-vl", device="cpu", use_warmup=False) as llm:
        llm.generate([[21, 22]], params, use_tqdm=False)
        meter = meter_of(llm)
        ended = threading.Thread(target=lambda: None)  # as the one that writes the cache of weights
        ended.start()
        ended.join()
        meter._seen[(~ended.native_id << 3) | 6] = 0.0
        with meter.watching():
            llm.run_batch(
                tmp_path / "photos",
                tmp_path / "out.jsonl",
                prompt="Describe it.",
                sampling_params=params,
                use_tqdm=False,
            )
        decode = type(llm._desk.media.media.processors["image"]).decode
        assert decode.__name__ == "decode", "the processor is as it was"
        assert llm.stats().num_generated_tokens == 16, "no engine was started again"
    seconds = meter.seconds
    assert all(seconds[part] > 0 for part in ("decode", "resize", "tower", "prefill", "decoding"))
    assert 0 < seconds["waiting"] < seconds["wall"]
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 3
