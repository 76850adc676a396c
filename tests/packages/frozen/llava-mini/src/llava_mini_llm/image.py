"""An image is a square."""

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm_processors.image.options import ImageOptions
from mmdeploy_llm_processors.image.patches import resize
from mmdeploy_llm_processors.image.tiling.tile_processor import SquareTileProcessor
from mmdeploy_llm_processors.image.tiling.tiles import TileOptions, resolve_pixels

HALF = (0.5, 0.5, 0.5)


class Images(SquareTileProcessor):
    token = "<image>"
    markers = ("<image>",)

    def __init__(self, checkpoint, options):
        vision = checkpoint.config.vision_config
        side, patch = vision.image_size, vision.patch_size
        default = ImageOptions(
            min_pixels=side**2,
            max_pixels=side**2,
            patch_size=patch,
            merge_size=1,
            image_mean=HALF,
            image_std=HALF,
        )
        pixels = resolve_pixels(default, checkpoint.preprocessor, options, ())
        super().__init__(TileOptions(pixels=pixels, side=side, is_tiled=False))

    def own_options(self, given):
        if given:
            raise MediaError(f"an image of this model has no options, got {', '.join(given)}")
        return self.options

    def num_tiles(self, size, options):
        return 1

    def tiles(self, image, options):
        yield resize(image, options.side, options.side, options.pixels)

    def text(self, num_tiles):
        return self.token * self.tokens_of_tile * num_tiles
