"""A model that cannot run says why in one sentence that names the layer, before weights are read
where that is possible."""

import re

import pytest
import torch
import transformers
from jinja2 import Template
from mmdeploy_llm_plugins.transformers_any import ATOMIC, provide_models
from mmdeploy_llm_plugins.transformers_any.mechanisms import RECOMPUTED, REPEATED
from mmdeploy_llm_plugins.transformers_any.mixing import NUM_TOKENS, check_mixing
from mmdeploy_llm_plugins.transformers_any.model import AnyModel
from mmdeploy_llm_plugins.transformers_any.trial import Whole
from torch import nn
from transformers.core_model_loading import Interleave, WeightConverter

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import CheckpointError, ConfigError, ModelNotSupportedError
from mmdeploy_llm.testing.checkpoint import write_checkpoint
from mmdeploy_llm.testing.tiny import make_tokenizer

FIELDS = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
REFUSED = {
    "both directions": ("Bert", {}, r"encoder\.layer\.0\.attention\.self .* is not causal"),
    "an encoder": ("Bart", {}, r"its decoder attends to an encoder"),
    "boxes of words": (
        "Udop",
        {},
        r"its encoder reads words with their boxes .* \(bbox\)",
    ),
}
ARCHITECTURES = {
    "Bert": "BertLMHeadModel",
    "Llama4Text": "Llama4ForCausalLM",
    "Udop": "UdopForConditionalGeneration",
}


def on_meta(config):
    with torch.device("meta"):
        return AnyModel(config)


def config_of(kind, **fields):
    config = getattr(transformers, f"{kind}Config")(**{**FIELDS, **fields})
    config.architectures = [ARCHITECTURES.get(kind, f"{kind}ForCausalLM")]
    return config


@pytest.mark.full
@pytest.mark.parametrize("case", REFUSED)
def test_the_layer_is_named(case):
    kind, fields, message = REFUSED[case]
    with pytest.raises(ModelNotSupportedError, match=message) as refused:
        on_meta(config_of(kind, **fields))
    text = str(refused.value)
    assert text.startswith("transformers_any cannot run ")
    assert text.endswith("use a plugin made for this model")
    assert ". " not in text  # one sentence


@pytest.mark.full
def test_media_that_see_each_other_need_an_atomic_spec(monkeypatch):
    config = transformers.Gemma3Config(text_config=FIELDS, vision_config={"num_hidden_layers": 1})
    config.architectures = ["Gemma3ForConditionalGeneration"]
    assert on_meta(config).num_layers == 4
    monkeypatch.setattr("mmdeploy_llm_plugins.transformers_any.together.ATOMIC", ())
    with pytest.raises(ModelNotSupportedError, match="makes masks of its own for media"):
        on_meta(config)


def test_atomic_architectures_have_a_spec_with_atomic_media():
    specs = [spec for spec in provide_models() if spec.atomic_media]
    assert tuple(name for spec in specs for name in spec.architectures) == ATOMIC


def test_a_spec_with_a_question_has_a_template():
    """Its checkpoints have none, and a batch asks the question in a conversation."""
    asked = {spec.question: spec for spec in provide_models() if spec.question}
    assert {*asked} == {"caption en", "a photo of", "An image of"}
    for spec in asked.values():
        message = {"content": [{"type": "image"}, {"type": "text", "text": spec.question}]}
        written = Template(spec.chat_template).render(messages=[message])
        assert written == f"<image>{spec.question}"


