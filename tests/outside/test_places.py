"""Parts of an outsider, checked by the kit and used in chats, batches and lines of OpenAI."""

import base64
import importlib
import json
import sys
from pathlib import Path

import pytest

from mmdeploy_llm import LLM, AsyncLLM, SamplingParams
from mmdeploy_llm.client.ray.blocks import BlockEngine
from mmdeploy_llm.client.ray.deaths import DeathLedger
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.startup.media import ChatMedia
from mmdeploy_llm.testing import ChatPartConformance, ChatPartExample, PluginConformance
from mmdeploy_llm.values.options.config import EngineConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES / "plugins"))
places = importlib.import_module("places")
FILE = str(EXAMPLES / "plugins/places.py")
LOCATION, TABLE, NOTEBOOK = places.provide_chat_parts()
PNG = (EXAMPLES / "images/picture-1.png").read_bytes()
PLOT = base64.b64encode(PNG).decode()
CELLS = {"cells": [{"source": ["a = 1\n", "a"], "outputs": [{"data": {"image/png": PLOT}}, {}]}]}
WHERE = {"type": "location", "lat": 47.37, "lon": -8.5}


class TestPlugin(PluginConformance):
    plugin = "places"


class TestLocation(ChatPartConformance):
    spec = LOCATION
    examples = (
        ChatPartExample(part=WHERE, expected=("Place: 47.3700 N, 8.5000 W. ",)),
        ChatPartExample(
            part={**WHERE, "name": "Zurich"}, expected=("Place: Zurich (47.3700 N, 8.5000 W). ",)
        ),
    )
    wrong = ({**WHERE, "lat": 91}, {**WHERE, "lat": "47"}, {"type": "location"}, {**WHERE, "x": 1})


class TestTable(ChatPartConformance):
    spec = TABLE
    examples = (
        ChatPartExample(
            part={"type": "table", "header": ["a", "b"], "rows": [[1, None]]},
            expected=("a | b\n1 | None\n",),
        ),
    )
    wrong = ({"type": "table", "rows": [[1], [1, 2]]}, {"type": "table", "rows": {}})


class TestNotebook(ChatPartConformance):
    spec = NOTEBOOK
    files = {"a.ipynb": json.dumps(CELLS).encode(), "b.txt": b"[1]"}  # noqa: RUF012
    examples = (
        ChatPartExample(
            part={"type": "notebook", "notebook": "a.ipynb"},
            expected=("a = 1\na\n", {"type": "image", "image": f"data:image/png;base64,{PLOT}"}),
        ),
    )
    wrong = ({"type": "notebook", "notebook": "b.txt"}, {"type": "notebook", "notebook": "c"})


def user(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Describe the image."}]}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with LLM(
        "shapes-vl",
        plugins=[FILE],
        enable_prefix_caching=True,
        block_size=16,
        limit_mm_per_prompt={"image": 2},
    ) as llm:
        yield llm


PARAMS = SamplingParams(temperature=0, max_tokens=4)


@pytest.mark.full
def test_parts_become_texts_and_images_of_a_chat(llm, tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(CELLS))
    asked = user(WHERE, {"type": "notebook", "notebook": str(path)})
    own, plain = llm.chat(
        [
            asked,
            user(
                {"type": "text", "text": "Place: 47.3700 N, 8.5000 W. "},
                {"type": "text", "text": "a = 1\na\n"},
                {"type": "image", "image": PNG},
            ),
        ],
        PARAMS,
        use_tqdm=False,
    )
    assert own.error_msg is None
    assert own.prompt == plain.prompt
    assert own.outputs.token_ids == plain.outputs.token_ids
    assert own.num_input_image_tokens == plain.num_input_image_tokens > 0
    assert llm.count_tokens({"messages": asked}).num_prompt_tokens == len(own.prompt_token_ids)
    assert asked == user(WHERE, {"type": "notebook", "notebook": str(path)})


