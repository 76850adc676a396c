"""Every plugin folder of this repository works when it is copied into its own package.

Each folder, with the folders that it imports, becomes a package `lifted_NAME` with a short
pyproject.toml and is installed into a fresh environment, in which the originals cannot be imported.
"""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from mmdeploy_llm.hooks.discovery import CORE  # loaded also where they are not named
from mmdeploy_llm.hooks.names import normalise
from mmdeploy_llm.testing import make_tokenizer, write_checkpoint, write_tiny

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / kind / f"mmdeploy_llm_{kind}" for kind in ("plugins", "processors")]
ENTRY_POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
PLUGINS = ENTRY_POINTS["mmdeploy_llm"]
OURS = re.compile(r"\bmmdeploy_llm_(?:plugins|processors)\.(\w+)")
PROJECT = """\
[project]
name = "lifted-{name}"
version = "1.0"
[project.entry-points.mmdeploy_llm]
lifted-{name} = "lifted_{name}.{name}"
"""
DATA = """\
[tool.setuptools.package-data]
"*" = ["*.ttf"]
"""
BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mmdeploy_llm_plugins", "mmdeploy_llm_processors"):
            raise ModuleNotFoundError(f"{name} is blocked in this test", name=name)

sys.meta_path.insert(0, Blocked())
"""
CHECK = """
import json
from mmdeploy_llm.testing.check import check_plugin
found = {{name: [(v.check, v.subject, v.message) for v in check_plugin(name) if v.outcome == "fail"]
         for name in {names!r}}}
print(json.dumps(found))
"""
RUN = """
import json
from mmdeploy_llm import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
found = []
for model, prompt, options in json.loads({jobs!r}):
    with LLM(model, plugins={plugins!r}, blocked_plugins={blocked!r}, num_threads=1,
             **options) as llm:
        (output,) = llm.generate(prompt, params, use_tqdm=False)
    said = output.outputs
    found.append([output.error_msg, list(said.token_ids), said.text, said.reasoning_content,
                  output.num_input_image_tokens, output.num_input_video_tokens])
print(json.dumps(found))
"""


def folder_of(name):
    """Returns the folder of a plugin, such as plugins/mmdeploy_llm_plugins/qwen for qwen."""
    (path,) = [folder / name for folder in FOLDERS if (folder / name).is_dir()]
    return path


def needed(name, seen=()):
    """Returns the plugin's folder and those that it imports, by name."""
    text = "".join(file.read_text() for file in sorted(folder_of(name).rglob("*.py")))
    others = set(OURS.findall(text)) - {name, *seen}
    names = {name}
    for other in others:
        names |= needed(other, (*seen, *names))
    return names


def lift(name, parent):
    """Writes the package of one plugin."""
    module = f"lifted_{name}"
    package = parent / module / module
    for part in needed(name):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(folder_of(part), package / part, ignore=ignored)
    (package / "__init__.py").touch()
    for file in package.rglob("*.py"):
        file.write_text(OURS.sub(rf"{module}.\1", file.read_text()))
    has_data = any(package.rglob("*.ttf"))
    (parent / module / "pyproject.toml").write_text(
        PROJECT.format(name=name) + (DATA if has_data else "")
    )
    return parent / module


@pytest.fixture(scope="module")
def environment(new_environment, tmp_path_factory):
    made = new_environment()
    folders = [lift(name, tmp_path_factory.mktemp("lifted")) for name in PLUGINS]
    made.run("pip install " + " ".join(map(str, folders)))
    return made


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Returns (model, prompt, options) for every plugin that computes or reads something."""
    import transformers

    folder = tmp_path_factory.mktemp("models")
    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    olmo = transformers.Olmo2Config(
        vocab_size=len(tokenizer), num_attention_heads=4, max_position_embeddings=512, **sizes
    )
    image = str(ROOT / "examples/images/picture-2.jpg")
    clip = str(ROOT / "examples/images/clip-1.mp4")
    ernie = {"image": "<|image@placeholder|>", "video": "<|video@placeholder|>"}
    return [
        *(
            (str(write_tiny(family, folder / family)), "Hello there", {})
            for family in ("glm4", "llama", "qwen2")
        ),
        (str(write_checkpoint(olmo, folder / "olmo", tokenizer=tokenizer)), "Hello there", {}),
        (
            str(write_tiny("qwen2_5_vl", folder / "vl")),
            {"prompt": "<|image_pad|> What?", "multimodal_data": {"image": [image]}},
            {},
        ),
        *(
            (
                "shapes-vl",
                {"prompt": f"{ernie[kind]} What?<think>", "multimodal_data": {kind: [path]}},
                {"reasoning_parser": "ernie-45-vl"},
            )
            for kind, path in (("image", image), ("video", clip))
        ),
    ]


def test_every_plugin_of_this_repository_is_lifted():
    assert set(PLUGINS) == {name for name in PLUGINS if folder_of(name).is_dir()}
    assert needed("paddleocr") == {"paddleocr", "ernie", "video", "image"}


@pytest.mark.long
def test_lifted_plugins_keep_their_contracts(environment):
    names = [f"lifted-{normalise(name)}" for name in PLUGINS]
    found = environment.program(BLOCK + CHECK.format(names=names))
    assert found == {name: [] for name in names}


@pytest.mark.long
def test_lifted_plugins_give_what_the_originals_give(environment, jobs):
    lifted, ours = (
        environment.program(
            block + RUN.format(jobs=json.dumps(jobs), plugins=plugins, blocked=blocked)
        )
        for block, plugins, blocked in (
            (BLOCK, tuple(f"lifted-{name}" for name in PLUGINS), CORE),
            ("", tuple(PLUGINS), ()),
        )
    )
    assert lifted == ours
    assert [message for message, *_ in ours] == [None] * len(jobs)
    assert ours[-1][-1] > 0  # tokens of the video
