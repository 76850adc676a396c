"""mmdeploy_llm: offline multimodal inference in batches.

Public names are imported when first used, so that `import mmdeploy_llm` is quick and imports no
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapter_ref import LoRARequest
    from .aio.async_llm import AsyncLLM
    from .aio.handle import Handle
    from .aio.pool import ModelPool
    from .client.counting import TokenCounter, count_tokens
    from .config import EngineConfig
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
    from .intake.rendered import TokenCount
    from .llm import LLM
    from .outputs import (
        CompletionOutput,
        Completions,
        Logprob,
        RequestMetrics,
        RequestOutput,
        ToolCall,
    )
    from .params import (
        EarlyStopParams,
        GuidedDecodingParams,
        NoRepeatNGramParams,
        SamplingParams,
        StructuredOutputsParams,
    )
    from .pooled_outputs import ClassifyOutput, EmbeddingOutput, ScoreOutput
    from .records.record import ItemError

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
    "LLM": "llm",
    "AsyncLLM": "aio.async_llm",
    "Handle": "aio.handle",
    "ModelPool": "aio.pool",
    "EngineConfig": "config",
    "EarlyStopParams": "params",
    "GuidedDecodingParams": "params",
    "NoRepeatNGramParams": "params",
    "SamplingParams": "params",
    "StructuredOutputsParams": "params",
    "ClassifyOutput": "pooled_outputs",
    "CompletionOutput": "outputs",
    "EmbeddingOutput": "pooled_outputs",
    "ScoreOutput": "pooled_outputs",
    "ItemError": "records.record",
    "LoRARequest": "adapter_ref",
    "Completions": "outputs",
    "Logprob": "outputs",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "TokenCount": "intake.rendered",
    "TokenCounter": "client.counting",
    "ToolCall": "outputs",
    "count_tokens": "client.counting",
}


def __getattr__(name: str) -> Any:
    """Imports a public name from the module that defines it (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
