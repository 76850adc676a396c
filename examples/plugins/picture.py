"""An image processor as a plugin of one file: an image is shrunk to fit into a square, and each of
its patches is a token, with a mark after each row."""

from mmdeploy_llm.hooks import MediaProcessorSpec, hookimpl


@hookimpl
def provide_media_processors():
    """Lists the processor, for the model `acme`."""
    return [
        MediaProcessorSpec(
            name="acme-image", kind="image", factory=f"{__name__}:images", models=("acme",)
        )
    ]


def images(checkpoint, options):
    """Builds the processor; torch and Pillow are imported here, not where plugins are listed."""
    from mmdeploy_llm_processors.sized import PictureProcessor, Prepared

    from mmdeploy_llm.media import PatchOptions, resize

    class Images(PictureProcessor):
        token = "<image>"
        markers = (token,)
        defaults = {"max_side": 448, "patch_size": 14}
        from_file = ("patch_size",)  # of the checkpoint's preprocessor_config.json
        item_options = ("max_side",)  # that one prompt or image may set
        bounds = ("max_side",)  # which image_tokens lowers

        def prepare(self, image, settings):
            patch = settings["patch_size"]
            shrink = min(1.0, settings["max_side"] / max(image.size))
            columns, rows = (max(1, round(side * shrink / patch)) for side in image.size)
            pixels = resize(image, rows * patch, columns * patch)
            patches = self.patchify(pixels, PatchOptions(patch_size=patch))
            row = self.token * columns + "<row>"
            return Prepared(tensors={"pixels": patches}, text=row * rows, grid=(1, rows, columns))

    return Images(checkpoint, options)
