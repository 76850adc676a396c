"""Prompts that a family's rule divides between an encoder and a decoder."""

from types import SimpleNamespace

import pytest

from mmdeploy_llm.errors import PluginContractError
from mmdeploy_llm.hooks import EncoderPrompt, MediaInput, MediaSpan, MediaView
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.media.loading.outside import Expanded, divided
from mmdeploy_llm.values.params import SamplingParams

ITEM = MediaInput(kind="image", tensors={}, num_tokens=3, key="a")


PROMPT = SimpleNamespace(text="text", ids=(), pieces=("text",))


def rule(found, has_places=False):
    return SimpleNamespace(divide=lambda text, ids, media, encode: found, has_places=has_places)


def test_items_stand_outside_of_the_tokens():
    made = divided(rule(EncoderPrompt(ids=(2, 5), items=(ITEM,))), PROMPT, (ITEM,), len)
    assert (made.ids, made.spans) == ([2, 5], (MediaSpan(offset=0, item=ITEM, rows=()),))
    assert made.spans[0].runs == ()
    assert made.spans[0].end > 2**40


def test_an_item_is_meant_for_the_tokens_of_its_view():
    view = MediaView(first=1, end=None, num_tokens=2)
    made = divided(rule(EncoderPrompt(ids=(2, 5), items=(ITEM,), views=(view,))), PROMPT, (), len)
    assert made.spans == (MediaSpan(offset=0, item=ITEM, rows=(), view=view),)


@pytest.mark.parametrize(
    ("places", "span"),
    [
        ((0, 1, 2), MediaSpan(offset=0, item=ITEM)),
        ((1, 2, 4), MediaSpan(offset=1, item=ITEM, rows=(0, 1, 3))),
    ],
)
def test_an_item_with_places_stands_in_the_tokens(places, span):
    found = EncoderPrompt(ids=(9, 9, 9, 9, 9, 5), items=(ITEM,), places=(places,))
    assert divided(rule(found), PROMPT, (ITEM,), len).spans == (span,)


def test_a_rule_names_tokens_that_end_an_answer():
    made = divided(rule(EncoderPrompt(ids=(2,), items=(), end_ids=(7, 8))), PROMPT, (), len)
    assert made.params(SamplingParams(stop_token_ids=[8])).stop_token_ids == (8, 7)
    ignoring = SamplingParams(ignore_eos=True)
    assert made.params(ignoring) is ignoring, "a caller who ignores ends ignores these too"


@pytest.mark.parametrize("found", [EncoderPrompt(ids=(), items=()), None])
def test_a_rule_that_gives_nothing_to_continue(found):
    with pytest.raises(PluginContractError, match="EncoderPrompt with at least one id"):
        divided(rule(found), PROMPT, (), len)


def test_no_kind_has_a_placeholder_where_there_is_a_rule():
    media = ModelMedia(processors={"image": object()}, encoder=rule(None))
    assert media.inside.processors == {}
    placed = ModelMedia(processors={"image": object()}, encoder=rule(None, has_places=True))
    assert (placed.inside, placed.template) == (placed, None)
    assert ModelMedia().inside == ModelMedia()


def test_processors_of_a_rule_stand_before_those_of_the_caller():
    rules = {"rules": {"end": 3}, "b": {}}
    found = EncoderPrompt(ids=(2,), items=(), processors=rules)
    made = divided(rule(found), PROMPT, (), len)
    given = SamplingParams(logits_processors=["a", "b"], logits_processors_args={"bias": 1})
    params = made.params(given)
    assert params.logits_processors == ("rules", "b", "a")
    assert params.logits_processors_args == {"bias": 1, "end": 3}
    assert Expanded(ids=[1], spans=()).params(given) is given
    assert divided(rule(EncoderPrompt(ids=(2,), items=())), PROMPT, (), len).params(given) is given
