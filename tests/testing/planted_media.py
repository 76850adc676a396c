"""Bugs planted in the built-in media processors, by replacing what they call.

A plant takes the class of the processor and a function `put(owner, name, value)`; most wrap the one
method or function that a hurried author would have got wrong.
"""

import dataclasses
import threading
import time
from pathlib import Path

import mmdeploy_llm_plugins.internvl.image as internvl
import mmdeploy_llm_processors.image.processor as of_patches
import numpy as np
import torch
from PIL import Image, ImageFile

import mmdeploy_llm.media.image.decode as decode
import mmdeploy_llm.media.image.files as files
import mmdeploy_llm.media.pixels.patches as patches
import mmdeploy_llm.media.video.container as container
from mmdeploy_llm.media.image.decode import ImageDecoder

PART = 2**16  # bytes that a digest of a part reads


def wrapped(owner, name, change):
    """Returns a plant that replaces a function by change(the function)."""
    return lambda cls, put: put(owner, name, change(getattr(owner, name)))


def method(name, change):
    """The same for a method of the processor's class."""
    return lambda cls, put: put(cls, name, change(getattr(cls, name)))


def result(**fields):
    """Changes fields of what `process` returns; each value is a function of the field."""

    def change(process):
        def changed(self, item, options):
            made = process(self, item, options)
            new = {name: value(getattr(made, name)) for name, value in fields.items()}
            return dataclasses.replace(made, **new)

        return changed

    return method("process", change)


def pixels(change):
    return result(tensors=lambda tensors: {**tensors, "pixels": change(tensors["pixels"])})


def constant(**attributes):
    def plant(cls, put):
        for name, value in attributes.items():
            put(cls, name, value)

    return plant


def built(extra):
    """Does something more when the processor is built."""

    def change(build):
        def changed(self, checkpoint, options):
            build(self, checkpoint, options)
            extra(self)

        return changed

    return method("__init__", change)


def unnormalised(table):
    return lambda options: table(dataclasses.replace(options, do_normalize=False))


def one_deviation(table):
    """Divides all channels by the deviation of the first."""
    return lambda options: table(
        dataclasses.replace(options, image_std=(options.image_std[0],) * 3)
    )


def nearest(_):
    def resize(image, height, width, options):
        return np.asarray(image.resize((width, height), Image.Resampling.NEAREST))

    return resize


def bilinear(_):
    def resize(image, height, width, options):
        return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))

    return resize


def cropped(_):
    """Cuts out the middle in place of resizing."""

    def resize(image, height, width, options):
        return np.asarray(image.crop((0, 0, width, height)))

    return resize


def of_a_part(digest):
    return lambda form, data: digest(form, bytes(data)[:PART])


def of_some_pixels(_):
    return lambda image: files.digest_of(b"pixels", image.tobytes()[:PART])


def of_last_pixels(_):
    return lambda image: files.digest_of(b"pixels", image.tobytes()[-PART:])


def without_size(_):
    return lambda image: files.digest_of(b"pixels", image.tobytes())


def of_a_part_of_a_frame(_):
    return lambda self, source, limits: files.digest_of(b"", np.asarray(source).tobytes()[:PART])


def of_the_engine(method_of):
    """Makes the key of the engine's options whatever the item's are."""
    return lambda self, digest, options: method_of(self, digest, self.options)


def without_normalisation(method_of):
    def key(self, digest, options):
        return method_of(self, digest, dataclasses.replace(options, do_normalize=True))

    return key


def without_budget(method_of):
    def key(self, digest, options):
        own = {"max_tokens": None, "min_pixels": 1, "max_pixels": 2}
        return method_of(self, digest, dataclasses.replace(options, **own))

    return key


def no_options(count):
    return lambda self, item, options: count(self, item, {})


def unchecked(_):
    return lambda *_, **__: None


def below(_):
    """Takes the limit for the first number that is too many."""

    def check(blob, kind, limits):
        limits.check_bytes(len(blob) + 1, kind)

    return check


def loaded_first(open_file):
    """Checks the size of an image that is decoded already."""

    def open_and_load(blob, limits):
        head = dataclasses.replace(limits, max_pixels=2**60)
        image = open_file(blob, head)
        if image.format == "PNG" and image.size[0] * image.size[1] < 2**29:
            image.load()
            image.convert("RGB")
        files.check_pixels(image.size, limits)
        return image

    return open_and_load


def raw_errors(_):
    class Raw:
        def __init__(self, image):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *_):
            return False

    return Raw


def reads_paths(read):
    def changed(self, source, limits):
        if isinstance(source, str | Path) and not str(source).startswith("file:"):
            source = Path(source).read_bytes()
        return read(self, source, limits)

    return changed


def reads_paths_by_name(read):
    """Compares names with the root, and follows links."""

    def changed(self, source, limits):
        if isinstance(source, Path) and source.is_relative_to(limits.allowed_root or "/"):
            source = source.read_bytes()
        return read(self, source, limits)

    return changed


