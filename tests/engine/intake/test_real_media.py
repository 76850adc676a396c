"""Intake with the in-tree plugins: files, data: URLs, objects, the real image processors."""

import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mmdeploy_llm.errors import MediaError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits, PluginManager
from mmdeploy_llm.values.params import SamplingParams

PARAMS = SamplingParams()
PLACE = "<|image_pad|>"


@pytest.fixture(scope="module")
def manager():
    return PluginManager.load(plugins=("qwen", "sources"))


@pytest.fixture
def real(make_intake, manager, tmp_path):
    """An Intake with the Qwen processor, selected by the plugin manager."""
    spec = manager.media_processor("image", "qwen2_5_vl")
    checkpoint = Checkpoint(folder=tmp_path, config=SimpleNamespace())
    processor = manager.build(spec, checkpoint, {})

    def make(**limits):
        return make_intake(
            processors={"image": processor},
            fetch=manager.fetch_media,
            limits=MediaLimits(**limits),
            limit_mm_per_prompt={"image": 20},
            max_model_len=4096,
        )

    return make


@pytest.fixture
def picture():
    values = np.random.default_rng(0).integers(0, 256, (90, 60, 3), dtype=np.uint8)
    return Image.fromarray(values)


def encoded(image, format="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, format)
    return buffer.getvalue()


def accept(intake, *sources):
    data = {"image": list(sources)}
    (request,) = intake.accept({"prompt": PLACE * len(sources), "multimodal_data": data}, PARAMS)
    return request


def test_one_picture_in_every_form_has_the_same_pixels(real, picture, tmp_path):
    blob = encoded(picture)
    path = tmp_path / "picture.png"
    path.write_bytes(blob)
    values = np.asarray(picture)
    sources = [
        picture,
        blob,
        bytearray(blob),
        memoryview(blob),
        io.BytesIO(blob),
        str(path),
        path,
        path.as_uri(),
        "data:image/png;base64," + base64.b64encode(blob).decode(),
        values,
        torch.from_numpy(values.transpose(2, 0, 1).copy()),
        encoded(picture, "BMP"),
    ]
    request = accept(real(), *sources)
    first = request.media[0].item
    assert first.grid_thw == (1, 6, 4)
    assert first.num_tokens == 6
    for span in request.media:
        assert span.item.grid_thw == first.grid_thw
        assert torch.equal(span.item.tensors["pixels"], first.tensors["pixels"])
    # The loaded picture, the PNG and the BMP have three keys: items are equal within one form only.
    assert len({span.item.key for span in request.media}) == 3


def test_counting_reads_headers_only(real, picture):
    blob = encoded(picture)
    count = real().count_tokens({"prompt": PLACE, "multimodal_data": {"image": blob[:100]}})
    assert count.num_input_image_tokens == accept(real(), blob).num_media_tokens("image") == 6


def test_faults_name_the_item_and_no_address(real, picture, tmp_path):
    path = tmp_path / "broken.png"
    path.write_bytes(encoded(picture)[:300])
    intake = real(max_bytes=10**6, max_pixels=10**5)
    faults = {
        MediaError: [str(path), tmp_path / "gone.png", b"", tmp_path],
        UnsupportedMediaError: ["http://host/x.png", b"no image at all", object()],
        MediaLimitError: [np.zeros((1000, 1000), np.uint8), b"\x89PNG" * 300_000],
    }
    for kind, sources in faults.items():
        for source in sources:
            with pytest.raises(kind, match="image") as caught:
                accept(intake, picture, source)
            assert type(caught.value) is kind
            assert "0x" not in str(caught.value)
            assert accept(intake, picture).media


@pytest.mark.parametrize("num", [1, 2])
def test_a_file_that_cannot_be_decoded_is_named_as_it_was_given(
    real, picture, tmp_path, num, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "broken.png").write_bytes(encoded(picture)[:300])
    good = tmp_path / "good.png"
    good.write_bytes(encoded(picture))
    for name in ("folder/broken.png", f"file://{tmp_path}/folder/broken.png"):
        with pytest.raises(MediaError) as caught:
            accept(real(), *[good] * (num - 1), name)
        assert str(caught.value).startswith("the PNG" if num == 1 else "image 2: the PNG")
        assert str(caught.value).endswith(f"(image file {name!r})")
