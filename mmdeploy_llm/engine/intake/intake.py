"""Intake: turns a prompt of any form into Requests that the engine can run.

read the prompt > check kinds and counts > render > tokenize > match placeholders
> fetch, decode, process media > expand > check lengths > fill the params
"""

from __future__ import annotations

import copy
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mmdeploy_llm.engine.intake.templates import Renderer
from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers.pooling.abilities import GENERATES, Abilities
from mmdeploy_llm.media.boxes.reading import FoundBoxes, find_boxes
from mmdeploy_llm.media.budgets.choice import budgets_of
from mmdeploy_llm.media.loading.cache import CacheStats
from mmdeploy_llm.media.loading.embeds import EmbedsReader
from mmdeploy_llm.media.loading.keys import encoded_by
from mmdeploy_llm.media.loading.loader import MediaLoader
from mmdeploy_llm.media.loading.outside import Expanded, divided
from mmdeploy_llm.messages import MediaItem
from mmdeploy_llm.request import Request
from mmdeploy_llm.system.guarding.given_template import load_template
from mmdeploy_llm.values.adapter_ref import AdapterRef
from mmdeploy_llm.values.deadline import Deadline
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.pooling_request import PoolingRequest
from mmdeploy_llm.values.prompt import PromptParts

from .chat import with_harmless_texts, with_sources
from .complete import check_complete, with_known_roles
from .defaults import ParamsResolver, sample_seed
from .documents import Documents, Group
from .parts import TemplateParts
from .placeholders import Placeholders
from .prompts import PromptReader, kwargs_of, with_options, wrong_content
from .reasoning_ends import ReasoningEnds
from .rendered import Rendered, TokenCount
from .rules import MediaRules, ParamRules, TextRules
from .template import render, template_variables, warn_of_unread
from .tools import chosen_tools
from .unicode_text import check_chat
from .wanting import Begun, Wanting, Writing


