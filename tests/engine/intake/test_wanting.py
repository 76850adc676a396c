"""Prompts of requests that want no text: instructions, pairs, labels, and what is refused."""

import pytest

from mmdeploy_llm.errors import PromptTooLongError, RequestError, UnsupportedMediaError
from mmdeploy_llm.layers.pooling.abilities import Abilities
from mmdeploy_llm.layers.pooling.rules import EmbeddingRules, PairRule
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.pooling_request import PoolingRequest

VECTOR = PoolingRequest()
SCORE = PoolingRequest(what="score")
IMAGE = {"image": b"3"}


@pytest.fixture
def accept(make_intake):
    """accept(prompt, wanted, rules, **abilities) -> the request."""

    def one(prompt, wanted=VECTOR, params=None, max_model_len=256, abilities=None, **rules):
        own = Abilities(**{"rules": EmbeddingRules(**rules), **(abilities or {})})
        intake = make_intake(abilities=own, max_model_len=max_model_len)
        (request,) = intake.accept(prompt, params or SamplingParams(), wanted=wanted)
        return request

    return one


def test_what_is_wanted_is_filled_in_by_the_model(accept):
    assert accept("a").wanted == PoolingRequest(what="vector", pooling="last", normalize=True)
    own = accept("a", pooling="mean", normalize=False, dimensions=8).wanted
    assert own == PoolingRequest(
        what="vector", pooling="mean", normalize=False, dimensions=8, is_cut_last=True
    )
    assert accept("a", pooling="tokens").wanted.what == "token_vectors"
    asked = PoolingRequest(what="vector", pooling="cls", normalize=True, dimensions=4)
    assert accept("a", asked, pooling="mean", normalize=False, dimensions=8).wanted == asked
    assert accept("a", abilities={"pooling": "cls"}).wanted.pooling == "cls"


def test_prompts_of_the_folder(accept):
    rules = {"prompts": {"query": "find: ", "doc": "text: "}, "default_prompt": "doc"}
    plain = {text: accept(text).prompt_token_ids for text in ("find: a", "text: a", "so: a")}
    assert accept("a", **rules).prompt_token_ids == plain["text: a"]
    for instruction, text in (("query", "find: a"), ("so: ", "so: a")):
        wanted = PoolingRequest(instruction=instruction)
        assert accept("a", wanted, **rules).prompt_token_ids == plain[text]
    skipped = accept("a", **rules, includes_prompt=False, pooling="mean").wanted.num_skipped
    assert skipped == len(accept("text: ").prompt_token_ids)
    assert accept("FIND: A", lower_case=True).prompt_token_ids == plain["find: a"]
    assert accept([10, 11], **rules).prompt_token_ids == [10, 11]
    with pytest.raises(RequestError, match="write the instruction into them"):
        accept([10, 11], PoolingRequest(instruction="so: "))


@pytest.mark.full
def test_media_alone_are_a_prompt(accept):
    alone = accept({"multimodal_data": IMAGE})
    assert alone.num_media_tokens("image") == 3
    with_text = accept({"prompt": "a", "multimodal_data": IMAGE})
    assert with_text.prompt_token_ids[: len(alone.prompt_token_ids)] == alone.prompt_token_ids
    with pytest.raises(UnsupportedMediaError):
        accept({"multimodal_data": {"video": b"3"}})


@pytest.mark.parametrize(
    "empty", ["", " ", {"prompt": ""}, {"prompt": " "}, {"multimodal_data": {"image": []}}, []]
)
def test_an_empty_prompt_is_refused(accept, empty):
    with pytest.raises(RequestError, match="empty"):
        accept(empty)


