"""Qwen2, Qwen2.5 and Qwen3 text models, dense and with experts; Qwen2-VL, Qwen2.5-VL and Qwen3-VL;
Qwen3-Next; Qwen3.5 with and without media; the thinkers of Qwen2.5-Omni and Qwen3-Omni."""

from __future__ import annotations

from dataclasses import replace

from mmdeploy_llm.hooks import BoxRule, MediaProcessorSpec, ModelSpec, hookimpl

GGUF = "mmdeploy_llm_plugins.qwen.gguf:TABLE"
DRAFT_HEAD = "mmdeploy_llm_plugins.qwen.draft:add_head"
OMNI = {  # model -> kind -> class of its processor
    "qwen2_5_omni": {
        "image": "Qwen25OmniImageProcessor",
        "video": "Qwen25OmniVideoProcessor",
        "audio": "OmniAudioProcessor",
    },
    "qwen3_omni_moe": {
        "image": "Qwen3OmniImageProcessor",
        "video": "Qwen3OmniVideoProcessor",
        "audio": "OmniAudioProcessor",
    },
}

# How the Qwen-VL models write boxes. Qwen2-VL: "cat(100,200),(300,400)" between special tokens,
# from 0 to 1000. Qwen2.5-VL: JSON in pixels of the resized picture. Qwen3-VL: JSON from 0 to
# 1000.
BOX_KEYS = ("bbox_2d", "bbox")
QWEN2_VL_BOXES = BoxRule(
    keys=BOX_KEYS,
    pattern=r"\(\d{1,5}\s?,\s?\d{1,5}\)\s?,\s?\(\d{1,5}\s?,\s?\d{1,5}\)",
)
QWEN2_5_VL_BOXES = BoxRule(keys=BOX_KEYS, scale=None)
QWEN3_VL_BOXES = BoxRule(keys=BOX_KEYS)


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of the families, named as in transformers."""
    hybrids = (replace(spec, draft_head=DRAFT_HEAD) for spec in _hybrid_models())
    specs = (*_text_models(), *_vl_models(), *hybrids)
    return (*(replace(spec, gguf=GGUF) for spec in specs), *_omni_models())


def _text_models() -> tuple[ModelSpec, ...]:
    return (
        ModelSpec(
            name="qwen2",
            architectures=("Qwen2ForCausalLM",),
            factory="mmdeploy_llm_plugins.qwen.text:Qwen2ForCausalLM",
            tiny="mmdeploy_llm_plugins.qwen.tiny:QWEN2",
            deterministic=True,
            tools="qwen",
        ),
        ModelSpec(
            name="qwen2_moe",
            architectures=("Qwen2MoeForCausalLM",),
            factory="mmdeploy_llm_plugins.qwen.text:Qwen2MoeForCausalLM",
            tiny="mmdeploy_llm_plugins.qwen.tiny:QWEN2_MOE",
            # Not deterministic: torch's sigmoid of the shared expert's gate depends on the rows.
            tools="qwen",
        ),
        ModelSpec(
            name="qwen3",
            vectors="mmdeploy_llm_plugins.qwen.vectors:QWEN3",
            architectures=("Qwen3ForCausalLM",),
            factory="mmdeploy_llm_plugins.qwen.text:Qwen3ForCausalLM",
            tiny="mmdeploy_llm_plugins.qwen.tiny:QWEN3",
            deterministic=True,
            reasoning="qwen3",
            tools="qwen",
        ),
        ModelSpec(
            name="qwen3_moe",
            vectors="mmdeploy_llm_plugins.qwen.vectors:QWEN3",
            architectures=("Qwen3MoeForCausalLM",),
            factory="mmdeploy_llm_plugins.qwen.text:Qwen3MoeForCausalLM",
            tiny="mmdeploy_llm_plugins.qwen.tiny:QWEN3_MOE",
            deterministic=True,
            reasoning="qwen3",
            tools="qwen",
        ),
    )


def _vl_models() -> tuple[ModelSpec, ...]:
    return (
        ModelSpec(
            name="qwen2_vl",
            architectures=("Qwen2VLForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.qwen.vl:Qwen2VLForConditionalGeneration",
            tiny="mmdeploy_llm_plugins.qwen.tiny_vl:QWEN2_VL",
            deterministic=True,
            boxes="mmdeploy_llm_plugins.qwen:QWEN2_VL_BOXES",
            media=("image", "video"),
            tools="qwen",
        ),
        ModelSpec(
            name="qwen2_5_vl",
            architectures=("Qwen2_5_VLForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.qwen.vl:Qwen25VLForConditionalGeneration",
            tiny="mmdeploy_llm_plugins.qwen.tiny:QWEN2_5_VL",
            deterministic=True,
            boxes="mmdeploy_llm_plugins.qwen:QWEN2_5_VL_BOXES",
            media=("image", "video"),
            tools="qwen",
        ),
        ModelSpec(
            name="qwen3_vl",
            vectors="mmdeploy_llm_plugins.qwen.vectors:QWEN3_VL",
            architectures=("Qwen3VLForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.qwen.vl3:Qwen3VLForConditionalGeneration",
            tiny="mmdeploy_llm_plugins.qwen.tiny_vl:QWEN3_VL",
            deterministic=True,
            boxes="mmdeploy_llm_plugins.qwen:QWEN3_VL_BOXES",
            media=("image", "video"),
            reasoning="qwen3",
            tools="qwen",
        ),
        ModelSpec(
            name="qwen3_vl_moe",
            vectors="mmdeploy_llm_plugins.qwen.vectors:QWEN3_VL",
            architectures=("Qwen3VLMoeForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.qwen.vl3:Qwen3VLMoeForConditionalGeneration",
            tiny="mmdeploy_llm_plugins.qwen.tiny_vl:QWEN3_VL_MOE",
            deterministic=True,
            boxes="mmdeploy_llm_plugins.qwen:QWEN3_VL_BOXES",
            media=("image", "video"),
            reasoning="qwen3",
            tools="qwen",
        ),
    )


def _hybrid_models() -> tuple[ModelSpec, ...]:
    text = "mmdeploy_llm_plugins.qwen.qwen35:Qwen35ForCausalLM"
    vl = "mmdeploy_llm_plugins.qwen.qwen35:Qwen35ForConditionalGeneration"
    media = ("image", "video")
    return (
        ModelSpec(
            name="qwen3_next",
            architectures=("Qwen3NextForCausalLM",),
            factory="mmdeploy_llm_plugins.qwen.next:Qwen3NextForCausalLM",
            tiny="mmdeploy_llm_plugins.qwen.tiny35:QWEN3_NEXT",
            reasoning="qwen3",
            tools="qwen",
        ),
        ModelSpec(
            name="qwen3_5_text",
            architectures=("Qwen3_5ForCausalLM",),
            factory=text,
            tiny="mmdeploy_llm_plugins.qwen.tiny35:QWEN3_5_TEXT",
            reasoning="qwen3",
            tools="qwen",
        ),
        ModelSpec(
            name="qwen3_5_moe_text",
            architectures=("Qwen3_5MoeForCausalLM",),
            factory=text,
            tiny="mmdeploy_llm_plugins.qwen.tiny35:QWEN3_5_MOE_TEXT",
            reasoning="qwen3",
            tools="qwen",
        ),
        ModelSpec(
            name="qwen3_5",
            architectures=("Qwen3_5ForConditionalGeneration",),
            factory=vl,
            tiny="mmdeploy_llm_plugins.qwen.tiny35:QWEN3_5",
            boxes="mmdeploy_llm_plugins.qwen:QWEN3_VL_BOXES",
            media=media,
            reasoning="qwen3",
            tools="qwen",
        ),
        ModelSpec(
            name="qwen3_5_moe",
            architectures=("Qwen3_5MoeForConditionalGeneration",),
            factory=vl,
            tiny="mmdeploy_llm_plugins.qwen.tiny35:QWEN3_5_MOE",
            boxes="mmdeploy_llm_plugins.qwen:QWEN3_VL_BOXES",
            media=media,
            reasoning="qwen3",
            tools="qwen",
        ),
    )


def _omni_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of the thinkers: what they say is text, the parts that speak are left."""
    media = ("image", "video", "audio")
    return (
        ModelSpec(
            name="qwen2_5_omni",
            architectures=(
                "Qwen2_5OmniModel",
                "Qwen2_5OmniForConditionalGeneration",
                "Qwen2_5OmniThinkerForConditionalGeneration",
            ),
            factory="mmdeploy_llm_plugins.qwen.omni:Qwen25OmniForConditionalGeneration",
            tiny="mmdeploy_llm_plugins.qwen.tiny_omni:QWEN2_5_OMNI",
            media=media,
            tools="qwen",
        ),
        ModelSpec(
            name="qwen3_omni_moe",
            architectures=(
                "Qwen3OmniMoeForConditionalGeneration",
                "Qwen3OmniMoeThinkerForConditionalGeneration",
            ),
            factory="mmdeploy_llm_plugins.qwen.omni:Qwen3OmniForConditionalGeneration",
            tiny="mmdeploy_llm_plugins.qwen.tiny_omni:QWEN3_OMNI_MOE",
            media=media,
            reasoning="qwen3",
            tools="qwen",
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the specs for images, videos and sounds."""
    return (
        MediaProcessorSpec(
            name="qwen-image",
            kind="image",
            factory="mmdeploy_llm_plugins.qwen.image:QwenImageProcessor",
            models=("qwen2_vl", "qwen2_5_vl"),
        ),
        MediaProcessorSpec(
            name="qwen-video",
            kind="video",
            factory="mmdeploy_llm_plugins.qwen.video:QwenVideoProcessor",
            models=("qwen2_vl", "qwen2_5_vl"),
        ),
        MediaProcessorSpec(
            name="qwen3-image",
            kind="image",
            factory="mmdeploy_llm_plugins.qwen.image:Qwen3ImageProcessor",
            models=("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        ),
        MediaProcessorSpec(
            name="qwen3-video",
            kind="video",
            factory="mmdeploy_llm_plugins.qwen.video3:Qwen3VideoProcessor",
            models=("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        ),
        *(
            MediaProcessorSpec(
                name=f"{model}-{kind}",
                kind=kind,
                factory=f"mmdeploy_llm_plugins.qwen.omni_media:{name}",
                models=(model,),
            )
            for model, kinds in OMNI.items()
            for kind, name in kinds.items()
        ),
    )
