"""deterministic=True: the same bits alone and in any company, and a refusal where that cannot be
promised."""

import json
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.cli import app
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.kernels.cpu import cpu_levels
from mmdeploy_llm.testing.determinism.check import NUM_TOKENS, WAYS, check_determinism
from mmdeploy_llm.values.options.config import EngineConfig

FORMATS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
FAMILIES = ("qwen3", "qwen2_5_vl", "qwen3_vl_moe", "ernie4_5_vl_moe", "glm4")
IN_CI = ("qwen3", "ernie4_5_vl_moe")  # besides qwen2_5_vl: text only, and experts
LEVELS = [level.value for level in cpu_levels()]
OF_CI = "avx2"  # besides the best level of this machine
LONG = 1100  # tokens: attention to them is computed in two chunks


@pytest.fixture(scope="module")
def folder_of(tiny_folder):
    """Sizes that are no multiple of a register's values leave remainders in every loop."""
    return partial(tiny_folder, max_position_embeddings=2048)


# One family in all formats, others and the levels in one; the kit compares the bits of every model
# alone and in a batch.
ALL = [
    pytest.param("qwen2_5_vl", LEVELS[0], name, marks=[pytest.mark.long] * (name == "float32"))
    for name in FORMATS
]
SOME = [
    *((family, LEVELS[0]) for family in FAMILIES if family != "qwen2_5_vl"),
    *(("qwen2_5_vl", level) for level in LEVELS[1:]),
]
CASES = ALL + [
    pytest.param(
        *case,
        name,
        marks=[pytest.mark.long]
        * (
            name != "bfloat16"
            or case[1] not in (LEVELS[0], OF_CI)
            or case[0] not in ("qwen2_5_vl", *IN_CI)
        ),
    )
    for case in SOME
    for name in FORMATS
]


@pytest.mark.full
@pytest.mark.parametrize(("family", "level", "name"), CASES)
def test_no_bit_depends_on_the_company(folder_of, family, level, name):
    config = EngineConfig(
        model=str(folder_of(family)), deterministic=True, cpu_level=level, **FORMATS[name]
    )
    found = list(check_determinism(config, longest=LONG))
    num_requests = 5 + 3 * ("vl" in family)  # texts; two images and a video
    assert [each.way for each in found] == list(WAYS)
    for each in found:
        assert each.has_happened, each.way
        assert each.num_tokens == NUM_TOKENS * num_requests
        assert each.num_logprobs > each.num_tokens
        assert each.is_same, each


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "num_requests"),
    [("whisper", 9), ("vision_encoder_decoder", 6), ("t5gemma2", 7), ("qwen2_5_omni", 11)],
)
def test_what_is_seen_and_heard_is_compared_too(tiny_folder, family, num_requests):
    """Five texts, and conversations about two pictures, a video and three sounds: what the family
    reads of these. An encoder gets pictures or sounds outside of conversations, too, with and
    without a text."""
    config = EngineConfig(model=str(tiny_folder(family)))
    batch = next(iter(check_determinism(config, longest=70)))
    assert batch.num_tokens == NUM_TOKENS * num_requests
    assert batch.is_same, batch


@pytest.mark.full
@pytest.mark.parametrize("dtype", [pytest.param("int8", marks=pytest.mark.long), "int4"])
def test_no_bit_of_a_quantised_cache_depends_on_the_company(folder_of, dtype):
    options = {"dtype": "bfloat16", "kv_cache_dtype": dtype, "deterministic": True}
    config = EngineConfig(model=str(folder_of("qwen3")), **options)
    for each in check_determinism(config, longest=LONG):
        assert each.has_happened, each.way
        assert each.is_same, each