def larger(peek):
    def changed(self, source, limits):
        found = peek(self, source, limits)
        return dataclasses.replace(found, size=(found.size[0] + 60, found.size[1]))

    return changed


def in_self(process):
    def changed(self, item, options):
        self.item = item
        time.sleep(0)
        return process(self, self.item, options)

    return changed


def counting(process):
    """Numbers the items that it has seen."""

    def changed(self, item, options):
        self.count = getattr(self, "count", 0) + 1
        made = process(self, item, options)
        return dataclasses.replace(made, key=f"{made.key}-{self.count}")

    return changed


def in_place(read):
    def changed(self, source, limits):
        if isinstance(source, np.ndarray) and source.flags.writeable:
            source //= 2
        return read(self, source, limits)

    return changed


def item_in_place(process):
    def changed(self, item, options):
        made = process(self, item, options)
        item.image.paste((0, 0, 0), (0, 0, 9, 9))
        return made

    return changed


def thread_of(self):
    threading.Thread(target=time.sleep, args=(9,), daemon=True, name="prefetch").start()


def allow_truncated(self):
    ImageFile.LOAD_TRUNCATED_IMAGES = not ImageFile.LOAD_TRUNCATED_IMAGES


def seed(self):
    torch.manual_seed(0)


def swapped(texts):
    def changed(checkpoint, defaults):
        found = dict(texts(checkpoint, defaults))
        names = ("start_image_token", "end_image_token")
        if names[0] in found:
            found[names[0]], found[names[1]] = found[names[1]], found[names[0]]
        return found

    return changed


def stripped(text):
    return lambda self, num_tiles: text(self, num_tiles).strip()


def one_token_less(text):
    return lambda self, num_tiles: text(self, num_tiles).replace(self.token, "", 1)


def a_sound_token_less(process):
    def changed(self, item, options):
        made = process(self, item, options)
        text = made.prompt_text.replace(self.token, "", 1)
        return dataclasses.replace(made, prompt_text=text, num_tokens=made.num_tokens - 1)

    return changed


def last_first(tiles):
    return lambda self, image, options: list(tiles(self, image, options))[::-1]


def always_one(num_tiles):
    return lambda self, size, options: 1


def unlocked(lock):
    class Free:
        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    return lambda self, image: Free()


def fixed_fps(key):
    def changed(self, item, plan):
        options = dataclasses.replace(plan.options, fps=1.0, target_frames=-1)
        plan = dataclasses.replace(plan, options=options, indices=[0], height=0, width=0)
        return key(self, item, plan)

    return changed


def of_a_part_of_a_video(file_digest):
    """Hashes the beginning of a file only."""
    return lambda blob, limits: file_digest(blob[:PART], limits)


