"""mmdeploy_llm: offline multimodal inference in batches.

Public names are imported when first used, so that `import mmdeploy_llm` is quick and imports no
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client.aio.async_llm import AsyncLLM
    from .client.aio.handle import Handle
    from .client.aio.pool import ModelPool
    from .client.counting import TokenCounter, count_tokens
    from .client.llm import LLM
    from .data.records.record import ItemError
    from .engine.intake.rendered import TokenCount
    from .errors import (
        AbortedError,
        CheckpointError,
        ConfigError,
        EngineError,
        InvalidAnswerError,
        MediaError,
        MediaLimitError,
        MediaTimeoutError,
        MMDeployLLMError,
        ModelError,
        ModelNotSupportedError,
        OutOfBlocksError,
        PluginConflictError,
        PluginContractError,
        PluginError,
        PluginLoadError,
        PromptTooLongError,
        QueueFullError,
        RequestError,
        RequestTimeoutError,
        UnsupportedMediaError,
        WorkerDiedError,
    )
    from .values.adapter_ref import LoRARequest
    from .values.options.config import EngineConfig
    from .values.outputs.pooled import ClassifyOutput, EmbeddingOutput, ScoreOutput
    from .values.outputs.request_output import (
        CompletionOutput,
        Completions,
        Logprob,
        RequestMetrics,
        RequestOutput,
        ToolCall,
    )
    from .values.params import (
        EarlyStopParams,
        GuidedDecodingParams,
        NoRepeatNGramParams,
        SamplingParams,
        StructuredOutputsParams,
    )

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AbortedError",
    "AsyncLLM",
    "CheckpointError",
    "ClassifyOutput",
    "CompletionOutput",
    "Completions",
    "ConfigError",
    "EarlyStopParams",
    "EmbeddingOutput",
    "EngineConfig",
    "EngineError",
    "GuidedDecodingParams",
    "Handle",
    "InvalidAnswerError",
    "ItemError",
    "LoRARequest",
    "Logprob",
    "MMDeployLLMError",
    "MediaError",
    "MediaLimitError",
    "MediaTimeoutError",
    "ModelError",
    "ModelNotSupportedError",
    "ModelPool",
    "NoRepeatNGramParams",
    "OutOfBlocksError",
    "PluginConflictError",
    "PluginContractError",
    "PluginError",
    "PluginLoadError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestTimeoutError",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutputsParams",
    "TokenCount",
    "TokenCounter",
    "ToolCall",
    "UnsupportedMediaError",
    "WorkerDiedError",
    "count_tokens",
]

_HOMES = {
    "LLM": "client.llm",
    "AsyncLLM": "client.aio.async_llm",
    "Handle": "client.aio.handle",
    "ModelPool": "client.aio.pool",
    "EngineConfig": "values.options.config",
    "EarlyStopParams": "values.params",
    "GuidedDecodingParams": "values.params",
    "NoRepeatNGramParams": "values.params",
    "SamplingParams": "values.params",
    "StructuredOutputsParams": "values.params",
    "ClassifyOutput": "values.outputs.pooled",
    "CompletionOutput": "values.outputs.request_output",
    "EmbeddingOutput": "values.outputs.pooled",
    "ScoreOutput": "values.outputs.pooled",
    "ItemError": "data.records.record",
    "LoRARequest": "values.adapter_ref",
    "Completions": "values.outputs.request_output",
    "Logprob": "values.outputs.request_output",
    "RequestMetrics": "values.outputs.request_output",
    "RequestOutput": "values.outputs.request_output",
    "TokenCount": "engine.intake.rendered",
    "TokenCounter": "client.counting",
    "ToolCall": "values.outputs.request_output",
    "count_tokens": "client.counting",
}


def __getattr__(name: str) -> Any:
    """Imports a public name from the module that defines it (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
