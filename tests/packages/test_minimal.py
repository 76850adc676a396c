"""examples/plugin_minimal can be installed into a fresh environment, used and removed."""

import importlib.util
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "plugin_minimal"
CHART = [["apples", 3.0], ["pears", 5.0]]
USE = """
import json
from mmdeploy_llm import LLM, SamplingParams

chart, folder = {chart!r}, {folder!r}
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
with LLM(folder, reasoning_parser="auto", limit_mm_per_prompt={{"chart": 2}}, num_threads=1) as llm:
    prompts = [
        {{"prompt": "<chart> Which?", "multimodal_data": {{"chart": [chart]}}}},
        {{"prompt": "<chart><chart> Same?", "multimodal_data": {{"chart": [chart, {csv!r}]}}}},
        "No chart at all",
        {{"prompt": "<chart> Which?", "multimodal_data": {{"chart": [b"no,number"]}}}},
        {{"prompt": "<chart> Which?", "multimodal_data": {{"charts": [chart]}}}},
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    part = {{"type": "chart", "chart": chart, "colour": "red"}}
    message = {{"role": "user", "content": [part, {{"type": "text", "text": " Which?"}}]}}
    (chat,) = llm.chat([message], params, use_tqdm=False)
print(json.dumps([[o.prompt_token_ids, o.outputs.token_ids, o.error_code, o.error_msg]
                  for o in [*outputs, chat]], default=list))
"""
GONE = """
import json
from mmdeploy_llm import LLM, MMDeployLLMError
from mmdeploy_llm.hooks import PluginManager

manager = PluginManager.load()
try:
    LLM({folder!r}, reasoning_parser="notes", blocked_plugins=("transformers_any",))
except MMDeployLLMError as error:
    message = str(error)
print(json.dumps([[plugin.name for plugin in manager.plugins], message]))
"""


@pytest.fixture(scope="module")
def environment(new_environment):
    made = new_environment()
    made.copy = made.install(FOLDER)
    return made


@pytest.fixture(scope="module")
def folder(load_file, tmp_path_factory):
    """Writes the package's own tiny checkpoint."""
    return load_file(FOLDER / "tests" / "tiny.py").write_tiny_llava(
        tmp_path_factory.mktemp("llava")
    )


@pytest.fixture(scope="module")
def outputs(environment, folder, tmp_path_factory):
    csv = tmp_path_factory.mktemp("csv") / "fruit.csv"
    csv.write_text("".join(f"{label},{value}\n" for label, value in CHART))
    return environment.program(USE.format(chart=CHART, folder=str(folder), csv=str(csv)))


def test_it_is_listed(environment):
    found = json.loads(environment.run("mmdeploy-llm plugins list --json").stdout)
    (plugin,) = [plugin for plugin in found if plugin["name"] == "minimal"]
    assert plugin["distribution"] == "minimal-llm"
    assert plugin["failures"] == []
    assert [model["media"] for model in plugin["models"]] == [["chart"]]


def test_it_keeps_its_contract(environment, folder):
    done = environment.run(f"mmdeploy-llm plugins check minimal --model {folder} --json")
    outcomes = [verdict["outcome"] for verdict in json.loads(done.stdout)]
    assert "fail" not in outcomes
    assert outcomes.count("pass") > 20


def test_its_own_tests_pass(environment):
    assert " passed" in environment.run("pytest -q", cwd=environment.copy).stdout


def test_tokens_with_charts_are_those_of_transformers(outputs, folder):
    """transformers' LLaVA generates the same tokens for the same ids and pixels."""
    import numpy as np
    import torch
    import transformers

    spec = importlib.util.spec_from_file_location("charts", FOLDER / "src/minimal_llm/charts.py")
    charts = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "charts", charts)
        spec.loader.exec_module(charts)
    labels, values = zip(*CHART, strict=True)
    chart = charts.Chart(labels=labels, values=values)
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder).eval()
    for number, colours in ((0, ["blue"]), (1, ["blue", "blue"]), (5, ["red"])):
        ids, found, code, message = outputs[number]
        assert code == 200, message
        assert ids.count(model.config.image_token_index) == 16 * len(colours)
        pictures = [np.asarray(charts.draw(chart, 56, colour)) for colour in colours]
        pixels = (np.stack(pictures) / 255 - charts.CLIP_MEAN) / charts.CLIP_STD
        expected = model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            pixel_values=torch.from_numpy(pixels).permute(0, 3, 1, 2).float(),
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
        )
        assert expected[0, len(ids) :].tolist() == found


def test_a_wrong_item_is_an_error_of_its_own(outputs):
    assert outputs[2][2] == 200
    assert outputs[3][2] == 400
    assert "each row of a chart is a label and a number" in outputs[3][3]
    assert outputs[4][2] == 400
    assert "unknown kind 'charts'; did you mean 'chart'" in outputs[4][3]


def test_removed_it_is_gone(environment, folder):
    environment.run("pip uninstall --yes minimal-llm")
    names, message = environment.program(GONE.format(folder=str(folder)))
    assert "minimal" not in names
    assert "LlavaForConditionalGeneration" in message or "notes" in message
