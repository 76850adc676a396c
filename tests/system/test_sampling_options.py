"""SamplingParams through a real LLM on tiny checkpoints: logits processors, stop sequences, early
stops, odd values and seeds, alone and in a batch, streamed and not, with preemptions."""

import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmdeploy_llm import LLM, ConfigError, GuidedDecodingParams, SamplingParams
from tests.together import begin_together

PROMPTS = ["How many are there?", "Z is for zebra", "The quick brown fox", "One two three four"]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
STUMBLES = """
from mmdeploy_llm.hooks import LogitsProcessor, LogitsProcessorSpec

class Stumbles(LogitsProcessor):
    def start(self, row):
        if row.arguments.get("how") == "start":
            raise OSError("no start")

    def apply(self, logits, rows):
        if any(row.arguments and len(row.output_token_ids) == 3 for row in rows):
            raise SystemExit("third token")
        return logits

@hookimpl
def provide_logits_processors():
    factory = __name__ + ":Stumbles"
    return [LogitsProcessorSpec(name="stumbles", factory=factory, arguments=("how",))]
"""


@pytest.fixture(scope="module")
def llm(tiny_folder):
    with LLM(model=str(tiny_folder("qwen2")), block_size=16, use_warmup=False) as llm:
        yield llm


def results(llm, params, prompts=PROMPTS):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error_msg for output in outputs if output.error_code != 200] == []
    return outputs


def ids_of(outputs):
    return [list(output.outputs.token_ids) for output in outputs]


def streamed(llm, prompt, params):
    """Returns text, ids and finish reason of a streamed request."""
    deltas = [output.outputs for output in llm.stream(prompt, params)]
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    return "".join(delta.text for delta in deltas), ids, deltas[-1].finish_reason


