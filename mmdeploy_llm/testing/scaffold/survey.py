"""Reads a checkpoint's folder and says which parts of a plugin its model needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmdeploy_llm.errors import ConfigError, ModelNotSupportedError
from mmdeploy_llm.hooks import Checkpoint, PluginManager
from mmdeploy_llm.hooks.factories import resolve
from mmdeploy_llm.hooks.selection import ANY_MODEL
from mmdeploy_llm.system.guarding.folder_files import read_text
from mmdeploy_llm.weights.folder import read_checkpoint

from .decoder_trial import TOLERANCE, DecoderFound, find_decoder

# Keys, or names of weights, of parts that the standard decoder lacks -> what helps.
HELP: Mapping[str, str] = {
    r"sinks": "attention sinks: DecoderConfig.has_sinks",
    r"experts|moe_|mlp\.gate\.|router": "experts: layers.MoEConfig and DecoderConfig.moe, or "
    "a layer of your own of layers.Experts",
    r"lora_rank|q_a_proj|kv_a_proj": "latent attention: subclass layers.Attention",
    r"mamba|ssm|conv1d": "state spaces: layers.Mamba2 in a layer with its own add_mixer and mix",
    r"linear_(key|num|value|conv)|linear_attn": "linear attention: layers.GatedDeltaNet",
    r"conv_L_cache|\.conv\.": "short convolutions: layers.GatedShortConv",
    r"clip_qkv": "clipped q, k and v: subclass layers.Attention",
    r"qk_(layer)?norm|q_(layer)?norm": "another norm of q and k: subclass layers.Attention",
    r"rope_parameters|position": "positions that are not rotary: a Decoder of your own",
    r"hidden_act|activation": "another activation: a layer with an MLP of your own",
}
MEDIA_WORD = re.compile(r"image|img|video|vision|audio|pad|think|tool|call", re.IGNORECASE)
MAX_SHOWN = 12
MAX_TEMPLATE_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Says what a checkpoint needs.

    text_class: of its text model in transformers; None: there is none. decoder: what was found for
        it.
    parsers: "reasoning" and "tools" -> names whose markers the chat template has.
    lines: the findings in words.
    """

    architecture: str
    model_type: str
    served_by: str | None
    text_class: str | None
    decoder: DecoderFound | None
    media: tuple[str, ...]
    parsers: Mapping[str, tuple[str, ...]]
    lines: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The kind of package that starts with these parts."""
        return "vision-model" if "image" in self.media else "model"


def survey(folder: Path) -> Survey:
    """Reads config.json and the files beside it; no code of the checkpoint is run.

    Raises CheckpointError for a folder that is no checkpoint, ConfigError for a config that names
    no architecture.
    """
    checkpoint = read_checkpoint(folder)
    config, architecture = checkpoint.config, checkpoint.architecture
    if not architecture.isidentifier():
        raise ConfigError(f"config.json of {str(folder)!r} names no architecture: {architecture!r}")
    text = config.get_text_config()
    media = tuple(kind for kind in ("image", "video", "audio") if _reads(config, kind))
    name = _text_class(text, architecture)
    decoder = None if name is None else find_decoder(text, name)
    served_by = _served_by(architecture, config)
    parsers = _parsers(checkpoint)
    lines = (
        f"{architecture} ({config.model_type}), served by "
        f"{served_by or 'no plugin of its own'} so far",
        *_decoder_lines(decoder, text.model_type),
        *_encoder_lines(config),
        *_media_lines(config, checkpoint.preprocessor, media),
        *(
            f"{kind}: the chat template has the markers of {', '.join(names)}"
            for kind, names in parsers.items()
        ),
        *_token_lines(checkpoint),
    )
    return Survey(
        architecture=architecture,
        model_type=config.model_type,
        served_by=served_by,
        text_class=name,
        decoder=decoder,
        media=media,
        parsers=parsers,
        lines=lines,
    )


def _text_class(text: Any, architecture: str) -> str | None:
    """Returns transformers' class of the text model alone."""
    import transformers

    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    found = names.get(text.model_type)
    name = found if isinstance(found, str) else architecture
    known = getattr(transformers, name, None)
    fits = known is not None and getattr(known, "config_class", None) is type(text)
    return name if fits else None


def _served_by(architecture: str, config: Any) -> str | None:
    manager = PluginManager.load()
    try:
        spec = manager.model_for([architecture], config)
    except ModelNotSupportedError:
        return None
    return None if ANY_MODEL in spec.architectures else manager.owner(spec)


