"""Whatever the JSON files of a checkpoint hold, opening it ends soon, with a model or with an error
of this package."""

import copy
import json
import os
import random
import shutil
import signal
import socket
import time
from contextlib import contextmanager

import pytest

from mmdeploy_llm.engine.intake.tokenizer import load_tokenizer
from mmdeploy_llm.engine.startup.cards import CudaSetup
from mmdeploy_llm.engine.startup.machine import Machine
from mmdeploy_llm.engine.startup.media import build_processors
from mmdeploy_llm.engine.startup.model_files import read_model_files
from mmdeploy_llm.engine.startup.options import final_options
from mmdeploy_llm.errors import CheckpointError, MMDeployLLMError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.kernels import TORCH
from mmdeploy_llm.testing.tiny import write_tiny
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.weights.bounds import bounded_building
from mmdeploy_llm.weights.find import find_weights
from mmdeploy_llm.weights.folder import read_checkpoint, resolve_model

NUM_CASES = 10_000
NUM_TOGETHER = 500  # in one test
MAX_SECONDS = 60  # after which a case hangs; it takes about 50 ms
MACHINE = Machine(
    cpus=(0, 1),
    placement=None,
    cuda=CudaSetup(torch="2", cuda=None),
    kernels=TORCH,
)
FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
)
ODD = (
    None,
    True,
    False,
    0,
    -1,
    -(2**31),
    2**31,
    10**9,
    10**40,
    0.5,
    -0.0,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "5",
    "x" * 5000,
    "a/b",
    "../../x",
    "\0",
    "\ud800",
    "\u202e",
    "{{ 1 }}",
    "float16",
    [],
    [[]],
    [1] * 1000,
    {},
    {"": 0},
    {"a": {"b": [0]}},
)
KEYS = (
    "architectures",
    "attn_implementation",
    "auto_map",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_size",
    "id2label",
    "image_mean",
    "layer_types",
    "max_position_embeddings",
    "model_type",
    "num_hidden_layers",
    "num_labels",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "sliding_window",
    "text_config",
    "tokenizer_class",
    "vision_config",
    "vocab_size",
)


class Hangs(BaseException):
    """No Exception: nothing that is tested may catch it."""


@contextmanager
def deadline(seconds=MAX_SECONDS):
    def end(*_):
        raise Hangs

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def open_model(folder):
    """Does all that needs no weights."""
    config = EngineConfig(
        model=str(folder), guided_decoding_backend="off", attention_backend="reference"
    )
    files = read_model_files(config)
    final_options(config, files, MACHINE)
    build_processors(files, config)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("good")
    return [write_tiny(name, root / name) for name in ("qwen2_5_vl", "llama")]


@pytest.fixture
def plugins_once(monkeypatch):
    """Loads the plugins once for all cases: they do not depend on the checkpoint."""
    loaded = PluginManager.load()
    monkeypatch.setattr(PluginManager, "load", lambda *_, **core: loaded)


@pytest.fixture
def model(models, tmp_path):
    """A copy of a model with images, without weights."""
    folder = tmp_path / "model"
    shutil.copytree(models[0], folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def change(folder, name, **values):
    old = json.loads((folder / name).read_text("utf-8"))
    (folder / name).write_text(json.dumps({**old, **values}))


def mutated(rng, text):
    """The text of a JSON file with one to three faults."""
    values = json.loads(text)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(values))
        holder, key = rng.choice(places) if places else (values, "x")
        match rng.randrange(6):
            case 0 if isinstance(holder, dict):
                holder.pop(key, None)
            case 1 if isinstance(holder, dict):
                holder[rng.choice(KEYS)] = _odd(rng)
            case 2:
                holder[key] = _nested(rng.choice((3, 70)), _odd(rng))
            case 3 if places:
                other, name = rng.choice(places)
                holder[key] = json.loads(json.dumps(other.get(name, 0) if _has(other) else 0))
            case _:
                holder[key] = _odd(rng)
    return _spoiled(rng, json.dumps(values)) if rng.random() < 0.1 else json.dumps(values)


def _odd(rng):
    """A copy: what is put into one file may be changed by the next mutation."""
    return copy.deepcopy(rng.choice(ODD))


def _has(holder):
    return isinstance(holder, dict)


