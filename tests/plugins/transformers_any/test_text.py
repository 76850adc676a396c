"""Text models against transformers: see testing.model_conformance. Each family is tested because
its attention or its head differs from the others."""

import pytest
import transformers
from mmdeploy_llm_plugins.transformers_any import ANY

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.testing import ModelConformance, ModelVariantConformance
from mmdeploy_llm.testing.checkpoint import write_checkpoint
from mmdeploy_llm.testing.tiny import make_tokenizer
from tests.together import begin_together

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEXTS = ("The quick brown fox", "User: how many circles are there? Assistant:", "a circle " * 9)
OTHERS = ("ernie", "glm", "gptoss", "llama", "phi", "qwen")  # plugins of single families
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 128,
}
CONFIGS = {
    # The plain decoder.
    "llama": ("Llama", {}),
    # Frequencies that change beyond max_position_embeddings, where no sequence goes.
    "llama_dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    # The head is the embedding.
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 20}),
    # A window in all layers; q, k and v in one matrix.
    "phi3": ("Phi3", {"sliding_window": 9}),
    "phi3_long": (
        "Phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {**ROPE, "short_factor": [1.1] * 8, "long_factor": [4.0] * 8},
        },
    ),
    # Norms after attention and MLP, and on queries and keys.
    "olmo2": ("Olmo2", {}),
    # Half of each head is rotated; attention and MLP in parallel; LayerNorm.
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    # A scale for scores and one for logits.
    "granite": ("Granite", {"attention_multiplier": 0.3, "logits_scaling": 3.0}),
    # Logits that are scaled, norms without bias.
    "cohere": ("Cohere", {"logit_scale": 0.3}),
    # Learned positions; the decoder is nested two levels down.
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    # Experts, one tensor each in the checkpoint and stacked in the model.
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    # Latent attention: values smaller than keys; experts in groups, a shared one.
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
        },
    ),
    # Attention sinks; a window in every other layer.
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    # Sinks in the layers with a window, which have more key heads; values smaller than keys.
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {
            "head_dim": 16,
            "v_head_dim": 8,
            "num_key_value_heads": 1,
            "sliding_window": 9,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    # Sinks by a factor of the output.
    "granite_swa": ("GraniteSWA", {"sliding_window": 9}),
    "flint": (
        "Flint",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_only_layers": [0],
        },
    ),
    # Attention and Mamba-2, a state for each, in every layer.
    "falcon_h1": (
        "FalconH1",
        {
            "head_dim": 16,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
        },
    ),
    # Mamba-1: transformers continues from its state for one token at a time only.
    "jamba": (
        "Jamba",
        {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}
OWN = ("gemma2", "phi3_long")  # with a class of their own


def write(name, folder, configs=CONFIGS):
    kind, fields = configs[name]
    tokenizer = make_tokenizer()
    config = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            **fields,
        }
    )
    config.architectures = [f"{kind}ForCausalLM"]
    write_checkpoint(config, folder, tokenizer=tokenizer)


class AnyText:
    """A checkpoint of the family of CONFIGS that the fixture `name` gives."""

    spec = ANY

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, name, tmp_path_factory):
        folder = tmp_path_factory.mktemp(name)
        write(name, folder)
        return folder


@pytest.mark.full
class TestOthers(AnyText, ModelVariantConformance):
    """Families that need no more than the comparison with transformers."""

    @pytest.fixture(scope="class", params=[name for name in CONFIGS if name not in OWN])
    @classmethod
    def name(cls, request):
        return request.param


