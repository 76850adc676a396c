"""image_tokens and video_tokens of an engine, a prompt or an item: which processor an item gets."""

import copy

import pytest

from mmdeploy_llm.engine.intake.prompts import with_options
from mmdeploy_llm.errors import ConfigError, MediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.budgets.choice import Budgets
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.media.loading.loader import MediaLoader
from mmdeploy_llm.media.loading.within_budget import within_budget
from mmdeploy_llm.messages import MediaItem
from mmdeploy_llm.values.options.config import EngineConfig

from .conftest import FakeProcessor


class Bounded(FakeProcessor):
    """An image has the tokens that its bytes say, at most those of the budget."""

    auto_tokens = 8
    most = None

    def with_budget(self, tokens, *, may_raise=False):
        if tokens < 2:
            raise ConfigError(f"image_tokens = {tokens} is below 2")
        limited = copy.copy(self)
        limited.most = tokens
        return limited

    def decode(self, source, limits):
        found = super().decode(source, limits)
        return found if self.most is None else min(found, self.most)

    def peek(self, source, limits):
        return 100 if self.most is None else self.most


class Careless(Bounded):
    """Forgets its budget."""

    def decode(self, source, limits):
        return int(source)


def loader(processor, budget="full"):
    processors = {"image": within_budget(processor, budget)}
    return MediaLoader(
        media=ModelMedia(processors=processors),
        fetch=lambda ref, limits: ref.uri.encode(),
        limits=MediaLimits(),
        max_items={"image": 9},
        budgets={"image": budget},
    )


def tokens(found, number, **options):
    item = MediaItem(kind="image", source=str(number).encode(), options=options)
    (loaded,), (counted,) = found.load([item]), found.count([item])
    assert counted.num_tokens in (loaded.num_tokens, found._budgets.of(item)[0].most, 100)
    return loaded.num_tokens


@pytest.mark.parametrize(
    ("engine", "item", "wanted"),
    [
        ("full", None, 50),
        ("auto", None, 8),
        (20, None, 20),
        ("full", 5, 5),
        (20, 5, 5),
        (20, 20, 20),
        (20, "auto", 8),
        (4, "auto", 4),
        ("auto", "auto", 8),
        ("full", "full", 50),
    ],
)
def test_an_item_has_the_lower_budget(engine, item, wanted):
    """A prompt's budget holds where it is below the engine's; "auto" is as the engine's plugin
    says."""
    options = {} if item is None else {"image_tokens": item}
    assert tokens(loader(Bounded(), engine), 50, **options) == wanted


@pytest.mark.parametrize(("engine", "item"), [(20, 21), (20, "full"), ("auto", 9)])
def test_a_prompt_may_only_lower_the_budget(engine, item):
    """More than the engine's budget is that prompt's error."""
    with pytest.raises(MediaError, match=r"above the engine's (20|8); raise it in LLM"):
        tokens(loader(Bounded(), engine), 50, image_tokens=item)


@pytest.mark.parametrize("wrong", [0, -1, True, "256", 2.5, None, "a" * 999, [], {}])
def test_a_wrong_budget(wrong):
    """A budget that is none is that prompt's error, with a short message."""
    with pytest.raises(MediaError, match='must be "auto", "full" or a whole number') as caught:
        tokens(loader(Bounded()), 50, image_tokens=wrong)
    assert len(str(caught.value)) < 200


def test_what_the_family_cannot_keep_to():
    """A number below the family's least is an error of the engine or of the prompt."""
    with pytest.raises(ConfigError, match="is below 2"):
        loader(Bounded(), 1)
    with pytest.raises(MediaError, match="is below 2"):
        tokens(loader(Bounded()), 50, image_tokens=1)


def test_auto_fails_no_family(caplog):
    """Where a family cannot keep to the number of "auto", its own rule holds."""

    class Large(Bounded):
        auto_tokens = 1  # below its least

    found = loader(Large(), "auto")
    assert "'auto' changes nothing: image_tokens = 1 is below 2" in caplog.text
    assert tokens(found, 50) == 50
    assert tokens(loader(Large()), 50, image_tokens="auto") == 50


def test_a_plugin_without_budgets_is_named():
    """A number is an error that names the plugin; "auto" leaves its own rule, and says so."""
    with pytest.raises(ConfigError, match=r"FakeProcessor \(plugin .*\) does not implement"):
        loader(FakeProcessor(), 5)
    with pytest.raises(MediaError, match="FakeProcessor"):
        loader(FakeProcessor()).load(
            [MediaItem(kind="image", source=b"9", options={"image_tokens": 5})]
        )


def test_auto_without_a_number_is_logged(caplog):
    """ "auto" of a plugin that names no number changes nothing."""
    found = loader(FakeProcessor(), "auto")
    assert "'auto' changes nothing" in caplog.text
    assert found.load([MediaItem(kind="image", source=b"9", options={})])[0].num_tokens == 9


def test_a_plugin_that_breaks_its_budget_is_named():
    """More tokens than the engine's budget never reach the model."""
    with pytest.raises(MediaError, match=r"Careless .* gave the image 50 tokens; image_tokens"):
        loader(Careless(), 20).load([MediaItem(kind="image", source=b"50", options={})])


def test_one_picture_with_two_budgets_is_two_items():
    """The cache of processed media tells budgets apart."""
    found = loader(Bounded())
    assert [tokens(found, 50, image_tokens=n) for n in (5, 7, 5)] == [5, 7, 5]


def test_video_tokens_of_a_prompt_is_tokens_of_its_videos():
    """The prefix of a video's option is cut off; its own wins, and both names are one option."""
    item = MediaItem(kind="video", source=b"9", options={})
    (found,) = with_options([item], {"video_tokens": 70}, ["image", "video"])
    assert found.options == {"tokens": 70}

    class Video(Bounded):
        kind = "video"

    budgets = Budgets({"video": Video()}, {"video": 100})
    assert budgets.of(found)[0].most == 70
    assert budgets.of(found)[1].options == {}
    with pytest.raises(MediaError, match="are one option"):
        budgets.of(MediaItem(kind="video", source=b"", options={"tokens": 1, "video_tokens": 1}))


def test_kinds_of_plugins_keep_their_own_options():
    """`chart_tokens` is an option of a plugin's own."""
    item = MediaItem(kind="chart", source=b"9", options={"tokens": 3, "chart_tokens": 4})
    processor = FakeProcessor()
    assert Budgets({"chart": processor}, {}).of(item) == (processor, item)


@pytest.mark.parametrize("wrong", [0, True, "lots", 1.5])
def test_a_wrong_budget_of_an_engine(wrong):
    """An engine's budget is checked before anything is loaded."""
    with pytest.raises(ConfigError, match=r"image_tokens.*(\n.*)*whole number above 0"):
        EngineConfig(model="m", image_tokens=wrong)


def test_a_number_may_be_written_as_text():
    """Options of the environment and of job files are texts."""
    assert EngineConfig(model="m", image_tokens="256", video_tokens="auto").image_tokens == 256
