"""Models that keep nothing of earlier tokens, or what is not known, are computed again at each
step, and their answers are those of transformers' own `generate`."""

import pytest
import torch
import transformers
from mmdeploy_llm_plugins.transformers_any import again
from mmdeploy_llm_plugins.transformers_any.mechanisms import RECOMPUTED, REPEATED
from mmdeploy_llm_plugins.transformers_any.model import AnyModel

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.testing.checkpoint import write_checkpoint
from mmdeploy_llm.testing.tiny import make_tokenizer
from mmdeploy_llm.weights.folder.text_sizes import read_text_sizes

PROMPTS = [[45, 59, 33, 47, 71], [301, 52, 105, 77] * 3 + [48, 60], [44], list(range(40, 55))]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SETTINGS = {
    "dtype": "float32",
    "num_threads": 1,
    "use_warmup": False,
    "block_size": 4,
    "kv_cache_memory": 2**24,
    "max_model_len": 32,
}
# Its attention has no cache; its cache is of its own kind; its last token is a mask; its cache
# holds hidden states; its prompt sees itself in both directions; it predicts several tokens.
CLASSES = {
    "OpenAIGPTLMHeadModel": RECOMPUTED,
    "ReformerModelWithLMHead": RECOMPUTED,
    "XLMWithLMHeadModel": REPEATED,
    "XLNetLMHeadModel": REPEATED,
    "CpmAntForCausalLM": REPEATED,
    "ProphetNetForCausalLM": REPEATED,
}
QUICK = ("OpenAIGPTLMHeadModel", "XLNetLMHeadModel")


@pytest.fixture(scope="module")
def census(load_file):
    return load_file("plugins/transformers_any/census/census.py")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in CLASSES
    ],
)
def made(request, census, tmp_path_factory):
    """Returns the class, the folder, and transformers' answers."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    tokenizer = make_tokenizer("qwen2")
    write_checkpoint(census.config_of(name), folder, tokenizer=tokenizer, dtype=torch.float32)
    inputs = [{"input_ids": torch.tensor([prompt])} for prompt in PROMPTS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(census, "MAX_TOKENS", GREEDY.max_tokens)
        return name, folder, [tokens for tokens, _ in census.reference(folder, name, inputs)]


def answers(llm):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.error_msg for output in outputs] == [None] * len(PROMPTS)
    return [list(output.outputs.token_ids) for output in outputs]


@pytest.mark.full
@pytest.mark.one_is_quick
def test_answers_are_those_of_generate(made):
    """They are so in a batch and again, from prefixes or in chunks where these are possible, and in
    a pool in which requests are preempted."""
    name, folder, wanted = made
    repeats = CLASSES[name] == REPEATED
    steps = {"max_num_batched_tokens": 32 if repeats else 7, "max_num_seqs": 4}
    for more in (steps, {"num_gpu_blocks_override": 12}):
        with LLM(model=str(folder), **SETTINGS, **more) as llm:
            assert CLASSES[name] in llm.model.mechanisms
            assert llm.model.sees_prompts == repeats
            assert answers(llm) == answers(llm) == wanted


@pytest.mark.full
def test_an_answer_of_one_request_is_a_prompt_of_another(made):
    """A model whose prompt is unlike its answer does not take one for the other."""
    name, folder, wanted = made
    longer = [*PROMPTS[0], *wanted[0]]
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    own = model.generate(
        torch.tensor([longer]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with LLM(model=str(folder), **SETTINGS) as llm:
        assert answers(llm) == wanted
        few = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (output,) = llm.generate([longer], few, use_tqdm=False)
    assert list(output.outputs.token_ids) == own[0, len(longer) :].tolist()


@pytest.mark.full
def test_log_probabilities_of_a_prompt_that_sees_itself_are_an_error(made):
    """They do not exist; of other models they are given."""
    name, folder, _ = made
    asked = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    with LLM(model=str(folder), max_logprobs=1, **SETTINGS) as llm:
        (output,) = llm.generate(PROMPTS[:1], asked, use_tqdm=False)
    has_error = output.error_msg is not None and "leave out prompt_logprobs" in output.error_msg
    assert has_error == (CLASSES[name] == REPEATED)


def test_tokens_are_kept_as_bits():
    ids = torch.tensor([0, 1, 511, 2**31 - 1, 250_000])
    in_prompt = torch.tensor([True, True, True, False, False])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found, num_prompt = again._tokens(again._bits(ids, in_prompt).to(dtype))
        assert found.tolist() == ids.tolist()
        assert num_prompt == 3


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("ReformerModelWithLMHead", "int8"),
        pytest.param("CpmAntForCausalLM", "int4", marks=pytest.mark.full),
        pytest.param("ProphetNetForCausalLM", "int8wo", marks=pytest.mark.full),
    ],
)
def test_in_few_bits_answers_are_those_of_generate_too(name, quantization, census, tmp_path):
    """Transformers' own `generate` of the very modules whose weights the kernels have rounded."""
    config = census.config_of(name)
    write_checkpoint(config, tmp_path, tokenizer=make_tokenizer("qwen2"), dtype=torch.float32)
    with LLM(model=str(tmp_path), quantization=quantization, **SETTINGS) as llm:
        assert any(getattr(module, "packed", None) for module in llm.model.modules())
        found = answers(llm)
        own = llm.model.parts.inner
        for prompt, tokens in zip(PROMPTS, found, strict=True):
            ids = torch.tensor([prompt])
            wanted = own.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False
            )
            assert tokens == wanted[0, len(prompt) :].tolist()


