"""The plugin API: hooks, the types they carry, and the manager that finds and isolates plugins."""

from mmdeploy_llm.messages import MediaRef
from mmdeploy_llm.metrics import EngineInfo, RequestRecord, StepStats
from mmdeploy_llm.outputs import ToolCall
from mmdeploy_llm.plugin_objects.attention import (
    AttentionBackend,
    AttentionBackendSpec,
    AttentionSetup,
)
from mmdeploy_llm.plugin_objects.boxes import BoxRule
from mmdeploy_llm.plugin_objects.chat_parts import ChatPartContext, ChatPartSpec
from mmdeploy_llm.plugin_objects.corpora import CorpusFile, CorpusFormatSpec, DamagedRow
from mmdeploy_llm.plugin_objects.encoder_prompts import EncoderPrompt, EncoderPrompts
from mmdeploy_llm.plugin_objects.logits import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcessorSpec,
    LogitsRow,
)
from mmdeploy_llm.plugin_objects.model import Model
from mmdeploy_llm.plugin_objects.parsing import NextText, ReasoningParser, Segment, ToolParser
from mmdeploy_llm.plugin_objects.pixels import PixelKernels
from mmdeploy_llm.plugin_objects.reading import ReadingPreset, ReadPage, ReadText
from mmdeploy_llm.plugin_objects.speech import Heard, SpeechRules, Spoken
from mmdeploy_llm.plugin_objects.store import OutputSinkSpec, RecordStore
from mmdeploy_llm.plugin_objects.weights import WeightFormatSpec
from mmdeploy_llm.plugin_versions import API_VERSION
from mmdeploy_llm.request import ITEM_NUMBER, MediaInput, MediaSpan, MediaView

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
    "AttentionBackend",
    "AttentionBackendSpec",
    "AttentionSetup",
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
    "StepStats",
    "ToolCall",
    "ToolParser",
    "ToolParserSpec",
    "WeightFormatSpec",
    "hookimpl",
    "hookspec",
]