def _places(values):
    """(holder, key) of every value inside."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in list(items):
        yield values, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


def _nested(depth, value):
    for _ in range(depth):
        value = [value]
    return value


def _spoiled(rng, text):
    at = rng.randrange(len(text) + 1)
    deep = text[:at] + "[" * 10**5 + text[at:]
    return rng.choice((deep, text[:at], text[:at] + rng.choice('[]{},:"\\0eN') + text[at + 1 :]))


def check_mutations(models, folder, start, end):
    """Opens a model once for each seed."""
    num_refused = 0
    for number, good in enumerate(models):
        shutil.copytree(good, folder / str(number), ignore=shutil.ignore_patterns("*.safetensors"))
    for seed in range(start, end):
        rng = random.Random(seed)
        number = rng.randrange(len(models))
        path = folder / str(number) / rng.choice(FILES)
        before = path.read_text("utf-8") if path.exists() else None
        path.write_text(mutated(rng, before or "{}"), "utf-8")
        try:
            with deadline():
                open_model(path.parent)
        except MMDeployLLMError as error:
            num_refused += bool(str(error))
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {path.name}: {error!r}") from error
        finally:
            path.unlink() if before is None else path.write_text(before, "utf-8")
    return num_refused


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(start, marks=pytest.mark.long if start else pytest.mark.full)
        for start in range(0, NUM_CASES, NUM_TOGETHER)
    ],
)
def test_mutated_files(models, plugins_once, tmp_path, start):
    num_refused = check_mutations(models, tmp_path, start, start + NUM_TOGETHER)
    assert 0 < num_refused < NUM_TOGETHER


def test_the_good_models_open(models):
    for folder in models:
        open_model(folder)


# What each error says: file, key, found, allowed.


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("name", "key", "value", "allowed"),
    [
        ("config.json", "architectures", 5, "a list of names"),
        ("config.json", "architectures", ["x" * 5000], "256 characters"),
        ("config.json", "attn_implementation", "evil/kernels", "never a repository"),
        ("config.json", "hidden_size", 0, "from 1 to"),
        ("config.json", "max_position_embeddings", -5, "from 1 to"),
        ("config.json", "max_position_embeddings", 0, "from 1 to"),
        ("config.json", "max_position_embeddings", 10**12, "from 1 to"),
        ("config.json", "model_type", ["x"], "a name"),
        ("config.json", "num_attention_heads", 0, "from 1 to"),
        ("config.json", "num_hidden_layers", 10**9, "from 1 to 10000"),
        ("config.json", "encoder_layers", 10**9, "10000 layers"),
        ("config.json", "num_labels", 10**9, "from 0 to 100000"),
        ("config.json", "num_things", 10**9, "up to"),
        ("config.json", "x", 10**40, "64 bits"),
        ("config.json", "rope_theta", float("inf"), "a number above 0"),
        ("generation_config.json", "eos_token_id", "2", "a token id"),
        ("generation_config.json", "eos_token_id", [2, None], "a token id"),
        ("generation_config.json", "eos_token_id", 2.5, "a token id"),
        ("generation_config.json", "do_sample", "yes", "true or false"),
        ("preprocessor_config.json", "image_mean", [float("nan")] * 3, "a number"),
        ("preprocessor_config.json", "image_mean", ["a"] * 3, "finite numbers"),
        ("preprocessor_config.json", "image_std", [0, 0, 0], "above 0"),
        ("preprocessor_config.json", "patch_size", 0, "from 1 to"),
        ("tokenizer_config.json", "chat_template", 5, "a text"),
        ("tokenizer_config.json", "x", "\ud800", "UTF-8"),
    ],
)
def test_values_out_of_range(model, name, key, value, allowed):
    change(model, name, **{key: value})
    start = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        open_model(model)
    message = str(caught.value)
    assert f"{key!r} in {name} of the model is" in message
    assert allowed in message.partition("allowed: ")[2]
    assert len(message) < 400 + len(str(model))
    assert message.endswith(f" (model {str(model)!r})")
    assert time.monotonic() - start < MAX_SECONDS


@pytest.mark.one_is_quick
@pytest.mark.parametrize("chosen", [0, -1, 5])
@pytest.mark.parametrize(
    "names", [("num_experts", "num_experts_per_tok"), ("n_routed_experts", "moe_k")]
)
def test_a_router_that_would_choose_no_expert_or_too_many(model, names, chosen):
    change(model, "config.json", **dict(zip(names, (4, chosen), strict=True)))
    with pytest.raises(
        CheckpointError, match=f"{names[1]}' in config.json .* is {chosen}; .* 1 to the 4"
    ):
        open_model(model)


def test_a_value_inside_a_config(model):
    config = json.loads((model / "config.json").read_text("utf-8"))
    change(model, "config.json", vision_config={**config["vision_config"], "depth": 10**9})
    with pytest.raises(CheckpointError, match=r"'vision_config.depth' in config.json.*10000"):
        open_model(model)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("token_id", [-1, 10**6, [10**6]])
def test_an_end_token_outside_the_vocabulary(model, token_id):
    change(model, "generation_config.json", eos_token_id=token_id)
    with pytest.raises(CheckpointError, match=r"'eos_token_id' in generation_.*allowed: 0 to"):
        open_model(model)


def test_infinity_and_other_keys_pass(model):
    """Published checkpoints have them: "time_step_limit": [0.0, Infinity], int(1e30)."""
    change(model, "config.json", time_step_limit=[0.0, float("inf")], own={"num_x": 3})
    change(model, "tokenizer_config.json", model_max_length=int(1e30))
    open_model(model)


def test_integers_that_are_written_as_floats(model):
    """Programs have written them, and transformers' own config of Music Flamingo does: a model gets
    integers."""
    change(model, "generation_config.json", eos_token_id=[2, 3])
    wanted = read_checkpoint(model)
    text = json.loads((model / "config.json").read_text("utf-8"))["text_config"]
    keys = ("hidden_size", "max_position_embeddings", "num_hidden_layers", "vocab_size")
    change(model, "config.json", text_config=text | {key: float(text[key]) for key in keys})
    change(model, "generation_config.json", eos_token_id=[2.0, 3.0])
    images = json.loads((model / "preprocessor_config.json").read_text("utf-8"))
    change(model, "preprocessor_config.json", patch_size=float(images["patch_size"]))
    found = read_checkpoint(model)
    for one, other in (
        (found.config.to_dict(), wanted.config.to_dict()),
        (found.generation, wanted.generation),
        (found.preprocessor, wanted.preprocessor),
    ):
        assert json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


# What stands where a file is expected.


def fifo(path):
    os.mkfifo(path)


def endless(path):
    path.symlink_to("/dev/zero")


def folder_instead(path):
    path.mkdir()


def listening(path):
    with socket.socket(socket.AF_UNIX) as end:
        before = os.getcwd()
        os.chdir(path.parent)  # the path of a socket is short
        end.bind(path.name)
        os.chdir(before)


NAMES = (*FILES, "processor_config.json", "tokenizer.json", "chat_template.jinja")
NAMES += ("special_tokens_map.json", "vocab.txt", "tokenizer.model", "model.safetensors")


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [fifo, endless, listening], ids=lambda make: make.__name__)
def test_only_regular_files_are_opened(model, name, make):
    (model / name).unlink(missing_ok=True)
    make(model / name)
    with deadline(), pytest.raises(CheckpointError, match=rf"{name} of the model is a"):
        load_tokenizer(model)
    with deadline(), pytest.raises(CheckpointError, match=rf"{name} of the model is a"):
        read_checkpoint(model)


@pytest.mark.parametrize("make", [fifo, endless, folder_instead], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "x.safetensors"]
)
def test_only_regular_files_are_weights(tmp_path, name, make):
    make(tmp_path / name)
    with deadline(), pytest.raises(CheckpointError, match=rf"{name} of the model is a"):
        find_weights(tmp_path)


def test_sizes_are_bounded(model):
    with (model / "config.json").open("ab") as file:
        file.truncate(2**34)  # sparse
    with deadline(), pytest.raises(CheckpointError, match=r"config.json of the model has.*bytes"):
        read_checkpoint(model)


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**5, '{"a": ' + "1" * 5000 + "}"])
def test_nested_and_long_json(model, text):
    (model / "generation_config.json").write_text(text)
    with deadline(), pytest.raises(CheckpointError, match=r"generation_config.json of the model"):
        read_checkpoint(model)


@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 5000, "~nobody-of-this-name/x", "a\0b"])
def test_names_of_models(name):
    with pytest.raises(CheckpointError):
        resolve_model(name)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", ""])
def test_names_of_weight_files(tmp_path, name):
    values = {"weight_map": {"x": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="name files"):
        find_weights(tmp_path)


def test_a_model_cannot_grow_without_end():
    from torch import device, nn

    few = bounded_building(max_parts=100)
    with device("meta"), pytest.raises(CheckpointError, match="layers and experts"), few:
        nn.ModuleList(nn.Linear(2, 2) for _ in range(10**9))
    with device("meta"), pytest.raises(CheckpointError, match="weights; allowed"):  # noqa: SIM117
        with bounded_building():
            nn.Linear(2**30, 2**30)
    with device("meta"):
        nn.ModuleList(nn.Linear(2, 2) for _ in range(200))  # not outside the block
