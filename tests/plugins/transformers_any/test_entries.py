"""Attention that keeps more than keys and values by token, on the pages of the engine: compressed
entries (DeepSeek V4), and the positions of an indexer beside n-grams of token ids (Qwen4-Exp); and
other decoders of a kind of their own, in chunks, in a tight pool and in few bits."""

import pytest
import torch
import transformers
from mmdeploy_llm_plugins.transformers_any import limits
from mmdeploy_llm_plugins.transformers_any.trial import Memory
from mmdeploy_llm_plugins.transformers_parts.cache import pages

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.testing.checkpoint import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[45, 59, 33, 47, 71, 5, 9], [301, 52, 105, 77] * 5 + [48, 60, 61]]
CLASSES = (
    "DeepseekV4ForCausalLM",
    "DoryForCausalLM",  # the layers run in loops, and each run has keys of its own
    "Gemma3nForCausalLM",  # inputs for each layer
    "HrmTextForCausalLM",
    "Llama4ForCausalLM",  # attention in chunks
    "Qwen4ExpForCausalLM",
)


@pytest.fixture(scope="module")
def shrink(load_file):
    return load_file("plugins/transformers_any/census/shrink.py")


def test_entries_are_made_of_all_tokens_so_far():
    """Tokens that come in several steps make the same entries as those that come in one."""
    places, memory = pages.Places(), Memory()
    kept = [pages.Kept(window=4, compress_rate=2)]
    rows = torch.arange(20.0).view(1, 5, 4)
    for start, end, count in ((0, 3, 2), (3, 4, 4), (4, 5, 4)):
        memory.begin(start, end)
        new = torch.arange(start, end)
        layer = pages.sequence_cache(kept, places, memory, 0, new).layers[0]
        own = rows[:, start:end]
        found, gates, first = layer.store_compression_weights("compressor", own, -own)
        assert (found.shape[1], first) == (count, 0)
        assert torch.equal(found, rows[:, :count])
        assert torch.equal(gates, -rows[:, :count])
        assert layer.update_overlap_state("compressor", found, gates, 2) == (None, None)


def test_the_limit_counts_tokens_not_entries(shrink):
    config = shrink.shrunk(transformers.DeepseekV4Config, index_topk=8)
    with torch.device("meta"):
        decoder = transformers.DeepseekV4Model(config)
    rate = config.compress_rates["compressed_sparse_attention"]
    assert limits.of_decoder("DeepseekV4", decoder).num_tokens == 8 * rate


@pytest.mark.full
@pytest.mark.parametrize("name", CLASSES)
def test_in_a_tight_pool_and_in_few_bits(shrink, tmp_path, make_llm, name):
    """Answers are equal in chunks, from the prefix cache, and after preemption; in few bits, all of
    these are one."""
    kind = getattr(transformers, name)
    config = shrink.shrunk(kind.config_class)
    config.architectures = [name]
    folder = write_checkpoint(config, tmp_path, architecture=name)
    model = kind.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = [
            model.generate(torch.tensor([prompt]), max_new_tokens=12, eos_token_id=None)
            for prompt in PROMPTS
        ]
    expected = [out[0, -12:].tolist() for out in expected]
    small = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    tight = {**small, "num_gpu_blocks_override": 11, "max_model_len": 40}
    few = [[], []]
    for number, options in enumerate((small, tight)):
        llm, _ = make_llm(folder, **options)
        assert [answers(llm) for _ in range(2)] == [expected] * 2
        few[number] = answers(make_llm(folder, quantization="wint8", **options)[0])
    assert few[0] == few[1] != []


def answers(llm):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.error_msg for output in outputs] == [None] * len(PROMPTS)
    return [list(output.outputs.token_ids) for output in outputs]
