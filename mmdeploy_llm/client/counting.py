"""Counts tokens of prompts without the weights of the model."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Unpack

from mmdeploy_llm.engine.intake.rendered import TokenCount
from mmdeploy_llm.errors import EngineError
from mmdeploy_llm.messages import Conversation, Prompt
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.prompt import PromptParts
from mmdeploy_llm.values.text.signatures import takes
from mmdeploy_llm.weights.folder import PROMPT_FILES, look_up

from .arguments import as_prompt
from .belonging import Belonging

if TYPE_CHECKING:
    from mmdeploy_llm.values.params.option_dicts import EngineOptions


class TokenCounter(Belonging):
    """Counts tokens as an LLM with the same arguments would, without loading the model: it reads
    the configuration, the tokenizer and the chat template, and of media the headers. A folder
    without weights is enough. Use it in a `with` block, or call `close`.

    model, options: as for LLM; options of computing, such as `device`, have no effect. Raises
    ConfigError, ModelError or PluginError when the files cannot be used.
    """

    @takes(EngineConfig)
    def __init__(self, model: str | PathLike[str], **options: Unpack[EngineOptions]) -> None:
        config = EngineConfig.from_options(model, options)
        look_up(config, PROMPT_FILES)
        from mmdeploy_llm.engine.startup.rooms import open_intake

        super().__init__()
        self._is_closed = False
        self._intake = open_intake(config)

    def count_tokens(self, prompt: Prompt | Conversation | PromptParts) -> TokenCount:
        """Counts prompt and media tokens. Raises RequestError for a prompt that cannot be prepared.
        May be called from several threads."""
        self._home.check()
        if self._is_closed:
            raise EngineError("this TokenCounter is closed; make a new one")
        return self._intake.count_tokens(as_prompt(prompt))

    def close(self) -> None:
        """Ends the processes and threads that read media and render templates."""
        self._home.check()
        self._is_closed = True
        self._intake.interrupt()
        self._intake.close()


@takes(EngineConfig)
def count_tokens(
    model: str | PathLike[str], prompt: Prompt | Conversation, **options: Unpack[EngineOptions]
) -> TokenCount:
    """Counts the tokens of one prompt without the weights of the model.

    prompt: text, token ids, a dict as for LLM.generate, or a conversation as for LLM.chat.
    model, options: as for LLM. Raises as TokenCounter does, which reads the files once for many
    prompts.
    """
    with TokenCounter(model, **options) as counter:
        return counter.count_tokens(prompt)