@pytest.mark.full
def test_conversations_have_the_instruction_as_their_system_message(accept):
    rules = {"system": "represent"}
    text = accept({"prompt": "a", "multimodal_data": IMAGE}, **rules).prompt
    assert "represent" in text
    assert "find" in accept("a", PoolingRequest(instruction="find"), **rules).prompt
    messages = [{"role": "user", "content": "a"}]
    assert "represent" in accept({"messages": messages}, **rules).prompt
    assert "represent" not in accept({"messages": messages}).prompt
    own = [{"role": "system", "content": "mine"}, *messages]
    assert "represent" not in accept({"messages": own}, **rules).prompt
    with pytest.raises(RequestError, match="system message already"):
        accept({"messages": own}, PoolingRequest(instruction="find"), **rules)


PAIR = {"query": "q", "document": "d"}


def test_pairs_by_a_template(accept):
    can = {"abilities": {"can_score": True}}
    rule = PairRule(template="{instruction}|{query}|{document}", instruction="judge")
    can_text = {"can_score": True, "rules": EmbeddingRules(pairs=rule)}
    assert accept(PAIR, SCORE, abilities=can_text).prompt == "judge|q|d"
    other = PoolingRequest(what="score", instruction="{document}")
    assert accept(PAIR, other, abilities=can_text).prompt == "{document}|q|d"
    system = PairRule(template="{query} - {document}", system="judge")
    can_chat = {"can_score": True, "rules": EmbeddingRules(pairs=system)}
    images = {"query": {"multimodal_data": IMAGE}, "document": "d"}
    request = accept(images, SCORE, abilities=can_chat)
    assert request.num_media_tokens("image") == 3
    assert "judge" in request.prompt
    joined = accept(PAIR, SCORE, **can)
    assert joined.token_types is None or len(joined.token_types) == len(joined.prompt_token_ids)


@pytest.mark.parametrize(
    ("pair", "match"),
    [
        ({"query": "", "document": "d"}, "empty"),
        ({"query": "q", "document": [5]}, "must be a text"),
        ({"query": {"multimodal_data": IMAGE}, "document": "d"}, "without media"),
        ({"query": "q\ud800", "document": "d"}, "surrogate"),
    ],
)
def test_wrong_pairs_are_refused(accept, pair, match):
    with pytest.raises(RequestError, match=match):
        accept(pair, SCORE, abilities={"can_score": True})


def test_a_pair_is_no_prompt_for_a_vector(accept):
    with pytest.raises(RequestError, match="unknown key 'query'"):
        accept(PAIR)


def test_what_a_model_cannot_give_is_refused(accept, make_intake):
    with pytest.raises(RequestError, match="no head that scores"):
        accept(PAIR, SCORE)
    scorer = {"abilities": {"can_generate": False, "can_score": True}}
    with pytest.raises(RequestError, match=r"call LLM\.rerank"):
        accept("a", **scorer)
    embedder = Abilities(can_generate=False, pooling="last")
    for wanted in (None, PoolingRequest(what="likelihood", label="x")):
        with pytest.raises(RequestError, match=r"call LLM\.embed"):
            make_intake(abilities=embedder).accept("a", SamplingParams(), wanted=wanted)


def test_params_and_wrong_dimensions_are_refused(accept):
    with pytest.raises(RequestError, match=r"\(n, temperature\) have no meaning"):
        accept("a", params=SamplingParams(n=2, temperature=0))
    with pytest.raises(RequestError, match="dimensions must be 1"):
        accept("a", PoolingRequest(dimensions=0))


def test_the_longest_prompt(accept):
    assert len(accept([10] * 64, max_model_len=64).prompt_token_ids) == 64
    with pytest.raises(PromptTooLongError, match="65 tokens, 64 are allowed"):
        accept([10] * 65, max_model_len=64)
    with pytest.raises(PromptTooLongError, match="9 tokens, 8 are allowed"):
        accept([10] * 9, max_tokens=8)


def test_labels_follow_the_prompt(accept):
    prompt = accept("the a").prompt_token_ids
    request = accept("the a", PoolingRequest(what="likelihood", label="the"))
    assert request.prompt_token_ids[: len(prompt)] == prompt
    assert request.wanted.num_skipped == len(prompt) < len(request.prompt_token_ids)
