"""AsyncLLM: submits requests to an engine that runs on its own, from any thread or event loop."""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, Unpack

from mmdeploy_llm.client.arguments import as_prompt, as_prompts, one_params
from mmdeploy_llm.client.keywords import explaining_keywords
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.errors import EngineError, QueueFullError, RequestError
from mmdeploy_llm.messages import Conversation, Prompt
from mmdeploy_llm.values.adapter_ref import LoRARequest
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.outputs.request_output import RequestOutput
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.text.signatures import takes
from mmdeploy_llm.values.text.spelling import naming_elsewhere

from .handle import Handle, News, by_completion, whole_of
from .vectors import AsyncVectors

if TYPE_CHECKING:
    from mmdeploy_llm.values.params.option_dicts import EngineOptions


_ELSEWHERE = {
    "chat": "submit(messages), or generate(messages), which yields outputs",
    "embed_iter": "embed for each prompt, in tasks",
    "encode": "embed(prompts), which returns vectors",
    "generate_iter": "submit for each prompt",
    "run_batch": "LLM, whose run_batch answers an iterable",
    "stream": "submit(prompt), whose handle yields deltas with `async for` or `for`",
}


@naming_elsewhere(_ELSEWHERE)
@explaining_keywords
class AsyncLLM(AsyncVectors):
    """A loaded model that answers requests whether anybody waits for them or not.

        async with AsyncLLM("shapes-vl", max_num_seqs=16) as llm:
            handle = llm.submit(prompt, SamplingParams(temperature=0))
            async for delta in handle: ...

    model, options: as for LLM, whose errors it raises.
    max_queued: requests that may be here beyond the `max_num_seqs` that are computed at the same
        time; None: no bound.
    step_lock: entered for each step, where models share the cores.

    Its methods may be called from any thread and any event loop. An error of one request is in its
    output. When the engine dies, the requests it has end as errors, and later calls raise
    WorkerDiedError. Use it in a `with` or `async with` block, or call `close`.

    plugins, model, runtime, num_kv_blocks: as of LLM.
    """

    @takes(EngineConfig)
    def __init__(
        self,
        model: str | PathLike[str] | EngineConfig,
        *,
        max_queued: int | None = None,
        step_lock: AbstractContextManager[None] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        config = model
        if not isinstance(config, EngineConfig):
            config = EngineConfig.from_options(config, options)
        super().__init__(config, step_lock)
        self._max_queued = max_queued
        self._handles: weakref.WeakValueDictionary[str, Handle] = weakref.WeakValueDictionary()
        self._is_finishing = False

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """Makes the object of an EngineConfig, as vLLM's method does of AsyncEngineArgs."""
        return cls(engine_args)

    def submit(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        adapter: str | LoRARequest | None = None,
        wait: bool = True,
    ) -> Handle:
        """Starts a request and returns its handle, without waiting for any of it.

        prompt: one prompt as for LLM.generate, or one conversation; {"messages": ..., "tools": ...,
        "chat_template_kwargs": ...} for a conversation with options.
        request_id: for `abort`, unique among unfinished requests; None: one is made.
        priority: smaller is computed first; equal ones in the order in which they were submitted.
        timeout: seconds, after which the request ends with error_code 408 wherever it is.
        adapter: the name of a LoRA adapter, unless the prompt names one; None: the model alone.
        wait: where `max_queued` requests wait already, whether this call waits until there is room
        or raises QueueFullError. In a task use `generate`, which does not hold up the event loop
        meanwhile.
        """
        ask = self._ask(prompt, sampling_params, request_id, priority, timeout, adapter)
        return self._start(ask, waits=wait)

    async def generate(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        adapter: str | LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the outputs of one request, by its params' `output_kind`: all so far, what is new,
        or one at the end. The other arguments are as for `submit`. Closing the generator, or
        cancelling its task, aborts the request."""
        if isinstance(adapter, LoRARequest):  # its files may have to be read
            adapter = await asyncio.to_thread(self._adapter, adapter)
        ask = self._ask(prompt, sampling_params, request_id, priority, timeout, adapter)
        try:
            handle = self._start(ask, waits=False)
        except QueueFullError:
            handle = await asyncio.to_thread(self._start, ask, waits=True)
        kind = ask.params.output_kind
        try:
            if kind == "final_only":
                yield await handle
                return
            read: list[RequestOutput] = []
            async for delta in handle:
                if kind == "cumulative":
                    read = by_completion([*read, delta])
                yield delta if kind == "delta" else whole_of(read, ask.params.n)
        finally:
            handle.release()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends one or several requests at the next step; unknown ones are ignored."""
        self._home.check()
        for name in [request_id] if isinstance(request_id, str) else request_id:
            handle = self._handles.get(name)
            if handle is not None:
                handle.abort()

    def finish(self, *, abort: bool = False) -> None:
        """Refuses new requests, and returns when those it has have ended. abort: ends them at the
        next step."""
        self._home.check()
        self._is_finishing = True
        while left := [each for each in list(self._handles.values()) if not each.is_finished]:
            for handle in left:
                if abort:
                    handle.abort()
                handle.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._home.is_here:
            await asyncio.to_thread(self.close)

    def _ask(
        self,
        prompt: Any,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        timeout: float | None,
        adapter: str | LoRARequest | None,
    ) -> Ask:
        """Checks the arguments of a request. Raises TypeError, ValueError and EngineError."""
        self._home.check()
        self._desk.check()
        found = as_prompt(prompt)
        if len(as_prompts(found)) != 1:
            raise ValueError("submit takes one prompt; call it for each of several")
        return Ask(
            prompt=found,
            item=prompt,
            params=one_params(params),
            stream=True,
            request_id=request_id or uuid.uuid4().hex,
            priority=priority,
            timeout=timeout,
            adapter=self._adapter(adapter),
        )

    def _start(self, ask: Ask, *, waits: bool) -> Handle:
        self._check_not_finishing()
        known = self._handles.get(ask.request_id)
        if known is not None and not known.is_finished:
            raise RequestError(
                f"request_id {ask.request_id!r} is in use; wait for that request, or take another"
            )
        news = News()
        ticket = self._desk.submit(ask, news, max_queued=self._max_queued, waits=waits)
        handle = self._handles[ask.request_id] = Handle(ticket, news, self)
        self._check_not_finishing()  # `finish` may not have seen it; it is aborted then
        return handle

    async def _answered(self, asks: Sequence[Ask]) -> list[RequestOutput]:
        """Returns the outputs of asks in their order, as many at once as may be here; aborts them
        all when its task is cancelled."""
        self._home.check()
        self._desk.check()
        handles: list[Handle] = []
        try:
            for ask in asks:
                own = replace(ask, request_id=uuid.uuid4().hex)
                try:
                    handles.append(self._start(own, waits=False))
                except QueueFullError:
                    handles.append(await asyncio.to_thread(self._start, own, waits=True))
            return [await handle for handle in handles]
        finally:
            for handle in handles:
                handle.release()

    def _check_not_finishing(self) -> None:
        if self._is_finishing:
            raise EngineError("this model is being stopped and takes no more requests")
