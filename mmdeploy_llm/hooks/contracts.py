"""The types that a plugin returns and implements: specs are frozen data, behaviour is a few small
base classes and protocols.

Nothing here imports torch. A spec names its heavy code as "module:Attribute", which is imported
when it is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from mmdeploy_llm.errors import ConfigError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks.objects.model_files import ModelFile
from mmdeploy_llm.hooks.objects.pixels import PixelKernels
from mmdeploy_llm.request import MediaInput
from mmdeploy_llm.system.guarding.folder_files import read_object
from mmdeploy_llm.values.deadline import Deadline
from mmdeploy_llm.values.first_bytes import FirstBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model family that a plugin can run.

    name: the family's name.
    architectures: names in config.json's `architectures` that the family serves; "*" serves any
        architecture that no other spec names.
    factory: "module:Class", called as factory(config) with transformers' config object, on the meta
        device; returns a Model.
    media: kinds of media that the model accepts.
    refuses: "module:function", called as function(config): why the family does not compute a model
        of these architectures, a sentence without its end, or None. The next plugin that serves
        the model takes it then, and the log says why. None: the family takes all.
    reasoning, tools: names of the default parsers.
    atomic_media: the tokens of a media item, up to text between them, are computed in one step and
        attend to each other in both directions.
    tp_plan: module name pattern -> style in which the module is sharded, for modules that are not
        built from the package's layers; see docs/plugin_objects.md.
    deterministic: whether a row of the results is the same bits whatever other rows are computed
        with it, on the CPU kernels; needed by LLM(deterministic=True). True of a model whose
        weights are all in the package's layers, and whose other operations compute each row or
        media item alone.
    gguf: "module:TABLE", a GGUFTable of mmdeploy_llm.weights.gguf.tables; None: GGUF files are
        not read.
    boxes: "module:RULE", a BoxRule that says how the models write boxes; None: they write none.
    draft_head: "module:function", called as function(model, config): adds `Model.draft_head`.
    speech: "module:Class", SpeechRules built as factory(checkpoint), with which sounds are
        transcribed; None: they are not.
    chat_template: of checkpoints without one; None: these take no conversations.
    question: what a batch asks about an item of media where nobody gives a question, such as a
        space for a model that begins its answer with the prompt; None: to describe it.
    vectors: "module:RULES", EmbeddingRules of mmdeploy_llm.layers.pooling.rules that say how the
        family makes vectors and scores pairs, where a checkpoint's folder does not; None: as any
        model.
    encoder: "module:Class", EncoderPrompts built as factory(checkpoint): how a prompt is divided
        between encoder and decoder. Media have no placeholders, and the Model has the attribute
        `cross`. None: media stand in the prompt.
    tiny: "module:FAMILY", a Family of mmdeploy_llm.testing.tiny: how to write a tiny checkpoint of
        the family, and how transformers takes its media; imported by tests only.
    sampling: what is usual for the family's answers, where a request does not say otherwise: values
        of SamplingParams that generation_config.json may have, and no_repeat_ngram.
    priority: in-tree plugins use 0; the highest wins and a tie is an error.
    """

    name: str
    architectures: tuple[str, ...]
    factory: str
    media: tuple[str, ...] = ()
    reasoning: str | None = None
    tools: str | None = None
    atomic_media: bool = False
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    deterministic: bool = False
    refuses: str | None = None
    gguf: str | None = None
    boxes: str | None = None
    encoder: str | None = None
    draft_head: str | None = None
    speech: str | None = None
    chat_template: str | None = None
    question: str | None = None
    vectors: str | None = None
    tiny: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningParserSpec:
    """A named reasoning parser; `aliases` are other names for it.

    factory: "module:Class", called without arguments, once per request.
    """

    name: str
    factory: str
    aliases: tuple[str, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolParserSpec:
    """A named parser of tool calls; `aliases` are other names for it.

    factory: "module:Class", called without arguments, once per request.
    """

    name: str
    factory: str
    aliases: tuple[str, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaProcessorSpec:
    """A processor of one kind of media for some model families.

    kind: "image", "video", or a lower-case word for a kind of your own; a model accepts it when the
        word is in its `media`.
    models: names of ModelSpecs, or ("*",) for any; a named family beats "*".
    factory: "module:Class", called as factory(checkpoint, options) once per engine; options are the
        engine's `mm_processor_kwargs`. It returns a MediaProcessor; with `yields`, a MediaSplitter.
        The engine's limits are not its business: they come with each call of `decode` or `split`,
        since each request may shorten them.
    suffixes: of files of the kind, such as ".wav" and ".nii.gz", in small letters. Those of several
        specs of one kind are united, as are the following three.
    columns: names of a table's columns that hold such items.
    first_bytes: what files of the kind begin with; an entry may be (offset, bytes).
    part_types: further types of a message's parts beside the kind and "<kind>_url", such as
        "input_audio".
    part_text: what stands for an item in a chat prompt where the model's template does not render
        such a part, with one of the processor's markers; None: the first of them. None with
        `yields`, whose parts have their own.
    yields: the kind into whose items an item is split before placeholders are counted, such as
        "image" for a document of pages.
    """

    name: str
    kind: str
    factory: str
    models: tuple[str, ...] = ("*",)
    priority: int = 0
    suffixes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    first_bytes: tuple[FirstBytes, ...] = ()
    part_types: tuple[str, ...] = ()
    part_text: str | None = None
    yields: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model folder that has been read; each mapping is a JSON file's content, {} if the file is
    absent.

    config: transformers' config object.
    preprocessor: options of the image processor.
    video_preprocessor: options of the video processor.
    generation: generation_config.json.
    model_file: a file of another format that holds all of these and the weights; None: there is
        none.
    gguf_files: the GGUF files that hold the weights; (): safetensors files of the folder do.
    gguf_tower: the GGUF file that holds the vision tower's weights; None: the others hold all.
    gguf_tables: ModelSpec.gguf of the plugins by whose tables these files are read.
    """

    folder: Path
    config: Any
    preprocessor: Mapping[str, Any] = field(default_factory=dict)
    video_preprocessor: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    model_file: ModelFile | None = None
    gguf_files: tuple[Path, ...] = ()
    gguf_tower: Path | None = None
    gguf_tables: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        """The first of config.json's architectures, "" when there is none."""
        return next(iter(getattr(self.config, "architectures", None) or ()), "")

    @property
    def other_files(self) -> tuple[Path, ...]:
        """The files with the weights where they are no safetensors files; () where they are."""
        return self.gguf_files or (() if self.model_file is None else (self.model_file.path,))

    def read_json(self, file_name: str) -> Mapping[str, Any]:
        """Reads a JSON object from a file of the folder, {} when there is no such file; of a model
        file, what transformers' folder of the model would have.

        Raises CheckpointError for anything but a regular file of a bounded size and depth.
        """
        if self.model_file is not None:
            return self.model_file.read_json(file_name)
        return read_object(self.folder / file_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Limits on one media item, checked from headers before anything is decoded in full.

    Sizes in bytes and pixels, times in seconds.

    fetch_timeout: for one item in total, retries included.
    allowed_root: local paths must lie below this folder (None: anywhere).
    allow_urls: http and https URLs may be fetched.
    allowed_domains: host names that URLs may name, "*.example.com" for all hosts below a domain;
        (): any public host.
    allow_private_addresses: hosts in allowed_domains may have addresses of private networks and of
        this machine.
    allowed_schemes: other schemes that may be opened, such as "s3".
    deadline: of the request; the times above are shortened to it. None: it has none.
    isolation: whether a processor decodes in the threads of intake, or in processes that are killed
        after decode_timeout and use at most decode_memory bytes; "auto" leaves the choice to
        the processor.
    pixels: "square": videos whose pixels are not square have the shape that players show, HDR and
        colours that are not sRGB what players and browsers show; or "as-stored".
    """

    max_bytes: int = 256 * 2**20
    max_pixels: int = 178_956_970
    max_frames: int = 4096
    max_duration: float = 4 * 3600.0
    fetch_timeout: float = 30.0
    allowed_root: Path | None = None
    allow_urls: bool = False
    allowed_domains: tuple[str, ...] = ()
    allow_private_addresses: bool = False
    allowed_schemes: tuple[str, ...] = ()
    isolation: Literal["auto", "thread", "process"] = "auto"
    decode_timeout: float = 60.0
    decode_memory: int = 4 * 2**30
    deadline: Deadline | None = None
    pixels: Literal["square", "as-stored"] = "square"

    @property
    def is_as_shown(self) -> bool:
        """Whether pixels become those that players and browsers show."""
        return self.pixels == "square"

    def until(self, deadline: Deadline) -> MediaLimits:
        """Returns these limits with times that end at `deadline`, which has not passed."""
        left = deadline.left
        return replace(
            self,
            fetch_timeout=min(self.fetch_timeout, left),
            decode_timeout=min(self.decode_timeout, left),
            deadline=deadline,
        )

    def check_bytes(self, num_bytes: int, name: str, *, is_all: bool = True) -> None:
        """Raises MediaLimitError for more than max_bytes. name: of the item, for the message.
        is_all: False when the item may have more bytes than num_bytes."""
        if num_bytes > self.max_bytes:
            more = "" if is_all else " or more"
            raise MediaLimitError(
                f"{name} has {num_bytes} bytes{more}, {self.max_bytes} are allowed; shrink it or "
                "raise max_media_bytes"
            )

    def check_frames(self, count: int) -> None:
        """Raises MediaLimitError for a list of more than max_frames frames."""
        if count > self.max_frames:
            raise MediaLimitError(
                f"the video has {count} frames, {self.max_frames} are allowed; remove some"
            )


class MediaProcessor(ABC):
    """Turns one kind of media into model inputs. One instance per engine, called from several
    threads at once.

    token: text of the placeholder token; its id fills the prompt num_tokens times per item.
    markers: texts that represent one item in a rendered prompt, with or without `token`; a marker
        may consist of several tokens.
    written_token: token that stands in the final prompt for each `token`; None: `token` itself.
    joints: (pattern, text) pairs: after all items are written into a text, each match of a pattern,
        a regular expression, becomes the text, in this order. They hold no `token`.
    is_whole_prompt: whether an item's prompt_text is all of a prompt, and a text beside it is
        refused. The tokenizer need not have `token`.
    auto_tokens: what `image_tokens="auto"` (or video_tokens) stands for, what the family's authors
        use in their examples; None: `with_budget` is not implemented.
    """

    kind: ClassVar[str]
    token: str
    markers: tuple[str, ...]
    written_token: str | None = None
    joints: tuple[tuple[str, str], ...] = ()
    is_whole_prompt: bool = False
    auto_tokens: int | None = None

    @abstractmethod
    def decode(self, source: Any, limits: MediaLimits) -> Any:
        """Decodes bytes, or converts a loaded object, to the processor's one canonical form.

        Checks the limits before the full decode. Raises MediaError and its subclasses.
        """

    @abstractmethod
    def process(self, item: Any, options: Mapping[str, Any]) -> MediaInput:
        """Returns the model inputs of an item from `decode`; options are the item's own. Raises
        MediaError."""

    @abstractmethod
    def count_tokens(self, item: Any, options: Mapping[str, Any]) -> int:
        """Returns `process(item, options).num_tokens` without processing the item."""

    def prompt_text(self, item: Any, options: Mapping[str, Any]) -> str | None:
        """Returns `process(item, options).prompt_text` without processing the item; None by
        default."""
        return None

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Mapping[str, Any]
    ) -> MediaInput:
        """Returns an item whose embeddings the caller has computed: what `process` would return,
        without a key and without the tensors that only the encoder reads.

        num_tokens: rows of the embeddings. grid: patches in (time, rows, columns), where the caller
        gave one; the number of tokens of the result follows from it. options: what else the caller
        gave with the item. Raises MediaError and its subclasses; by default all are refused.
        """
        raise UnsupportedMediaError(
            f"the {self.kind}s of this model cannot be given as embeddings; give the {self.kind}s"
        )

    def largest(self, max_tokens: int) -> MediaInput | None:
        """Returns the largest item of at most max_tokens that `process` could return, with any
        content. The memory that encoding it takes is measured at start. None (the default):
        unknown."""
        return None

    def with_budget(self, tokens: int, *, may_raise: bool = False) -> MediaProcessor:
        """Returns a processor like this one none of whose items has more than `tokens` tokens, and
        whose large items have nearly as many. It shares what this one holds: `close` is called of
        this one only.

        may_raise: the number replaces bounds that the checkpoint or the family sets, also upwards;
        otherwise, and where the user has set a bound, the lower one holds. Raises ConfigError for a
        number that the family cannot keep to; by default for any.
        """
        raise ConfigError(
            f"{self.kind}_tokens cannot be kept to: media processor {type(self).__name__} (plugin "
            f"{type(self).__module__}) does not implement with_budget; leave the option out"
        )

    def use_kernels(self, kernels: PixelKernels) -> None:  # noqa: B027 - optional to override
        """Called before the first item where kernels are available: `process` may compute with
        them, and must return the same values as without."""

    def close(self) -> None:  # noqa: B027 - optional to override
        """Called when the engine is closed: release processes and files."""
