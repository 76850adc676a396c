"""Asks transformers what it makes of an item: the reference of a media processor, derived from the
checkpoint's own files where transformers can read them without torchvision."""

from __future__ import annotations

import io
import warnings
import wave
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import transformers
from PIL import Image, ImageOps
from torch import Tensor

from mmdeploy_llm.hooks import Checkpoint, MediaLimits, MediaProcessor, PluginManager
from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.hooks.selection import ANY_MODEL
from mmdeploy_llm.testing.models.base import CheckSkipped

PIXELS = "pixel_values"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
GIVE_YOUR_OWN = "give the truth yourself: add `make_reference` to the test class"
NAMING_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
AROUND = ("Look: ", " so")  # texts around an item in the prompt that is compared
OF_A_BYTE = 1 / 255 / 0.22  # by which torch and Pillow round otherwise, divided by deviations
HEARING = ("feature_extractor", "audio_processor")  # names of what processes sounds
OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaTruth:
    """A reference's result for one item.

    tensors: name -> tensor; those that the processor has under the same name must be equal, and the
        first is its pixels, whatever their order.
    token_ids: of the prompt AROUND[0] + marker + AROUND[1]; None: not compared.
    num_tokens: placeholders of the item; None: not compared.
    prompt_text: of the item; None: not compared.
    tolerance: of values; None: the subject's.
    has_own_size: it may have another size than the item, by options of its own; then nothing is
        compared.
    """

    tensors: Mapping[str, Tensor]
    token_ids: Sequence[int] | None = None
    num_tokens: int | None = None
    prompt_text: str | None = None
    tolerance: float | None = None
    has_own_size: bool = False


# Called with (source, options of the item, markers of the processor).
Reference = Callable[[Any, Mapping[str, Any], Sequence[str]], MediaTruth]


class TransformersImages:
    """transformers' processor of a checkpoint's images, with Pillow. `processor` is None where
    transformers cannot make it of the files, and `reason` says why: then pixels are compared, and
    texts are not."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises CheckSkipped when the checkpoint has no image processor that runs here."""
        folder = checkpoint.folder
        if not checkpoint.preprocessor and not (folder / "processor_config.json").exists():
            raise CheckSkipped(
                "the checkpoint has no preprocessor_config.json to ask transformers with; write "
                f"it in `checkpoint`, give the model's spec `tiny`, or {GIVE_YOUR_OWN}"
            )
        try:
            # Here, for it takes seconds. Not by its public name, which older versions refuse
            # without torchvision, for any backend.
            from transformers.models.auto.image_processing_auto import AutoImageProcessor

            self.images: Any = AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises whatever its classes raise
            raise CheckSkipped(
                f"transformers cannot make the image processor of the checkpoint's files "
                f"({_reason(error)}); {GIVE_YOUR_OWN}"
            ) from error
        self.processor: Any = None
        self.reason = ""
        base = _processor_class(checkpoint)
        usual = getattr(base, "images_kwargs", None) or {}
        # What the checkpoint's file says is its own, whatever is usual for the class.
        known = {*checkpoint.preprocessor, "return_tensors"}
        self._usual = {name: value for name, value in usual.items() if name not in known}
        try:
            self.processor = _assembled(base, checkpoint, image_processor=self.images)
        except Exception as error:
            self.reason = _reason(error)

    def __call__(
        self, source: Any, options: Mapping[str, Any], markers: Sequence[str]
    ) -> MediaTruth:
        """Returns the truth about an image, given as bytes, of Pillow or as an array."""
        image = opened(source)
        with warnings.catch_warnings(action="ignore"):  # those of transformers are not the author's
            if self.processor is not None:
                try:
                    token = self.processor.image_token
                    return _of_prompt(self.processor, token, markers, images=[image], **options)
                except Exception as error:  # the files lack something, such as an audio token
                    self.processor, self.reason = None, _reason(error)
            made = self.images(image, return_tensors="pt", **{**self._usual, **options})
        return MediaTruth(tensors=_pixels_first(made))