@pytest.mark.full
def test_why_generate_runs_again_is_said(census, tmp_path, monkeypatch, caplog):
    """An error of transformers' code in the trial of one pass is in the log."""
    config = census.config_of("OpenAIGPTLMHeadModel")
    write_checkpoint(config, tmp_path, tokenizer=make_tokenizer("qwen2"), dtype=torch.float32)

    def fails(*_):
        raise RuntimeError("no pass")

    monkeypatch.setattr(again.Again, "_in_one_pass", fails)
    with LLM(model=str(tmp_path), **SETTINGS) as llm:
        assert REPEATED in llm.model.mechanisms
    assert "by `generate` since one pass failed (RuntimeError: no pass)" in caplog.text


@pytest.mark.full
@pytest.mark.parametrize("name", ["Blip2ForConditionalGeneration", "MusicgenForCausalLM"])
def test_media_and_several_heads_are_refused(name, census):
    """Their answers need more than tokens."""
    config = census.config_of(name)
    if name == "Blip2ForConditionalGeneration":
        with torch.device("meta"):
            model = AnyModel(config)
        with pytest.raises(ModelNotSupportedError, match="the reason"):
            again.Again(model.parts, ModelNotSupportedError("the reason"))
        return
    with torch.device("meta"), pytest.raises((ModelNotSupportedError, AttributeError)):
        again.Again(AnyModel(config).parts, ModelNotSupportedError("the reason"))


@pytest.mark.parametrize(
    ("kind", "fields", "count"),
    [
        ("Marian", {"vocab_size": 40, "decoder_vocab_size": 50}, 50),
        ("Marian", {"vocab_size": 40}, 40),
        ("Inkling2", {"text_config": {"vocab_size": 48, "unpadded_vocab_size": 40}}, 40),
        ("XLNet", {"vocab_size": 40}, 40),
    ],
)
def test_sizes_of_old_configs(kind, fields, count, tmp_path):
    """The vocabulary is the head's; XLNet's -1 stands for no longest sequence."""
    config = getattr(transformers, f"{kind}Config")(**fields)
    sizes = read_text_sizes(Checkpoint(folder=tmp_path, config=config))
    assert sizes.vocab_size == count
    assert sizes.max_position_embeddings != -1
