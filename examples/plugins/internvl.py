"""InternVL 3 and 3.5 as a plugin of one file: tiles of an image, a plain vision transformer, pixel
shuffle, an MLP, and a Qwen decoder."""

from dataclasses import replace

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl

# From the published names, and those of transformers' modules, to those of the layers.
RENAMES = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(model\.)?language_model\.(model\.)?", "model."),
    (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"^multi_modal_projector\.layer_norm\.", "projector_norm."),
    (r"^multi_modal_projector\.linear_", "projector.fc"),
    (r"^vision_tower\.embeddings\.patch_embeddings\.projection\.", "visual.patch_embed.proj."),
    (r"^vision_tower\.embeddings\.cls_token$", "visual.class_token"),
    (r"^vision_tower\.embeddings\.position_embeddings$", "visual.positions"),
    (r"^vision_tower\.layernorm\.", "norm."),
    (r"^vision_tower\.encoder\.layer\.", "visual.blocks."),
    (r"^(visual\.blocks\.\d+)\.lambda_", r"\1.scale"),
    (r"^(visual\.blocks\.\d+)\.layernorm_before\.", r"\1.norm1."),
    (r"^(visual\.blocks\.\d+)\.layernorm_after\.", r"\1.norm2."),
    (r"^(visual\.blocks\.\d+)\.attention\.projection_layer\.", r"\1.attn.proj."),
    (r"^(visual\.blocks\.\d+)\.attention\.", r"\1.attn."),
)
IGNORED = (r"rotary_emb\.inv_freq$", r"\.mask_token$")  # of pre-training


@hookimpl
def provide_models():
    """Lists the family. Whoever lists plugins imports this file, so torch is imported below."""
    return [
        ModelSpec(
            name="internvl-of-one-file",
            architectures=("InternVLForConditionalGeneration",),
            factory=f"{__name__}:build",
            media=("image",),
            deterministic=True,
            priority=1,  # the built-in plugin serves it at 0
        )
    ]


@hookimpl
def provide_media_processors():
    """Lists the processor of images."""
    return [
        MediaProcessorSpec(
            name="internvl-of-one-file-image",
            kind="image",
            factory=f"{__name__}:images",
            models=("internvl-of-one-file",),
        )
    ]


def sizes(config):
    """Returns the pixels of a tile's side and of a patch's, and the patches of a token's side."""
    vision = config.vision_config
    side, patch = (
        size[0] if isinstance(size, list | tuple) else size
        for size in (vision.image_size, vision.patch_size)
    )
    return side, patch, round(1 / config.downsample_ratio)


def images(checkpoint, options):
    """Builds the processor of images."""
    import numpy as np
    from mmdeploy_llm_processors.sized import PictureProcessor, Prepared

    from mmdeploy_llm.media import CLIP_MEAN, CLIP_STD, PatchOptions, tile_grid, tiles

    side, patch, merge = sizes(checkpoint.config)

    class Tiles(PictureProcessor):
        """Square tiles with nearly the image's aspect, and a thumbnail, between two marks."""

        token = "<IMG_CONTEXT>"
        markers = (token,)
        bounds = ("max_patches",)  # transformers' name of the number of tiles
        item_options = ("min_patches", "max_patches", "crop_to_patches")
        from_file = ("min_patches", "max_patches", "image_mean", "image_std")
        defaults = {"min_patches": 1, "max_patches": 12, "crop_to_patches": True}
        defaults |= {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}

        def grid(self, size, settings):
            """Returns the columns and rows of tiles of an image of (width, height)."""
            if not settings["crop_to_patches"] or settings["max_patches"] == 1:
                return 1, 1
            least, most = settings["min_patches"], settings["max_patches"]
            return tile_grid(size, side, min_tiles=least, max_tiles=most)

        def text(self, size, settings):
            """Returns the text of an image, whose tiles have the same number of tokens each."""
            columns, rows = self.grid(size, settings)
            count = columns * rows + (columns * rows > 1)
            return f"<img>{self.token * count * (side // patch // merge) ** 2}</img>"

        def prepare(self, image, settings):
            """Returns the patch rows of all tiles, in blocks of those that become one token."""
            own = {name: settings[name] for name in ("image_mean", "image_std")}
            patches = PatchOptions(patch_size=patch, merge_size=merge, **own)
            found = tiles(image, self.grid(image.size, settings), side)
            rows = np.concatenate([self.patchify(tile, patches) for tile in found])
            return Prepared(tensors={"pixels": rows}, text=self.text(image.size, settings))

    return Tiles(checkpoint, options)


def build(config):
    """Builds the model of a config of transformers."""
    import torch
    from torch import nn

    from mmdeploy_llm.layers import MLP, CausalLM, LayerNorm, PlainVisionEncoder, vision_activation
    from mmdeploy_llm.weights.map import WeightMap

    class InternVL(CausalLM):
        """The tower, the projector and the decoder."""

        def __init__(self):
            text, tower = decoder_of(config), tower_of(config)
            super().__init__(text)
            self.visual = PlainVisionEncoder(tower)
            has_norm = not config.vision_config.use_mean_pooling
            self.norm = LayerNorm(tower.size, tower.norm_eps) if has_norm else nn.Identity()
            self.merged_size = tower.size * tower.merge_size**2
            self.projector_norm = LayerNorm(self.merged_size, 1e-5)
            activation = vision_activation(config.projector_hidden_act)
            hidden = config.text_config.hidden_size
            self.projector = MLP(self.merged_size, hidden, hidden, activation)
            ignored = (*IGNORED, r"(^|\.)lm_head\.") if text.is_tied else IGNORED
            self.weight_map = WeightMap(self, renames=RENAMES, ignored=ignored)

        def encode_media(self, items):
            """Returns [num_tokens, hidden] for each item; all tiles are computed together."""
            device = self.model.embed_tokens.weight.device
            x = self.visual(torch.cat([item.tensors["pixels"].to(device) for item in items]))
            merged = self.norm(x).reshape(-1, self.merged_size)  # pixel shuffle: rows are in blocks
            rows = self.projector(self.projector_norm(merged))
            return torch.split(rows, [item.num_tokens for item in items])

    return InternVL()


def decoder_of(config):
    """Returns the options of the decoder: Qwen2 in version 3, Qwen3 in version 3.5."""
    from mmdeploy_llm.layers import standard_decoder

    text, is_qwen2 = config.text_config, config.text_config.model_type == "qwen2"
    is_tied = config.tie_word_embeddings and getattr(text, "tie_word_embeddings", False)
    decoder = replace(standard_decoder(text, own=()), is_tied=is_tied, qk_norm=not is_qwen2)
    return replace(decoder, qkv_bias=True) if is_qwen2 else decoder


def tower_of(config):
    """Returns the options of the vision transformer."""
    from mmdeploy_llm.layers import PlainVisionConfig

    vision, (side, patch, merge) = config.vision_config, sizes(config)
    return PlainVisionConfig(
        size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_layers=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        image_side=side // patch,
        merge_size=merge,
        patch_size=patch,
        norm=vision.norm_type,
        norm_eps=vision.layer_norm_eps,
        activation=vision.hidden_act,
        attention_bias=vision.attention_bias,
        has_class_token=True,
        qk_norm_eps=1e-6 if vision.use_qk_norm else None,
        has_layer_scale=True,
    )
