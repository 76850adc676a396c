"""Prompts that a family's rule divides between an encoder and a decoder."""

from types import SimpleNamespace

import pytest

from mmdeploy_llm.errors import PluginContractError
from mmdeploy_llm.hooks import EncoderPrompt, MediaInput, MediaSpan
from mmdeploy_llm.media_loading.kinds import ModelMedia
from mmdeploy_llm.media_loading.outside import divided

ITEM = MediaInput(kind="image", tensors={}, num_tokens=3, key="a")


PROMPT = SimpleNamespace(text="text", ids=(), pieces=("text",))


def rule(found):
    return SimpleNamespace(divide=lambda text, ids, media, encode: found)


def test_items_stand_outside_of_the_tokens():
    made = divided(rule(EncoderPrompt(ids=(2, 5), items=(ITEM,))), PROMPT, (ITEM,), len)
    assert (made.ids, made.spans) == ([2, 5], (MediaSpan(offset=0, item=ITEM, rows=()),))
    assert made.spans[0].runs == ()
    assert made.spans[0].end > 2**40


@pytest.mark.parametrize("found", [EncoderPrompt(ids=(), items=()), None])
def test_a_rule_that_gives_nothing_to_continue(found):
    with pytest.raises(PluginContractError, match="EncoderPrompt with at least one id"):
        divided(rule(found), PROMPT, (), len)


def test_no_kind_has_a_placeholder_where_there_is_a_rule():
    media = ModelMedia(processors={"image": object()}, encoder=rule(None))
    assert media.inside.processors == {}
    assert ModelMedia().inside == ModelMedia()
