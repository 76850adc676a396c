"""No code of a checkpoint ever runs: every call that could run it says so, and folders that hold
such code are opened in a program whose stdin answers "y" to every question."""

import ast
import json
import shutil
import subprocess
import sys

import pytest
import transformers

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.testing.tiny import write_tiny
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.tree import shipped

LOADERS = {"from_pretrained", "from_config", "get_class_from_dynamic_module"}
SECONDS = 120


def unsafe_calls(source):
    """Line numbers of what may load code and is no call that says trust_remote_code=False."""
    nodes = list(ast.walk(ast.parse(source)))
    safe = {id(node.func) for node in nodes if isinstance(node, ast.Call) and _says_no(node)}
    return [
        node.lineno
        for node in nodes
        if getattr(node, "attr", getattr(node, "id", None)) in LOADERS and id(node) not in safe
    ]


def _says_no(call):
    return any(
        keyword.arg == "trust_remote_code"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is False
        for keyword in call.keywords
    )


def test_every_call_that_can_load_code_says_no():
    wrong, num_calls = [], 0
    for name, path in shipped().items():
        source = path.read_text("utf-8")
        num_calls += source.count(".from_pretrained(")
        wrong += [f"{name}:{line}" for line in unsafe_calls(source)]
    assert wrong == []
    assert num_calls >= 4  # the test sees the calls that there are


@pytest.mark.parametrize(
    ("source", "is_safe"),
    [
        ("AutoConfig.from_pretrained(x, trust_remote_code=False)", True),
        ("AutoConfig.from_pretrained(x)", False),
        ("AutoConfig.from_pretrained(x, trust_remote_code=True)", False),
        ("AutoConfig.from_pretrained(x, trust_remote_code=no)", False),
        ("AutoConfig.from_pretrained(x, trust_remote_code=0)", False),
        ("AutoConfig.from_pretrained(x, **options)", False),
        ("load = AutoConfig.from_pretrained", False),
        ("AutoModel.from_config(f(trust_remote_code=False))", False),
        ("A(B.from_pretrained(x), trust_remote_code=False)", False),
    ],
)
def test_the_test_of_the_calls(source, is_safe):
    assert (unsafe_calls(source) == []) is is_safe


# Opens each folder with the real plugins as far as that needs no weights, and builds the model. Its
# stdin says "y" to whatever transformers asks.
PROGRAM = """
import os, sys, torch
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.errors import CheckpointError, ModelNotSupportedError, UnsupportedMediaError
from mmdeploy_llm.engine.startup.media import build_processors
from mmdeploy_llm.engine.startup.model_files import read_model_files
for folder in sys.argv[1:]:
    name = os.path.basename(folder)
    os.chdir(folder)
    config = EngineConfig(model=folder, guided_decoding_backend="off")
    try:
        files = read_model_files(config)
        build_processors(files, config)
        with torch.device("meta"):
            files.plugins.build(files.spec, files.checkpoint.config)
        print("ANSWER", name, "built", flush=True)
    except (CheckpointError, ModelNotSupportedError, UnsupportedMediaError) as error:
        print("ANSWER", name, type(error).__name__, error, flush=True)
"""

