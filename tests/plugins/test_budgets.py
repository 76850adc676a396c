"""An image has at most as many tokens as its budget, whatever its shape and family, and a photo
nearly as many."""

from types import SimpleNamespace

import pytest
from mmdeploy_llm_processors.video.processor import VideoItem

from mmdeploy_llm.errors import ConfigError, MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits, PluginManager
from mmdeploy_llm.media.image.decode import ImageHeader
from mmdeploy_llm.media.video.timeline import constant_timeline

MANAGER = PluginManager.load()
SPECS = {spec.name: spec for spec in MANAGER.media_processors if spec.priority == 0}
VIDEOS = [name for name, spec in SPECS.items() if spec.kind == "video"]
# Processors of transformers, whose checkpoints fix what an image becomes: one size, or tiles.
FIXED = {"clip-image", "siglip2-image", "colpali-image", "colmodernvbert-image", "florence-image"}
FIXED |= {"mllama-image", "pp_formulanet-image", "t5gemma2-image", "vision_encoder_decoder-image"}
FIXED |= {"blip-image", "git-image", "kosmos2_5-image", "pix2struct-image"}
FIXED |= {"neomme-image", "tipsv2-image", "ultravbert-image"}
IMAGES = [name for name, spec in SPECS.items() if spec.kind == "image" and name not in FIXED]
PHOTO = (4032, 3024)
SIZES = [
    PHOTO,
    (3024, 4032),
    (1, 1),
    (1, 180),
    (199, 1),
    (10000, 100),
    (100, 10000),
    (28, 28),
    (57, 55),
    (640, 480),
    (1920, 1080),
    (12000, 9000),
    (999, 1001),
]
# The published sizes of each family's tower.
PATCH_16 = ("qwen3-video", "gemma4-video", "qwen3-image", "gemma4-image", "lfm2-image")
PATCH_16 += ("qwen3_omni_moe-image", "qwen3_omni_moe-video")
SIDES = {"internvl-video": 448, "gemma3-image": 896, "internvl-image": 448}
# Fewest tokens of an image; 1 for those that are not named.
LEAST = {"gemma3-image": 256, "gemma4-image": 70, "internvl-image": 256}
# Families that use less of a budget for a photo, because they have steps: the next lower one.
STEPS = {
    "gemma3-image": lambda tokens: 256,
    "gemma4-image": lambda tokens: max(n for n in (70, 140, 280, 560, 1120) if n <= tokens),
    "internvl-image": lambda tokens: 1280 if tokens >= 1280 else 256,
    "lfm2-image": lambda tokens: (
        tokens if tokens <= 256 or 768 <= tokens <= 2000 else 256 if tokens < 768 else 2000
    ),
    "minicpm-image": lambda tokens: tokens if tokens >= 3 * 64 else 64,
}


def processor_of(name, folder, options=None, model_type=None):
    """Builds the processor of a checkpoint with sizes as published."""
    vision = SimpleNamespace(
        patch_size=16 if name in PATCH_16 else 14,
        image_size=SIDES.get(name, 448),
        spatial_merge_size=2,
        position_embedding_size=10240,
    )
    if name.startswith("gemma4"):
        del vision.spatial_merge_size
        vision.pooling_kernel_size = 3
    config = SimpleNamespace(
        vision_config=vision,
        downsample_ratio=0.5,
        downsample_factor=2,
        mm_tokens_per_image=256,
        model_type=model_type,
    )
    checkpoint = Checkpoint(folder=folder, config=config)
    return MANAGER.build(SPECS[name], checkpoint, options or {})


def tokens_of(processor, size):
    """Counts the tokens of an image of (width, height)."""
    return processor.count_tokens(ImageHeader(size=size), {})


@pytest.mark.one_is_quick
@pytest.mark.parametrize("tokens", [1, 4, 64, 70, 100, 256, 500, 768, 1024, 1280, 3000])
@pytest.mark.parametrize("name", IMAGES)
def test_no_image_has_more_tokens_than_its_budget(name, tokens, tmp_path):
    """Images of any shape stay within the budget, and a photo uses at least 70 % of it."""
    processor = processor_of(name, tmp_path)
    if tokens < LEAST.get(name, 1):
        with pytest.raises(ConfigError, match=f"image_tokens = {tokens} is below"):
            processor.with_budget(tokens)
        return
    limited = processor.with_budget(tokens, may_raise=True)
    for size in SIZES:
        assert 1 <= tokens_of(limited, size) <= tokens, size
    wanted = STEPS.get(name, lambda tokens: tokens)(tokens)
    if tokens >= 64:
        assert tokens_of(limited, PHOTO) >= 0.7 * wanted


