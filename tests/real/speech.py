"""Transcripts of real speech by Whisper, beside those of transformers and of faster-whisper.

    python -m tests.real.speech [MODEL]...     # whisper-tiny-en, whisper-base

Speech: sentences of an audio book of LibriVox, cards and a command, with their texts, from
pocketsphinx's tests. The long recording has all of them in several orders.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from tests.real.ct2_whisper import whisper_folder
from tests.real.packages import folder_of

RATE = 16_000
MODELS = ("whisper-tiny-en", "whisper-base")
PAUSE = 0.6  # seconds between two pieces of the long recording
ROUNDS = 7
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """Samples [n] in float32 at RATE, and what is said in them, in lower case."""

    samples: np.ndarray
    text: str


def sentences() -> list[Spoken]:
    """Returns the sentences of the audio book, in the order of the book."""
    return _spoken("librivox.txt", "{}.wav")


def commands() -> list[Spoken]:
    """Returns what is said to machines: cards, and a command to go."""
    go = np.fromfile(folder_of("speech") / "goforward.raw", "<i2").astype(np.float32) / 2**15
    return [*_spoken("cards.txt", "cards-{}.wav"), Spoken(samples=go, text="go forward ten meters")]


def _spoken(transcription: str, file: str) -> list[Spoken]:
    found, folder = [], folder_of("speech")
    for line in (folder / transcription).read_text().splitlines():
        text, name = re.fullmatch(r"<s> (.*?) *</s> \((.*)\)", line).groups()
        samples, rate = soundfile.read(folder / file.format(name.split("-")[-1]), dtype="float32")
        assert rate == RATE
        found.append(Spoken(samples=samples, text=text))
    return found


def recording() -> Spoken:
    """Returns minutes of speech: the sentences ROUNDS times, with another command in between."""
    pieces, between = [], commands()
    for turn in range(ROUNDS):
        pieces += [*sentences(), between[turn % len(between)]]
    silence = np.zeros(round(PAUSE * RATE), np.float32)
    samples = [part for piece in pieces for part in (piece.samples, silence)]
    return Spoken(samples=np.concatenate(samples), text=" ".join(piece.text for piece in pieces))


def far_apart(seconds: float) -> tuple[Spoken, list[float]]:
    """Returns the sentences of the audio book with faint noise of so many seconds after each, and
    the moments at which they begin: where the sound first is louder than breath."""
    pieces, moments, at = list[np.ndarray](), list[float](), 0
    noise = np.random.default_rng(0).standard_normal(round(seconds * RATE)).astype(np.float32)
    for each in sentences():
        loudness = np.convolve(np.abs(each.samples), np.ones(160) / 160, "same")
        moments.append((at + int(np.argmax(loudness > 0.02))) / RATE)
        pieces += [each.samples, noise * 5e-4]
        at += len(each.samples) + len(noise)
    text = " ".join(each.text for each in sentences())
    return Spoken(samples=np.concatenate(pieces), text=text), moments


def words(text: str) -> list[str]:
    """Returns the words of a text as a person counts them: without case and punctuation, digits
    and "Mr." written out, "cold-hearted" as two."""
    text = re.sub(r"(?<!\d)10(?!\d)", " ten ", text.lower())
    text = re.sub(r"\d", lambda digit: f" {DIGITS[int(digit[0])]} ", text)
    text = re.sub(r"\bmr\b\.?", "mister", text)
    return re.findall(r"[a-z']+", text.replace("-", " "))


def word_errors(found: str, said: str) -> int:
    """Returns how many words are wrong, missing or too many, at least."""
    rows, columns = words(found), words(said)
    costs = list(range(len(columns) + 1))
    for number, row in enumerate(rows, 1):
        diagonal, costs[0] = costs[0], number
        for at, column in enumerate(columns, 1):
            cheapest = min(costs[at] + 1, costs[at - 1] + 1, diagonal + (row != column))
            diagonal, costs[at] = costs[at], cheapest
    return costs[-1]


def one_window(model: str, spoken: list[Spoken], prompt: str = "<|timestamps|>") -> list[list[int]]:
    """Returns the tokens that this engine writes for sounds of half a minute at most."""
    from mmdeploy_llm import LLM, SamplingParams

    prompts = [
        {
            "prompt": prompt,
            "multimodal_data": {"audio": {"array": each.samples, "sampling_rate": RATE}},
        }
        for each in spoken
    ]
    params = SamplingParams(temperature=0, max_tokens=200)
    with LLM(str(whisper_folder(model)), dtype="float32", kv_cache_memory=2**28) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False, on_error="raise")
    return [list(output.outputs.token_ids) for output in outputs]


def one_window_of_transformers(model: str, spoken: list[Spoken]) -> list[list[int]]:
    """Returns the same of transformers' generate with times."""
    import torch
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    folder = whisper_folder(model)
    features_of = WhisperFeatureExtractor.from_pretrained(folder)
    whisper = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    languages = {"language": "en", "task": "transcribe"} if model == "whisper-base" else {}
    found = []
    for each in spoken:
        features = features_of(each.samples, sampling_rate=RATE, return_tensors="pt").input_features
        ids = whisper.generate(features, return_timestamps=True, max_new_tokens=200, **languages)
        found.append(ids[0].tolist())
    return found


