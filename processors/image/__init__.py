"""Images as model inputs, for ERNIE 4.5 VL and Qwen-VL. Imports neither Pillow nor torch by
itself."""

from mmdeploy_llm.hooks import MediaProcessorSpec, hookimpl

ERNIE = MediaProcessorSpec(
    name="ernie-image",
    kind="image",
    factory="mmdeploy_llm_processors.image.processor:ErnieImageProcessor",
    models=("ernie4_5_vl_moe",),
)
QWEN = MediaProcessorSpec(
    name="qwen-image",
    kind="image",
    factory="mmdeploy_llm_processors.image.processor:QwenImageProcessor",
    models=("qwen2_vl", "qwen2_5_vl"),
)


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """One spec for each family."""
    return (ERNIE, QWEN)
