"""Plugin `llava-mini`."""

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl

MMDEPLOY_LLM_API = (1, 1)


@hookimpl
def provide_models():
    return [
        ModelSpec(
            name="llava-mini",
            architectures=("LlavaForConditionalGeneration",),
            factory="llava_mini_llm.model:LlavaMini",
            media=("image",),
            reasoning=None,
            tiny="llava_mini_llm.tiny:TINY",
        )
    ]


@hookimpl
def provide_media_processors():
    return [
        MediaProcessorSpec(
            name="llava-mini-image",
            kind="image",
            factory="llava_mini_llm.image:Images",
            models=("llava-mini",),
        )
    ]
