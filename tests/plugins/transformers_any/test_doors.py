"""What a decoder takes besides embeddings, what its positions are counted from, and what its cache
copies: each by one door, which refuses what it does not know."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from mmdeploy_llm_plugins.transformers_any import ANY, media, structure, trial
from mmdeploy_llm_plugins.transformers_parts.cache import pages

from mmdeploy_llm.errors import MediaError, ModelNotSupportedError, RequestError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.testing.checkpoint import write_checkpoint
from mmdeploy_llm.testing.model_conformance import build

from .conftest import text_fields

PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 384, "head_dim": 16}


def gemma3n():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    fields = text_fields(layer_types=kinds, num_kv_shared_layers=0, laurel_rank=4, **PER_LAYER)
    fields |= {"activation_sparsity_pattern": [0.0] * 3, "intermediate_size": 96}
    return transformers.Gemma3nTextModel(transformers.Gemma3nTextConfig(**fields)).eval()


def test_embeddings_for_layers_are_made_of_ids():
    """Gemma 3n: embeddings and ids give what ids alone give."""
    torch.manual_seed(0)
    decoder, ids = gemma3n(), torch.tensor([[5, 9, 300, 7]])
    structure.check_decoder("Gemma3n", decoder)
    (name, make), *others = structure.makers(decoder).items()
    assert (name, others) == ("per_layer_inputs", [])
    with torch.inference_mode():
        wanted = decoder(input_ids=ids).last_hidden_state
        given = {"inputs_embeds": decoder.embed_tokens(ids), name: make(ids)}
        assert torch.equal(decoder(**given).last_hidden_state, wanted)


def test_a_method_that_needs_more_than_ids_is_refused():
    """Gemma 4's reads the embeddings too, and has other rules for media."""
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    with torch.device("meta"):
        decoder = transformers.Gemma4TextModel(
            transformers.Gemma4TextConfig(**text_fields(layer_types=kinds, **PER_LAYER))
        )
    assert structure.makers(decoder) == {}
    with pytest.raises(ModelNotSupportedError, match="takes per_layer_inputs besides"):
        structure.check_decoder("Gemma4", decoder)


class Canvas:
    """A model that counts positions from crops and the marks around them, as MiniCPM-V 4.7."""

    def get_rope_index(self, input_ids, mm_token_type_ids=None, target_sizes=None):
        assert target_sizes.tolist() == [[2, 3], [4, 5]]
        return torch.stack([input_ids, mm_token_type_ids, input_ids + 1]), None


def image_at(offset, **tensors):
    item = MediaInput(kind="image", tensors=tensors, num_tokens=2, key="k")
    return MediaSpan(offset=offset, item=item)


def test_positions_from_tokens():
    base = Canvas()
    assert media.counts_from_tokens(base)
    assert not media.counts_from_tokens(SimpleNamespace(get_rope_index=lambda ids: None))
    spans = [
        image_at(1, target_sizes=torch.tensor([[2, 3]])),
        image_at(4, target_sizes=torch.tensor([[4, 5]])),
    ]
    found = media.positions_of(base, (7, 1, 1, 8, 1, 1, 9), spans)
    assert found.tolist() == [
        [7, 1, 1, 8, 1, 1, 9],
        [0, 1, 1, 0, 1, 1, 0],
        [8, 2, 2, 9, 2, 2, 10],
    ]
    with pytest.raises(MediaError, match="sizes of an item's crops"):
        media.positions_of(base, (1, 1), [image_at(0)])


def test_copies_of_a_layer_have_places_of_their_own():
    """Dory's loops write to copies of the cache's layers."""
    places, memory = pages.Places(), trial.Memory()
    memory.begin(0, 2)
    cache = pages.sequence_cache([pages.Kept()] * 2, places, memory, 0, torch.arange(2))
    cache.layers += [copy.deepcopy(layer) for layer in cache.layers]
    rows = torch.arange(16.0).view(1, 1, 2, 8)
    for number, layer in enumerate(cache.layers):
        keys, _ = layer.update(rows + number, rows)
        assert torch.equal(keys, rows + number)
    assert len(places.index) == 4


