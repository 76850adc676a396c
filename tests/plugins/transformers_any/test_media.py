"""Embeddings of media are what the model returns, in rows of its size, or an error."""

from types import SimpleNamespace

import pytest
import torch
from mmdeploy_llm_plugins.transformers_any import media

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import MediaInput, MediaSpan

PIXELS = torch.arange(6.0).view(1, 3, 2)
ITEM = MediaInput(
    kind="image", tensors={"pixel_values": PIXELS, "other": PIXELS}, num_tokens=3, key="k"
)


class Model:
    """A model of hidden size 2; returns `found` for pixels."""

    def __init__(self, found):
        self.found = found

    def get_input_embeddings(self):
        return torch.nn.Embedding(4, 2)

    def get_image_features(self, pixel_values, return_dict):
        return self.found


@pytest.mark.parametrize("found", [PIXELS, [PIXELS[:, :1], PIXELS[:, 1:]]])
def test_rows_of_all_tiles(found):
    model = Model(SimpleNamespace(pooler_output=found))
    assert torch.equal(media.encode("M", model, None, ITEM), PIXELS[0])


@pytest.mark.parametrize("pair", [lambda x: x, lambda x: (1, x)])
def test_features_for_layers_are_further_columns(pair):
    found = SimpleNamespace(pooler_output=None, deepstack_features=[pair(PIXELS), pair(2 * PIXELS)])
    rows = media.encode("M", Model(None), Model(found), ITEM)
    assert torch.equal(rows, torch.cat([0 * PIXELS[0], PIXELS[0], 2 * PIXELS[0]], 1))


@pytest.mark.parametrize("found", [{"pixels": PIXELS}, torch.zeros(1, 3, 4), None])
def test_other_results_are_refused(found):
    with pytest.raises(MediaError, match="does not return the embeddings of the image's tokens"):
        media.encode("M", Model(found), None, ITEM)


def test_features_of_the_rows_of_one_sequence():
    config = SimpleNamespace(deepstack_layer_map=[[7, 0], [8, 2]], spatial_target_layers=[2])
    embeds = torch.arange(16.0).view(2, 8)
    inputs = ForwardInputs(
        token_ids=torch.zeros(6, dtype=torch.int64),
        positions=torch.arange(6),
        in_prompt=torch.ones(6, dtype=torch.bool),
        attn=None,
        media_rows=torch.tensor([1, 4]),
        media_embeds=embeds,
    )
    given = media.features(config, inputs, 2, 3, 6)
    assert given["vision_mask"].tolist() == [[[False], [True], [False]]]
    assert {k: v.tolist() for k, v in given["deepstack_features"].items()} == {
        0: [[10.0, 11.0]],
        2: [[14.0, 15.0]],  # the last of a layer counts, as in transformers
    }


def test_positions_need_a_grid():
    base = SimpleNamespace(get_rope_index=lambda ids, mm_token_type_ids, image_grid_thw: None)
    with pytest.raises(MediaError, match=r"\(a grid of patches\)"):
        media.positions(base, 4, [MediaSpan(offset=0, item=ITEM)])