def _decoder_lines(found: DecoderFound | None, model_type: str) -> Iterator[str]:
    if found is None:
        yield f"text: transformers has no class for {model_type} alone; compare the whole model"
        return
    if _is_equal(found):
        yield (
            "text: the standard decoder, its logits equal transformers' on random weights "
            f"(largest difference {found.difference:.1g})"
        )
    yield from (f"option: {name} = {value}" for name, value in found.options.items())
    if found.is_interleaved:
        yield "option: rotary pairs are interleaved"
    if found.has_fused_heads:
        yield "weights: query, key and value of each head in turn: weights.map.fused_head_targets"
    yield from (f"weights: {pattern} -> {new}" for pattern, new in found.renames)
    if not _is_equal(found):
        for key, value in found.own.items():
            yield f"not in the standard decoder: {key} = {_short(value)}"
    for text in found.missing[:MAX_SHOWN]:
        yield f"not covered: {_short(text, 300)}"
    if len(found.missing) > MAX_SHOWN:
        yield f"not covered: {len(found.missing) - MAX_SHOWN} more of the same kind"
    if found.missing:
        said = " ".join((*found.own, *found.missing))
        yield from (f"try: {text}" for pattern, text in HELP.items() if re.search(pattern, said))


def _encoder_lines(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "not covered: an encoder whose keys and values the decoder reads (cross attention)"


def _is_equal(found: DecoderFound) -> bool:
    return found.difference is not None and found.difference <= TOLERANCE


def _reads(config: Any, kind: str) -> bool:
    """Whether a model reads a kind of media."""
    part = "vision_config" if kind == "image" else f"{kind}_config"
    if kind == "video":
        return getattr(config, "video_token_id", None) is not None
    return getattr(config, part, None) is not None


def _media_lines(
    config: Any, preprocessor: Mapping[str, Any], media: tuple[str, ...]
) -> Iterator[str]:
    if not media:
        return
    yield f"media: {', '.join(media)}"
    vision = getattr(config, "vision_config", None)
    if vision is not None:
        is_grid = any(
            getattr(vision, key, None) for key in ("spatial_merge_size", "temporal_patch_size")
        )
        block = (
            "layers.VisionEncoder and layers.GridLM, which read grids of patches of any size"
            if is_grid
            else "layers.PlainVisionEncoder, which reads squares of one size"
        )
        yield f"tower: {vision.model_type}: {block}"
    if getattr(config, "audio_config", None) is not None:
        yield f"tower: {config.audio_config.model_type}: none of the blocks; a module of your own"
    yield from (f"projector: {line}" for line in _projector(config))
    if preprocessor:
        named = preprocessor.get("image_processor_type", "of unknown type")
        tiles = [key for key in preprocessor if re.search("tile|crop|split|max_patches", key)]
        base = "TileProcessor" if tiles else "ImageProcessor, or SquareTileProcessor for one size"
        yield f"images: {named}: {base}{' (' + ', '.join(tiles) + ')' if tiles else ''}"


def _projector(config: Any) -> Iterator[str]:
    """Yields the weights between tower and text model, of transformers' model without memory."""
    import torch
    import transformers

    model_class = getattr(transformers, next(iter(config.architectures)), None)
    if model_class is None:
        return
    try:
        with torch.device("meta"):
            state = model_class(config).state_dict()
    except Exception as error:  # transformers' code may refuse a config in any way
        yield f"transformers does not build the model: {error}"
        return
    others = re.compile(r"language_model|vision|visual|audio_tower|lm_head|\.layers\.|embed_tokens")
    found = [f"{key} {list(value.shape)}" for key, value in state.items() if not others.search(key)]
    yield from found[:MAX_SHOWN]


def _parsers(checkpoint: Checkpoint) -> Mapping[str, tuple[str, ...]]:
    """Returns the parsers all of whose markers are in the chat template."""
    template = _template(checkpoint)
    manager = PluginManager.load()
    groups: Mapping[str, Sequence[Any]] = {
        "reasoning": manager.reasoning_parsers,
        "tools": manager.tool_parsers,
    }
    found = {
        kind: tuple(sorted(spec.name for spec in specs if _fits(manager, spec, template)))
        for kind, specs in groups.items()
    }
    return {kind: names for kind, names in found.items() if names}


def _fits(manager: PluginManager, spec: Any, template: str) -> bool:
    markers = getattr(resolve(spec, manager.origin(spec)), "markers", ())
    return bool(markers) and all(marker in template for marker in markers)


def _template(checkpoint: Checkpoint) -> str:
    file = checkpoint.folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file, MAX_TEMPLATE_BYTES)
    names = ("chat_template.json", "tokenizer_config.json")
    return "".join(str(checkpoint.read_json(name).get("chat_template", "")) for name in names)


def _token_lines(checkpoint: Checkpoint) -> Iterator[str]:
    """Yields the tokens that may mark media, thinking or calls."""
    added = checkpoint.read_json("tokenizer.json").get("added_tokens")
    entries = added if isinstance(added, list) else []
    texts = [str(each.get("content", "")) for each in entries if isinstance(each, dict)]
    tokens = [text for text in texts if MEDIA_WORD.search(text)]
    if tokens:
        yield f"tokens: {', '.join(tokens[:MAX_SHOWN])}"


def _short(value: Any, most: int = 80) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}..."
