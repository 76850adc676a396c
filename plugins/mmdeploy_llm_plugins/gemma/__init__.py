"""Gemma models of Google: text models of versions 1 to 3, versions 3 and 4 with images, version 4
with sounds."""

from __future__ import annotations

from mmdeploy_llm.hooks import BoxRule, MediaProcessorSpec, ModelSpec, hookimpl

FACTORY = "mmdeploy_llm_plugins.gemma.text:GemmaForCausalLM"
MODULE4 = "mmdeploy_llm_plugins.gemma.model4"
GGUF = "mmdeploy_llm_plugins.gemma.gguf:TABLE"

# How Gemma writes boxes: JSON with "box_2d", [top, left, bottom, right] from 0 to 1000.
BOXES = BoxRule(keys=("box_2d",), order="yxyx")


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of all versions."""
    return (*_text_models(), *_media_models())


def _text_models() -> tuple[ModelSpec, ...]:
    return (
        ModelSpec(
            name="gemma",
            architectures=("GemmaForCausalLM",),
            factory=FACTORY,
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.gemma.tiny:GEMMA",
        ),
        ModelSpec(
            name="gemma2",
            architectures=("Gemma2ForCausalLM",),
            factory=FACTORY,
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.gemma.tiny:GEMMA2",
        ),
        ModelSpec(
            name="gemma3_text",
            architectures=("Gemma3ForCausalLM",),
            factory=FACTORY,
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.gemma.tiny:GEMMA3_TEXT",
        ),
        ModelSpec(
            name="gemma4_text",
            architectures=("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"),
            factory=f"{MODULE4}:Gemma4ForCausalLM",
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.gemma.tiny4:GEMMA4_TEXT",
            reasoning="gemma4",
        ),
        ModelSpec(
            name="embedding_gemma2_text",
            architectures=("EmbeddingGemma2TextModel",),
            factory="mmdeploy_llm_plugins.gemma.embedding2:EmbeddingGemma2TextModel",
            tiny="mmdeploy_llm_plugins.gemma.tiny_embedding2:EMBEDDING_GEMMA2_TEXT",
        ),
    )


def _media_models() -> tuple[ModelSpec, ...]:
    return (
        ModelSpec(
            name="embedding_gemma2",
            architectures=("EmbeddingGemma2Model",),
            factory="mmdeploy_llm_plugins.gemma.embedding2:EmbeddingGemma2Model",
            tiny="mmdeploy_llm_plugins.gemma.tiny_embedding2:EMBEDDING_GEMMA2",
            media=("image", "audio"),
        ),
        ModelSpec(
            name="gemma3",
            architectures=("Gemma3ForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.gemma.model3:Gemma3ForConditionalGeneration",
            tiny="mmdeploy_llm_plugins.gemma.tiny3:GEMMA3",
            boxes="mmdeploy_llm_plugins.gemma:BOXES",
            media=("image",),
            atomic_media=True,
        ),
        ModelSpec(
            name="gemma4",
            architectures=("Gemma4ForConditionalGeneration",),
            factory=f"{MODULE4}:Gemma4ForConditionalGeneration",
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.gemma.tiny4:GEMMA4",
            boxes="mmdeploy_llm_plugins.gemma:BOXES",
            media=("image", "video", "audio"),
            reasoning="gemma4",
            atomic_media=True,
        ),
        ModelSpec(
            name="gemma4_unified",
            architectures=("Gemma4UnifiedForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.gemma.unified4:Gemma4UnifiedForConditionalGeneration",
            tiny="mmdeploy_llm_plugins.gemma.tiny4:GEMMA4_UNIFIED",
            boxes="mmdeploy_llm_plugins.gemma:BOXES",
            media=("image", "video", "audio"),
            reasoning="gemma4",
            atomic_media=True,
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the specs for images, videos and sounds."""
    return (
        MediaProcessorSpec(
            name="gemma3-image",
            kind="image",
            factory="mmdeploy_llm_plugins.gemma.image3:Gemma3ImageProcessor",
            models=("gemma3",),
        ),
        MediaProcessorSpec(
            name="gemma4-image",
            kind="image",
            factory="mmdeploy_llm_plugins.gemma.image4:Gemma4ImageProcessor",
            models=("embedding_gemma2", "gemma4", "gemma4_unified"),
        ),
        MediaProcessorSpec(
            name="gemma4-video",
            kind="video",
            factory="mmdeploy_llm_plugins.gemma.video4:Gemma4VideoProcessor",
            models=("gemma4", "gemma4_unified"),
        ),
        MediaProcessorSpec(
            name="gemma4-audio",
            kind="audio",
            factory="mmdeploy_llm_plugins.gemma.audio4:Gemma4AudioProcessor",
            models=("embedding_gemma2", "gemma4", "gemma4_unified"),
        ),
    )