class Failing(torch.nn.Module):
    """A model whose own forward fails, around a language model with a head, as Llama 4."""

    def __init__(self, inner):
        super().__init__()
        self.language_model = inner

    def forward(self, **_):
        raise AttributeError("no attribute 'image_outputs'")


def test_the_language_model_stands_in_for_a_forward_that_fails():
    torch.manual_seed(0)
    inner = transformers.LlamaForCausalLM(transformers.LlamaConfig(**text_fields())).eval()
    ids = torch.tensor([4, 5, 6])
    with torch.inference_mode():
        found = trial._own_logits(Failing(inner), inner.model, ids)
        assert torch.equal(found, inner(input_ids=ids[None]).logits[0])
        with pytest.raises(AttributeError, match="image_outputs"):
            trial._own_logits(Failing(inner.model), inner.model, ids)


ROBERTAS = {
    "Roberta": transformers.RobertaForCausalLM,  # lists its head after the embeddings
    "XLMRoberta": transformers.XLMRobertaForCausalLM,  # and before them
    "Xmod": transformers.XmodForCausalLM,
}


@pytest.mark.full
@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", ROBERTAS)
def test_roberta_counts_from_after_padding(tmp_path, name):
    """It counts as it was trained, up to the last position that it has."""
    kind = ROBERTAS[name]
    fields = text_fields(max_position_embeddings=12, num_hidden_layers=1, is_decoder=True)
    fields |= {"pad_token_id": 4, "architectures": [kind.__name__]}
    if name == "Xmod":
        fields |= {"languages": ["en_XX", "de_DE"], "default_language": "de_DE"}
    config = kind.config_class(**fields)
    write_checkpoint(config, tmp_path, architecture=kind.__name__)
    model = kind.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ours, ids = build(ANY, tmp_path, config, torch.float32), torch.arange(20, 27)
    assert structure.positions_of(model.base_model) == (5, 7)
    assert torch.equal(ours.parts.embed(ids), model.get_input_embeddings()(ids))
    memory, found = trial.Memory(), []
    with torch.inference_mode():
        wanted = model(input_ids=ids[None]).logits[0]
        if not ours.attends_itself:
            memory = trial.Whole()
            found = ours.logits(ours.forward(step_of(ids, 0, memory)))
            assert (found - wanted).abs().max() < 1e-4
    with pytest.raises(RequestError, match=r"has no positions .* more than 7 tokens"):
        ours.forward(step_of(ids[:1], 7, memory))


def step_of(ids, start, attn):
    return ForwardInputs(
        token_ids=ids,
        positions=torch.arange(start, start + len(ids)),
        in_prompt=torch.ones(len(ids), dtype=torch.bool),
        attn=attn,
    )


def test_positions_are_kept_with_the_keys_of_an_indexer():
    """Qwen4-Exp's indexer rotates keys anew, by the positions of all tokens."""
    places, memory = pages.Places(), trial.Memory()
    kept, earlier = [pages.Kept(has_indexer=True)], torch.tensor([[0, 1], [0, 70_000], [0, 5]])
    memory.begin(0, 2)
    layer = pages.sequence_cache(kept, places, memory, 0, earlier).layers[0]
    assert layer.indexer_position_ids is None
    layer.indexer_position_ids = earlier
    memory.begin(2, 3)
    layer = pages.sequence_cache(kept, places, memory, 0, torch.tensor([2])).layers[0]
    for _ in range(2):  # models ask twice
        assert torch.equal(layer.indexer_position_ids, earlier.unsqueeze(1))
    memory.begin(3, 4)
    layer = pages.sequence_cache(kept, places, memory, 0, torch.tensor([3])).layers[0]
    assert layer.indexer_position_ids[:, 0].tolist() == [[0, 1, 2], [0, 70_000, 2], [0, 5, 2]]


def test_token_ids_themselves_are_an_argument():
    class Decoder(torch.nn.Module):
        def forward(self, inputs_embeds=None, position_ids=None, ple_input_ids=None):
            """Takes what Qwen4-Exp's does."""

    ids = torch.tensor([[5, 9]])
    structure.check_decoder("Qwen4Exp", Decoder())
    ((name, make),) = structure.makers(Decoder()).items()
    assert name == "ple_input_ids"
    assert torch.equal(make(ids), ids)
