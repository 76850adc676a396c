"""The in-tree processors pass the conformance kit, used as by a third party."""

import pytest

from mmdeploy_llm.hooks import MediaLimits, PluginManager
from mmdeploy_llm.media_checks.subject import ProcessorSubject, checkpoint_of
from mmdeploy_llm.media_checks.truth import TransformersSounds
from mmdeploy_llm.testing import MediaProcessorConformance

MANAGER = PluginManager.load()
# Those of families; transformers_any's need the checkpoint of a whole model.
SPECS = {spec.name: spec for spec in MANAGER.media_processors if spec.priority == 0}
IMAGE, VIDEO, AUDIO = (
    [spec for spec in SPECS.values() if spec.kind == kind] for kind in ("image", "video", "audio")
)


def name_of(spec):
    return spec.name


def with_tiers(specs, quick):
    """Leaves all but one to the full tier."""
    return [pytest.param(spec, marks=[pytest.mark.full] * (spec.name != quick)) for spec in specs]


SMALL = {"video_min_pixels": 56 * 56, "video_max_pixels": 28 * 28 * 16, "video_min_frames": 2}


def subject_of(spec, tmp_path_factory, **fields):
    """Yields the subject of the checks, and closes it."""
    checkpoint = checkpoint_of(spec, tmp_path_factory.mktemp("checkpoint"))
    subject = ProcessorSubject(spec=spec, checkpoint=checkpoint, **fields)
    yield subject
    subject.close()


class TestImages(MediaProcessorConformance):
    """Checks every image processor on generated files, Pillow images and arrays."""

    @pytest.fixture(
        scope="class", params=with_tiers(IMAGE, "qwen-image"), ids=lambda spec: spec.name
    )
    @classmethod
    def subject(cls, request, tmp_path_factory):
        options = {"do_normalize": request.param.name == "gemma4-image"}  # not its default
        yield from subject_of(request.param, tmp_path_factory, other_options=options)


class TestVideos(MediaProcessorConformance):
    """Checks every video processor; files are read in worker processes."""

    @pytest.fixture(
        scope="class", params=with_tiers(VIDEO, "qwen-video"), ids=lambda spec: spec.name
    )
    @classmethod
    def subject(cls, request, tmp_path_factory):
        options, other = SMALL, {"video_max_pixels": 28 * 28 * 12}
        if request.param.name == "internvl-video":  # its frames have one size
            options, other = {}, {"video_target_frames": 3}
        elif request.param.name == "gemma4-video":  # its tiny tower knows few positions
            options = {}
        yield from subject_of(
            request.param,
            tmp_path_factory,
            options=options,
            other_options=other,
            item_options={"target_frames": 4, "fps": -1},
        )


def sounds_of(kind, checkpoint):
    """transformers' processor of Qwen2.5-Omni fills its sounds, on the way to the extractor."""
    is_filled = checkpoint.config.model_type.startswith("qwen2_5_omni")
    return TransformersSounds(checkpoint, **({"padding": "max_length"} if is_filled else {}))


class TestSounds(MediaProcessorConformance):
    """Checks every processor of sounds, whose features are transformers'."""

    @pytest.fixture(
        scope="class", params=with_tiers(AUDIO, "gemma4-audio"), ids=lambda spec: spec.name
    )
    @classmethod
    def subject(cls, request, tmp_path_factory):
        yield from subject_of(
            request.param,
            tmp_path_factory,
            item_options=({"start": 0.1}, {"end": 0.25}),
            make_reference=sounds_of,
        )


class TestIsolatedImages(TestImages):
    """Checks images that are decoded in worker processes."""

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory):
        yield from subject_of(
            SPECS["qwen-image"],
            tmp_path_factory,
            limits=MediaLimits(isolation="process"),
            other_options={"do_normalize": False},
        )