class Intake:
    """Turns prompts into Requests (room 1). Methods may be called from several threads at once.

    text, media, params: see rules.py. abilities: of the model. new_request_id: returns unique ids.

    Raises CheckpointError when tokenizer, processors and generation_config do not fit together.
    """

    def __init__(
        self,
        *,
        config: RuntimeConfig,
        text: TextRules,
        media: MediaRules,
        params: ParamRules,
        abilities: Abilities = GENERATES,
        new_request_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._tokenizer, self._kinds, self._rules = text.tokenizer, media.media, media
        self._placeholders = Placeholders(self._kinds.inside, text.tokenizer)
        self._documents = Documents(self._kinds.inside, text.tokenizer)
        self._renderer, self._parts = Renderer(), TemplateParts(self._kinds, self._rendered_text)
        self.media = MediaLoader(
            media=self._kinds,
            fetch=media.fetch,
            limits=media.limits,
            max_items=config.limit_mm_per_prompt,
            cache_bytes=media.cache_bytes,
            guard=media.guard,
            embeds=EmbedsReader(dtype=config.dtype, media_size=media.media_size),
            budgets=budgets_of(config.options),
        )
        self._params = ParamsResolver(
            config=config,
            vocab_size=text.vocab_size,
            grammars=params.grammars,
            check_processors=params.check_processors,
            encode=text.tokenizer.encode,
        )
        self._text, self._unread = text, set[str]()  # names that were warned of
        self._ends = ReasoningEnds(text)
        self._new_request_id = new_request_id
        writing = Writing(
            check_media=self.media.check,
            written=self._written,
            placeholders=self._placeholders,
            tokenizer=text.tokenizer,
        )
        self._prompts = PromptReader.of_model(self._kinds, media.expander)
        self._wanting = Wanting(
            abilities, self._prompts, config.max_model_len, self._params, writing
        )

    def accept(
        self,
        prompt: Any,
        params: SamplingParams,
        *,
        item: Any = None,
        where: str = "",
        stream: bool = False,
        number: int = 0,
        request_id: str | None = None,
        priority: int = 0,
        deadline: Deadline | None = None,
        is_shared: bool = False,
        wanted: PoolingRequest | None = None,
        adapter: AdapterRef | None = None,
    ) -> tuple[Request, ...]:
        """Returns the n requests of a prompt, by index; they share its media.

        item: the caller's object; None: the prompt. where: names the prompt in messages of errors.
        number: of the prompt in this engine: params without a seed get one of it and the engine's.
        request_id: of the first request; the others add their index to it. None: a new one.
        priority, deadline: of priority_of, deadline_of. wanted: None: text. Raises RequestError.
        """
        begun = self._wanting.begin(prompt, params, wanted, number, where, deadline)
        rendered, expanded = self._read(begun, deadline)
        request = Request(
            wanted=self._wanting.labelled(begun.wanted, expanded.ids),  # first: it adds ids
            request_id=self._new_request_id() if request_id is None else request_id,
            prompt=rendered.text if rendered.pieces else None,
            item=prompt if item is None else item,
            prompt_token_ids=expanded.ids,
            params=expanded.params(begun.params(len(expanded.ids))),
            token_types=rendered.token_types,
            heads=expanded.heads,
            eos_token_ids=self._text.eos_token_ids,
            media=expanded.spans if adapter is None else encoded_by(adapter, expanded.spans),
            prompt_text=rendered.text,
            tools=rendered.tools,
            reasoning_end_ids=self._ends.ids_for(params, rendered.text),
            bad_words_token_ids=self._tokenizer.banned(params),
            priority=priority,
            deadline=deadline,
            adapter=adapter,
            is_shared=is_shared or params.n > 1,
            stream=stream,
            arrival_time=begun.arrival_time,
            preprocess_end_time=time.time(),
        )
        lists = begun.windows or [expanded.ids] * params.n
        return tuple(self._sample(request, *own) for own in enumerate(lists))

    def _read(self, begun: Begun, deadline: Deadline | None) -> tuple[Rendered, Expanded]:
        """Renders a prompt, checks its length, and writes its media into it."""
        rendered = self._render(begun.parts, deadline)
        begun.params(0 if self._kinds.encoder else len(rendered.ids))  # an encoder may read it
        return rendered, self._expand(rendered, self.media.load(rendered.items, deadline))

    def copy_tokenizer(self) -> Any:
        """Returns a copy of transformers' tokenizer; settings of the copy do not change prompts."""
        return copy.deepcopy(self._tokenizer.raw)

    def cache_stats(self) -> Mapping[str, CacheStats]:
        """Returns the statistics of the media caches, by name."""
        return self.media.stats

    def interrupt(self) -> None:
        """Ends calls that are under way, so that `close` need not wait for them."""
        for part in (self._renderer, self._tokenizer, self._params, self.media):
            part.interrupt()

    def close(self) -> None:
        """Closes the media processors and ends the processes of templates and grammars."""
        for part in (self._renderer, self._tokenizer, self._params, self.media):
            part.close()

    def count_tokens(self, prompt: Any) -> TokenCount:
        """Returns the token counts that `accept` would produce, from media headers where possible.

        Raises RequestError and its subclasses, but not for a prompt that is too long.
        """
        rendered = self._render(self._prompts.read(prompt))
        media = self.media.count(rendered.items)
        expanded = self._expand(rendered, media)
        sums = Counter[str]()
        for span in expanded.spans:
            sums.update(span.item.counts)
        return TokenCount(
            num_prompt_tokens=len(expanded.ids),
            num_input_image_tokens=sums["image"],
            num_input_video_tokens=sums["video"],
            num_input_tokens_by_kind=dict(sums),
            shown=media[0].shown if len(media) == 1 else None,
        )

    def boxes(self, prompt: Any, text: str) -> FoundBoxes:
        """Returns the boxes in an answer to a prompt with one picture, in its pixels; opens its
        header again. Raises RequestError."""
        if self._rules.box_rule is None:
            raise RequestError("no plugin says how this model writes boxes (ModelSpec.boxes)")
        rendered = self._render(self._prompts.read(prompt))
        found = [item for item in self.media.count(rendered.items) if item.size is not None]
        if len(found) != 1 or len(rendered.items) != 1 or found[0].size is None:
            raise RequestError(
                f"boxes need a prompt with one picture and nothing else, found "
                f"{', '.join(item.kind for item in rendered.items) or 'no media'}"
            )
        return find_boxes(text, self._rules.box_rule, found[0].size, found[0].shown, rendered.text)

    def _sample(self, request: Request, index: int, ids: list[int]) -> Request:
        """Returns one of the n requests of a prompt, or of its windows."""
        assert request.params.seed is not None
        seed = sample_seed(request.params.seed, index)
        return replace(
            request,
            request_id=f"{request.request_id}-{index}" if index else request.request_id,
            index=index,
            prompt_token_ids=ids,
            params=request.params.model_copy(update={"seed": seed}),
            output_token_ids=[],
            block_ids=[],
        )

    def _render(self, parts: PromptParts, deadline: Deadline | None = None) -> Rendered:
        """Renders and tokenizes a prompt and matches its media to placeholders, before anything
        is opened but documents."""
        own: Any = None
        if parts.processor_kwargs:
            own, rest = kwargs_of(parts.processor_kwargs, self._kinds.splitters)
            parts = replace(parts, processor_kwargs=rest)
        if parts.messages is not None:
            rendered = self._render_chat(parts, own, deadline)
        else:
            self.media.check(parts.media)
            if self._documents.concern(parts):
                parts = self._with_documents(parts, own, deadline)
            elif own is not None:
                with_options(parts.media, own, self._kinds.kinds)  # of no document: an error
            rendered = self._render_text(parts)
        counts = Counter(item.kind for item in rendered.items)
        self._placeholders.check_counts(rendered.ids, counts, parts.hint)
        if parts.processor_kwargs is None:
            return rendered
        items = with_options(rendered.items, parts.processor_kwargs, self._kinds.kinds)
        return replace(rendered, items=items)

    def _split(
        self, items: Sequence[MediaItem], own: Any, deadline: Deadline | None
    ) -> list[Group]:
        """Splits the documents among the media of a prompt. own: their mm_processor_kwargs."""
        if own is not None:
            items = with_options(items, own, self._kinds.kinds)
        if not any(item.kind in self._kinds.splitters for item in items):
            return [Group(item=item, parts=(item,)) for item in items]
        found = self.media.split(items, deadline)
        return [Group(item=item, parts=parts) for item, parts in zip(items, found, strict=True)]

    def _with_documents(
        self, parts: PromptParts, own: Any, deadline: Deadline | None
    ) -> PromptParts:
        """Returns a prompt with the parts of its documents in place of them."""
        groups = self._split(parts.media, own, deadline)
        hint = self._documents.hint(groups)
        if parts.ids is not None:
            self._check_vocabulary(parts.ids)
            count = self._placeholders.count_in_ids
            ids, items = self._documents.in_ids(parts.ids, groups, self._written, count)
            return replace(parts, ids=tuple(ids), media=items, hint=hint)
        text, items = self._documents.in_text(
            parts.text or "", groups, self._written, self._placeholders.count_in_text
        )
        return replace(parts, text=text, media=items, hint=hint)

    def _render_text(self, parts: PromptParts) -> Rendered:
        settings = (parts.template, parts.template_kwargs, parts.tools)
        if any(setting is not None for setting in settings):
            raise RequestError(
                "chat_template, chat_template_kwargs and tools need 'messages'; a text prompt is "
                "used without a template"
            )
        if parts.ids is not None:
            self._check_vocabulary(parts.ids)
            ids = self._placeholders.in_ids(parts.ids)
            return Rendered(text=self._tokenizer.decode(ids), ids=tuple(ids), items=parts.media)
        if parts.text is None:
            raise wrong_content("none")
        text = parts.text
        if parts.pair is not None:
            ids, types = self._tokenizer.encode_pair(text, parts.pair)
            return Rendered(text=text, ids=self._checked(ids), items=(), token_types=types)
        ids = self._tokenizer.encode_prompt(self._placeholders.in_text(text))
        return Rendered(text=text, ids=self._checked(ids), items=parts.media, pieces=(text,))

    def _written(self, kind: str, count: int) -> str:
        """Returns what stands for the parts of a document in a prompt without a template."""
        return self._parts.text(kind, count, self._text.chat_template)

    def _render_chat(self, parts: PromptParts, kwargs: Any, deadline: Deadline | None) -> Rendered:
        template = self._template(parts.template)
        variables = template_variables(parts.template_kwargs)
        tools = chosen_tools(parts.tools, variables)
        messages, outside = parts.messages or (), self._kinds.outside_texts
        markers = (*self._placeholders.markers, *self._documents.markers, *outside)
        conversation = with_harmless_texts(messages, tools, markers, template)
        variables["tools"] = list(conversation.tools) or None
        check_chat(conversation.messages, variables, template)
        warn_of_unread(parts.template_kwargs, template, self._unread)
        items = with_sources(messages, parts.media)
        self.media.check(items)
        groups = self._split(items, kwargs, deadline)
        own = [group.parts for group in groups]
        given = self._parts.messages(conversation.messages, own, template)
        written = with_known_roles(given, template)
        text = self._rendered_text(template, written, variables)
        check_complete(
            written,
            conversation.tools,
            text,
            lambda other, tools: self._rendered_text(
                template, other, {**variables, "tools": list(tools) or None}
            ),
        )
        pieces = text.split(conversation.mark) if conversation.mark else [text]
        ids = self._encode_pieces([self._placeholders.in_text(piece) for piece in pieces])
        return Rendered(
            text="".join(pieces),
            ids=self._checked(ids),
            items=tuple(item for group in own for item in group),
            pieces=tuple(pieces),
            is_template=True,
            tools=tools,
        )

    def _rendered_text(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        return render(self._tokenizer.raw, template, messages, variables, renderer=self._renderer)

    def _encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        return [token_id for piece in pieces for token_id in self._tokenizer.encode(piece)]

    def _expand(self, rendered: Rendered, media: Sequence[MediaInput]) -> Expanded:
        """Writes the media into the prompt: into the text where an item's prompt_text is more
        than placeholder tokens, else into the ids. A family with an encoder has its own rule."""
        if self._kinds.encoder is not None:
            return divided(self._kinds.encoder, rendered, media, self._tokenizer.encode)
        if not media:
            return Expanded(ids=list(rendered.ids), spans=())
        if not rendered.pieces or all(item.prompt_text is None for item in media):
            return self._placeholders.expand(rendered.ids, media, self._tokenizer.encode)
        filled = self._placeholders.fill(rendered.pieces, media)
        if rendered.is_template:
            ids = self._encode_pieces(filled)
        else:
            ids = self._tokenizer.encode_prompt(filled[0])
        return self._placeholders.locate(self._checked(ids), media)

    def _template(self, own: str | None) -> str:
        """Returns the template given with this prompt, else the engine's."""
        if own is not None:
            try:
                return load_template(own)
            except ConfigError as error:
                raise RequestError(str(error)) from error
        if self._text.chat_template is None:
            raise RequestError(
                "the model has no chat template; give chat_template, or use generate with a "
                "rendered prompt"
            )
        return self._text.chat_template

    def _checked(self, ids: list[int]) -> tuple[int, ...]:
        if not ids and self._kinds.encoder is None:  # whose rule says how a decoder begins
            raise RequestError("the prompt has no tokens; give at least one character")
        self._check_vocabulary(ids)
        return tuple(ids)

    def _check_vocabulary(self, ids: Sequence[int]) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self._text.vocab_size):
            wrong = next(item for item in ids if not 0 <= item < self._text.vocab_size)
            raise RequestError(
                f"the prompt has token id {wrong}; allowed are 0 to {self._text.vocab_size - 1}"
            )
