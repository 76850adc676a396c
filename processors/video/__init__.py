"""Turns videos into model inputs, for ERNIE 4.5 VL, Gemma 4, GLM-4V, InternVL and Qwen-VL.
Importing this package imports neither PyAV, Pillow nor torch."""

from mmdeploy_llm.hooks import MediaProcessorSpec, hookimpl

ERNIE = MediaProcessorSpec(
    name="ernie-video",
    kind="video",
    factory="mmdeploy_llm_processors.video.processor:ErnieVideoProcessor",
    models=("ernie4_5_vl_moe",),
)
QWEN = MediaProcessorSpec(
    name="qwen-video",
    kind="video",
    factory="mmdeploy_llm_processors.video.processor:QwenVideoProcessor",
    models=("qwen2_vl", "qwen2_5_vl"),
)


QWEN3 = MediaProcessorSpec(
    name="qwen3-video",
    kind="video",
    factory="mmdeploy_llm_processors.video.qwen3:Qwen3VideoProcessor",
    models=("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
)

GEMMA4 = MediaProcessorSpec(
    name="gemma4-video",
    kind="video",
    factory="mmdeploy_llm_processors.video.gemma:Gemma4VideoProcessor",
    models=("gemma4",),
)
GLM = MediaProcessorSpec(
    name="glm-video",
    kind="video",
    factory="mmdeploy_llm_processors.video.glm:GlmVideoProcessor",
    models=("glm4v", "glm4v_moe", "glm46v", "glm_ocr"),
)
INTERNVL = MediaProcessorSpec(
    name="internvl-video",
    kind="video",
    factory="mmdeploy_llm_processors.video.internvl:InternVLVideoProcessor",
    models=("internvl",),
)


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns one spec for each family."""
    return (ERNIE, QWEN, QWEN3, GEMMA4, GLM, INTERNVL)