@pytest.mark.parametrize("name", IMAGES)
def test_auto_lowers_and_never_raises(name, tmp_path):
    """With "auto" no image has more tokens than without a budget, or than the number that it
    stands for; without any budget nothing changes."""
    processor = processor_of(name, tmp_path)
    before = [tokens_of(processor, size) for size in SIZES]
    limited = processor.with_budget(processor.auto_tokens)
    found = [tokens_of(limited, size) for size in SIZES]
    assert all(one <= other for one, other in zip(found, before, strict=True))
    assert max(found) <= processor.auto_tokens <= 1280
    assert [tokens_of(processor, size) for size in SIZES] == before


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", IMAGES)
def test_a_processed_image_is_within_the_budget(name, tmp_path):
    """What `process` makes has the tokens that were counted, and a key of its own."""
    from PIL import Image

    processor = processor_of(name, tmp_path)
    limited = processor.with_budget(max(LEAST.get(name, 1), 100), may_raise=True)
    for size in ((300, 200), (7, 900)):
        keys = set()
        for one in (processor, limited):
            item = one.decode(Image.new("RGB", size), MediaLimits())
            made = one.process(item, {})
            assert made.num_tokens == one.count_tokens(item, {})
            if made.prompt_text is not None:
                assert made.prompt_text.count(one.token) == made.num_tokens
            keys.add(made.key)
        assert made.num_tokens <= max(LEAST.get(name, 1), 100)
        assert len(keys) == 2 or name in ("gemma3-image", "gemma4-image")
    processor.close()


def test_largest_keeps_to_the_budget(tmp_path):
    """The memory of the largest item is measured within the budget."""
    for name in IMAGES:
        limited = processor_of(name, tmp_path).with_budget(300, may_raise=True)
        made = limited.largest(100_000)
        assert made is None or made.num_tokens <= 300, name


def test_own_bounds_stay(tmp_path):
    """A bound that the user has set holds beside the budget: the lower one wins, and a lower bound
    above the budget is an error."""
    pixels = 200 * 28 * 28
    own = processor_of("qwen-image", tmp_path, {"max_pixels": pixels})
    assert tokens_of(own.with_budget(1000, may_raise=True), PHOTO) <= 200
    assert tokens_of(own.with_budget(100, may_raise=True), PHOTO) <= 100
    own = processor_of("qwen-image", tmp_path, {"min_pixels": pixels})
    with pytest.raises(ConfigError, match="min_pixels = 156800 asks for more than the 100 tokens"):
        own.with_budget(100)
    own = processor_of("internvl-image", tmp_path, {"max_patches": 4})
    assert tokens_of(own.with_budget(9000, may_raise=True), PHOTO) == 5 * 256
    own = processor_of("internvl-image", tmp_path, {"min_patches": 6})
    with pytest.raises(ConfigError, match="min_patches = 6 asks for more tiles than the 4"):
        own.with_budget(1024)
    own = processor_of("gemma3-image", tmp_path, {"do_pan_and_scan": True})
    assert tokens_of(own.with_budget(800), (2000, 500)) == 768
    with pytest.raises(ConfigError, match=r"256 is below 768: an image and two crops"):
        own.with_budget(256)
    own = processor_of("lfm2-image", tmp_path, {"do_image_splitting": True})
    with pytest.raises(ConfigError, match="is below 768: the tokens of the fewest tiles"):
        own.with_budget(500)
    own = processor_of("qwen-image", tmp_path, {"do_resize": False})
    with pytest.raises(ConfigError, match="do_resize is off"):
        own.with_budget(500)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen-image", {"max_pixels": 3000 * 784}),
        ("glm-image", {"max_pixels": 2 * 3000 * 784}),
        ("ernie-image", {"size": {"shortest_edge": 784, "longest_edge": 3000 * 784}}),
        ("internvl-image", {"max_patches": 12}),
        ("gemma4-image", {"max_soft_tokens": 1120}),
        ("lfm2-image", {"max_tiles": 10}),
        ("minicpm-image", {"max_slice_nums": 30}),
    ],
)
def test_auto_leaves_the_users_own_bound(name, options, tmp_path):
    """An option of the family that is given is what "auto" stands for."""
    own = processor_of(name, tmp_path, options)
    limited = own.with_budget(own.auto_tokens)
    assert tokens_of(limited, PHOTO) == tokens_of(own, PHOTO)
    assert tokens_of(own, PHOTO) > (1000 if name == "gemma4-image" else 1280)


def test_a_number_raises_what_the_family_sets(tmp_path):
    """A number of an engine replaces the family's bound upwards too; that of a prompt does not."""
    processor = processor_of("gemma4-image", tmp_path)
    assert tokens_of(processor.with_budget(1200, may_raise=True), PHOTO) > 1000
    assert tokens_of(processor.with_budget(1200), PHOTO) <= 280
    processor = processor_of("qwen-image", tmp_path)
    assert 3000 < tokens_of(processor.with_budget(4000, may_raise=True), PHOTO) <= 4000
    assert tokens_of(processor.with_budget(4000), PHOTO) <= 1280


