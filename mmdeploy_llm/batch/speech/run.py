"""Transcribes files: decodes each, asks about all windows at once, and joins the answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from mmdeploy_llm.data.records.identity import file_state
from mmdeploy_llm.engine.desk.answerer import LoadedModel
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.outcome import Answer
from mmdeploy_llm.errors import ConfigError, MMDeployLLMError
from mmdeploy_llm.hooks import (
    Heard,
    MediaLimits,
    SpeechRules,
    Spoken,
    TextRules,
    WordTimes,
)
from mmdeploy_llm.media import SoundDecoder, read_beneath
from mmdeploy_llm.media.sound.voice import FindsVoices, VoiceDetector
from mmdeploy_llm.messages import Prompt
from mmdeploy_llm.values.params import SamplingParams

from .doubts import is_doubtful, is_poor, is_unspoken
from .joining import Line, joined
from .line_words import timed_words
from .sources import Source
from .windows import (
    ACROSS,
    Stretch,
    Window,
    heard_of,
    spoken_within,
    windows_of,
    windows_of_speech,
)
from .writing import DOUBT

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
TASKS = ("transcribe", "translate")
CHANNELS = ("mixed", "apart")
OVERLAP = 5.0  # seconds that windows share, where nothing else is said
SEED = 0  # of answers that are asked for again, so that a run can be repeated
SHORTEST = 0.1  # seconds of a last window that is heard
MOST_AGAIN = 64  # windows that wait to be asked for again, of files that are not written until then
SHORTEST_VOICE = 0.2  # seconds of speech that begins after them
SHORTEST_REST = 1.0  # seconds after the last word of a window that are asked for again
MOST_NAMED = 5  # moments in a line about a file
SILENCE = 1e-4  # of the largest sample: digital silence, in which models hear words that are not


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The question about each file.

    language: by code or English name; None: recognized in each window. before: words said before,
        or names to be spelled so. overlap: seconds that windows share; None: OVERLAP, or less of a
        model that hears less than four times that at once. channels: "mixed" to one, or "apart":
        each is a speaker. vad: whether only the stretches are heard in which a detector of voices
        finds speech. word_timestamps: each line has words with their times.
    """

    language: str | None = None
    task: str = TASKS[0]
    before: str = ""
    overlap: float | None = None
    channels: str = CHANNELS[0]
    vad: bool = False
    word_timestamps: bool = False

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ConfigError(f"task must be {' or '.join(TASKS)}, got {self.task!r:.40}")
        if self.channels not in CHANNELS:
            raise ConfigError(
                f"channels must be {' or '.join(CHANNELS)}, got {self.channels!r:.40}"
            )
        if self.overlap is not None and not self.overlap >= 0:
            raise ConfigError(f"overlap must be seconds, 0 or more, got {self.overlap!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A file that was transcribed, or why it was not.

    seconds: its length. languages: those that were recognized, in order. num_silent: windows of
    digital silence. num_unspoken: windows in which nobody speaks, see is_unspoken. num_again:
    windows that were asked for again, see is_poor. doubtful: the seconds from which on lines are
    marked as doubtful. skipped: seconds without speech that were not heard, and all seconds, of
    all channels together; None: no detector was asked. notes: see OpenSound. source: what was
    heard.
    """

    path: Path
    source: Source | None = None
    lines: tuple[Line, ...] = ()
    seconds: float = 0.0
    languages: tuple[str, ...] = ()
    num_silent: int = 0
    num_unspoken: int = 0
    num_again: int = 0
    doubtful: tuple[float, ...] = ()
    skipped: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()
    error: str | None = None

    @property
    def told(self) -> str:
        """A line about the file: its length, its lines, and what was asked for again."""
        parts = [f"{self.seconds:.0f} s", _counted(len(self.lines), "line"), *self.languages]
        if self.skipped is not None:
            parts.append(skipped_told(*self.skipped))
        if self.num_silent:
            parts.append(f"{_counted(self.num_silent, 'window')} of digital silence")
        if self.num_unspoken:
            parts.append(f"{_counted(self.num_unspoken, 'window')} in which nobody speaks")
        if self.num_again:
            parts.append(f"{_counted(self.num_again, 'window')} asked for again")
        if self.doubtful:
            where = [f"{seconds:.0f} s" for seconds in self.doubtful[:MOST_NAMED]]
            left = len(self.doubtful) - len(where)
            where += [f"{left} more"] if left else []
            parts.append(f"doubtful, marked {DOUBT}, from {', '.join(where)}")
        return f"{self.path}: {'; '.join((', '.join(parts), *self.notes))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """An answer about a window, from `first` seconds in it on."""

    heard: Heard
    first: float
    is_doubtful: bool


@dataclass(slots=True, kw_only=True, eq=False)
class _File:
    """A file in work. num_samples: of each channel. windows: of its channels, one after the other,
    and then what became of windows that were parted; heard: what was heard in each, by index.
    again, unspoken: indices of windows, see Transcript. voices: of each channel the stretches in
    which somebody speaks; (): not known. skipped: samples that are not heard, of all channels;
    None: no detector was asked."""

    path: Path
    source: Source | None = None
    windows: list[Window]
    rate: int
    num_samples: int = 0
    num_channels: int = 1
    voices: tuple[Sequence[Stretch], ...] = ()
    skipped: int | None = None
    num_left: int = 0
    num_silent: int = 0
    notes: tuple[str, ...] = ()
    heard: dict[int, list[_Part]] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)
    unspoken: set[int] = field(default_factory=set)
    error: str | None = None


def asked_of(rule: SpeechRules, wish: Wish) -> str | Mapping[str, Any]:
    """Returns the prompt for each window. Raises RequestError for a language or task that the model
    does not know, ConfigError for times of words that it does not tell."""
    prompt = rule.prompt(wish.language, wish.task, wish.before)
    if not wish.word_timestamps and not is_aligned(rule):
        return prompt
    if not isinstance(rule, WordTimes) or not isinstance(prompt, str):
        raise ConfigError(
            "this model does not tell when a word is spoken; leave --word-timestamps out, or take "
            "a model that does"
        )
    return rule.with_words(prompt)


def is_aligned(rule: SpeechRules) -> bool:
    """Whether an answer tells all of its sound, and no other can be had; see SpeechRules."""
    return bool(getattr(rule, "is_aligned", False))


class Transcriber:
    """Transcribes files with one model. detector: of voices, for a wish with vad; None: see
    detector_of.

    Raises ConfigError for windows that overlap by half of what the model hears at once.
    """

    def __init__(
        self,
        llm: LoadedModel,
        rule: SpeechRules,
        wish: Wish,
        limits: MediaLimits | None = None,
        detector: FindsVoices | None = None,
    ) -> None:
        self._detector = detector_of(wish, rule, detector)
        self._llm, self._rule, self._limits = llm, rule, limits or MediaLimits()
        self._language, self._is_apart = wish.language, wish.channels == "apart"
        self._prompt = asked_of(rule, wish)
        self._is_aligned, self._has_words = is_aligned(rule), wish.word_timestamps
        is_timed = self._has_words or self._is_aligned
        self._timed = rule if is_timed and isinstance(rule, WordTimes) else None
        self._temperatures = TEMPERATURES[: 1 if self._is_aligned else None]
        self._texts = rule if isinstance(rule, TextRules) else None
        overlap = min(OVERLAP, rule.seconds / 4) if wish.overlap is None else wish.overlap
        if 2 * overlap >= rule.seconds:
            raise ConfigError(
                f"windows cannot overlap by {overlap:g} seconds: this model hears {rule.seconds:g} "
                "at once, and less than half of it is allowed"
            )
        self._size, self._overlap = (round(s * rule.rate) for s in (rule.seconds, overlap))
        self._again = list[Ask]()  # those of the next temperature
        self._rests = list[Ask]()  # of windows whose answers end early
        self._ready = deque[_File]()

    def run(self, paths: Iterable[Path]) -> Iterator[Transcript]:
        """Yields a transcript of each file as it is finished. Only the files in work are held;
        those with a poor answer are in work until MOST_AGAIN are poor, or all others finished."""
        decoder, left = SoundDecoder(), iter(paths)
        try:
            for path in left:
                yield from self._answers(self._asks(chain((path,), left), decoder))
        finally:
            decoder.close()

    def _answers(self, asks: Iterator[Ask]) -> Iterator[Transcript]:
        """Asks, and then for what is left of windows whose answers ended early, or were parted."""
        yield from self._tries(asks)
        while self._rests:
            rests, self._rests = self._rests, []
            yield from self._tries(iter(rests))

    def _tries(self, asks: Iterator[Ask]) -> Iterator[Transcript]:
        """Asks, and asks again where answers are poor."""
        for temperature in self._temperatures:
            with closing(self._llm.answer_each(asks)) as answers:
                for answer in answers:
                    self._take(answer, is_last=temperature == self._temperatures[-1])
                    yield from self._finished()
            yield from self._finished()
            if not self._again:
                return
            asks = self._asks_again(temperature)

    def _asks_again(self, before: float) -> Iterator[Ask]:
        """Yields the asks whose answers were poor, at the temperature after `before`."""
        again, self._again = self._again, []
        params = self._params(TEMPERATURES[TEMPERATURES.index(before) + 1])
        for ask in again:
            file, index, _ = ask.item
            file.again.add(index)
            yield replace(ask, params=params)

    def _asks(self, paths: Iterable[Path], decoder: SoundDecoder) -> Iterator[Ask]:
        """Yields an ask for each window in which there is anything to hear, of files until many
        answers are poor."""
        for path in paths:
            file = _File(path=path, windows=[], rate=self._rule.rate)
            state = file_state(str(path))  # before: what is written to it meanwhile shows later
            try:
                blob = read_beneath(path, self._limits, name="the file")
                opened = decoder.open(blob, self._limits)
                if self._is_apart:
                    channels = opened.channels(self._rule.rate)
                else:
                    channels = opened.samples(self._rule.rate, {})[None]
            except MMDeployLLMError as error:
                file.error = str(error)
                self._ready.append(file)
                continue
            file.notes = opened.notes
            file.source = Source(
                path=path,
                digest=opened.digest,
                num_bytes=len(blob),
                modified=state[1] if state is not None else 0,
            )
            self._plan(file, channels)
            long = [
                (index, window.sound(channels[window.channel]))
                for index, window in enumerate(file.windows)
                # else a last rest
                if not window.overlaps or window.end - window.first >= SHORTEST * self._rule.rate
            ]
            asked = [(index, own) for index, own in long if _is_heard(own)]
            file.num_left, file.num_silent = len(asked), len(long) - len(asked)
            if len(channels) > 1:
                heard = {file.windows[index].channel for index, _ in asked}
                silent = (at for at in range(len(channels)) if at not in heard)
                file.notes += tuple(f"channel {at + 1} is silent" for at in silent)
            if not asked:
                self._ready.append(file)
            for index, own in asked:
                yield self._ask(file, index, own, 0.0)
            if len(self._again) + len(self._rests) >= MOST_AGAIN:
                return

    def _plan(self, file: _File, channels: np.ndarray) -> None:
        """Plans the windows of a file: of all of it, or of its speech alone."""
        file.num_channels, file.num_samples = channels.shape
        own = list[Window]()
        if self._detector is None:
            for at in range(file.num_channels):
                own += windows_of(file.num_samples, self._size, self._overlap, at)
            file.windows = own
            return
        file.voices = tuple(self._detector.stretches(samples) for samples in channels)
        file.skipped = channels.size
        for at, voices in enumerate(file.voices):
            heard = heard_of(voices, file.num_samples, file.rate)
            own += windows_of_speech(heard, self._size, self._overlap, at)
            file.skipped -= sum(end - first for first, end in heard)
            if not voices:
                where = f"in channel {at + 1}" if file.num_channels > 1 else "in it"
                file.notes += (f"nobody speaks {where}",)
        file.windows = own

    def _ask(self, file: _File, index: int, samples: np.ndarray, first: float) -> Ask:
        """Returns the request for a window, from `first` seconds in it on."""
        # A copy: one that is asked for again would hold the samples of its whole file.
        sound = {"array": samples.copy(), "sampling_rate": self._rule.rate}
        own = {"prompt": self._prompt} if isinstance(self._prompt, str) else self._prompt
        prompt: Prompt = {**own, "multimodal_data": {"audio": sound}}
        return Ask(prompt=prompt, params=self._params(TEMPERATURES[0]), item=(file, index, first))

    def _params(self, temperature: float) -> SamplingParams:
        """Returns how an answer is written. Log-probabilities of a conversation's tokens would need
        the logits of all of them, and say nothing that is read."""
        most = None if self._texts is None else self._texts.max_tokens
        about_prompt = 1 if self._texts is None else None
        return SamplingParams(
            temperature=temperature,
            seed=SEED,
            logprobs=1,
            prompt_logprobs=about_prompt,
            max_tokens=most,
        )

    def _take(self, answer: Answer, *, is_last: bool) -> None:
        """Reads an answer; the last one of a file makes it ready. is_last: whether a poor one is
        taken."""
        (file, index, begin), output = answer.ask.item, answer.output
        own = output.outputs
        if output.is_ok and own is not None:
            text, sure = self._text(own.token_ids), self._rule.sureness(output)
            part: _Part | None = None
            if not is_unspoken(text, sure):
                poor = is_poor(text, own.finish_reason, sure.mean_logprob)
                if poor and not is_last:
                    self._again.append(answer.ask)
                    return
                heard, is_guess = self._heard(answer), poor or is_doubtful(sure)
                part = _Part(heard=heard, first=begin, is_doubtful=is_guess)
                if self._is_parted(answer.ask, part):
                    return
                file.heard.setdefault(index, []).append(part)
            elif not begin:
                file.unspoken.add(index)
            if part is not None and not begin and self._is_left(answer.ask, part):
                return
        else:
            window = file.windows[index]
            channel = f"channel {window.channel + 1}, " if file.num_channels > 1 else ""
            where = f"{channel}from second {window.first / file.rate:g} on"
            file.error = file.error or f"{where}: {output.error_msg}"
        file.num_left -= 1
        if not file.num_left:
            self._ready.append(file)

    def _heard(self, answer: Answer) -> Heard:
        """Reads an answer, with the words where they are wanted."""
        output, asked = answer.output, answer.ask.prompt
        if self._timed is None:
            heard, ids = self._rule.read(output.outputs.token_ids), output.outputs.token_ids
            if self._texts is None:
                return heard
            return replace(heard, language=self._texts.cleaned(self._decoded(ids)).language)
        sound: Any = asked
        seconds = len(sound["multimodal_data"]["audio"]["array"]) / self._rule.rate
        heard = self._timed.read_words(output, seconds, self._language, self._decoded)
        if self._has_words:
            return heard
        return replace(heard, spoken=tuple(replace(own, words=()) for own in heard.spoken))

    def _is_left(self, ask: Ask, part: _Part) -> bool:
        """Asks for the rest of a window whose answer ends before the overlap with the next one
        begins, which would have it without its begin; or ends before the speech does that was
        found in it. Returns whether there is such a rest."""
        file, index, _ = ask.item
        last = part.heard.spoken[-1].end if part.heard.spoken else None
        if part.is_doubtful or last is None or self._is_aligned:
            return False
        window, first = file.windows[index], round(last * file.rate)
        asked: Any = ask.prompt
        rest = asked["multimodal_data"]["audio"]["array"][first:]
        following = file.windows[index + 1] if index + 1 < len(file.windows) else None
        if following is not None and following.overlaps:
            is_left = window.first + first <= following.first and _is_heard(rest)
            is_left = is_left and len(rest) >= SHORTEST_REST * file.rate
        else:
            is_left = bool(file.voices) and _is_spoken(file, window, first)
        if not is_left:
            return False
        self._rests.append(self._ask(file, index, rest, last))
        return True

    def _is_parted(self, ask: Ask, part: _Part) -> bool:
        """Asks for each piece of a window alone where a line is said to go on after silence that
        was left out: nothing says which of its words were said before. Returns whether it is so."""
        file, index, begin = ask.item
        window, rate = file.windows[index], file.rate
        asked: Any = ask.prompt
        samples = asked["multimodal_data"]["audio"]["array"]
        at = round(begin * rate)
        spans = (_span(one, at, at + len(samples), rate) for one in part.heard.spoken)
        if not any(window.is_across(*span, round(ACROSS * rate)) for span in spans):
            return False
        for own in window.parts(at):
            long = own.end - own.first
            self._rests.append(self._ask(file, len(file.windows), samples[:long], 0.0))
            file.windows.append(own)
            file.num_left += 1
            samples = samples[long:]
        file.num_left -= 1
        return True

    def _finished(self) -> Iterator[Transcript]:
        while self._ready:
            file = self._ready.popleft()
            seconds = file.num_samples / file.rate
            if file.error is not None:
                yield Transcript(path=file.path, seconds=seconds, error=file.error)
                continue
            parts = [(index, own) for index in sorted(file.heard) for own in file.heard[index]]
            languages = [part.heard.language for _, part in parts]
            yield Transcript(
                path=file.path,
                source=file.source,
                lines=tuple(self._joined(file)),
                seconds=seconds,
                languages=tuple(dict.fromkeys(one for one in languages if one is not None)),
                num_silent=file.num_silent,
                num_unspoken=len(file.unspoken),
                num_again=len(file.again),
                doubtful=tuple(
                    sorted(_begin(file, *part) for part in parts if part[1].is_doubtful)
                ),
                skipped=_skipped(file),
                notes=file.notes,
            )

    def _joined(self, file: _File) -> list[Line]:
        """Returns the lines of all channels, by the moments at which they begin; with speakers
        where there are several channels. Windows that overlap are joined."""
        lines = list[Line]()
        order = sorted(
            range(len(file.windows)),
            key=lambda at: (file.windows[at].channel, file.windows[at].first),
        )
        chains = list[list[int]]()
        for at in order:
            if file.windows[at].overlaps:
                chains[-1].append(at)
            else:
                chains.append([at])
        for chain_of in chains:
            channel = file.windows[chain_of[0]].channel
            speaker = f"channel {channel + 1}" if file.num_channels > 1 else None
            own = joined([self._lines(file, at) for at in chain_of])
            lines += (replace(line, speaker=speaker) for line in own)
        return sorted(lines, key=lambda line: line.start)

    def _lines(self, file: _File, index: int) -> tuple[float, float, list[Line]]:
        """Returns begin and end of a window in the file, and what was said in it."""
        window, rate = file.windows[index], file.rate
        found = list[Line]()
        for part in file.heard.get(index, ()):
            for spoken in part.heard.spoken:
                text = self._text(spoken.ids)
                added, latest = _place(file, window, part.first, spoken)
                start, end = _times(file, window, part.first, spoken)
                line = Line(
                    start=start,
                    end=end,
                    text=text,
                    language=part.heard.language or self._language,
                    is_doubtful=part.is_doubtful,
                    words=tuple(timed_words(spoken.words, added, latest)),
                )
                found += [line] if text else []
        return window.first / rate, window.end / rate, found

    def _text(self, ids: Sequence[int]) -> str:
        text = self._decoded(ids)
        return (text if self._texts is None else self._texts.cleaned(text).words).strip()

    def _decoded(self, ids: Sequence[int]) -> str:
        text: str = self._llm.get_tokenizer().decode(list(ids), skip_special_tokens=True)
        return text


def detector_of(
    wish: Wish, rule: SpeechRules, given: FindsVoices | None = None
) -> FindsVoices | None:
    """Returns the detector of voices for a wish, the given one or Silero's; None: it is not wished.
    Raises ConfigError where it is not installed or hears another rate than the model."""
    if not wish.vad:
        return None
    detector = given or VoiceDetector()
    if detector.rate != rule.rate:
        raise ConfigError(
            f"vad hears {detector.rate} samples per second and this model {rule.rate}; leave vad "
            "out"
        )
    return detector


def skipped_told(skipped: float, seconds: float) -> str:
    """Returns in words what of so many seconds was not heard."""
    share = skipped / seconds if seconds else 0.0
    return f"{skipped:.0f} s ({share:.0%}) without speech skipped"


def _skipped(file: _File) -> tuple[float, float] | None:
    """Returns the seconds that were not heard, and all; None: no detector was asked."""
    if file.skipped is None:
        return None
    return file.skipped / file.rate, file.num_samples * file.num_channels / file.rate


def _begin(file: _File, index: int, part: _Part) -> float:
    """Returns the second of a file at which the sound of an answer begins."""
    sample = round(part.first * file.rate)
    at, (first, _) = file.windows[index].piece_at(sample)
    return part.first + (first - at) / file.rate


def _span(spoken: Spoken, first: int, end: int, rate: int) -> tuple[int, int]:
    """Returns the samples of a window of a sentence that was heard in its samples first .. end."""
    begin = min(first + round(spoken.start * rate), end)
    last = end if spoken.end is None else min(first + round(spoken.end * rate), end)
    return begin, max(begin, last)


def _place(file: _File, window: Window, first: float, spoken: Spoken) -> tuple[float, float]:
    """Returns what is added to the times of a sentence that was heard from `first` seconds in a
    window on, to be those of the file; and the second at which the piece ends that it lies in."""
    begin, end = _span(spoken, round(first * file.rate), window.num_heard, file.rate)
    at, (start, last) = window.piece_at((begin + end) // 2)
    return first + (start - at) / file.rate, last / file.rate


def _times(file: _File, window: Window, first: float, spoken: Spoken) -> tuple[float, float]:
    """Returns the seconds of a file at which a sentence begins and ends; where speech was found, no
    silence before and after it. first: see _place."""
    added, latest = _place(file, window, first, spoken)
    begin = min(added + spoken.start, latest)
    end = latest if spoken.end is None else min(added + spoken.end, latest)
    end = max(begin, end)
    if not file.voices:
        return begin, end
    voices = file.voices[window.channel]
    own = spoken_within(round(begin * file.rate), round(end * file.rate), voices)
    return own[0] / file.rate, own[1] / file.rate


def _is_spoken(file: _File, window: Window, first: int) -> bool:
    """Whether somebody speaks after sample `first` of a window: goes on for a second, or begins."""
    voices = file.voices[window.channel]
    for own in window.parts(first):
        for begin, end in voices:
            seconds = (min(end, own.end) - max(begin, own.first)) / file.rate
            if seconds > (SHORTEST_REST if begin < own.first else SHORTEST_VOICE):
                return True
    return False


def _is_heard(samples: np.ndarray) -> bool:
    """Whether a window is asked about: it is not digital silence."""
    return bool(len(samples)) and float(np.abs(samples).max()) > SILENCE


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
