"""The conformance kit, with which plugin authors test their plugins. It may import any package;
only the program's `plugins check` imports it.

    from mmdeploy_llm.testing import ParserExample, ReasoningParserConformance

    class TestMyParser(ReasoningParserConformance):
        spec = provide_reasoning_parsers()[0]
        examples = (ParserExample(text="<t>why</t>so", reasoning="why", content="so"),)

Names are imported on first use, so that importing this package is cheap.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmdeploy_llm.testing.media.truth import MediaTruth
    from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped
    from mmdeploy_llm.testing.plugins.chat_parts import ChatPartExample
    from mmdeploy_llm.testing.plugins.logits import LogitsExample
    from mmdeploy_llm.testing.plugins.parsers import ParserExample
    from mmdeploy_llm.testing.plugins.tools import ToolParserExample
    from mmdeploy_llm.testing.tiny import make_tokenizer, write_tiny

    from .attention_conformance import AttentionBackendConformance
    from .check import check_plugin
    from .checkpoint import write_checkpoint
    from .conformance import (
        ChatPartConformance,
        CorpusFormatConformance,
        FetcherConformance,
        OutputSinkConformance,
        PluginConformance,
        ReasoningParserConformance,
        ToolParserConformance,
    )
    from .embedder_conformance import EmbedderConformance
    from .fakes import FakeMediaProcessor, FakeModel, FakeReasoningParser, fake_manager
    from .logits_conformance import LogitsProcessorConformance
    from .media_conformance import MediaProcessorConformance
    from .model_conformance import ModelConformance, ModelVariantConformance
    from .splitter_conformance import SplitterConformance
    from .verdicts import Verdict
    from .weight_conformance import WeightFormatConformance

__all__ = [
    "AttentionBackendConformance",
    "ChatPartConformance",
    "ChatPartExample",
    "CheckFailed",
    "CheckSkipped",
    "CorpusFormatConformance",
    "EmbedderConformance",
    "FakeMediaProcessor",
    "FakeModel",
    "FakeReasoningParser",
    "FetcherConformance",
    "LogitsExample",
    "LogitsProcessorConformance",
    "MediaProcessorConformance",
    "MediaTruth",
    "ModelConformance",
    "ModelVariantConformance",
    "OutputSinkConformance",
    "ParserExample",
    "PluginConformance",
    "ReasoningParserConformance",
    "SplitterConformance",
    "ToolParserConformance",
    "ToolParserExample",
    "Verdict",
    "WeightFormatConformance",
    "check_plugin",
    "fake_manager",
    "make_tokenizer",
    "write_checkpoint",
    "write_tiny",
]

_MODULES = MappingProxyType(
    {
        "AttentionBackendConformance": ".attention_conformance",
        "ChatPartConformance": ".conformance",
        "ChatPartExample": ".plugins.chat_parts",
        "CheckFailed": ".models.base",
        "CheckSkipped": ".models.base",
        "CorpusFormatConformance": ".conformance",
        "EmbedderConformance": ".embedder_conformance",
        "FakeMediaProcessor": ".fakes",
        "FakeModel": ".fakes",
        "FakeReasoningParser": ".fakes",
        "FetcherConformance": ".conformance",
        "LogitsExample": ".plugins.logits",
        "LogitsProcessorConformance": ".logits_conformance",
        "MediaProcessorConformance": ".media_conformance",
        "MediaTruth": ".media.truth",
        "ModelConformance": ".model_conformance",
        "ModelVariantConformance": ".model_conformance",
        "OutputSinkConformance": ".conformance",
        "ParserExample": ".plugins.parsers",
        "PluginConformance": ".conformance",
        "ReasoningParserConformance": ".conformance",
        "SplitterConformance": ".splitter_conformance",
        "ToolParserConformance": ".conformance",
        "ToolParserExample": ".plugins.tools",
        "Verdict": ".verdicts",
        "WeightFormatConformance": ".weight_conformance",
        "check_plugin": ".check",
        "fake_manager": ".fakes",
        "make_tokenizer": ".tiny",
        "write_checkpoint": ".checkpoint",
        "write_tiny": ".tiny",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_MODULES[name], __name__)
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise ModuleNotFoundError(
            f"{__name__}.{name} needs pytest, which is not installed; install it with "
            "pip install 'mmdeploy-llm[testing]'",
            name="pytest",
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
