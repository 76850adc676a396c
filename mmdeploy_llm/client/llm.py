"""LLM: the one object through which Python uses this package. Prompts in, results out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from mmdeploy_llm.messages import Conversation, Prompts
from mmdeploy_llm.values.adapter_ref import AnyAdapter
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.outputs.request_output import RequestOutput
from mmdeploy_llm.values.text.progress_bars import UseTqdm
from mmdeploy_llm.values.text.signatures import takes
from mmdeploy_llm.values.text.spelling import naming_elsewhere

from .answering import OnError, ParamsLike
from .arguments import (
    as_conversations,
    as_prompts,
    asks_of,
    asks_of_chats,
    chat_options,
    params_for,
)
from .bulk.embedding import EmbeddingClient
from .bulk.vectors import VectorClient
from .keywords import explaining_keywords

if TYPE_CHECKING:
    from mmdeploy_llm.values.params.option_dicts import EngineOptions


_ELSEWHERE = {
    "encode": "embed(prompts), which returns vectors; get_tokenizer() for token ids",
    "reward": "score(query, documents)",
    "similarity": "score(query, documents), which compares as the model's folder says",
}


@naming_elsewhere(_ELSEWHERE)
@explaining_keywords
class LLM(EmbeddingClient, VectorClient):
    """A loaded model that answers prompts.

    model: a local folder, a hub id, or the name of a bundled model. Options are the fields of
    EngineConfig. Raises ConfigError, ModelError or PluginError when it cannot be loaded.

    An error in one prompt becomes that prompt's output (`finish_reason="error"`, an `error_code`
    other than 200 and a message) and leaves the other prompts untouched. With `on_error="raise"`
    the first such error is raised instead. A wrong call raises TypeError or ValueError at once.

    The model computes in a thread of its own, or with tensor_parallel_size or data_parallel_size in
    other processes; the methods may be called from any thread. Ctrl-C ends the call that it
    interrupts and aborts its prompts. When the last engine has died, requests that have not
    finished come back as errors, and later calls raise WorkerDiedError.

    An LLM belongs to the process and changes little of it. While one that computes in this process
    is open, freed memory is kept for later steps (glibc's mallopt), LRU_CACHE_CAPACITY is set in
    the environment of the C library, and Python's garbage collector leaves out the objects that
    existed when the model was loaded (gc.freeze); while others want the CPUs OpenMP has some idle
    threads, so that it does not spin; cpu_affinity and numa_node place its own threads.
    During a step, torch computes with `num_threads` threads, and on the engine's card. `close`, or
    the last of several LLMs to close, puts all of it back. In a process that is forked from this
    one every method raises EngineError.

    plugins: the loaded plugins; observers and fetchers may be registered there. With several
    engines only those of installed plugins are called, in each engine's process.
    num_kv_blocks: blocks of the KV cache, each for `runtime.block_size` tokens; of several engines,
    those of the one with fewest.
    runtime: every option with its final value, see RuntimeConfig.
    """

    @takes(EngineConfig)
    def __init__(self, model: str | PathLike[str], **options: Unpack[EngineOptions]) -> None:
        super().__init__(EngineConfig.from_options(model, options))

    def generate(
        self,
        prompts: Prompts,
        sampling_params: ParamsLike = None,
        use_tqdm: UseTqdm = True,
        *,
        adapter: AnyAdapter = None,
        on_error: OnError = "return",
    ) -> list[RequestOutput]:
        """Completes every prompt and returns one result for each, in the order of the prompts; with
        `n` > 1 it holds n completions.

        prompts: text, token ids, or {"prompt" | "prompt_token_ids" | "messages",
        "multimodal_data": {"image": ..., "video": ...}}; one of these, or any iterable of them.
        With "messages", also "tools" as in `chat`. What a tokenizer returns is accepted too: its
        "input_ids" are one prompt or a batch, without the padding of its "attention_mask".
        sampling_params: one for all prompts, or a list with one for each.
        use_tqdm: whether a progress bar is shown, or what makes it, called as tqdm is, such as
        functools.partial(tqdm, leave=False).
        adapter: the name of a LoRA adapter for all prompts, or a list with one for each; a prompt's
        own "adapter" precedes it. None: the model alone.
        on_error: "return" or "raise", see LLM.
        """
        items = as_prompts(prompts)
        params = params_for(sampling_params, len(items), "prompts")
        asks = self._with_adapters(asks_of(items, params), adapter)
        return self._collect(asks, use_tqdm, on_error)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: ParamsLike = None,
        use_tqdm: UseTqdm = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tools: Any = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        adapter: AnyAdapter = None,
        on_error: OnError = "return",
    ) -> list[RequestOutput]:
        """Answers one conversation or several, rendered by the model's chat template.

        chat_template_kwargs: variables for the template, such as {"enable_thinking": False}.
        chat_template: another Jinja template, or a file with one.
        tools: functions that the model may call, each {"type": "function", "function": {"name",
        "description", "parameters": JSON schema}} or a Python function with types and a docstring.
        With `tool_call_parser` the calls are in `outputs.tool_calls`. To continue, append an
        assistant message with these calls and one message of role "tool" for each result.
        add_generation_prompt: whether the prompt ends with the beginning of an assistant message;
        None: unless continue_final_message is True.
        continue_final_message: whether the model continues the last message, one of the assistant.
        adapter: as for `generate`.
        """
        options = chat_options(
            chat_template_kwargs,
            chat_template,
            tools,
            add_generation_prompt,
            continue_final_message,
        )
        items = as_conversations(messages)
        params = params_for(sampling_params, len(items), "messages")
        asks = self._with_adapters(asks_of_chats(items, params, options), adapter)
        return self._collect(asks, use_tqdm, on_error)