def test_parts_that_differ_share_no_prefix_beyond_the_difference(llm):
    long = {"type": "table", "rows": [["cell"] * 8] * 20}
    same, again, other = (
        llm.chat(user({**WHERE, "lon": lon}, long), PARAMS, use_tqdm=False)[0]
        for lon in (100.5, 100.5, -100.5)
    )
    assert again.num_cached_tokens > 100
    assert other.num_cached_tokens < 32
    assert same.prompt_token_ids == again.prompt_token_ids != other.prompt_token_ids


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({**WHERE, "lat": 91}, "messages[0].content[0]: lat must be from -90 to 90"),
        ({**WHERE, "lng": 1}, "content[0]: unknown key 'lng'; did you mean 'lon'?"),
        ({**WHERE, "lat": True}, "content[0].lat: must be a number, got True"),
        ({"type": "location", "lat": 1}, "content[0]: a location part needs 'lon'"),
        ({"type": "notebook", "notebook": "/no/such"}, "content[0]: "),
        ({"type": "place"}, "of plugin 'places.py'"),
        ({"type": "table", "rows": ["<|image@placeholder|>"]}, "rows must be lists"),
    ],
)
def test_a_wrong_part_is_the_error_of_its_item(llm, part, words):
    bad, good = llm.chat([user(part), user(WHERE)], PARAMS, use_tqdm=False)
    assert words in bad.error_msg
    assert " at 0x" not in bad.error_msg
    assert good.error_msg is None


def test_placeholders_in_parts_count_as_text(llm):
    part = {"type": "table", "rows": [["<|image@placeholder|>"]]}
    (output,) = llm.chat(user(part), PARAMS, use_tqdm=False)
    assert output.error_msg is None
    assert output.num_input_image_tokens == 0


def test_a_batch_has_them_in_lines_and_resumes(llm, tmp_path):
    (tmp_path / "a.ipynb").write_text(json.dumps(CELLS))
    notebook = {"type": "notebook", "notebook": "a.ipynb"}
    body = {"messages": user(notebook)}
    lines = [
        {"id": "own", "messages": user(WHERE, notebook)},
        {"id": "bad", "messages": user({**WHERE, "lat": 91})},
        {"custom_id": "openai", "url": "/v1/chat/completions", "body": body},
    ]
    corpus = tmp_path / "lines.jsonl"
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    llm.run_batch(str(corpus), str(out), sampling_params=PARAMS, use_tqdm=False)
    found = {own["id"]: own for own in map(json.loads, out.read_text().splitlines())}
    assert found["own"]["error"] is found["openai"]["error"] is None
    assert "messages[0].content[0]: lat must be" in found["bad"]["error"]["message"]
    assert found["own"]["num_image_tokens"] > 0
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": []}))  # what it names has changed
    summary = llm.run_batch(
        str(corpus), str(out), sampling_params=PARAMS, use_tqdm=False, resume=True
    )
    found = {own["id"]: own for own in map(json.loads, out.read_text().splitlines())}
    assert found["openai"]["num_image_tokens"] == 0, summary


def test_an_actor_of_a_cluster_has_them(llm):
    """Ray's actors hold an LLM like this one, and get prompts as they are."""
    ask = Ask(prompt={"messages": user(WHERE)}, params=PARAMS, item=1)
    (answer,) = BlockEngine(llm, DeathLedger()).answer("block", [ask])
    assert "Place: 47.3700 N, 8.5000 W. " in answer.output.prompt


@pytest.mark.full  # an engine of its own
def test_requests_at_any_time_have_them():
    with AsyncLLM("shapes-vl", plugins=[FILE], quiet=True) as llm:
        good, wrong = (llm.submit(user({**WHERE, "lat": lat}), PARAMS).get() for lat in (47.37, 91))
    assert "Place: 47.3700 N, 8.5000 W. " in good.prompt
    assert "messages[0].content[0]: lat must be from -90 to 90" in wrong.error_msg


def test_calibration_takes_the_media_that_parts_become(tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(CELLS))
    notebook = {"type": "notebook", "notebook": str(path)}
    link = {"type": "image_url", "image_url": {"url": "b.png", "detail": "low"}}
    media = ChatMedia(EngineConfig.from_options("shapes-vl", {"plugins": [FILE]}))
    found = media.of(user(WHERE, notebook, link))
    media.close()
    assert {own.kind for own in found} == {"image"}
    assert [own.source.uri for own in found] == [f"data:image/png;base64,{PLOT}", "b.png"]
