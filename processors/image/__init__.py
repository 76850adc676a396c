"""Turns images into model inputs, for ERNIE 4.5 VL, Gemma 3 and 4, GLM-4V, InternVL, LFM2-VL,
MiniCPM-V, Qwen-VL and PaddleOCR-VL. Importing this package imports neither Pillow nor torch."""

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


QWEN3 = MediaProcessorSpec(
    name="qwen3-image",
    kind="image",
    factory="mmdeploy_llm_processors.image.processor:Qwen3ImageProcessor",
    models=("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
)
PADDLEOCR = MediaProcessorSpec(
    name="paddleocr-image",
    kind="image",
    factory="mmdeploy_llm_processors.image.processor:PaddleOCRImageProcessor",
    models=("paddleocr_vl",),
)
INTERNVL = MediaProcessorSpec(
    name="internvl-image",
    kind="image",
    factory="mmdeploy_llm_processors.image.tiling.internvl:InternVLImageProcessor",
    models=("internvl",),
)

GEMMA3 = MediaProcessorSpec(
    name="gemma3-image",
    kind="image",
    factory="mmdeploy_llm_processors.image.tiling.gemma3:Gemma3ImageProcessor",
    models=("gemma3",),
)
GEMMA4 = MediaProcessorSpec(
    name="gemma4-image",
    kind="image",
    factory="mmdeploy_llm_processors.image.gemma:Gemma4ImageProcessor",
    models=("gemma4",),
)
GLM = MediaProcessorSpec(
    name="glm-image",
    kind="image",
    factory="mmdeploy_llm_processors.image.processor:GlmImageProcessor",
    models=("glm4v", "glm4v_moe", "glm46v", "glm_ocr"),
)
LFM2 = MediaProcessorSpec(
    name="lfm2-image",
    kind="image",
    factory="mmdeploy_llm_processors.image.tiling.lfm:LfmImageProcessor",
    models=("lfm2_vl",),
)

MINICPM = MediaProcessorSpec(
    name="minicpm-image",
    kind="image",
    factory="mmdeploy_llm_processors.image.tiling.minicpm:MiniCPMImageProcessor",
    models=("minicpmv4_6",),
)


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns one spec for each family."""
    return (ERNIE, QWEN, QWEN3, PADDLEOCR, INTERNVL, GEMMA3, GEMMA4, GLM, LFM2, MINICPM)
