"""Every exception this package raises on purpose, and the error codes of failed requests.

MMDeployLLMError
 + ConfigError(ValueError)          bad option or combination of options
 + RequestError(ValueError)         this request is wrong; the engine is fine         400
 |   + PromptTooLongError           prompt and requested output do not fit            400
 |   + MediaError                   media cannot be read                              400
 |   + MediaLimitError              media is over a limit                             413
 |   + UnsupportedMediaError        media of a type or format that is not accepted    415
 |   + MediaTimeoutError            media took too long to fetch or decode            408
 |   + RequestTimeoutError          the request's own timeout has passed              408
 |   + InvalidAnswerError           the answer is not what its constraint asks for    422
 |   + QueueFullError               too many requests wait already                    429
 |   + AbortedError                 the caller has aborted the request                499
 + ModelError                       the model folder cannot be used
 |   + ModelNotSupportedError       no plugin serves the model's architecture, or it cannot run
 |   + CheckpointError              weights or files are missing, surplus or malformed
 + PluginError                      a plugin is at fault                              500
 |   + PluginLoadError              a plugin cannot be imported or registered
 |   + PluginConflictError          two plugins claim the same name at the same priority
 |   + PluginContractError          a plugin returned something its contract does not allow
 + EngineError(RuntimeError)        the engine cannot continue                        500
     + OutOfBlocksError             the KV cache cannot hold what must run
     + WorkerDiedError              a worker process ended
"""

OK = 200
ABORTED = 499


class MMDeployLLMError(Exception):
    """Base of every exception in this package. `code` is the error code that a failed request
    reports."""

    code = 500


class ConfigError(MMDeployLLMError, ValueError):
    """An option, or a combination of options, is not valid."""

    code = 400


class RequestError(MMDeployLLMError, ValueError):
    """One request is wrong; the engine and all other requests are fine."""

    code = 400


class PromptTooLongError(RequestError):
    """The prompt and the minimum number of new tokens do not fit the context or the KV cache."""


class MediaError(RequestError):
    """A media item cannot be read or does not match the prompt."""


class MediaLimitError(MediaError):
    """A media item is too large, or the prompt has too many of them."""

    code = 413


class UnsupportedMediaError(MediaError):
    """A media item has a type or a format that is not accepted."""

    code = 415


class MediaTimeoutError(MediaError):
    """A media item took longer than allowed to fetch or decode."""

    code = 408


class RequestTimeoutError(RequestError):
    """The request was not finished within its timeout."""

    code = 408


class InvalidAnswerError(RequestError):
    """The answer does not follow the grammar or schema that it was to follow."""

    code = 422


class QueueFullError(RequestError):
    """The caller allows no more requests to wait."""

    code = 429


class AbortedError(RequestError):
    """The caller has aborted the request before it was computed."""

    code = ABORTED


class ModelError(MMDeployLLMError):
    """The model cannot be used."""


class ModelNotSupportedError(ModelError):
    """No loaded plugin serves the checkpoint's architecture, or the one that does cannot run it."""


class CheckpointError(ModelError):
    """Files of the checkpoint are missing, surplus or malformed."""


class PluginError(MMDeployLLMError):
    """A plugin is at fault."""


class PluginLoadError(PluginError):
    """A plugin that was requested by name cannot be imported or registered."""


class PluginConflictError(PluginError):
    """Two plugins claim the same name at the same priority."""


class PluginContractError(PluginError):
    """A plugin returned something that its contract does not allow."""


class EngineError(MMDeployLLMError, RuntimeError):
    """The engine cannot continue."""


class OutOfBlocksError(EngineError):
    """The KV cache has no free block for a request that must run."""


class WorkerDiedError(EngineError):
    """A worker process ended before its work was done."""
