"""The types a plugin returns and implements: specs are frozen data, behaviour is three small
protocols.

Nothing here imports torch; a spec names its heavy code as "module:Attribute", imported when it is
needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, final

from mmdeploy_llm.errors import MediaLimitError
from mmdeploy_llm.outputs import ToolCall
from mmdeploy_llm.request import MediaInput, MediaSpan

if TYPE_CHECKING:
    from torch import Tensor

    from mmdeploy_llm.forward import ForwardInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model family that a plugin can run.

    name: the family's name. architectures: names in config.json's `architectures` that it serves.
    factory: "module:Class"; called as factory(config) with transformers' config object, on the meta
    device; gives a Model; "*" serves any architecture that no other spec names. media: kinds it
    accepts. reasoning, tools: names of the default parsers. atomic_media: the tokens of a media
    item are computed in one step and see each other in both directions.
    tp_plan: module name pattern -> how it is divided among devices, where it is not of the
    package's layers; see plugins/README.md. priority: in-tree plugins use 0; the highest wins and a
    tie is an error.
    """

    name: str
    architectures: tuple[str, ...]
    factory: str
    media: tuple[str, ...] = ()
    reasoning: str | None = None
    tools: str | None = None
    atomic_media: bool = False
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningParserSpec:
    """A named reasoning parser. factory: "module:Class", called without arguments, once per
    request. aliases: other names for it."""

    name: str
    factory: str
    aliases: tuple[str, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolParserSpec:
    """A named parser of tool calls. factory: "module:Class", called without arguments, once per
    request. aliases: other names for it."""

    name: str
    factory: str
    aliases: tuple[str, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaProcessorSpec:
    """A processor of one kind of media for some model families.

    kind: "image", "video", or a word in lower case for one of your own, which a model takes when
    its `media` has it. models: names of ModelSpecs, or ("*",) for any; a named family beats "*".
    factory: "module:Class", called as factory(checkpoint, options) once per engine; options are the
    engine's `mm_processor_kwargs`.
    """

    name: str
    kind: str
    factory: str
    models: tuple[str, ...] = ("*",)
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model folder, read: config is transformers' config object, the mappings are the JSON
    files ({} if absent). preprocessor: the image processor's, video_preprocessor: the video
    processor's."""

    folder: Path
    config: Any
    preprocessor: Mapping[str, Any] = field(default_factory=dict)
    video_preprocessor: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The first of config.json's architectures, "" when it names none."""
        return next(iter(getattr(self.config, "architectures", None) or ()), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """What one media item may be. Checked from headers, before anything is decoded in full.

    Sizes in bytes and pixels, times in seconds. fetch_timeout: for one item in all, retries
    included. allowed_root: local paths must lie below it (None: any). allow_urls: http and https
    URLs may be fetched, from allowed_domains (host names, "*.example.com" for all below one; ():
    from any public host). allow_private_addresses: hosts in allowed_domains may have addresses of
    private networks and of this machine. allowed_schemes: others that may be opened, such as "s3".
    isolation: whether a processor decodes in the intake's threads or in processes that can be
    killed, after decode_timeout, and may use decode_memory; "auto" leaves it to the processor.
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

    def check_bytes(self, num_bytes: int, name: str, *, is_all: bool = True) -> None:
        """Raises MediaLimitError for more than max_bytes. name: of the item, for the message.
        is_all: False where only so many are known yet."""
        if num_bytes > self.max_bytes:
            more = "" if is_all else " or more"
            raise MediaLimitError(
                f"{name} has {num_bytes} bytes{more}, {self.max_bytes} are allowed; shrink it or "
                "raise max_media_bytes"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of generated text and what it is.

    "tool_calls": text of tool calls where a family keeps them apart from its answer. The tool
    parser gets it; without one it is dropped.
    """

    kind: Literal["reasoning", "content", "tool_calls"]
    text: str


class ReasoningParser(ABC):
    """Splits the text of one request into reasoning and content. One instance serves one request.

    The result does not depend on how the text is cut into `feed` calls.
    markers: texts that the parser looks for; tokens with exactly such a text reach it even when
    special tokens are skipped.
    start_marker: the text by which a prompt opens the reasoning. A prompt with `end_marker` after
    its last `start_marker` has closed it, and `reasoning_max_tokens` then forces nothing. None: a
    prompt says nothing about the reasoning, for example because it quotes the markers.
    end_marker: the text that ends the reasoning; `reasoning_max_tokens` forces it.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    start_marker: ClassVar[str | None] = None
    end_marker: ClassVar[str | None] = None

    def start(self, prompt: str) -> None:  # noqa: B027 - optional to override
        """Called once, before any text, with the rendered prompt, which may have opened or
        closed the reasoning."""

    @abstractmethod
    def feed(self, text: str) -> list[Segment]:
        """What the new text settles; text that may yet become a marker is held back."""

    @abstractmethod
    def finish(self) -> list[Segment]:
        """What was held back, once no more text comes."""

    @final
    def parse(self, text: str) -> list[Segment]:
        """The whole text at once: `feed` and `finish`."""
        return self.feed(text) + self.finish()


class ToolParser(ABC):
    """Takes the tool calls out of the content of one request. One instance serves one request.

    The result does not depend on how the text is cut into `feed` calls. A call is given whole, as
    soon as it is; text that turns out to be no call is given as content, so that nothing is lost.
    markers: texts that the parser looks for; tokens with exactly such a text reach it even when
    special tokens are skipped.
    """

    markers: ClassVar[tuple[str, ...]] = ()

    def start(self, tools: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 - optional
        """Called once, before any text, with the request's tools; () when it came without."""

    @abstractmethod
    def feed(self, text: str) -> list[str | ToolCall]:
        """What the new text settles: content and calls, in order."""

    @abstractmethod
    def finish(self) -> list[str | ToolCall]:
        """What was held back, once no more text comes."""

    @final
    def parse(self, text: str) -> list[str | ToolCall]:
        """The whole text at once: `feed` and `finish`."""
        return self.feed(text) + self.finish()


class PixelKernels(Protocol):
    """What the CPU's kernels do with pixels."""

    def patchify(
        self,
        pixels: Tensor,
        table: Tensor,
        out: Tensor,
        *,
        patch_size: int,
        merge_size: int,
        frames: range,
    ) -> None:
        """Values of uint8 `pixels` [H, W, 3], looked up in `table` [3, 256] float32, as `frames` of
        the patch rows `out` [N, 3, T, P, P] float32, all contiguous. Patches come in blocks of
        merge_size x merge_size."""
        ...


class MediaProcessor(ABC):
    """Turns one kind of media into model inputs. One instance per engine, used from several
    threads at once.

    token: the text of the one placeholder token whose id fills the prompt, num_tokens times per
    item.
    markers: texts that stand for one item in a rendered prompt, `token` among them or not; one may
    be several tokens.
    """

    kind: ClassVar[str]
    token: str
    markers: tuple[str, ...]

    @abstractmethod
    def decode(self, source: Any, limits: MediaLimits) -> Any:
        """The media behind bytes or a loaded object, in one canonical form.

        Raises MediaError and its children; limits are checked before the full decode.
        """

    @abstractmethod
    def process(self, item: Any, options: Mapping[str, Any]) -> MediaInput:
        """Model inputs of what `decode` gave; options are the item's own. Raises MediaError."""

    @abstractmethod
    def count_tokens(self, item: Any, options: Mapping[str, Any]) -> int:
        """`process(item, options).num_tokens`, without the work."""

    def prompt_text(self, item: Any, options: Mapping[str, Any]) -> str | None:
        """`process(item, options).prompt_text`, without the work; None unless overridden."""
        return None

    def largest(self, max_tokens: int) -> MediaInput | None:
        """The largest item that `process` could give, of max_tokens at most and with any content:
        the memory it takes to encode it is measured at start. None, unless overridden: unknown.
        """
        return None

    def use_kernels(self, kernels: PixelKernels) -> None:  # noqa: B027 - optional to override
        """Called before the first item where there are kernels: `process` may compute with them,
        and must give what it gives without."""

    def close(self) -> None:  # noqa: B027 - optional to override
        """The engine is closed: let go of processes and files."""


class Model(Protocol):
    """What a ModelSpec's factory builds: an ordinary nn.Module for one device. T tokens, N
    requests' last tokens.

    An attribute `media_size` says how wide the rows of `encode_media` are where that is not
    hidden_size; see `media_size`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Hidden states after the final norm, [T, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab]."""
        ...

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """One [num_tokens, media_size] per item, in order. Only for models with media."""
        ...

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor | None:
        """[3, num_tokens] int64 M-RoPE positions of a prompt; None when position i is simply i.

        Tokens generated after the prompt continue at its last token's position + 1, on all axes.
        """
        ...


def media_size(model: Model) -> int:
    """Values in a row of `model.encode_media`: the embedding, and behind it whatever else the model
    adds at the media's places (Qwen3-VL's features for the first layers)."""
    return int(getattr(model, "media_size", model.hidden_size))