@pytest.mark.full
class TestGemma2(AnyText, ModelConformance):
    """All checks, for whole-model attention: soft caps on scores and logits, a window in every
    other layer, its own score scale."""

    @pytest.fixture(scope="class")
    @classmethod
    def name(cls):
        return "gemma2"

    @pytest.mark.full
    def test_the_engine_gives_the_reference_tokens(self, subject, make_llm):
        """Batched, in chunks, and with prefixes found in the cache."""
        options = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
        llm, stats = make_llm(subject.folder, blocked_plugins=OTHERS, **options)
        for _ in range(2):
            begin_together(llm, len(TEXTS))
            outputs = llm.generate(list(TEXTS), GREEDY, use_tqdm=False)
            for output in outputs:
                assert output.error_msg is None
                wanted = subject.reference.generate(list(output.prompt_token_ids), 12)
                assert list(output.outputs.token_ids) == wanted
        assert any(output.num_cached_tokens for output in outputs)
        assert max(step.num_scheduled_requests for step in stats.steps) > 1


@pytest.mark.full
class TestPhi3Long(AnyText, ModelVariantConformance):
    """Rotary factors that depend on the length; sequences up to 128 tokens use the short ones, and
    longer ones the long ones for all their tokens, as in transformers' generate."""

    @pytest.fixture(scope="class")
    @classmethod
    def name(cls):
        return "phi3_long"

    @pytest.mark.parametrize("blocked", [OTHERS, ()], ids=["transformers_any", "phi"])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"max_num_batched_tokens": 48},
            pytest.param({"speculative": "ngram"}, marks=pytest.mark.long),
        ],
        ids=str,
    )
    def test_sequences_grow_long(self, subject, make_llm, options, blocked):
        """Prompts of 60 to 200 tokens in one batch; some grow beyond 128 while they decode."""
        llm, _ = make_llm(subject.folder, block_size=8, blocked_plugins=blocked, **options)
        text = make_tokenizer().encode(" ".join(TEXTS) * 20)
        prompts = [text[:count] for count in (60, 100, 120, 127, 128, 129, 200)]
        wanted = {len(ids): subject.reference.generate(ids, 40) for ids in prompts}
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        for _ in range(2):  # then from the prefix cache
            found = llm.generate(
                [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
            )
            for ids, output in zip(prompts, found, strict=True):
                assert output.error_msg is None
                assert output.outputs.token_ids == wanted[len(ids)]


@pytest.mark.full
def test_longer_requests_say_why_not(make_llm, tmp_path):
    """PhiMoE's rotary embedding also has scales that depend on the length."""
    tokenizer = make_tokenizer()
    rope = {**ROPE, "short_factor": [1.1] * 8, "long_factor": [4.0] * 8}
    config = transformers.PhimoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=512,
        original_max_position_embeddings=128,
        rope_parameters={**rope, "short_mscale": 1.2, "long_mscale": 1.3},
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config.architectures = ["PhimoeForCausalLM"]
    write_checkpoint(config, tmp_path, tokenizer=tokenizer)
    llm, _ = make_llm(tmp_path)
    long, short = llm.generate(["a " * 200, TEXTS[0]], GREEDY, use_tqdm=False)
    assert long.error_code == 400
    assert "other rotary frequencies for sequences of more than 128 tokens" in long.error_msg
    assert short.error_msg is None


@pytest.mark.full
def test_a_head_that_returns_float32(make_llm, tmp_path):
    """Half precision is allowed its rounding whatever the dtype of the logits is. The model has no
    attention at all."""
    tokenizer = make_tokenizer()
    config = transformers.MambaConfig(
        vocab_size=len(tokenizer), hidden_size=64, state_size=8, num_hidden_layers=2
    )
    write_checkpoint(config, tmp_path, tokenizer=tokenizer)
    llm, _ = make_llm(tmp_path, dtype="bfloat16", max_model_len=64)
    (output,) = llm.generate(TEXTS[:1], GREEDY, use_tqdm=False)
    assert output.error_msg is None
    assert len(output.outputs.token_ids) == GREEDY.max_tokens


@pytest.mark.full
@pytest.mark.parametrize("blocked", [(), OTHERS])
def test_a_plugin_made_for_the_model_comes_first(make_llm, tmp_path, blocked):
    write("llama", tmp_path)
    llm, _ = make_llm(tmp_path, blocked_plugins=blocked)
    spec = llm.plugins.model_for(["LlamaForCausalLM"])
    assert spec.name == ("transformers_any" if blocked else "llama")
