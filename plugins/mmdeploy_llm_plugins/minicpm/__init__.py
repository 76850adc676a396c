"""MiniCPM-V 4.6 of OpenBMB, whose decoder is Qwen3.5's."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec."""
    return (
        ModelSpec(
            name="minicpmv4_6",
            architectures=("MiniCPMV4_6ForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.minicpm.model:MiniCPMV46ForConditionalGeneration",
            tiny="mmdeploy_llm_plugins.minicpm.tiny:MINICPMV4_6",
            media=("image",),
            reasoning="qwen3",
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the spec for images."""
    return (
        MediaProcessorSpec(
            name="minicpm-image",
            kind="image",
            factory="mmdeploy_llm_plugins.minicpm.image:MiniCPMImageProcessor",
            models=("minicpmv4_6",),
        ),
    )
