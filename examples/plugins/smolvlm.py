"""SmolVLM as a plugin of one file: transformers' image processor on Pillow, a SigLIP tower, pixel
shuffle with one linear layer, and the decoder of Llama. Images only."""

from dataclasses import replace

import torch
from mmdeploy_llm_processors.from_transformers import TransformersImages

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl
from mmdeploy_llm.layers import (
    CausalLM,
    LayerNorm,
    Linear,
    PlainVisionConfig,
    PlainVisionEncoder,
    in_blocks,
    standard_decoder,
)
from mmdeploy_llm.weights.map import WeightMap

RENAMES = (  # from their names to those of the layers
    (r"^model\.text_model\.", "model."),
    (r"^model\.connector\.modality_projection\.proj\.", "projector."),
    (r"^model\.vision_model\.post_layernorm\.", "tower_norm."),
    (r"^model\.vision_model\.", "visual."),
    (r"^visual\.embeddings\.patch_embedding\.", "visual.patch_embed.proj."),
    (r"^visual\.embeddings\.position_embedding\.weight", "visual.positions"),
    (r"^visual\.encoder\.layers\.", "visual.blocks."),
    (r"^(visual\.blocks\.\d+)\.layer_norm", r"\1.norm"),
    (r"^(visual\.blocks\.\d+)\.self_attn\.out_proj\.", r"\1.attn.proj."),
    (r"^(visual\.blocks\.\d+)\.self_attn\.", r"\1.attn."),
)


@hookimpl
def provide_models():
    """Lists the family."""
    return [
        ModelSpec(
            name="smolvlm",
            architectures=("SmolVLMForConditionalGeneration",),
            factory=f"{__name__}:SmolVLM",
            media=("image",),
        )
    ]


@hookimpl
def provide_media_processors():
    """Lists the processor of images."""
    factory = f"{__name__}:Tiles"
    return [MediaProcessorSpec(name="smolvlm", kind="image", factory=factory, models=("smolvlm",))]


class Tiles(TransformersImages):
    """An image is rows and columns of tiles and a small copy, each after a mark of its own."""

    token = "<image>"
    markers = (token,)
    fields = {"return_row_col_info": True}
    item_options = ("do_image_splitting",)

    def __init__(self, checkpoint, options):
        vision = checkpoint.config.vision_config
        self.tile_tokens = (
            vision.image_size // vision.patch_size // checkpoint.config.scale_factor
        ) ** 2
        super().__init__(checkpoint, options)

    def num_tokens(self, made):
        """Returns the tokens of all tiles."""
        return made["pixel_values"].shape[1] * self.tile_tokens

    def written(self, made):
        """Returns the text of an image, as SmolVLM's processor writes it."""
        around, tile = "<fake_token_around_image>", self.token * self.tile_tokens
        (rows,), (columns,) = made["rows"][0], made["cols"][0]
        text = ""
        for row in range(1, int(rows) + 1):
            for column in range(1, int(columns) + 1):
                text += f"{around}<row_{row}_col_{column}>{tile}"
            text += "\n"
        return f"{text}{chr(10) if text else ''}{around}<global-img>{tile}{around}"


class SmolVLM(CausalLM):
    """The tower, the projector and the decoder."""

    def __init__(self, config):
        text = standard_decoder(config.text_config, own=())
        super().__init__(replace(text, is_tied=config.tie_word_embeddings))
        vision, self.merge = config.vision_config, config.scale_factor
        self.patch, self.side = vision.patch_size, vision.image_size // vision.patch_size
        tower = PlainVisionConfig(
            size=vision.hidden_size,
            intermediate_size=vision.intermediate_size,
            num_layers=vision.num_hidden_layers,
            num_heads=vision.num_attention_heads,
            image_side=self.side,
            merge_size=self.merge,
            patch_size=self.patch,
            norm_eps=vision.layer_norm_eps,
            activation=vision.hidden_act,
        )
        self.visual = PlainVisionEncoder(tower)
        self.tower_norm = LayerNorm(tower.size, tower.norm_eps)
        self.merged_size = tower.size * self.merge**2
        self.projector = Linear(self.merged_size, self.hidden_size)
        ignored = ("lm_head",) if self.lm_head is None else ()
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=ignored)

    def encode_media(self, items):
        """Returns [num_tokens, hidden] for each item; all tiles are computed together."""
        weight = self.projector.weight
        tiles = torch.cat([item.tensors["pixel_values"][0] for item in items]).to(weight)
        x = self.visual(torch.cat([self.patches(tile) for tile in tiles]))
        rows = self.projector(self.tower_norm(x).reshape(-1, self.merged_size))  # pixel shuffle
        return torch.split(rows, [item.num_tokens for item in items])

    def patches(self, tile):
        """Returns the patches of a tile [3, height, width] as rows, in blocks of those that become
        one token."""
        rows = tile.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        rows = rows.permute(1, 2, 0, 3, 4).reshape(self.side**2, -1)
        return in_blocks(rows, self.side, self.merge)