def prompts(picture):
    """Texts of several lengths, and pictures."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(20, 90, (n,), generator=generator).tolist() for n in (1, 9, 40, 150)]
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "What is it?"}]
    return [*texts, {"messages": [{"role": "user", "content": content}]}, texts[2] + texts[1]]


def answers(llm, given):
    """Returns token ids and log-probabilities of each prompt, which all sample, by several
    rules."""
    rules = ({}, {"repetition_penalty": 1.3, "frequency_penalty": 0.2}, {"top_k": 7, "min_p": 0.02})
    common = {"temperature": 0.7, "top_p": 0.95, "max_tokens": 12, "logprobs": 3}
    params = [
        SamplingParams(seed=seed, **common, **rules[seed % len(rules)])
        for seed in range(len(given))
    ]
    outputs = llm.generate(given, params, use_tqdm=False, on_error="raise")
    return [
        (output.outputs.token_ids, [list(entry.items()) for entry in output.outputs.logprobs])
        for output in outputs
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name != "bfloat16")) for name in FORMATS],
)
def test_engines_of_other_shapes_answer_alike(folder_of, make_picture, name):
    """The whole engine: one prompt at a time and all at once, with few tokens in a step, few
    blocks, a second time, and divided between two engines."""
    given, folder = prompts(make_picture(1, 120, 90)), str(folder_of("qwen2_5_vl"))
    options = {"deterministic": True, "quiet": True, "max_model_len": 512, **FORMATS[name]}
    with LLM(folder, max_num_seqs=1, enable_prefix_caching=False, **options) as llm:
        alone = answers(llm, given)
    with LLM(folder, **options) as llm:
        assert answers(llm, given) == alone
        assert answers(llm, given) == alone
    limits = {"max_num_batched_tokens": 20, "max_num_seqs": 4, "block_size": 16}
    with LLM(folder, num_gpu_blocks_override=14, num_threads=1, **limits, **options) as llm:
        assert answers(llm, given) == alone
    with LLM(folder, data_parallel_size=2, **options) as llm:
        assert answers(llm, given) == alone


@pytest.mark.full
def test_two_ranks_answer_alike_in_every_batch(folder_of):
    """The sums of two ranks have one order; their answers may differ from those of one process."""
    given = prompts(None)[:4]
    options = {"deterministic": True, "quiet": True, "dtype": "float32", "tensor_parallel_size": 2}
    with LLM(str(folder_of("qwen3")), **options) as llm:
        together = answers(llm, given)
        assert answers(llm, given[:1]) == together[:1]
        assert answers(llm, given[:2]) == together[:2]


@pytest.mark.full
@pytest.mark.parametrize("level", [LEVELS[0], LEVELS[-1]])
def test_tokens_are_those_of_transformers(folder_of, transformers_of, level):
    folder = folder_of("qwen3")
    given = prompts(None)[:4]
    expected = [transformers_of(folder).generate(prompt, 12) for prompt in given]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options = {"deterministic": True, "quiet": True, "dtype": "float32", "cpu_level": level}
    with LLM(str(folder), **options) as llm:
        outputs = llm.generate(given, params, use_tqdm=False)
    assert [list(output.outputs.token_ids) for output in outputs] == expected


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"native_kernels": False}, "deterministic = True needs the C\\+\\+ kernels"),
        ({"dtype": "float16"}, "reference adds in an order that depends on the batch"),
        (
            {"attention_backend": "reference"},
            "batch; deterministic=True needs 'native'",
        ),
        ({"tensor_parallel_size": 3}, "3 processes add their sums"),
        ({"blocked_plugins": ("qwen",)}, "plugin 'transformers_any' does not promise"),
    ],
)
def test_what_cannot_be_promised_is_refused(folder_of, options, reason):
    with pytest.raises(ConfigError, match=reason):
        LLM(str(folder_of("qwen3")), deterministic=True, device="cpu", **options)


def run_program(*arguments):
    return CliRunner().invoke(app, ["check-determinism", "--model", *arguments])


@pytest.mark.full
def test_the_program_finds_what_plain_torch_does_not_promise(folder_of):
    """The bits depend on the number of rows when torch multiplies, and the program says where."""
    arguments = ["--dtype", "float32", "--longest", "70", "--json"]
    result = run_program(str(folder_of("qwen3")), *arguments, "--engine", "native_kernels=False")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout[result.stdout.index("[") :])
    assert [each["way"] for each in found] == [way.value for way in WAYS]
    other = [each for each in found if each["num_other_logprobs"]]
    assert other
    for each in other:
        assert 0 < each["largest"] < 1e-3
        assert any("layers." in cause or "head" in cause for cause in each["causes"])


@pytest.mark.full
def test_the_program_checks_the_promise(folder_of):
    result = run_program(str(folder_of("qwen3")), "--mode", "--longest", "70")
    assert result.exit_code == 0, result.output
    assert result.output.count("same ") == len(WAYS)


def test_the_program_refuses_several_processes(folder_of):
    result = run_program(str(folder_of("qwen3")), "--engine", "data_parallel_size=2")
    assert result.exit_code == 2
