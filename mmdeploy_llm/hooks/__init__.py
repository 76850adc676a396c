"""The plugin API: hooks, the types they carry, and the manager that finds and isolates plugins."""

from mmdeploy_llm.hooks.objects.attention import (
    NO_SLOT,
    AttentionBackend,
    AttentionBackendSpec,
    AttentionKernels,
    AttentionSetup,
    BatchLayout,
    KVCache,
    StepLengths,
    VisibleKeys,
    without_spans,
)
from mmdeploy_llm.hooks.objects.boxes import BoxRule
from mmdeploy_llm.hooks.objects.chat_parts import ChatPartContext, ChatPartSpec
from mmdeploy_llm.hooks.objects.encoder_prompts import EncoderPrompt, EncoderPrompts
from mmdeploy_llm.hooks.objects.logits import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcessorSpec,
    LogitsRow,
)
from mmdeploy_llm.hooks.objects.model import Model
from mmdeploy_llm.hooks.objects.model_files import ModelFile, ModelFileSpec
from mmdeploy_llm.hooks.objects.parsing import NextText, ReasoningParser, Segment, ToolParser
from mmdeploy_llm.hooks.objects.pixels import PixelKernels
from mmdeploy_llm.hooks.objects.reading import ReadingPreset, ReadPage, ReadText
from mmdeploy_llm.hooks.objects.speech import (
    Heard,
    HeardText,
    SpeechRules,
    Spoken,
    SpokenWord,
    Sureness,
    TextRules,
    WordTimes,
)
from mmdeploy_llm.hooks.objects.store import (
    CorpusFile,
    CorpusFormatSpec,
    DamagedRow,
    OutputSinkSpec,
    RecordStore,
)
from mmdeploy_llm.hooks.objects.weights import WeightFormatSpec
from mmdeploy_llm.hooks.versions import API_VERSION
from mmdeploy_llm.messages import MediaRef
from mmdeploy_llm.request import ITEM_NUMBER, MediaInput, MediaSpan, MediaView
from mmdeploy_llm.values.outputs.metrics import EngineInfo, RequestRecord, StepStats
from mmdeploy_llm.values.outputs.request_output import ToolCall

from .contracts import (
    Checkpoint,
    MediaLimits,
    MediaProcessor,
    MediaProcessorSpec,
    ModelSpec,
    ReasoningParserSpec,
    ToolParserSpec,
)
from .kinds import KindTable
from .manager import PluginManager
from .records import PluginFailure, PluginInfo
from .specs import hookimpl, hookspec
from .splitting import MediaSplitter, SplitPart

__all__ = [
    "API_VERSION",
    "ITEM_NUMBER",
    "NO_SLOT",
    "AttentionBackend",
    "AttentionBackendSpec",
    "AttentionKernels",
    "AttentionSetup",
    "BatchLayout",
    "BoxRule",
    "ChatPartContext",
    "ChatPartSpec",
    "Checkpoint",
    "CorpusFile",
    "CorpusFormatSpec",
    "DamagedRow",
    "EncoderPrompt",
    "EncoderPrompts",
    "EngineInfo",
    "Heard",
    "HeardText",
    "KVCache",
    "KindTable",
    "LogitsContext",
    "LogitsProcessor",
    "LogitsProcessorSpec",
    "LogitsRow",
    "MediaInput",
    "MediaLimits",
    "MediaProcessor",
    "MediaProcessorSpec",
    "MediaRef",
    "MediaSpan",
    "MediaSplitter",
    "MediaView",
    "Model",
    "ModelFile",
    "ModelFileSpec",
    "ModelSpec",
    "NextText",
    "OutputSinkSpec",
    "PixelKernels",
    "PluginFailure",
    "PluginInfo",
    "PluginManager",
    "ReadPage",
    "ReadText",
    "ReadingPreset",
    "ReasoningParser",
    "ReasoningParserSpec",
    "RecordStore",
    "RequestRecord",
    "Segment",
    "SpeechRules",
    "SplitPart",
    "Spoken",
    "SpokenWord",
    "StepLengths",
    "StepStats",
    "Sureness",
    "TextRules",
    "ToolCall",
    "ToolParser",
    "ToolParserSpec",
    "VisibleKeys",
    "WeightFormatSpec",
    "WordTimes",
    "hookimpl",
    "hookspec",
    "without_spans",
]