@pytest.fixture
def install(tmp_path, monkeypatch, load_file):
    """install(name, source): a package with one plugin, found beside the installed ones."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    site = load_file("hooks/conftest.py").Site(folder)
    yield site.install
    for module in site.modules:
        sys.modules.pop(module, None)


class TestLogitsProcessors:
    def test_a_window_of_repetitions(self, llm):
        """A strong penalty lets no token of the window come again; others may."""
        args = {"repetition_window": 3, "repetition_window_penalty": 100}
        params = SamplingParams(
            **GREEDY, logits_processors="repetition-window", logits_processors_args=args
        )
        for ids in ids_of(results(llm, params)):
            assert all(ids[at] not in ids[max(0, at - 3) : at] for at in range(len(ids)))

    def test_logit_bias_equals_the_option(self, llm):
        own = SamplingParams(**GREEDY, logit_bias={70: 30.0, 71: -5.0})
        other = SamplingParams(
            **GREEDY,
            logits_processors="LogitBiasLogitsProcessor",
            logits_processors_args={"logit_bias": {"70": 30.0, 71: -5}},
        )
        assert ids_of(results(llm, own)) == ids_of(results(llm, other))

    @pytest.mark.full
    @pytest.mark.parametrize(
        "sampling", [{}, pytest.param({"temperature": 0.9, "seed": 5}, marks=pytest.mark.full)]
    )
    def test_alone_in_a_batch_streamed_and_preempted(self, llm, make_llm, tiny_folder, sampling):
        plain = {**GREEDY, "max_tokens": 40, **sampling}
        own = SamplingParams(**plain, logits_processors="repetition-window")
        params = [own, own, own, SamplingParams(**plain)]
        expected = ids_of(results(llm, params))
        for prompt, one, ids in zip(PROMPTS, params, expected, strict=True):
            assert ids_of(results(llm, one, [prompt])) == [ids]
            assert streamed(llm, prompt, one)[1] == ids
        small, stats = make_llm(tiny_folder("qwen2"), num_gpu_blocks_override=6, max_model_len=80)
        begin_together(small, len(PROMPTS))
        assert ids_of(results(small, params)) == expected
        assert stats.steps[-1].num_preemptions > 0

    def test_the_engine_lists_processors_as_in_fastdeploy(self, make_llm, tiny_folder):
        listed = ["LogitBiasLogitsProcessor"]
        llm, _ = make_llm(tiny_folder("qwen2"), logits_processors=listed)
        args = {"logit_bias": {70: 1000.0}}
        params = [SamplingParams(**GREEDY), SamplingParams(**GREEDY, logits_processors_args=args)]
        plain, biased = ids_of(results(llm, params, PROMPTS[:2]))
        assert set(biased) == {70}
        assert set(plain) != {70}
        with pytest.raises(ConfigError, match="no logits processor 'unknown'"):
            make_llm(tiny_folder("qwen2"), logits_processors="unknown")

    def test_a_broken_one_ends_its_own_requests(self, install, make_llm, tiny_folder):
        install("stumbles", STUMBLES)
        llm, _ = make_llm(tiny_folder("qwen2"))
        expected = ids_of(results(llm, SamplingParams(**GREEDY)))
        own = {**GREEDY, "logits_processors": "stumbles"}
        params = [
            SamplingParams(**GREEDY),
            SamplingParams(**own, logits_processors_args={"how": "late"}),
            SamplingParams(**own),
            SamplingParams(**own, logits_processors_args={"how": "start"}),
        ]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [output.error_code for output in outputs] == [200, 500, 200, 500]
        assert "'stumbles' of plugin 'stumbles' failed: SystemExit: third" in outputs[1].error_msg
        assert "'stumbles' failed to start: OSError" in outputs[3].error_msg
        assert list(outputs[1].outputs.token_ids) == expected[1][:3]
        assert [ids_of(outputs)[at] for at in (0, 2)] == [expected[0], expected[2]]
        assert ids_of(results(llm, SamplingParams(**GREEDY))) == expected

    def test_wrong_arguments_are_that_requests_error(self, llm):
        wrong = SamplingParams(logits_processors_args={"logit_bias": {3: 1.0}})
        outputs = llm.generate(PROMPTS[:2], [wrong, SamplingParams(**GREEDY)], use_tqdm=False)
        assert [output.error_code for output in outputs] == [400, 200]
        assert "name logit-bias in logits_processors" in outputs[0].error_msg


class TestStopSequences:
    @pytest.mark.parametrize("is_included", [False, True])
    def test_the_text_ends_before_the_sequence(self, llm, is_included):
        (whole,) = ids_of(results(llm, SamplingParams(**GREEDY), PROMPTS[:1]))
        at = next(
            at
            for at in range(3, 9)
            if whole[at : at + 2] not in [whole[i : i + 2] for i in range(at)]
        )
        sequence = whole[at : at + 2]
        near_miss = [whole[at + 2], 99_999 % 80, 1]
        params = SamplingParams(
            **GREEDY,
            stop_words_ids=[near_miss, sequence],
            include_stop_str_in_output=is_included,
        )
        (output,) = results(llm, params, PROMPTS[:1])
        end = at + 2 if is_included else at
        text = llm._desk.intake._tokenizer.raw.decode(whole[:end], skip_special_tokens=True)
        assert output.outputs.text == text
        assert list(output.outputs.token_ids) == whole[: at + 2]
        assert output.outputs.finish_reason == "stop"
        assert streamed(llm, PROMPTS[0], params) == (text, whole[: at + 2], "stop")
        later = params.replace(min_tokens=at + 3)
        assert len(ids_of(results(llm, later, PROMPTS[:1]))[0]) > at + 2

    def test_ids_outside_the_vocabulary_are_refused(self, llm):
        for wrong in ([[10**6]], [[1]] * 65, [[1] * 1025]):
            params = SamplingParams(stop_token_sequences=wrong)
            (output,) = llm.generate("Hello", params, use_tqdm=False)
            assert output.error_code == 400
            assert "stop" in output.error_msg


class TestEarlyStop:
    @pytest.mark.full
    @pytest.mark.parametrize(
        "sampling", [{}, pytest.param({"temperature": 1.0, "seed": 3}, marks=pytest.mark.full)]
    )
    def test_after_a_window_of_certain_tokens(self, llm, make_llm, tiny_folder, sampling):
        """The reference counts log-probabilities that an ordinary request reports."""
        own = {**GREEDY, "max_tokens": 40, **sampling}
        plain = results(llm, SamplingParams(**own, logprobs=0))
        for window_size, threshold, min_tokens in ((3, 0.02, 1), (2, 0.1, 8), (5, 0.0, 1)):
            early = {"window_size": window_size, "threshold": threshold}
            params = SamplingParams(**own, early_stop=early, min_tokens=min_tokens)
            expected = [
                expected_end(output.outputs, window_size, threshold, min_tokens) for output in plain
            ]
            found = results(llm, params)
            assert [(len(o.outputs.token_ids), o.outputs.finish_reason) for o in found] == expected
            for prompt, output in zip(PROMPTS, found, strict=True):
                single = streamed(llm, prompt, params)
                assert single == (
                    output.outputs.text,
                    list(output.outputs.token_ids),
                    output.outputs.finish_reason,
                )
        assert "repetition" in {reason for _, reason in expected}
        small, stats = make_llm(tiny_folder("qwen2"), num_gpu_blocks_override=7, max_model_len=96)
        params = SamplingParams(**own, early_stop={"window_size": 30, "threshold": 0.0})
        begin_together(small, len(PROMPTS))
        ends = [(len(o.outputs.token_ids), o.outputs.finish_reason) for o in results(small, params)]
        assert ends == [(30, "repetition")] * 4
        assert stats.steps[-1].num_preemptions > 0

    def test_the_engines_default_and_its_exceptions(self, make_llm, tiny_folder):
        llm, _ = make_llm(
            tiny_folder("qwen2"), early_stop_config={"window_size": 4, "threshold": 0.0}
        )
        own = [None, False, True, {"window_size": 2, "threshold": 0.0}]
        params = [SamplingParams(**GREEDY, early_stop=value) for value in own]
        assert [len(ids) for ids in ids_of(results(llm, params))] == [4, 12, 4, 2]


class TestNGramsThatMustNotRepeat:
    @pytest.mark.full
    def test_in_a_window_with_tokens_that_may(self, llm, make_llm, tiny_folder):
        """No token of a text is one that a search through the window forbids, and a text is the
        same alone, in a batch and after a preemption."""
        own = {**GREEDY, "max_tokens": 40, "logit_bias": {7: 9.0, 8: 9.0}}
        loops = ids_of(results(llm, SamplingParams(**own)))
        rule = {"size": 3, "window": 12, "may_repeat_token_ids": [7]}
        params = SamplingParams(**own, no_repeat_ngram=rule)
        found = results(llm, params)
        assert all(repeats(ids, 3, 12, {7}) for ids in loops)
        assert not any(repeats(ids, 3, 12, {7}) for ids in ids_of(found))
        for prompt, output in zip(PROMPTS, found, strict=True):
            assert streamed(llm, prompt, params)[1] == list(output.outputs.token_ids)
        small, stats = make_llm(tiny_folder("qwen2"), num_gpu_blocks_override=7, max_model_len=96)
        begin_together(small, len(PROMPTS))
        assert ids_of(results(small, params)) == ids_of(found)
        assert stats.steps[-1].num_preemptions > 0


def repeats(ids, size, window, may_repeat):
    """Returns the places of tokens that complete a sequence which the window before them has."""
    found = []
    for end in range(size, len(ids)):
        before = ids[max(0, end - window) : end]
        grams = {tuple(before[i : i + size]) for i in range(len(before) - size + 1)}
        if tuple(ids[end - size + 1 : end + 1]) in grams and ids[end] not in may_repeat:
            found.append(end)
    return found


def expected_end(completion, window_size, threshold, min_tokens):
    """Returns length and finish reason of the same request with an early stop."""
    num_certain = 0
    for number, entry in enumerate(completion.logprobs, 1):
        logprob = entry[completion.token_ids[number - 1]].logprob
        num_certain = num_certain + 1 if 2.718281828459045**logprob > threshold else 0
        if num_certain >= window_size and number >= min_tokens:
            return number, "repetition"
    return len(completion.token_ids), completion.finish_reason


NUMBERS = [
    *(0, 1, -1, 2, 10**6, 2**31, 2**63 - 1, 2**63, 10**40, -(10**40), 10**5000),
    *(-0.0, 5e-324, 1e-30, 0.5, 1.0, 1e30, 1e308, -1e308, float("inf"), float("nan")),
]
HUGE = st.sampled_from(NUMBERS)
VALUES = st.one_of(
    HUGE,
    st.none(),
    st.booleans(),
    st.text(max_size=3),
    st.lists(HUGE, max_size=2),
    st.lists(st.lists(HUGE, max_size=2), max_size=2),
    st.dictionaries(HUGE, HUGE, max_size=2),
    st.dictionaries(st.sampled_from(["window_size", "threshold", "logit_bias"]), HUGE, max_size=2),
)
# n is a number of requests: a thousand of them are allowed, and take long.
NAMES = sorted({*SamplingParams.model_fields} - {"n", "guided_decoding"})


@pytest.mark.full
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=3))
def test_any_value_of_any_param_is_used_or_refused(llm, caplog, values):
    """Whatever a caller writes is a ConfigError, an output or a 400, and no traceback is logged."""
    params = made(values)
    if params is None:
        return
    params = params.model_copy(update={"max_tokens": min(params.max_tokens or 3, 3)})
    outputs = llm.generate(["Hello", "World"], [params, SamplingParams(**GREEDY)], use_tqdm=False)
    assert outputs[0].error_code in (200, 400), (values, outputs[0].error_msg)
    assert outputs[1].error_code == 200
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.full
def test_every_number_that_is_accepted_runs(llm, caplog):
    """All of them in one batch: each has an output or a 400, and the request among them that asks
    for nothing gets what it gets alone."""
    forms = (lambda x: x, lambda x: [x], lambda x: [[x]], lambda x: {x: 2.0}, lambda x: {3: x})
    given = [{name: form(x)} for name in NAMES for x in NUMBERS for form in forms]
    given += [{"early_stop": {key: x}} for key in ("window_size", "threshold") for x in NUMBERS]
    given += [{**one, "temperature": 0.7, "seed": 3} for one in given if "temperature" not in one]
    chosen = [params for params in map(made, given) if params is not None]
    chosen = [one.model_copy(update={"max_tokens": min(one.max_tokens or 3, 3)}) for one in chosen]
    assert len(chosen) > 300
    plain = SamplingParams(**GREEDY)
    outputs = llm.generate(["Hello"] * (len(chosen) + 1), [*chosen, plain], use_tqdm=False)
    assert {output.error_code for output in outputs} == {200, 400}
    assert ids_of(outputs[-1:]) == ids_of(results(llm, plain, ["Hello"]))
    assert not [record for record in caplog.records if record.exc_info]


def made(values):
    try:
        return SamplingParams(**values)
    except ConfigError:
        return None


def test_a_param_of_guided_decoding_is_not_bounded_as_the_sampler_is():
    """A schema may hold any number."""
    assert GuidedDecodingParams(json={"type": "integer", "maximum": 10**40})


@pytest.mark.full
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_a_seed_gives_the_same_text_whatever_else_runs(options, make_llm, tiny_folder):
    """The promise of `seed` holds in bfloat16 and int8 with the C++ kernels, near-ties included,
    which random weights have at nearly every token."""
    own = {"dtype": "bfloat16", "max_num_seqs": 16, "native_kernels": True, **options}
    llm, _ = make_llm(tiny_folder("mistral"), **own)
    chosen = [
        SamplingParams(max_tokens=24, ignore_eos=True, seed=number, temperature=number % 3 / 2)
        for number in range(16)
    ]
    prompts = [PROMPTS[number % 4] * (1 + number % 3) for number in range(16)]
    whole = ids_of(results(llm, chosen, prompts))
    assert ids_of(results(llm, chosen[::-1], prompts[::-1]))[::-1] == whole
    for size in (1, 3):
        for first in range(0, 12, size):
            rows = slice(first, first + size)
            assert ids_of(results(llm, chosen[rows], prompts[rows])) == whole[rows]


@pytest.mark.full
def test_a_drawn_seed_can_be_used_again(make_llm, tiny_folder):
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=2.0, top_p=1.0)
    drawn, _ = make_llm(tiny_folder("qwen2"), seed=None)
    again, _ = make_llm(tiny_folder("qwen2"), seed=drawn.runtime.seed)
    other, _ = make_llm(tiny_folder("qwen2"), seed=None)
    first = ids_of(results(drawn, sampling))
    assert ids_of(results(again, sampling)) == first
    assert ids_of(results(other, sampling)) != first