def test_pages_of_an_ocr_model_have_more(tmp_path):
    """ "auto" leaves GLM-OCR what a page of text needs."""
    found = processor_of("glm-image", tmp_path, model_type="glm_ocr")
    assert found.auto_tokens == 6144
    assert processor_of("glm-image", tmp_path, model_type="glm4v").auto_tokens == 1280


def test_own_options_of_an_item_stay_within_its_budget(tmp_path):
    """An image's own max_pixels may lower the budget, not raise it."""
    limited = processor_of("qwen-image", tmp_path).with_budget(100)
    header = ImageHeader(size=PHOTO)
    assert limited.count_tokens(header, {"max_pixels": 50 * 784}) <= 50
    with pytest.raises(MediaError, match="is above the engine's 78400"):
        limited.count_tokens(header, {"max_pixels": 101 * 784})


def video(seconds, size=(1920, 1080), fps=30.0):
    """Returns an opened video whose frames are never read."""
    count = max(1, round(seconds * fps))
    timeline = constant_timeline(*size, count, fps)
    opened = SimpleNamespace(timeline=timeline, digest="0" * 40, has_chosen_frames=False, notes=())
    return VideoItem(video=opened, limits=MediaLimits())


@pytest.mark.one_is_quick
@pytest.mark.parametrize("tokens", [1, 70, 300, 1000, 8192])
@pytest.mark.parametrize("name", VIDEOS)
def test_no_video_has_more_tokens_than_its_budget(name, tokens, tmp_path):
    """Videos of any length and shape stay within the budget; a long one uses most of it, and its
    first and last frames stay."""
    processor = processor_of(name, tmp_path)
    if name == "internvl-video" and tokens < 256:
        with pytest.raises(ConfigError, match=f"video_tokens = {tokens} is below 256"):
            processor.with_budget(tokens)
        return
    limited = processor.with_budget(tokens)
    for seconds in (0.03, 1, 10, 120, 1900):
        for size in ((1920, 1080), (1080, 1920), (40, 2000), (64, 64)):
            item = video(seconds, size)
            whole = processor._plan(item, {}).indices
            if name == "gemma4-video" and tokens < 70:
                with pytest.raises(MediaError, match="video_tokens = 1 is below the"):
                    limited.count_tokens(item, {})
                continue
            found, plan = limited.count_tokens(item, {}), limited._plan(item, {})
            assert 1 <= found <= tokens, (seconds, size)
            assert found <= processor.count_tokens(item, {})
            assert set(plan.indices) <= set(whole)
            assert plan.indices[0] == whole[0]
            assert len(plan.indices) < 3 or plan.indices[-1] == whole[-1]
            text = limited.prompt_text(item, {})
            assert text is None or text.count(limited.token) == found
    most = min(tokens, processor.count_tokens(video(120), {}))
    if not (name == "gemma4-video" and tokens < 70):
        assert limited.count_tokens(video(120), {}) >= 0.6 * most or tokens < 300


def test_frames_get_smaller_before_they_get_fewer(tmp_path):
    """A budget shrinks the frames of families with any size, and thins out those of one size."""
    item = video(20)
    qwen = processor_of("qwen-video", tmp_path)
    whole, some, few = (
        one._plan(item, {}) for one in (qwen, qwen.with_budget(4000), qwen.with_budget(640))
    )
    assert len(whole.indices) == len(some.indices) == 40 > len(few.indices) == 20
    assert whole.height > some.height > few.height
    intern = processor_of("internvl-video", tmp_path)
    assert len(intern._plan(item, {}).indices) == 8
    assert len(intern.with_budget(1000)._plan(item, {}).indices) == 3


def test_two_budgets_of_a_video_are_two_keys(tmp_path):
    """The caches tell them apart."""
    qwen, item = processor_of("qwen-video", tmp_path), video(2)
    keys = [one._key(item, one._plan(item, {})) for one in (qwen, qwen.with_budget(300))]
    assert keys[0] != keys[1]
    own = processor_of("qwen-video", tmp_path, {"video_min_pixels": 300 * 784})
    with pytest.raises(ConfigError, match="asks for more than the 200 tokens of video_tokens"):
        own.with_budget(200)


@pytest.mark.parametrize("name", [name for name in IMAGES if name != "lfm2-image"])
def test_the_size_of_what_the_model_sees_goes_with_its_tokens(name, tmp_path):
    processor = processor_of(name, tmp_path)
    limited = processor.with_budget(processor.auto_tokens)
    for size in (PHOTO, PHOTO[::-1]):
        width, height = limited.shown_size(ImageHeader(size=size), {})
        assert 14**2 <= width * height / tokens_of(limited, size) <= 60**2
        assert width * height < size[0] * size[1] / 4
        assert width == height or (width > height) == (size[0] > size[1])