class TransformersSounds:
    """transformers' processor of a checkpoint's sounds, for WAV files of its own rate. `processor`
    is None where transformers cannot make it of the files, and `reason` says why: then the features
    of its extractor are compared, and texts are not. usual: what the extractor gets then."""

    def __init__(self, checkpoint: Checkpoint, **usual: Any) -> None:
        """Raises CheckSkipped when the checkpoint has no feature extractor."""
        try:
            self.sounds: Any = transformers.AutoFeatureExtractor.from_pretrained(
                checkpoint.folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises whatever its classes raise
            raise CheckSkipped(
                f"transformers cannot make a feature extractor of the checkpoint's files "
                f"({_reason(error)}); {GIVE_YOUR_OWN}"
            ) from error
        base = _processor_class(checkpoint)
        theirs = getattr(base, "audio_kwargs", None) or {}
        self.rate = int(self.sounds.sampling_rate)
        self._usual = {"padding": True, **theirs, **usual, "sampling_rate": self.rate}
        self.processor: Any = None
        self.reason = ""
        try:
            self.processor = _assembled(base, checkpoint, **dict.fromkeys(HEARING, self.sounds))
        except Exception as error:
            self.reason = _reason(error)

    def __call__(
        self, source: Any, options: Mapping[str, Any], markers: Sequence[str]
    ) -> MediaTruth:
        """Returns the truth about a sound, of all of its channels together. Raises CheckSkipped for
        one that must be resampled."""
        values = heard(source, self.rate)
        if self.processor is not None and not hasattr(self.processor, "audio_token"):
            # The model hears outside of its tokens, so there is no text to compare.
            made = self.processor(
                audio=values, sampling_rate=self.rate, return_tensors="pt", **options
            )
            return MediaTruth(tensors=_pixels_first(made))
        if self.processor is not None:
            # Asked as a whole, because some classes change what the extractor gets inside the call.
            given = {"audio": [values], "sampling_rate": self.rate, **options}
            try:
                return _of_prompt(self.processor, self.processor.audio_token, markers, **given)
            except Exception as error:  # Voxtral's takes sounds in chats only
                self.processor, self.reason = None, _reason(error)
        made = self.sounds([values], return_tensors="pt", **{**self._usual, **options})
        return MediaTruth(tensors=_pixels_first(made))


class TransformersVideos:
    """transformers' video processor of a checkpoint, run by the installed plugin that serves any
    model, whose frames need no torchvision, on lists of frames: which frames of a file are used,
    and how large, is for a family's options to say, and its own are the checkpoint's."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises CheckSkipped when there is none that runs here."""
        manager = PluginManager.load()
        served = {model.name for model in manager.models if ANY_MODEL in model.architectures}
        found = (
            spec
            for spec in manager.media_processors
            if spec.kind == "video" and spec.yields is None and served & {*spec.models}
        )
        spec = next(found, None)
        if spec is None:
            raise CheckSkipped(f"no installed plugin reads videos of any model; {GIVE_YOUR_OWN}")
        try:
            self.videos: MediaProcessor = imported(spec.factory)(checkpoint, {})
        except Exception as error:  # transformers raises whatever its classes raise
            raise CheckSkipped(
                f"transformers cannot make a video processor of the checkpoint's files "
                f"({_reason(error)}); {GIVE_YOUR_OWN}"
            ) from error

    def __call__(
        self, source: Any, options: Mapping[str, Any], markers: Sequence[str]
    ) -> MediaTruth:
        """Returns the truth about a video; its text where the markers are the same. Raises
        CheckSkipped for a file."""
        videos = self.videos
        if not isinstance(source, list):
            raise CheckSkipped(f"the reference takes lists of frames; {GIVE_YOUR_OWN}")
        with warnings.catch_warnings(action="ignore"):  # those of transformers are not the author's
            made = videos.process(videos.decode(source, MediaLimits(isolation="thread")), options)
        text = made.prompt_text if set(videos.markers) <= set(markers) else None
        if text is not None and videos.written_token is not None:
            text = text.replace(videos.token, videos.written_token)
        return MediaTruth(
            tensors=_pixels_first(made.tensors),
            num_tokens=made.num_tokens,
            prompt_text=text,
            tolerance=OF_A_BYTE,
            has_own_size=True,
        )


def _of_prompt(processor: Any, token: str, markers: Sequence[str], **given: Any) -> MediaTruth:
    """Returns what transformers' processor makes of a prompt with the item that is given."""
    marker = next((marker for marker in markers if token in marker), None)
    text = token if marker is None else marker.join(AROUND)
    made = processor(text=[text], return_tensors="pt", **given)
    # Without a marker of its own the prompts of the processor write items in another way, and where
    # a mask says what sees an item, that stands outside of the tokens.
    is_other = marker is None or "cross_attention_mask" in made
    ids = None if is_other else made["input_ids"][0].tolist()
    return MediaTruth(tensors=_pixels_first(made), token_ids=ids)


def heard(source: Any, rate: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns the samples of a WAV file, of all of its channels together. Raises CheckSkipped for
    another source and another rate."""
    if not isinstance(source, bytes):
        raise CheckSkipped(f"the reference takes no {type(source).__name__}; {GIVE_YOUR_OWN}")
    with wave.open(io.BytesIO(source)) as file:
        if file.getframerate() != rate:
            raise CheckSkipped(f"the reference resamples to {rate} Hz; {GIVE_YOUR_OWN}")
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        channels = samples.reshape(-1, file.getnchannels()).astype(np.float32) / 32768
    mixed: np.ndarray[Any, np.dtype[np.float32]] = channels.mean(1)
    return mixed


def opened(source: Any) -> Any:
    """Returns the upright RGB image that transformers' `load_image` makes of a source. Raises
    CheckSkipped for one that it does not know."""
    if isinstance(source, bytes):
        source = Image.open(io.BytesIO(source), formats=FORMATS)
    elif isinstance(source, np.ndarray):
        source = Image.fromarray(source)
    if not isinstance(source, Image.Image):
        raise CheckSkipped(f"transformers takes no {type(source).__name__}; {GIVE_YOUR_OWN}")
    return ImageOps.exif_transpose(source).convert("RGB")


def transformers_truth(kind: str, checkpoint: Checkpoint) -> Reference:
    """Returns transformers' processor of the checkpoint as the reference. Raises CheckSkipped where
    there is none."""
    if kind == "image":
        return TransformersImages(checkpoint)
    if kind == "audio":
        return TransformersSounds(checkpoint)
    if kind == "video":
        return TransformersVideos(checkpoint)
    raise CheckSkipped(f"the kit does not know how transformers takes a {kind}; {GIVE_YOUR_OWN}")


def _pixels_first(made: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a processor's result that belong to the image, pixels first."""
    tensors = {name: _as_tensor(value) for name, value in made.items() if name not in OF_TEXT}
    found = {name: value for name, value in tensors.items() if value is not None}
    return {
        name: found[name] for name in sorted(found, key=lambda name: not name.startswith(PIXELS))
    }


def _as_tensor(value: Any) -> Tensor | None:
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        value = value[0] if len(value) == 1 else None
    return value if isinstance(value, Tensor) else None


def _processor_class(checkpoint: Checkpoint) -> Any:
    """Returns the class that the checkpoint or its model type names, None where there is none."""
    names = (checkpoint.read_json(name).get("processor_class") for name in NAMING_FILES)
    model_type = getattr(checkpoint.config, "model_type", None)
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    named = next(filter(None, names), None) or PROCESSOR_MAPPING_NAMES.get(model_type)
    return getattr(transformers, str(named), None)


def inputs_of_media(
    checkpoint: Checkpoint, text: str, images: Sequence[Any], sounds: Sequence[Any]
) -> dict[str, Any]:
    """Returns the arguments of transformers' model for a rendered chat with images and sounds.
    Raises CheckSkipped where there is no processor."""
    parts: dict[str, Any] = {}
    given: dict[str, Any] = {}
    if images:
        parts["image_processor"] = TransformersImages(checkpoint).images
        given["images"] = [opened(image) for image in images]
    if sounds:
        extractor = TransformersSounds(checkpoint).sounds
        parts |= dict.fromkeys(HEARING, extractor)
        rate = int(extractor.sampling_rate)
        given |= {"audio": [heard(sound, rate) for sound in sounds], "sampling_rate": rate}
    try:
        processor = _assembled(_processor_class(checkpoint), checkpoint, **parts)
    except Exception as error:  # transformers raises whatever its classes raise
        raise CheckSkipped(
            f"transformers cannot make its processor of the checkpoint's files ({_reason(error)}); "
            "save it with the checkpoint as the model's authors do"
        ) from error
    return dict(processor(text=[text], return_tensors="pt", add_special_tokens=False, **given))


def _assembled(base: Any, checkpoint: Checkpoint, **parts: Any) -> Any:
    """Makes transformers' processor of these parts, those that it has, and the tokenizer; without
    what needs torchvision."""
    if base is None or not set(parts) & set(base.get_attributes()):
        model_type = getattr(checkpoint.config, "model_type", None)
        raise ValueError(f"there is no processor for the model type {model_type!r}")
    parts["tokenizer"] = transformers.AutoTokenizer.from_pretrained(
        checkpoint.folder, local_files_only=True, trust_remote_code=False
    )
    unchecked = {"check_argument_for_proper_class": lambda *_: None}
    subclass: Any = type(base.__name__, (base,), unchecked)
    options = dict(checkpoint.read_json("processor_config.json"))
    # A video processor needs torchvision; options of it that are read are often those of images.
    for others in ({}, {"video_processor": parts.get("image_processor")}):
        given = [{**others, **parts}.get(name) for name in base.get_attributes()]
        try:
            return subclass.from_args_and_dict(given, options)
        except AttributeError as error:
            last = error
    raise last


def _reason(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]