@pytest.mark.full
def test_features_for_layers_widen_the_embeddings_of_media():
    config = transformers.Qwen3VLConfig(
        text_config={**FIELDS, "head_dim": 8},
        vision_config={"depth": 1, "deepstack_visual_indexes": [0, 0]},
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    model = on_meta(config)
    assert model.media_size == 3 * model.hidden_size


@pytest.mark.full
def test_a_decoder_that_takes_types_of_tokens():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = transformers.Ernie4_5_VLMoeConfig(
        text_config={**FIELDS, "rope_parameters": rope}, vision_config={"depth": 1}
    )
    config.architectures = ["Ernie4_5_VLMoeForConditionalGeneration"]
    with pytest.raises(ModelNotSupportedError, match="takes moe_mm_token_type_ids besides"):
        on_meta(config)


@pytest.mark.parametrize("name", ["NoSuchForCausalLM", "AutoConfig", ""])
def test_an_unknown_architecture(name):
    config = config_of("Llama")
    config.architectures = [name]
    with pytest.raises(ModelNotSupportedError, match="has no model class"):
        on_meta(config)


def test_a_model_without_a_head():
    config = config_of("Llama")
    config.architectures = ["LlamaModel"]
    with pytest.raises(ModelNotSupportedError, match="has no head that gives logits"):
        on_meta(config)


def test_a_config_that_transformers_refuses():
    config = config_of("Llama", num_attention_heads=4)
    config.hidden_act = "nonsense"
    with pytest.raises(ModelNotSupportedError, match="cannot make LlamaForCausalLM from this"):
        on_meta(config)


def build_as(architecture, config):
    """Builds the model of a class that transformers does not have."""
    config.architectures = [architecture.__name__]
    setattr(transformers, architecture.__name__, architecture)
    try:
        return on_meta(config)
    finally:
        delattr(transformers, architecture.__name__)


class Layer(nn.Module):
    """shift: how much of the previous token is added, as in a convolution."""

    def __init__(self, shift):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shift = shift

    def forward(self, x):
        return x * self.scale + self.shift * torch.roll(x, 1, dims=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_tokens_that_meet_elsewhere_are_found_on_the_weights(shift, dtype):
    decoder = nn.Module()
    decoder.layers = nn.ModuleList([Layer(0.0), Layer(shift), Layer(0.0)]).to(dtype)

    def forward(x):
        assert x.shape == (NUM_TOKENS, 8)
        for layer in decoder.layers:
            x = layer(x)

    if shift:
        with pytest.raises(ModelNotSupportedError, match=r"layers\.1 \(Layer\) mixes tokens"):
            check_mixing("Model", decoder, 8, forward)
    else:
        check_mixing("Model", decoder, 8, forward)


@pytest.mark.full
def test_a_convolution_next_to_attention_is_found_when_the_model_is_loaded(
    tmp_path, monkeypatch, caplog
):
    """Nothing in the config reveals it, and every layer has attention. Sequences are then computed
    again at each step, which the log says with the layer."""
    forward = transformers.models.llama.modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(
        "transformers.models.llama.modeling_llama.LlamaMLP.forward",
        lambda self, x: forward(self, x) + torch.roll(x, 1, dims=1),
    )
    tokenizer = make_tokenizer()
    config = transformers.LlamaConfig(**{**FIELDS, "vocab_size": len(tokenizer)})
    write_checkpoint(config, tmp_path, tokenizer=tokenizer)
    with LLM(model=str(tmp_path), blocked_plugins=("llama",), num_threads=1) as llm:
        assert {REPEATED, RECOMPUTED} & set(llm.model.mechanisms)
    assert re.search(r"layers\.0 \(LlamaDecoderLayer.*mixes", caplog.text)


def test_a_conversion_that_computes_is_named():
    config = config_of("Llama")
    model = on_meta(config)
    model._weights._converters = [
        WeightConverter("fused.weight", "mlp.down_proj.weight", [Interleave(dim=0)])
    ]
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.0\.fused\.weight needs .*Interleave"
    ):
        model.weight_targets("model.layers.0.fused.weight")


LLAVA = "transformers.models.llava_onevision.modeling_llava_onevision.LlavaOnevisionModel"


@pytest.mark.full
def test_what_is_done_around_the_decoder_is_found_on_the_weights(reference_of, monkeypatch):
    """The model around the decoder scales the embeddings; no layer shows it."""
    folder = reference_of("llava_onevision").folder
    base = transformers.LlavaOnevisionModel
    forward = base.forward

    def scaled(self, input_ids=None, inputs_embeds=None, **kwargs):
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids) * 3
        return forward(self, inputs_embeds=inputs_embeds, **kwargs)

    monkeypatch.setattr(f"{LLAVA}.forward", scaled)
    with pytest.raises(ModelNotSupportedError, match="its logits differ from those of"):
        LLM(model=str(folder), num_threads=1)


