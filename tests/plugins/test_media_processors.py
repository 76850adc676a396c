"""The in-tree processors pass the conformance kit, used as by a third party."""

import pytest

from mmdeploy_llm.hooks import MediaLimits, PluginManager
from mmdeploy_llm.testing import MediaProcessorConformance
from mmdeploy_llm.testing.media.subject import ProcessorSubject, checkpoint_of

MANAGER = PluginManager.load()
# Their families' tests run the kit, with a checkpoint or a reference of their own.
IN_TESTS_OF_THEIR_FAMILY = (
    *("cohere_asr-audio", "granitespeech5-audio", "nemotron-audio", "parakeet-audio"),
)
# Those of families; transformers_any's need the checkpoint of a whole model.
SPECS = {
    spec.name: spec
    for spec in MANAGER.media_processors
    if spec.priority == 0 and spec.yields is None and spec.name not in IN_TESTS_OF_THEIR_FAMILY
}
QUICK = ("qwen-image", "qwen-video", "gemma4-audio")  # the others are left to the full tier
# What these check is in the processors' common base: one of each kind runs them, and the others
# only among the long tests.
OF_THE_BASE = tuple(
    check
    for check in MediaProcessorConformance.checks
    if check.__name__
    in {
        "close_leaves_nothing",
        "closes_twice",
        "keys_change_with_every_byte",
        "threads_do_not_disturb_each_other",
    }
)


def with_tier(tier):
    """Returns all processors as parameters, with a marker on all but the quick ones."""
    return [pytest.param(spec, marks=[tier] * (spec.name not in QUICK)) for spec in SPECS.values()]


def name_of(spec):
    return spec.name


def fields_of(spec):
    """Returns what differs between the subjects of the checks."""
    if spec.name == "kosmos2_5-image":  # it always normalises
        return {"other_options": {"max_patches": 6}}
    if spec.name == "neomme-image":  # the same
        return {"other_options": {"max_pixels": 1024}}
    if spec.kind == "image":
        is_normal = spec.name not in ("gemma4-image", "tipsv2-image")
        return {"other_options": {"do_normalize": not is_normal}}  # not its default
    if spec.kind == "audio":
        return {"item_options": ({"start": 0.1}, {"end": 0.25})}
    options = {"video_min_pixels": 56 * 56, "video_max_pixels": 28 * 28 * 16, "video_min_frames": 2}
    other = {"video_max_pixels": 28 * 28 * 12}
    if spec.name == "internvl-video":  # its frames have one size
        options, other = {}, {"video_target_frames": 3}
    elif spec.name == "gemma4-video":  # its tiny tower knows few positions
        options = {}
    items = {"target_frames": 4, "fps": -1}
    return {"options": options, "other_options": other, "item_options": items}


def subject_of(spec, tmp_path_factory, **fields):
    """Yields the subject of the checks, and closes it."""
    checkpoint = checkpoint_of(spec, tmp_path_factory.mktemp("checkpoint"))
    fields = {**fields_of(spec), **fields}
    subject = ProcessorSubject(spec=spec, checkpoint=checkpoint, **fields)
    yield subject
    subject.close()


class TestProcessors(MediaProcessorConformance):
    """Checks every processor on generated files and loaded objects; files of videos are read in
    worker processes."""

    checks = tuple(c for c in MediaProcessorConformance.checks if c not in OF_THE_BASE)

    @pytest.fixture(scope="class", params=with_tier(pytest.mark.full), ids=name_of)
    @classmethod
    def subject(cls, request, tmp_path_factory):
        yield from subject_of(request.param, tmp_path_factory)


class TestTheirBase(MediaProcessorConformance):
    """Checks what all processors inherit."""

    checks = OF_THE_BASE

    @pytest.fixture(scope="class", params=with_tier(pytest.mark.long), ids=name_of)
    @classmethod
    def subject(cls, request, tmp_path_factory):
        yield from subject_of(request.param, tmp_path_factory)


class TestIsolatedImages(MediaProcessorConformance):
    """Checks images that are decoded in worker processes."""

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory):
        limits = MediaLimits(isolation="process")
        yield from subject_of(SPECS["qwen-image"], tmp_path_factory, limits=limits)
