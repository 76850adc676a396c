"""InternVL 3 and 3.5 of OpenGVLab, in transformers' format."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl

GGUF = "mmdeploy_llm_plugins.internvl.gguf:TABLE"


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec of both versions."""
    return (
        ModelSpec(
            name="internvl",
            architectures=("InternVLForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.internvl.model:InternVLForConditionalGeneration",
            gguf=GGUF,
            deterministic=True,
            media=("image", "video"),
        ),
    )