@pytest.mark.full
def test_a_forward_that_needs_more_than_text_is_logged(reference_of, make_llm, monkeypatch, caplog):
    folder = reference_of("llava_onevision").folder

    def choosy(self, **kwargs):
        raise ValueError("where is the image?")

    monkeypatch.setattr(f"{LLAVA}.forward", choosy)
    make_llm(folder)
    assert "was not compared with transformers' own forward" in caplog.text
    assert "where is the image?" in caplog.text


def test_the_trial_attends_as_transformers_does():
    """The attention of the trial applies scale, window and soft cap."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(6, heads, 8, generator=generator) for heads in (4, 2, 2))
    found = Whole().attend(0, q, k, v, scale=0.5, window=3, softcap=2.0)
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    for token in range(6):
        seen = slice(max(0, token - 2), token + 1)
        scores = torch.einsum("hd,khd->hk", q[token], keys[seen]) * 0.5
        weights = (2.0 * torch.tanh(scores / 2.0)).softmax(-1)
        wanted = torch.einsum("hk,khd->hd", weights, values[seen])
        torch.testing.assert_close(found[token], wanted)


def test_a_config_without_positions(tmp_path):
    """Biases of the scores have no longest sequence, so the user states one."""
    tokenizer = make_tokenizer()
    config = transformers.BloomConfig(
        vocab_size=len(tokenizer), hidden_size=32, n_layer=2, n_head=4, eos_token_id=1
    )
    folder = write_checkpoint(config, tmp_path, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="does not say how long a sequence may be"):
        LLM(model=str(folder))
    with LLM(model=str(folder), max_model_len=64) as llm:
        assert llm.generate(["a b"], use_tqdm=False)[0].error_msg is None


@pytest.mark.full
@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"attention_backend": "native"},
            "attention_backend = 'native' does not run a model that",
        ),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype = 'int8' is not possible with a model"),
    ],
)
def test_options_that_need_attention_of_the_engine(falcon, option, message):
    with pytest.raises(ConfigError, match=message):
        LLM(model=str(falcon), blocked_plugins="decoders", **option)


@pytest.fixture(scope="module")
def falcon(tmp_path_factory):
    """A model that computes its attention itself."""
    config = config_of("Falcon", vocab_size=len(make_tokenizer()))
    return write_checkpoint(config, tmp_path_factory.mktemp("falcon"))


@pytest.mark.full
def test_a_cache_that_forgets_what_attention_sees(tmp_path):
    """Moshi's cache has a window, its attention none: beyond the window, tokens would depend on the
    steps in which they came."""
    tokenizer = make_tokenizer()
    config = config_of(
        "Moshi", vocab_size=len(tokenizer), sliding_window=16, ffn_dim=48, head_dim=8
    )
    folder = write_checkpoint(config, tmp_path, tokenizer=tokenizer)
    with LLM(model=str(folder)) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        short, long = llm.generate([[5] * 10, [5] * 20], params, use_tqdm=False)
    assert short.error_msg is None
    assert "sees other tokens in transformers' cache" in long.error_msg
    assert "set max_model_len=16" in long.error_msg


@pytest.mark.full
def test_a_model_that_views_the_result_of_attention(tmp_path):
    config = config_of(
        "Afmoe",
        vocab_size=len(make_tokenizer()),
        moe_intermediate_size=16,
        num_dense_layers=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    folder = write_checkpoint(config, tmp_path)
    with LLM(model=str(folder)) as llm:
        (output,) = llm.generate(["a b"], use_tqdm=False)
    assert output.error_code == 200


@pytest.mark.full
def test_an_error_of_the_model_on_its_weights(tmp_path, monkeypatch):
    config = config_of("Olmo", vocab_size=len(make_tokenizer()))
    folder = write_checkpoint(config, tmp_path)

    def fail(self, device):
        raise RuntimeError("odd sizes")

    monkeypatch.setattr(AnyModel, "init_buffers", fail)
    with pytest.raises(ModelNotSupportedError, match=r"cannot run.*RuntimeError: odd sizes"):
        LLM(model=str(folder), blocked_plugins=("decoders",))
