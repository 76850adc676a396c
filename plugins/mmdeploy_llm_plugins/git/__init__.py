"""GIT: short captions and answers, by one decoder that reads a picture and then the text."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl
from mmdeploy_llm_plugins.encoder_decoder.prompts import TEMPLATE


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec."""
    return (
        ModelSpec(
            name="git",
            architectures=("GitForCausalLM",),
            factory="mmdeploy_llm_plugins.git.model:GitForCausalLM",
            encoder="mmdeploy_llm_plugins.git.prompts:GitPrompts",
            tiny="mmdeploy_llm_plugins.git.tiny:GIT",
            chat_template=TEMPLATE,
            question=" ",
            media=("image",),
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the spec for images."""
    return (
        MediaProcessorSpec(
            name="git-image",
            kind="image",
            factory="mmdeploy_llm_plugins.git.image:GitImages",
            models=("git",),
        ),
    )
