"""Runs any causal or image-text-to-text model of transformers on this engine's paged KV cache, if
its attention goes through transformers' attention interface. Its priority is below every native
plugin: it serves architectures that no other plugin names."""

from dataclasses import replace

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl
from mmdeploy_llm_plugins.encoder_decoder.prompts import TEMPLATE

PRIORITY = -1000
MODEL = "mmdeploy_llm_plugins.transformers_any.model:AnyModel"

# Tokens of an image attend to each other in both directions, so they must come in one step.
BY_ITEM = ("Gemma3ForConditionalGeneration",)
# All tokens of a prompt with images do.
BY_PROMPT = ("PaliGemmaForConditionalGeneration",)
ATOMIC = (*BY_ITEM, *BY_PROMPT)
# Checkpoints hold a draft layer, as draft.py reads it.
DRAFTING = ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
# Their picture stands before a prompt, which InstructBLIP's Q-Former reads too; see before.py.
BLIP2 = ("Blip2ForConditionalGeneration",)
BY_QUERIES = ("InstructBlipForConditionalGeneration",)
BY_FRAMES = ("InstructBlipVideoForConditionalGeneration",)
KOSMOS = ("Kosmos2ForConditionalGeneration",)
# They hear, and transcribe as speech.py asks them.
HEARING = (
    *("AudioFlamingo3", "GlmAsr", "GraniteSpeech", "GraniteSpeechPlus", "OmniASR", "Qwen3ASR"),
    "Voxtral",
)

ANY = ModelSpec(
    name="transformers_any",
    architectures=("*",),
    factory=MODEL,
    gguf="mmdeploy_llm_plugins.transformers_parts.gguf:TABLE",
    media=("image", "video", "audio"),
    priority=PRIORITY,
)
ANY_ATOMIC = ModelSpec(
    name="transformers_any_atomic",
    architectures=BY_ITEM,
    factory=MODEL,
    media=("image", "video", "audio"),
    atomic_media=True,
    priority=PRIORITY,
)
ANY_PREFIX = replace(
    ANY_ATOMIC,
    name="transformers_any_prefix",
    architectures=BY_PROMPT,
    chat_template=TEMPLATE,
    question="caption en",
)
ANY_DRAFTING = ModelSpec(
    name="transformers_any_drafting",
    architectures=DRAFTING,
    factory=MODEL,
    draft_head="mmdeploy_llm_plugins.transformers_any.draft:add_head",
    priority=PRIORITY,
)
ANY_BEFORE = tuple(
    ModelSpec(
        name=f"transformers_any_{name}",
        architectures=architectures,
        factory=MODEL,
        encoder=f"mmdeploy_llm_plugins.transformers_any.before:{rule}",
        media=(kind,),
        chat_template=TEMPLATE.replace("image", kind),
        question=question,
        priority=PRIORITY,
    )
    for name, architectures, rule, kind, question in (
        ("blip2", BLIP2, "QueryPrompts", "image", "a photo of"),
        ("queries", BY_QUERIES, "QueryPrompts", "image", None),
        ("frames", BY_FRAMES, "VideoQueryPrompts", "video", None),
        ("kosmos", KOSMOS, "KosmosPrompts", "image", "An image of"),
    )
)
ANY_HEARING = tuple(
    replace(
        ANY,
        name=f"transformers_any_{name.lower()}",
        architectures=(f"{name}ForConditionalGeneration",),
        media=("audio",),
        speech=f"mmdeploy_llm_plugins.transformers_any.speech:{name}Speech",
    )
    for name in HEARING
)


def _names_of(kind: str) -> tuple[str, ...]:
    """Returns the names of the specs above whose items are of this kind."""
    return tuple(spec.name for spec in ANY_BEFORE if kind in spec.media)


IMAGES = MediaProcessorSpec(
    name="transformers_any-image",
    kind="image",
    factory="mmdeploy_llm_plugins.transformers_media.processor:AnyImageProcessor",
    models=(ANY.name, ANY_ATOMIC.name, ANY_PREFIX.name, *_names_of("image")),
    priority=PRIORITY,
)
VIDEOS = MediaProcessorSpec(
    name="transformers_any-video",
    kind="video",
    factory="mmdeploy_llm_plugins.transformers_media.video.processor:AnyVideoProcessor",
    models=(ANY.name, ANY_ATOMIC.name, ANY_PREFIX.name, *_names_of("video")),
    priority=PRIORITY,
)
SOUNDS = MediaProcessorSpec(
    name="transformers_any-audio",
    kind="audio",
    factory="mmdeploy_llm_plugins.transformers_media.sound.processor:AnyAudioProcessor",
    models=(ANY.name, ANY_ATOMIC.name, ANY_PREFIX.name, *(spec.name for spec in ANY_HEARING)),
    priority=PRIORITY,
)


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns one spec for all models, those for models whose images are atomic, one for those with
    a draft layer, those of models whose picture or video stands before a prompt, and those that
    transcribe."""
    return (ANY, ANY_ATOMIC, ANY_PREFIX, ANY_DRAFTING, *ANY_BEFORE, *ANY_HEARING)


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the specs for images, videos and sounds, which the checkpoint's own processor
    prepares."""
    return (IMAGES, VIDEOS, SOUNDS)