def clips_of_faster_whisper(model: str, spoken: list[Spoken], *, is_filled: bool) -> list[str]:
    """Returns the texts of sounds, each alone, at temperature 0. is_filled: with digital silence
    up to half a minute; faster-whisper itself fills features with zeros, which are no silence."""
    from faster_whisper import WhisperModel

    whisper = WhisperModel(str(folder_of(model)), device="cpu", compute_type="float32")
    found = []
    for each in spoken:
        rest = 30 * RATE - len(each.samples) if is_filled else 0
        samples = np.pad(each.samples, (0, rest))
        segments, _ = whisper.transcribe(samples, beam_size=1, language="en", temperature=0.0)
        found.append(" ".join(segment.text.strip() for segment in segments))
    return found


def text_of(model: str, ids: list[int]) -> str:
    """Returns tokens as text, without times."""
    from transformers import WhisperTokenizerFast

    tokenizer = WhisperTokenizerFast.from_pretrained(whisper_folder(model))
    return tokenizer.decode(ids, skip_special_tokens=True)


def transcribed(model: str, spoken: Spoken, *options: str) -> list[dict[str, Any]]:
    """Returns the lines {"start", "end", "text"} that `mmdeploy-llm transcribe` writes."""
    from typer.testing import CliRunner

    from mmdeploy_llm.cli.program import app

    with tempfile.TemporaryDirectory() as folder:
        sound = Path(folder) / "speech.wav"
        soundfile.write(sound, spoken.samples, RATE)
        asked = ["transcribe", str(sound), "--model", str(whisper_folder(model))]
        if model == "whisper-base":
            asked += ["--language", "en"]
        asked += ["--transcripts", "json", "--dtype", "float32", *options]
        found = CliRunner().invoke(app, asked)
        assert found.exit_code == 0, found.output
        return json.loads(sound.with_suffix(".json").read_text("utf-8"))


def transcribed_by_faster_whisper(model: str, spoken: Spoken) -> list[dict[str, Any]]:
    """Returns the same of faster-whisper with one beam, from the folder of CTranslate2."""
    from faster_whisper import WhisperModel

    whisper = WhisperModel(str(folder_of(model)), device="cpu", compute_type="float32")
    segments, _ = whisper.transcribe(spoken.samples, beam_size=1, language="en")
    return [{"start": s.start, "end": s.end, "text": s.text} for s in segments]


def words_of_faster_whisper(model: str, spoken: Spoken) -> list[tuple[str, float]]:
    """Returns words and their begins of faster-whisper, without the text before."""
    from faster_whisper import WhisperModel

    whisper = WhisperModel(str(folder_of(model)), device="cpu", compute_type="float32")
    segments, _ = whisper.transcribe(
        spoken.samples,
        beam_size=1,
        language="en",
        word_timestamps=True,
        condition_on_previous_text=False,
    )
    return [(word.word, word.start) for segment in segments for word in segment.words]


def words_of_lines(lines: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Returns words and their begins of a transcript."""
    return [(word["word"], word["start"]) for line in lines for word in line["words"]]


def apart(ours: list[tuple[str, float]], theirs: list[tuple[str, float]]) -> np.ndarray:
    """Returns the seconds between the begins of the words that both have heard."""
    names = [[re.sub(r"\W", "", word.lower()) for word, _ in own] for own in (ours, theirs)]
    matcher = difflib.SequenceMatcher(None, *names, autojunk=False)
    same = [
        (block.a + at, block.b + at)
        for block in matcher.get_matching_blocks()
        for at in range(block.size)
    ]
    return np.array([abs(ours[one][1] - theirs[two][1]) for one, two in same])


def text_of_lines(lines: list[dict[str, Any]]) -> str:
    """Returns the text of a transcript."""
    return " ".join(line["text"].strip() for line in lines)


def main() -> None:
    """Prints the errors of each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[[], *MODELS])
    long = recording()
    print(f"{len(long.samples) / RATE:.0f} s, {len(words(long.text))} words")
    for model in parser.parse_args().models or MODELS:
        for name, by in (("ours", transcribed), ("faster", transcribed_by_faster_whisper)):
            text = text_of_lines(by(model, long))
            print(f"{model} {name}: {word_errors(text, long.text)} errors\n{text}\n", flush=True)


if __name__ == "__main__":
    main()
