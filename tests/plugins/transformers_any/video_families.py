"""Tiny checkpoints of families that take videos, and transformers' model on videos as a reference.

The reference resizes by torch's `interpolate`, which is what torchvision does, and writes the text
of a video out, so it needs neither torchvision nor the code under test.
"""

import json
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.video.opening import open_video
from mmdeploy_llm.testing.media.samples import pixels, video_bytes

SIDE = 28
SQUARE = {"height": SIDE, "width": SIDE}
CROPPED = {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE}
COUNTS = (12, 5)  # frames of the videos, at ten a second
CHOSEN = (0, 3, 6, 9)  # of 12, where 4 are asked for
RESERVED = "<|reserved_special_token_0|>"


def videos():
    """Returns MP4 files of different sizes and lengths."""
    sizes = ((48, 80), (66, 58))
    return [
        video_bytes(pixels(*size, seed=seed), num_frames=count)
        for seed, (size, count) in enumerate(zip(sizes, COUNTS, strict=True))
    ]


def decoded(blob):
    """Returns all frames of a video, uint8 [frames, 3, height, width]."""
    video = open_video(blob, MediaLimits(isolation="thread"))
    frames = video.read(range(video.timeline.num_frames))
    return torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).permute(0, 3, 1, 2)


@dataclass(frozen=True, kw_only=True)
class VideoFamily:
    """family: as in conftest.py. video: video_preprocessor_config.json. text: number of frames ->
    the text of a video. prepare: frames -> [frames, 3, height, width] uint8, as the model takes
    them. tensor: name of the model's argument."""

    family: object
    video: dict
    text: object
    prepare: object
    tensor: str = "pixel_values_videos"


def llava_next_video(helpers):
    def config(tokenizer):
        return transformers.LlavaNextVideoConfig(
            text_config=transformers.LlamaConfig(**helpers.text_fields()),
            vision_config=transformers.CLIPVisionConfig(**helpers.vision_fields(projection_dim=32)),
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
            image_grid_pinpoints=[[SIDE, SIDE], [SIDE, 2 * SIDE]],
        )

    return helpers.Family(
        "LlavaNextVideoForConditionalGeneration",
        config,
        "<video>",
        helpers.NAMED,
        image_processor={
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": [[SIDE, SIDE], [SIDE, 2 * SIDE]],
            **CROPPED,
        },
        processor={
            "processor_class": "LlavaNextVideoProcessor",
            "patch_size": 7,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    )


def smolvlm(helpers):
    def config(tokenizer):
        return transformers.SmolVLMConfig(
            text_config=transformers.LlamaConfig(**helpers.text_fields()),
            vision_config=transformers.SmolVLMVisionConfig(**helpers.vision_fields()).to_dict(),
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            scale_factor=2,
            pad_token_id=0,
        )

    near = helpers.FAMILIES["idefics3"]
    return replace(
        near,
        architecture="SmolVLMForConditionalGeneration",
        config=config,
        marker="<video>",
        special=(*near.special, RESERVED),
        image_processor=near.image_processor | {"image_processor_type": "SmolVLMImageProcessor"},
        processor={"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    )


def smolvlm_text(count):
    """Returns the text of a video of SmolVLM at ten frames a second."""
    names = {1: "one", 2: "two"}
    times = ["00:00", "00:01"][:count]
    length = "0:00:01" if count == 2 else "0:00:00"
    text = f"You are provided the following series of {names[count]} frames from a {length} "
    text += "[H:MM:SS] video.\n"
    around = "<fake_token_around_image>"
    for time in times:
        text += f"\nFrame from {time}:{around}<global-img>{'<image>' * 4}{around}"
    return text + "\n\n"


def resized(frames, height, width, mode="bicubic"):
    return F.interpolate(frames, size=(height, width), mode=mode, antialias=True)


def cropped(frames):
    """Resizes the shorter edge to SIDE and takes the middle."""
    height, width = frames.shape[-2:]
    scale = SIDE / min(height, width)
    small = resized(frames, int(height * scale), int(width * scale))
    top, left = ((size - SIDE) // 2 for size in small.shape[-2:])
    return small[..., top : top + SIDE, left : left + SIDE]


def ends(frames):
    """Resizes the first and the last frame of a second or more, twice as SmolVLM does."""
    chosen = frames[[0, -1]] if len(frames) > 7 else frames[:1]
    height, width = chosen.shape[-2:]
    longest = 2 * SIDE
    if width >= height:
        size = int(longest / (width / height)), longest
    else:
        size = longest, int(longest * (width / height))
    size = [value + value % 2 for value in size]
    return resized(resized(chosen, *size, mode="lanczos"), SIDE, SIDE, mode="lanczos")


def families(helpers):
    """Returns name -> VideoFamily. helpers: the module conftest.py."""
    return {
        "llava_onevision": VideoFamily(
            family=replace(helpers.FAMILIES["llava_onevision"], marker="<video>"),
            video={"video_processor_type": "LlavaOnevisionVideoProcessor", "size": SQUARE},
            text=lambda count: "<video>" * (count + 1),  # one per frame, and the end of the line
            prepare=lambda frames: resized(frames, SIDE, SIDE),
        ),
        "llava_next_video": VideoFamily(
            family=llava_next_video(helpers),
            video={"video_processor_type": "LlavaNextVideoVideoProcessor", **CROPPED},
            text=lambda count: "<video>" * (4 * count),
            prepare=cropped,
        ),
        "smolvlm": VideoFamily(
            family=smolvlm(helpers),
            video={
                "video_processor_type": "SmolVLMVideoProcessor",
                "size": {"longest_edge": 2 * SIDE},
                "max_image_size": {"longest_edge": SIDE},
                "num_frames": 6,
                "fps": 2,
                "do_sample_frames": True,
            },
            text=smolvlm_text,
            prepare=ends,
            tensor="pixel_values",
        ),
    }


class VideoReference:
    """Runs transformers' model of a checkpoint on prompts with videos, one at a time."""

    def __init__(self, helpers, own, folder):
        self.own, self.folder = own, folder
        helpers.write(own.family, folder)
        fields = {**own.video, "image_mean": helpers.MEAN, "image_std": helpers.STD}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(fields))
        scale = torch.tensor([helpers.MEAN, helpers.STD]).view(2, 3, 1, 1) * 255
        self.mean, self.std = scale
        self.model = getattr(transformers, own.family.architecture).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def pixels(self, frames):
        """Returns the model's argument for one video, [1, frames, 3, height, width]."""
        return ((self.own.prepare(frames).float() - self.mean) / self.std)[None]

    def ids(self, prompt, videos):
        """Returns the token ids of a prompt of markers and text."""
        first, *rest = prompt.split(self.own.family.marker)
        for frames, part in zip(videos, rest, strict=True):
            first += self.own.text(len(self.own.prepare(frames))) + part
        return self.tokenizer(first, return_tensors="pt")["input_ids"]

    @torch.inference_mode()
    def generate(self, prompt, videos, max_tokens=10):
        """Returns the new token ids. The videos of a prompt have as many frames as each other."""
        ids = self.ids(prompt, videos)
        made = [self.pixels(frames) for frames in videos]
        given = {self.own.tensor: torch.cat(made)} if made else {}
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            **given,
        )
        return out[0, ids.shape[1] :].tolist()