IMAGE, VIDEO = "qwen-image", "qwen-video"
# What is wrong: the processor, the plant, the check that must find it.
PLANTS = {
    "pixels are not normalised": (
        IMAGE, wrapped(patches, "normalise_table", unnormalised), "pixels_equal_the_reference"),
    "one deviation for all channels": (
        IMAGE, wrapped(patches, "normalise_table", one_deviation), "pixels_equal_the_reference"),
    "resampling dropped": (
        IMAGE, wrapped(of_patches, "resize", nearest), "pixels_equal_the_reference"),
    "another filter": (
        IMAGE, wrapped(of_patches, "resize", bilinear), "pixels_equal_the_reference"),
    "cropped, not resized": (
        IMAGE, wrapped(of_patches, "resize", cropped), "pixels_equal_the_reference"),
    "EXIF ignored": (
        IMAGE, wrapped(files, "upright", lambda _: lambda image, orientation: image),
        "pixels_equal_the_reference"),
    "channels as BGR": (
        "gemma3-image", pixels(lambda x: x.view(len(x), 3, -1).flip(1).reshape(x.shape)),
        "pixels_equal_the_reference"),
    "patches turned round": (
        "internvl-image", pixels(lambda x: x.flip(1)), "pixels_equal_the_reference"),
    "tiles from the last to the first": (
        "internvl-image", method("tiles", last_first), "pixels_equal_the_reference"),
    "always one tile": (
        "internvl-image", method("num_tiles", always_one), "tokens_equal_the_reference"),
    "marks swapped": (
        "internvl-image", wrapped(internvl, "special_texts", swapped),
        "tokens_equal_the_reference"),
    "blank lines of the text lost": (
        "gemma3-image", method("text", stripped), "tokens_equal_the_reference"),
    "a placeholder less": (
        "gemma3-image", method("text", one_token_less), "prompt_text_holds_the_tokens"),
    "one token too many": (
        "glm-image", result(num_tokens=lambda n: n + 1), "tokens_equal_the_reference"),
    "a token of a sound less": (
        "qwen2_5_omni-audio", method("process", a_sound_token_less), "tokens_equal_the_reference"),
    "a sound that is not filled": (
        "qwen2_5_omni-audio",
        result(tensors=lambda tensors: {name: x[..., :9] for name, x in tensors.items()}),
        "pixels_equal_the_reference"),
    "digest of a part of a file": (
        IMAGE, wrapped(files, "digest_of", of_a_part), "keys_change_with_every_byte"),
    "digest of the first pixels": (
        IMAGE, wrapped(decode, "_pixel_digest", of_some_pixels), "keys_change_with_every_byte"),
    "digest of the last pixels": (
        IMAGE, wrapped(decode, "_pixel_digest", of_last_pixels), "keys_change_with_every_byte"),
    "digest without the shape": (
        IMAGE, wrapped(decode, "_pixel_digest", without_size), "keys_change_with_every_byte"),
    "an item's option missing in the key": (
        IMAGE, method("_key", of_the_engine), "keys_change_with_the_options"),
    "an engine's option missing in the key": (
        IMAGE, method("_key", without_normalisation), "keys_change_with_the_options"),
    "the budget missing in the key": (IMAGE, method("_key", without_budget), "budgets_are_kept"),
    "the budget ignored": (
        IMAGE, method("with_budget", lambda _: lambda self, tokens, may_raise=False: self),
        "budgets_are_kept"),
    "an item's option missing in the count": (
        IMAGE, method("count_tokens", no_options), "keys_change_with_the_options"),
    "peek says another size": (IMAGE, method("peek", larger), "count_tokens_equals_process"),
    "a number of the item in the key": (
        IMAGE, method("process", counting), "keys_are_deterministic"),
    "the limit of pixels ignored": (
        IMAGE, wrapped(files, "check_pixels", unchecked), "limits_are_respected"),
    "the limit of pixels ignored for loaded images": (
        IMAGE, wrapped(decode, "check_pixels", unchecked), "limits_are_respected"),
    "the limit of bytes ignored": (
        IMAGE, wrapped(files, "check_bytes", unchecked), "limits_are_respected"),
    "a limit off by one": (
        IMAGE, wrapped(files, "check_bytes", below), "limits_allow_what_they_say"),
    "decoded before the limit": (
        IMAGE, wrapped(files, "open_file", loaded_first), "limits_are_respected"),
    "errors of Pillow let through": (
        IMAGE, wrapped(files, "reading", raw_errors), "damaged_samples_raise_nothing_else"),
    "the root ignored": (
        IMAGE, method("decode", reads_paths), "files_outside_the_root_are_refused"),
    "links out of the root": (
        IMAGE, method("decode", reads_paths_by_name), "files_outside_the_root_are_refused"),
    "a reused token": (
        IMAGE, constant(token="<|video_pad|>", markers=("<|video_pad|>",)),
        "no_other_kind_has_the_token"),
    "a marker that begins another kind's": (
        IMAGE, constant(markers=("<|video",)), "no_other_kind_has_the_token"),
    "a token that ends another kind's": (
        IMAGE, constant(token="video_pad|>"), "no_other_kind_has_the_token"),
    "the item kept in self": (
        IMAGE, method("process", in_self), "threads_do_not_disturb_each_other"),
    "a lock removed": (
        IMAGE, wrapped(ImageDecoder, "_lock", unlocked), "threads_do_not_disturb_each_other"),
    "a thread that stays": (IMAGE, built(thread_of), "close_leaves_nothing"),
    "a switch of Pillow for all": (IMAGE, built(allow_truncated), "close_leaves_nothing"),
    "torch seeded": (IMAGE, built(seed), "close_leaves_nothing"),
    "the caller's array changed": (
        IMAGE, method("decode", in_place), "sources_are_left_as_they_are"),
    "the decoded item changed": (
        IMAGE, method("process", item_in_place), "sources_are_left_as_they_are"),
    "pixels in float64": (IMAGE, pixels(torch.Tensor.double), "tensors_are_ready"),
    "pixels not contiguous": (
        IMAGE, pixels(lambda x: x.t().contiguous().t()), "tensors_are_ready"),
    "digest of a part of a video": (
        VIDEO, wrapped(container, "file_digest", of_a_part_of_a_video),
        "keys_change_with_every_byte"),
    "digest of a part of each frame": (
        VIDEO, wrapped(ImageDecoder, "digest", of_a_part_of_a_frame),
        "keys_change_with_every_byte"),
    "fps missing in the key": (VIDEO, method("_key", fixed_fps), "keys_change_with_the_options"),
    "processes that stay": (
        VIDEO, method("close", lambda _: lambda self: None), "close_leaves_nothing"),
    "videos are not normalised": (
        "glm-video", wrapped(patches, "normalise_table", unnormalised),
        "pixels_equal_the_reference"),
}  # fmt: skip
# Why the kit does not find a planted bug.
MISSED = {
    "hosts not checked": (
        "the test's second host has an address of this machine, which the next check refuses; a "
        "public host of another name cannot be asked offline"
    ),
}
