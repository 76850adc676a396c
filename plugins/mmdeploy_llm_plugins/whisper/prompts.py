"""How Whisper reads a prompt: tokens for language, task and timestamps begin the answer, and words
are what was said before, or names to be spelled so.

    ""                               the language is recognized, transcribed without timestamps
    "<|de|>"                         German
    "<|german|><|translate|>"        to English
    "<|timestamps|>"                 with the begin and end of each sentence
    "<|timestamps|><|words|>"        and what tells when each word is spoken
    "Dr. Müller, ERNIE <|de|>"       these words were said before
    "<|startoftranscript|>..."       exactly these tokens
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from mmdeploy_llm.errors import PromptTooLongError, RequestError
from mmdeploy_llm.hooks import Checkpoint, EncoderPrompt, MediaInput
from mmdeploy_llm_plugins.encoder_decoder.prompts import one_item, setting, start_id

from .words import alignment_heads

MARKER, START, WORDS = "<|audio|>", "<|startoftranscript|>", "<|words|>"
NO_TIMES, TIMES, BEFORE = "<|notimestamps|>", "<|timestamps|>", "<|startofprev|>"
TASKS = ("transcribe", "translate")
UNGUIDED = (
    f"this prompt asks for timestamps, which are no part of what a constraint allows; leave out "
    f"{TIMES}, or end a prompt of tokens with {NO_TIMES}"
)
WORD = re.compile(r"(<\|[^|<>]*\|>)")
Encode = Callable[[str], list[int]]


class WhisperPrompts:
    """See hooks.EncoderPrompts. Raises CheckpointError where nothing says how a decoder begins."""

    has_places = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        config, generation = checkpoint.config, checkpoint.generation
        self._start = start_id(checkpoint, config)
        self._most_before = config.max_target_positions // 2 - 1  # tokens of what was said before
        self._heads = alignment_heads(checkpoint)
        is_multilingual = generation.get("is_multilingual") is not False
        languages = generation.get("lang_to_id") if is_multilingual else None
        self._languages: Mapping[str, int] = dict(languages or {})
        self._tasks: Mapping[str, int] = dict(generation.get("task_to_id") or {})
        self._no_times = generation.get("no_timestamps_token_id")
        self._rules: Mapping[str, Any] = {
            "languages": sorted(self._languages.values()),
            "suppressed": _ids(setting(checkpoint, config, "suppress_tokens")),
            "suppressed_first": _ids(setting(checkpoint, config, "begin_suppress_tokens")),
            "no_times": self._no_times,
            "latest": generation.get("max_initial_timestamp_index"),
            "end": _ids(setting(checkpoint, config, "eos_token_id"))[0],
        }

    def divide(
        self, text: str | None, ids: Sequence[int], media: Sequence[MediaInput], encode: Encode
    ) -> EncoderPrompt:
        """Returns the first tokens of the answer, and the sound."""
        item = one_item(media, "sound")
        has_words = text is not None and WORDS in text
        text = None if text is None else text.replace(WORDS, "")
        if text is None or START in text:
            own = ids if text is None else encode(text.replace(MARKER, "").strip())
            begin, follows, has_times = self._exact(list(own))
        else:
            begin, follows, has_times = self._asked(text.replace(MARKER, ""), encode)
        rules = {**self._rules, "follows": follows, "has_times": has_times}
        return EncoderPrompt(
            ids=tuple(begin),
            items=(item,),
            processors={"whisper": {"whisper": rules}},
            unguided=UNGUIDED if has_times else "",
            heads=self._heads if has_words else (),
        )

    def check(self, text: str) -> None:
        """Raises RequestError for a language, a task or a mark that the model does not know."""
        self._asked(text.replace(WORDS, ""), lambda words: [])

    def _exact(self, ids: list[int]) -> tuple[list[int], list[int] | None, bool]:
        """Returns what `_asked` does for a prompt that is the decoder's own tokens."""
        if self._start not in ids:
            raise RequestError(
                f"a prompt of token ids needs {START}, id {self._start}, with which the answer "
                "begins; give a text such as '<|en|>' to have it written"
            )
        has_times = self._no_times is not None and ids[-1] != self._no_times
        if ids[-1] == self._start and self._languages:
            return ids, [self._task("transcribe")], has_times
        return ids, None, has_times

    def _asked(self, text: str, encode: Encode) -> tuple[list[int], list[int] | None, bool]:
        """Returns the decoder's first tokens; those that follow a language that is recognized, None
        where it is known; and whether timestamps are written."""
        before, asked = "", dict[str, str]()
        for piece in WORD.split(text):
            name = piece[2:-2].strip().lower()
            if WORD.fullmatch(piece) is None:
                before += piece
            elif piece != BEFORE:
                kind = "times" if piece in (NO_TIMES, TIMES) else "language"
                kind = "task" if name in TASKS else kind
                if asked.setdefault(kind, name) != name:
                    raise RequestError(
                        f"the prompt asks for <|{asked[kind]}|> and {piece:.60}; give one of them"
                    )
        language = self._language(asked["language"]) if "language" in asked else None
        task, has_times = asked.get("task"), asked.get("times") == TIMES[2:-2]
        begin = [*self._before(before.strip(), encode), self._start]
        follows = []
        if self._languages:
            follows.append(self._task(task or TASKS[0]))
        elif task == "translate":
            raise RequestError("this model knows English only and cannot translate")
        if has_times and self._no_times is None:
            raise RequestError(
                "this model writes no timestamps: its generation_config.json has no "
                "no_timestamps_token_id"
            )
        if not has_times and self._no_times is not None:
            follows.append(self._no_times)
        if self._languages and language is None:
            return begin, follows, has_times
        return [*begin, *(() if language is None else (language,)), *follows], None, has_times

    def _language(self, name: str) -> int | None:
        """Returns the token of a language by its code or English name; None for English where the
        model knows no other."""
        code = TO_LANGUAGE_CODE.get(name, name)
        if not self._languages and code == "en":
            return None
        found = self._languages.get(f"<|{code}|>")
        if found is None:
            known = ", ".join(sorted(token[2:-2] for token in self._languages)) or "en"
            raise RequestError(
                f"{f'<|{name}|>'!r:.60} is no language, task or mark that this model knows; tasks: "
                f"{', '.join(TASKS)}; marks: timestamps, notimestamps; languages: {known}"
            )
        return found

    def _task(self, name: str) -> int:
        """Returns the token of a task. Raises RequestError where the model has none."""
        if name not in self._tasks:
            raise RequestError(
                f"this model cannot {name}: task_to_id of its generation_config.json"
            )
        return self._tasks[name]

    def _before(self, words: str, encode: Encode) -> list[int]:
        """Returns the tokens of what was said before. Raises PromptTooLongError."""
        if not words:
            return []
        ids = encode(f" {words}")
        if len(ids) > self._most_before:
            raise PromptTooLongError(
                f"the words before the sound have {len(ids)} tokens, {self._most_before} are "
                "allowed; give the last ones only"
            )
        return [*encode(BEFORE), *ids]


def _ids(value: Any) -> list[int]:
    """Returns a number or several as a list."""
    return [value] if isinstance(value, int) else list(value or ())
