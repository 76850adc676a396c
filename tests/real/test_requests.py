"""A real model keeps to what requests ask for: schemas, tools, stops, streams, long prompts."""

import json

import pytest
from pydantic import BaseModel

from mmdeploy_llm import LLM, GuidedDecodingParams, SamplingParams
from tests.real.answers import QUESTIONS, expected
from tests.real.closeness import dequantised
from tests.real.packages import file_of, folder_of

CONTEXT = 8192


class Person(BaseModel):
    name: str
    born: int
    city: str


def weather(city: str, unit: str = "celsius") -> str:
    """Returns the weather of a city.

    Args:
        city: the city's name
        unit: celsius or fahrenheit
    """
    return f"20 degrees {unit} in {city}"


@pytest.fixture(scope="module")
def qwen():
    file = str(file_of("qwen"))
    options = {"max_model_len": CONTEXT + 256, "kv_cache_memory": 2**29}
    with LLM(model=file, tool_call_parser="auto", **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def smollm2():
    with LLM(model=str(dequantised("smollm2")), dtype="float32", kv_cache_memory=2**28) as llm:
        yield llm


def asked(llm, text, tools=None, **params):
    params = SamplingParams(temperature=0, **{"max_tokens": 100} | params)
    messages = [{"role": "user", "content": text}]
    return llm.chat(messages, params, use_tqdm=False, tools=tools, on_error="raise")[0]


def test_an_answer_follows_a_schema_and_the_text(qwen):
    text = "Ada Lovelace was born in 1815 in London. Give her name, year of birth and city as JSON."
    output = asked(qwen, text, response_format=Person)
    found = Person.model_validate_json(output.outputs.text)
    assert output.outputs.is_valid
    assert found == Person(name="Ada Lovelace", born=1815, city="London")


@pytest.mark.parametrize(
    ("question", "choices", "right"),
    [
        ("Is Paris in France or in Spain?", ("Spain", "France"), "France"),
        ("Is ice cold or hot?", ("hot", "cold"), "cold"),
        ("Which is a fruit, an apple or a chair?", ("chair", "apple"), "apple"),
    ],
)
def test_a_choice_is_the_right_one(qwen, question, choices, right):
    output = asked(qwen, question, guided_decoding=GuidedDecodingParams(choice=choices))
    assert output.outputs.text == right


def test_a_tool_is_called_with_the_arguments_of_the_question(qwen):
    """This small model writes the call without the tags <tool_call> that its template asks for, so
    that no parser takes it out of the text."""
    output = asked(qwen, "What is the weather in Paris? Use the tool.", tools=[weather])
    assert "Returns the weather of a city." in output.prompt
    call = json.loads(output.outputs.text)
    assert (call["name"], call["arguments"]["city"]) == ("weather", "Paris")
    assert not output.outputs.tool_calls


def test_tools_that_a_template_ignores_are_an_error(smollm2):
    """The template of SmolLM2 knows no tools: the model would answer as if there were none."""
    messages = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
    params = SamplingParams(temperature=0, max_tokens=5)
    (output,) = smollm2.chat(messages, params, use_tqdm=False, tools=[weather])
    assert output.error_code == 400
    assert "does not tell the model of the tools (weather)" in output.error_msg
    assert not output.outputs.token_ids


def test_an_answer_ends_before_a_stop_text(qwen):
    whole = asked(qwen, "Count from one to ten in words, with commas.").outputs.text
    assert "four" in whole.lower()
    stop = "six" if "six" in whole else "Six"
    cut = asked(qwen, "Count from one to ten in words, with commas.", stop=[stop]).outputs
    assert cut.text == whole[: whole.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("question", [*QUESTIONS[:3], "Write a short poem with emojis: 🌞🌙⭐"])
def test_pieces_of_a_stream_are_the_whole(smollm2, question):
    messages = [{"role": "user", "content": question}]
    params = SamplingParams(temperature=0, max_tokens=40)
    whole = asked(smollm2, question, max_tokens=40).outputs
    pieces = list(smollm2.stream(messages, params))
    assert "".join(piece.outputs.text for piece in pieces) == whole.text
    assert [i for piece in pieces for i in piece.outputs.token_ids] == list(whole.token_ids)


def test_answers_alone_in_streams_and_in_a_batch_are_those_of_transformers(smollm2):
    """Greedy, in float32: so the same tokens however they are asked for."""
    for question, found in list(zip(QUESTIONS, expected(), strict=True))[:4]:
        assert asked(smollm2, question, max_tokens=40).outputs.token_ids == found["answer"]


def test_no_answer_ends_inside_a_character(smollm2):
    """Emojis are of several tokens in this vocabulary, and an answer may be cut in each of them:
    the tokens of one that is only begun are there, its text is not."""
    prompt = "🦜🐢🦜🐢🦜🐢🦜🐢🦜🐢🦜🐢"
    for tokens in range(1, 13):
        params = SamplingParams(temperature=0, max_tokens=tokens)
        (whole,) = smollm2.generate([prompt], params, use_tqdm=False, on_error="raise")
        streamed = "".join(piece.outputs.text for piece in smollm2.stream([prompt], params))
        assert streamed == whole.outputs.text
        assert "�" not in streamed, tokens
        assert len(whole.outputs.token_ids) == tokens


def test_eight_thousand_tokens_are_read(qwen):
    """A number that stands in the middle of a book is found."""
    book = (folder_of("text") / "alice29.txt").read_text("latin-1")[2000:29_500]
    secret = "\n\nThe secret number of the White Rabbit is 7391.\n\n"
    middle = book.index("\n\n", len(book) // 2)
    text = (
        f"{book[:middle]}{secret}{book[middle:]}\n\nWhat is the secret number of the White Rabbit?"
    )
    output = asked(qwen, text, max_tokens=30)
    assert CONTEXT - 1500 < len(output.prompt_token_ids) <= CONTEXT
    assert "7391" in output.outputs.text
