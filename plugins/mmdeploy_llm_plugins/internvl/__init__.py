"""InternVL 3 and 3.5 of OpenGVLab, in transformers' format."""

from __future__ import annotations

from mmdeploy_llm.hooks import BoxRule, MediaProcessorSpec, ModelSpec, hookimpl

GGUF = "mmdeploy_llm_plugins.internvl.gguf:TABLE"

# How InternVL writes boxes: <ref>a cat</ref><box>[[100, 200, 300, 400]]</box>, from 0 to 1000.
# The tags are special tokens, which answers usually do not have.
BOXES = BoxRule(
    keys=("bbox_2d", "bbox", "box_2d"),
    pattern=r"\[\[?\s?\d[-\d\s.,\[\]]*",
)


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec of both versions."""
    return (
        ModelSpec(
            name="internvl",
            architectures=("InternVLForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.internvl.model:InternVLForConditionalGeneration",
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.internvl.tiny:INTERNVL",
            deterministic=True,
            boxes="mmdeploy_llm_plugins.internvl:BOXES",
            media=("image", "video"),
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the specs for images and videos."""
    return (
        MediaProcessorSpec(
            name="internvl-image",
            kind="image",
            factory="mmdeploy_llm_plugins.internvl.image:InternVLImageProcessor",
            models=("internvl",),
        ),
        MediaProcessorSpec(
            name="internvl-video",
            kind="video",
            factory="mmdeploy_llm_plugins.internvl.video:InternVLVideoProcessor",
            models=("internvl",),
        ),
    )