AUTO_CLASSES = (
    "AutoConfig",
    "AutoFeatureExtractor",
    "AutoImageProcessor",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoProcessor",
    "AutoVideoProcessor",
)
AUTO_MAP = {name: "evil.Evil" for name in AUTO_CLASSES}
AUTO_MAP |= {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A good checkpoint that transformers_any runs, with images."""
    folder = tmp_path_factory.mktemp("good") / "llava"
    from mmdeploy_llm.testing.checkpoint import write_checkpoint
    from mmdeploy_llm.testing.tiny import make_tokenizer

    tokenizer = make_tokenizer()
    text = {"model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 32}
    text |= {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64}
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    config = transformers.LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=5,
        architectures=["LlavaForConditionalGeneration"],
    )
    image = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}}
    image |= {"crop_size": {"height": 28, "width": 28}}
    files = {
        "preprocessor_config.json": json.dumps(image),
        "processor_config.json": json.dumps(
            {"processor_class": "LlavaProcessor", "patch_size": 14, "image_token": "<image>"}
        ),
    }
    write_checkpoint(config, folder, tokenizer=tokenizer, files=files)
    return folder


def change(folder, name, **values):
    path = folder / name
    old = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**old, **values}))


def config_code(folder):
    change(folder, "config.json", model_type="evil", auto_map=AUTO_MAP)


def config_of_a_known_model(folder):
    change(folder, "config.json", auto_map=AUTO_MAP)


def config_inside_a_config(folder):
    """A vision tower that has a config but no model in transformers: AutoModel.from_config asks."""
    vision = {
        "model_type": "clipseg_vision_model",
        "auto_map": AUTO_MAP,
        "_name_or_path": str(folder),
    }
    change(folder, "config.json", vision_config=vision)


def kernels_of_the_hub(folder):
    change(folder, "config.json", attn_implementation="evil/kernels")


def tokenizer_code(folder):
    change(folder, "tokenizer_config.json", tokenizer_class="Evil", auto_map=AUTO_MAP)


def image_processor_code(folder):
    change(folder, "preprocessor_config.json", image_processor_type="Evil", auto_map=AUTO_MAP)


def image_processor_code_in_one_file(folder):
    inner = {"image_processor_type": "Evil", "auto_map": AUTO_MAP}
    (folder / "preprocessor_config.json").unlink()
    change(folder, "processor_config.json", image_processor=inner, auto_map=AUTO_MAP)


def video_processor_code(folder):
    values = {"video_processor_type": "Evil", "auto_map": AUTO_MAP}
    change(folder, "video_preprocessor_config.json", **values)


def processor_code(folder):
    values = {"processor_class": "Evil", "auto_map": AUTO_MAP}
    change(folder, "processor_config.json", **values)


def feature_extractor_code(folder):
    values = {"feature_extractor_type": "Evil", "image_processor_type": None}
    change(folder, "preprocessor_config.json", **values, auto_map=AUTO_MAP)


def audio_tokenizer_code(folder):
    """The processor's own from_pretrained loads the class and the folder that the file names."""
    other = folder / "other"
    other.mkdir()
    change(other, "config.json", model_type="evil", auto_map=AUTO_MAP)
    (other / "evil.py").write_text((folder / "evil.py").read_text("utf-8"))
    named = {"audio_tokenizer_class": "AutoModel", "audio_tokenizer_name_or_path": str(other)}
    change(folder, "processor_config.json", audio_tokenizer=named)


def generation_code(folder):
    change(folder, "generation_config.json", auto_map=AUTO_MAP, custom_generate="evil")
    (folder / "custom_generate").mkdir()
    evil = (folder / "evil.py").read_text("utf-8")
    (folder / "custom_generate/generate.py").write_text(evil)


def chat_template_code(folder):
    change(folder, "chat_template.json", chat_template="{{ ''.__class__.__mro__ }}")
    change(folder, "processor_config.json", auto_map=AUTO_MAP, chat_template="{{ 1 }}")


HOSTILE = {
    config_code: "CheckpointError",
    config_of_a_known_model: "built",
    config_inside_a_config: "ModelNotSupportedError",
    kernels_of_the_hub: "CheckpointError",
    tokenizer_code: "",
    image_processor_code: "CheckpointError",
    image_processor_code_in_one_file: "CheckpointError",
    video_processor_code: "built",
    processor_code: "",
    feature_extractor_code: "",
    audio_tokenizer_code: "built",
    generation_code: "built",
    chat_template_code: "built",
}


def run(program, *folders):
    """The finished program; stdin says yes for ever."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *map(str, folders)],
        input="y\n" * 1000,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def armed(arm, model, tmp_path):
    """A copy of the model with code in it; the code makes the file `ran` next to it."""
    folder = tmp_path / arm.__name__
    shutil.copytree(model, folder)
    ran = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Evil: pass\n")
    arm(folder)
    return folder


@pytest.mark.full
def test_no_code_of_a_hostile_folder_runs(model, tmp_path):
    folders = [armed(arm, model, tmp_path) for arm in HOSTILE]
    done = run(PROGRAM, *folders)
    assert [path for path in tmp_path.rglob("ran")] == [], "code of the checkpoint ran"
    assert "Do you wish to run" not in done.stdout + done.stderr, "it asked"
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    answers = {name: answer for _, name, answer, *_ in lines}
    assert answers.keys() == {arm.__name__ for arm in HOSTILE}
    wanted = {arm.__name__: answer or answers[arm.__name__] for arm, answer in HOSTILE.items()}
    assert answers == wanted, done.stdout
    # What transformers advises, and this package refuses, is not repeated.
    assert "trust_remote_code=True" not in done.stdout


@pytest.mark.long
def test_the_hostile_folders_are_hostile(model, tmp_path):
    """With a yes, transformers runs this code: the folders above would show it."""
    folder = armed(image_processor_code, model, tmp_path)
    run(
        "import sys\n"
        "from transformers.models.auto.image_processing_auto import AutoImageProcessor\n"
        "AutoImageProcessor.from_pretrained(sys.argv[1])\n",
        folder,
    )
    assert (folder / "ran").exists()


def test_names_of_code_are_forgotten_in_every_config(tmp_path):
    folder = write_tiny("qwen2_vl", tmp_path)
    values = json.loads((folder / "config.json").read_text("utf-8"))
    values["auto_map"] = values["vision_config"]["auto_map"] = AUTO_MAP
    values["text_config"] = {**values.get("text_config", {}), "auto_map": AUTO_MAP}
    (folder / "config.json").write_text(json.dumps(values))
    config = read_checkpoint(folder).config
    for found in (config, config.vision_config, config.get_text_config()):
        assert not hasattr(found, "auto_map")


def test_files_are_read_through_the_checked_reader(tmp_path):
    checkpoint = Checkpoint(folder=tmp_path, config=None)
    assert checkpoint.read_json("processor_config.json") == {}
    (tmp_path / "x.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        checkpoint.read_json("x.json")
