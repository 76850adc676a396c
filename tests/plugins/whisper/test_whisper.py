"""Whisper against transformers: the model with the checks of every family, its sounds, prompts and
rules, and whole answers."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins import whisper
from mmdeploy_llm_plugins.whisper.prompts import WhisperPrompts
from mmdeploy_llm_plugins.whisper.rules import AnswerRules, WhisperRules
from mmdeploy_llm_plugins.whisper.sound import WhisperSounds
from mmdeploy_llm_plugins.whisper.speech import WhisperSpeech
from mmdeploy_llm_plugins.whisper.tiny import END, LAST, NO_TIMES, START
from typer.testing import CliRunner

from mmdeploy_llm import LLM, GuidedDecodingParams, SamplingParams
from mmdeploy_llm.batch.speech.plan import open_rule
from mmdeploy_llm.batch.speech.run import Transcript
from mmdeploy_llm.cli.commands import transcribe as transcribing
from mmdeploy_llm.cli.program import app
from mmdeploy_llm.errors import (
    CheckpointError,
    ConfigError,
    MediaError,
    PromptTooLongError,
    RequestError,
    UnsupportedMediaError,
)
from mmdeploy_llm.hooks import LogitsContext, MediaInput
from mmdeploy_llm.testing import MediaProcessorConformance, ModelConformance
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.media.sound_files import noise, wav16

(SPEC,) = whisper.provide_models()
(SOUNDS,) = whisper.provide_media_processors()
RATE = 16000
ID = {token: END + index for index, token in enumerate(LAST)}
EN, DE, WRITE, TO_ENGLISH, BEFORE = (
    ID[f"<|{name}|>"] for name in ("en", "de", "transcribe", "translate", "startofprev")
)


@pytest.mark.full
class TestModel(ModelConformance):
    spec = SPEC


@pytest.mark.full
class TestSounds(MediaProcessorConformance):
    spec = SOUNDS


def sound(seed, seconds=4.0):
    values = np.random.default_rng(seed).standard_normal(round(seconds * RATE)) * 0.1
    return {"array": values.astype(np.float32), "sampling_rate": RATE}


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("whisper")


@pytest.fixture(scope="module")
def rule(folder):
    return WhisperPrompts(read_checkpoint(folder))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def encode(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


ITEM = MediaInput(kind="audio", tensors={}, num_tokens=200, key="a")


def test_frames_equal_those_of_transformers(folder):
    processor = WhisperSounds(read_checkpoint(folder), {})
    for seconds in (0.025, 0.6, 4.0):
        given = sound(1, seconds)["array"]
        made = processor.prepare(given, {})
        theirs = transformers.WhisperFeatureExtractor.from_pretrained(folder)
        expected = theirs(given, sampling_rate=RATE, return_tensors="pt")["input_features"]
        assert torch.equal(made.tensors["input_features"], expected)
        assert made.text == processor.token * 200 == processor.text(len(given), {})
    assert processor.most == 4.0
    with pytest.raises(MediaError, match=r"too short"):
        processor.processed(sound(1, 0.024)["array"], "", {})
    processor.close()


def test_frames_that_the_encoder_does_not_read(folder):
    checkpoint = read_checkpoint(folder)
    checkpoint.config.max_source_positions = 240
    with pytest.raises(CheckpointError, match=r"makes 400 frames .* reads 480"):
        WhisperSounds(checkpoint, {})


@pytest.mark.parametrize(
    ("text", "ids", "follows", "has_times"),
    [
        (" ", [START], [WRITE, NO_TIMES], False),
        ("<|audio|>", [START], [WRITE, NO_TIMES], False),
        ("<|timestamps|>", [START], [WRITE], True),
        ("<|translate|>", [START], [TO_ENGLISH, NO_TIMES], False),
        ("<|de|>", [START, DE, WRITE, NO_TIMES], None, False),
        ("<|German|><|translate|><|timestamps|>", [START, DE, TO_ENGLISH], None, True),
        ("<|en|><|transcribe|><|notimestamps|>", [START, EN, WRITE, NO_TIMES], None, False),
        ("<|startoftranscript|>", [START], [WRITE], True),
        ("<|startoftranscript|><|en|><|transcribe|>", [START, EN, WRITE], None, True),
        ("<|startoftranscript|><|en|><|notimestamps|>", [START, EN, NO_TIMES], None, False),
    ],
)
def test_prompts(rule, encode, text, ids, follows, has_times):
    made = rule.divide(text, (), (ITEM,), encode)
    given = made.processors["whisper"]["whisper"]
    assert (list(made.ids), made.items) == (ids, (ITEM,))
    assert (given["follows"], given["has_times"]) == (follows, has_times)
    if "start" in text:
        again = rule.divide(None, encode(text), (ITEM,), encode)
        assert (again.ids, again.processors) == (made.ids, made.processors)


def test_words_before_the_sound(rule, encode):
    for text in ("A fox <|de|>", "<|de|> A fox", "<|startofprev|> A fox<|de|>"):
        made = rule.divide(text, (), (ITEM,), encode)
        assert list(made.ids) == [BEFORE, *encode(" A fox"), START, DE, WRITE, NO_TIMES]
    with pytest.raises(PromptTooLongError, match=r"have \d+ tokens, 63 are allowed"):
        rule.divide("zq " * 80, (), (ITEM,), encode)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("<|fr|>", r"'<\|fr\|>' is no language, task or mark .*languages: de, en, zh"),
        ("<|summarize|>", "is no language, task or mark"),
        ("<|0.00|>", "is no language, task or mark"),
        ("<|de|> A fox <|en|>", r"asks for <\|de\|> and <\|en\|>; give one"),
        ("<|translate|><|transcribe|>", r"asks for <\|translate\|> and <\|transcribe\|>"),
        ("<|timestamps|><|notimestamps|>", r"asks for <\|timestamps\|> and <\|notime"),
        (None, r"needs <\|startoftranscript\|>, id 385"),
    ],
)
def test_prompts_that_are_refused(rule, encode, text, match):
    with pytest.raises(RequestError, match=match):
        rule.divide(text, [7], (ITEM,), encode)


def test_a_prompt_without_a_sound(rule, encode):
    with pytest.raises(MediaError, match="one sound in each prompt, found 0"):
        rule.divide("<|en|>", (), (), encode)


def test_a_model_that_knows_english_only(folder, encode):
    checkpoint = read_checkpoint(folder)
    own = {**checkpoint.generation, "is_multilingual": False}
    rule = WhisperPrompts(replace(checkpoint, generation=own))
    for text in (" ", "<|en|>", "<|english|>"):
        assert rule.divide(text, (), (ITEM,), encode).ids == (START, NO_TIMES)
    for text in ("<|de|>", "<|translate|>"):
        with pytest.raises(RequestError):
            rule.divide(text, (), (ITEM,), encode)


def test_an_old_checkpoint_without_the_rules_of_timestamps(folder, encode):
    """Its generation_config.json has no token of them; transformers refuses, too."""
    checkpoint = replace(read_checkpoint(folder), generation={"decoder_start_token_id": START})
    rule = WhisperPrompts(checkpoint)
    assert rule.divide(" ", (), (ITEM,), encode).ids == (START,)
    with pytest.raises(RequestError, match="writes no timestamps"):
        rule.divide("<|timestamps|>", (), (ITEM,), encode)


# prompt, sound, and how transformers is asked for the same
ASKED = [
    ("<|de|>", 0, {"language": "de"}),
    ("<|english|><|translate|>", 1, {"language": "english", "task": "translate"}),
    ("<|en|><|timestamps|>", 2, {"language": "en", "return_timestamps": True}),
    ("<|de|><|translate|><|timestamps|>", 3, {"language": "de", "task": "translate",
                                              "return_timestamps": True}),
    (" ", 4, {"task": "transcribe"}),
    ("<|timestamps|>", 5, {"task": "transcribe", "return_timestamps": True}),
    ("A brown fox <|en|>", 6, {"language": "en", "before": " A brown fox"}),
    ("<|de|>", 0, {"language": "de"}),
]  # fmt: skip
PREFIX = (EN, DE, WRITE, TO_ENGLISH, NO_TIMES)
SAMPLING = SamplingParams(max_tokens=32)
TIGHT = {"num_gpu_blocks_override": 4, "block_size": 16, "max_model_len": 60}
FEW = {"encoder_cache_memory": 2 * 200 * 2 * 3 * 64 * 4}  # bytes of two sounds


@pytest.fixture(scope="module")
def lively(tiny_folder):
    """A checkpoint whose answers vary: tied, random embeddings repeat the last token."""
    return tiny_folder("whisper", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def expected(lively, tokenizer):
    """Returns what transformers writes: the tokens after those of the prompt."""
    folder = lively
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    found = []
    for _, seed, asked in ASKED:
        made = extractor(sound(seed)["array"], sampling_rate=RATE, return_tensors="pt")
        before = asked.get("before")
        if before is not None:
            ids = [BEFORE, *tokenizer.encode(before, add_special_tokens=False)]
            asked = {**asked, "prompt_ids": torch.tensor(ids)}
            del asked["before"]
        out = model.generate(
            made["input_features"], max_new_tokens=32, force_unique_generate_call=True, **asked
        )[0].tolist()
        own = out[out.index(START) + 1 :]  # one window: it would go on after the last timestamp
        found.append([token for token in own if token not in PREFIX and token != END])
    assert len({tuple(ids) for ids in found}) == len(ASKED) - 1, "the sounds are heard"
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"native_kernels": False}, marks=pytest.mark.full),
        pytest.param({"max_num_batched_tokens": 3, "max_num_seqs": 3}, marks=pytest.mark.full),
        pytest.param({"max_num_seqs": 1}, marks=pytest.mark.full, id="one by one"),
        pytest.param(TIGHT, marks=pytest.mark.full, id="preempted"),
        pytest.param(FEW, marks=pytest.mark.full, id="few items at a time"),
    ],
)
def test_answers_equal_those_of_transformers(lively, expected, options):
    prompts = [
        {"prompt": text, "multimodal_data": {"audio": sound(seed)}} for text, seed, _ in ASKED
    ]
    options = {"kv_cache_memory": 2**22, **options}
    with LLM(str(lively), dtype="float32", use_warmup=False, **options) as llm:
        found = [out.outputs.token_ids for out in llm.generate(prompts, SAMPLING)]
        for index, (ids, wanted) in enumerate(zip(found, expected, strict=True)):
            own = [token for token in ids if token not in PREFIX and token != END]
            assert own == wanted[: len(own)], index
            assert len(own) >= min(29, len(wanted)), index
        count = llm.count_tokens(prompts[0])
        assert (count.num_prompt_tokens, count.num_input_tokens_by_kind) == (4, {"audio": 200})
        parts = [{"type": "audio", "audio": sound(0)}, {"type": "text", "text": "<|de|>"}]
        (told,) = llm.chat([{"role": "user", "content": parts}], SAMPLING)
        assert told.outputs.token_ids == found[0]
        wrong = llm.generate({"prompt": "<|de|>"}, SAMPLING)[0]
        assert (wrong.error_code, "one sound" in wrong.error_msg) == (400, True)


@pytest.mark.full
def test_constraints_and_bans_begin_after_the_language(lively):
    """Language and task are tokens of the answer, but belong to the prompt: neither a grammar nor a
    ban nor another processor concerns them."""
    languages, before = (EN, DE, ID["<|zh|>"]), ((WRITE, NO_TIMES), (TO_ENGLISH, NO_TIMES))
    params = SamplingParams(
        max_tokens=24,
        min_tokens=5,
        bad_words_token_ids=[*languages, *before[0], *before[1]],
        guided_decoding=GuidedDecodingParams(regex="[a-d]{8}"),
    )
    heard = {"audio": sound(1)}
    asked = ("", "<|translate|>", "<|de|>", "<|timestamps|>", "<|de|><|timestamps|>")
    options = {"dtype": "float32", "use_warmup": False, "kv_cache_memory": 2**22}
    with LLM(str(lively), max_num_seqs=2, **options) as llm:
        prompts = [{"prompt": text, "multimodal_data": heard} for text in asked]
        found = llm.generate(prompts, params)
    for out, follows in zip(found[:2], before, strict=True):
        own = out.outputs.token_ids
        assert (out.error_msg, own[0] in languages, tuple(own[1:3])) == (None, True, follows)
    for out in found[:3]:
        assert re.fullmatch("[a-d]{8}", out.outputs.text), out
    for out in found[3:]:
        assert (out.error_code, "asks for timestamps" in out.error_msg) == (400, True), out


@pytest.mark.full
def test_a_constraint_that_needs_suppressed_tokens_is_told(lively):
    """The request is wrong, not the engine: the tokens are named, and what bans them. What else is
    in the batch is not concerned, and a constraint that only may use such tokens is kept."""
    asked = ("'{8}", "a{8}", "[b-d']{8}", "b{3}'{3}", None)
    options = {"dtype": "float32", "use_warmup": False, "kv_cache_memory": 2**22}
    with LLM(str(lively), max_num_seqs=8, **options) as llm:
        prompt = {"prompt": "<|de|>", "multimodal_data": {"audio": sound(1)}}
        params = [
            SamplingParams(
                max_tokens=16,
                temperature=0,
                guided_decoding=None if regex is None else GuidedDecodingParams(regex=regex),
            )
            for regex in asked
        ]
        never, first, kept, later, free = llm.generate([prompt] * len(asked), params)
    for out, token in ((never, "'"), (first, "a"), (later, "'")):
        assert out.error_code == 400, out
        assert f"guided_decoding allows only {token!r} " in out.error_msg
        assert "banned by logits processor 'whisper' of plugin 'whisper';" in out.error_msg
        assert "suppress_tokens" in out.error_msg
    assert later.outputs.text == "bbb"
    assert re.fullmatch("[b-d]{8}", kept.outputs.text), kept
    assert free.error_code == 200


def test_a_language_that_the_model_does_not_know_is_told_at_once(folder):
    rule = WhisperSpeech(read_checkpoint(folder))
    assert rule.prompt("German", "translate", "ACME") == "ACME<|German|><|translate|><|timestamps|>"
    with pytest.raises(RequestError, match=r"klingon.*languages: de, en, zh"):
        rule.prompt("klingon", "transcribe", "")


def test_sentences_and_times_are_those_of_transformers(folder):
    """They are read of answers as the rules allow them: times in pairs, the last one perhaps alone
    or missing."""
    rule, first = WhisperSpeech(read_checkpoint(folder)), NO_TIMES + 1
    assert (rule.seconds, rule.rate) == (4.0, RATE)
    rng, step = np.random.default_rng(0), torch.tensor([0.0], dtype=torch.float64)
    for count in range(1, 61):
        times = np.sort(rng.integers(0, 200, 2 * (count % 5) + 2))
        ids = []
        for begin, end in times.reshape(-1, 2):
            words = rng.integers(1, 380, rng.integers(1, 5)).tolist()
            ids += [first + int(begin), *words, first + int(end)]
        ids = ids[:-1] if count % 3 == 0 else ids
        theirs, _ = transformers.WhisperForConditionalGeneration._retrieve_segment(
            seek_sequence=torch.tensor(ids),
            seek_outputs=[{}],
            time_offset=step,
            timestamp_begin=first,
            seek_num_frames=torch.tensor([400]),
            time_precision=0.02,
            time_precision_features=0.01,
            input_stride=2,
            prev_idx=0,
            idx=0,
            return_token_timestamps=False,
            decoder_input_ids=torch.tensor([[START]]),
        )
        heard = rule.read([DE, WRITE, *ids])
        assert heard.language == "de"
        spoken = [one for one in heard.spoken if one.end is not None]
        expected = [
            (float(own["start"]), float(own["end"]), [t for t in own["tokens"].tolist() if t < END])
            for own in theirs
        ]
        if len(times) == 2:  # without a pair of times the window is one, from its begin
            expected = [(spoken[0].start if spoken else 0, *own[1:]) for own in expected]
        found = [(one.start, one.end, list(one.ids)) for one in spoken]
        assert [ids for *_, ids in found] == [ids for *_, ids in expected][: len(found)]
        assert np.allclose([own[:2] for own in found], [own[:2] for own in expected][: len(found)])
        assert len(heard.spoken) == len(times) // 2
    assert heard.spoken[-1].end is None, "the last answer was cut"


@pytest.mark.parametrize(
    "prompt", ["<|timestamps|>", "<|de|><|timestamps|>", "A fox<|timestamps|>"]
)
def test_how_sure_an_answer_is(lively, tokenizer, prompt):
    """The probability of one token at the start of the transcript, and the mean of the words, are
    those of transformers. The checkpoint is random: its likeliest token stands for no speech."""
    model = transformers.WhisperForConditionalGeneration.from_pretrained(lively).eval()
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(lively)
    with LLM(str(lively), dtype="float32", use_warmup=False, kv_cache_memory=2**22) as llm:
        params = SamplingParams(max_tokens=24, logprobs=1, prompt_logprobs=1, temperature=0)
        given = {"prompt": prompt, "multimodal_data": {"audio": sound(3)}}
        (output,) = llm.generate(given, params)
    own = output.outputs.token_ids
    ids = torch.tensor([[*output.prompt_token_ids, *own]])
    made = extractor(sound(3)["array"], sampling_rate=RATE, return_tensors="pt")
    with torch.no_grad():
        logits = model(made["input_features"], decoder_input_ids=ids).logits[0]
    logprobs = logits.log_softmax(-1)
    start = ids[0].tolist().index(START)
    likeliest = int(logprobs[start].argmax())
    checkpoint = read_checkpoint(lively)
    generation = {**checkpoint.generation, "no_timestamps_token_id": likeliest + 1}
    sure = WhisperSpeech(replace(checkpoint, generation=generation)).sureness(output)
    assert sure.no_speech == pytest.approx(float(logprobs[start, likeliest].exp()), rel=1e-3)
    first = len(output.prompt_token_ids)
    words = [logprobs[first + at - 1, token] for at, token in enumerate(own) if token <= END]
    assert words, "the answer has words"
    assert sure.mean_logprob == pytest.approx(float(torch.stack(words).mean()), rel=1e-3)
    assert WhisperSpeech(checkpoint).sureness(output).no_speech == 0


def test_a_checkpoint_without_timestamps_does_not_transcribe(folder):
    with pytest.raises(UnsupportedMediaError, match="no_timestamps_token_id"):
        WhisperSpeech(replace(read_checkpoint(folder), generation={}))


def test_what_speech_asks_is_a_prompt(folder, rule, encode):
    speech = WhisperSpeech(read_checkpoint(folder))
    for language, begin in (("german", [START, DE, TO_ENGLISH]), (None, [START])):
        made = rule.divide(speech.prompt(language, "translate", ""), (), (ITEM,), encode)
        assert list(made.ids) == begin
        assert made.processors["whisper"]["whisper"]["has_times"]


@pytest.mark.full
def test_the_command_transcribes_a_folder(folder, tmp_path):
    for seed, seconds in enumerate((2.5, 9.0)):
        (tmp_path / f"{seed}.wav").write_bytes(wav16(noise(seconds, seed=seed)))
    arguments = ["transcribe", str(tmp_path), "--model", str(folder), "--transcripts", "srt,json"]
    more = ["--overlap", "1", "--dtype", "float32", "--engine", "kv_cache_memory=4194304"]
    found = CliRunner().invoke(app, [*arguments, *more])
    assert found.exit_code == 0, found.output
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{seed}.{end}" for seed in (0, 1) for end in ("wav", "srt", "json", "source")}
    rows = json.loads((tmp_path / "1.json").read_text("utf-8"))
    times = [moment for row in rows for moment in (row["start"], row["end"])]
    assert times == sorted(times)
    assert (len(rows) > 1, times[-1] <= 9.0) == (True, True)
    (tmp_path / "bad.wav").write_bytes(b"RIFF")
    found = CliRunner().invoke(app, [*arguments, *more])
    assert found.exit_code == 1
    assert "2 files have their transcripts" in found.output
    (tmp_path / "bad.wav").unlink()
    found = CliRunner().invoke(app, [*arguments, *more, "--translate"])
    assert found.exit_code == 1, "a transcript in another language is none of these"
    assert "task is 'translate', was 'transcribe'" in found.output


def test_a_run_that_is_stopped_says_how_to_go_on(capsys):
    def run(_):
        yield Transcript(path=Path("a.wav"), error="broken")
        yield Transcript(path=Path("b.wav"))
        raise KeyboardInterrupt

    planned = SimpleNamespace(tasks=dict.fromkeys("abc"), refused=(), run=run)
    with pytest.raises(KeyboardInterrupt):
        transcribing._run(None, planned)
    assert "stopped with 2 of 3 files left; the same command" in capsys.readouterr().err


def test_the_command_needs_a_model_that_transcribes(tiny_folder):
    config = EngineConfig.from_options(str(tiny_folder("florence2")), {})
    with pytest.raises(ConfigError, match=r"how florence2 transcribes .*whisper"):
        open_rule(config)


def test_some_tokens_are_not_the_first_and_some_never_written():
    none = torch.tensor([], dtype=torch.int64)
    first, never = torch.tensor([2]), torch.tensor([1])
    rules = AnswerRules(
        languages=none, follows=None, suppressed=never, suppressed_first=first, end=6,
        no_times=None, latest=None, has_times=False,
    )  # fmt: skip
    for output, banned in (([], [1, 2]), ([3], [1])):
        logits = torch.zeros(8)
        rules.apply(logits, output)
        assert logits.isinf().nonzero().flatten().tolist() == banned


def test_the_rules_come_with_the_prompt_alone(folder):
    """A caller's own would be silently without effect, or break the model's."""
    (spec,) = whisper.provide_logits_processors()
    processor = WhisperRules(LogitsContext(vocab_size=446, tokenizer=None))
    assert spec.arguments == ("whisper",)
    with pytest.raises(ValueError, match="write what you want into the prompt"):
        processor.check({"whisper": {"has_times": False}})
