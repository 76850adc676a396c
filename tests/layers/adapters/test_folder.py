"""Folders of adapters that are hostile, damaged or of a kind that is not served."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from mmdeploy_llm.engine.startup.loaded import AdapterTable
from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.layers.adapters import read_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj"
K = "base_model.model.model.layers.0.self_attn.k_proj"


def write(folder, tensors=None, **config):
    """Writes a PEFT folder of rank 4."""
    folder.mkdir(exist_ok=True)
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | config
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(halves() if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def halves(path=Q, rank=4, k=12, n=16, name=""):
    """Returns both halves of a random change."""
    return {
        f"{path}.lora_A{name}.weight": torch.randn(rank, k),
        f"{path}.lora_B{name}.weight": torch.randn(n, rank),
    }


def refused(folder, *words, **limits):
    """Asserts that the folder is refused with a message that has these words."""
    with pytest.raises(CheckpointError) as error:
        read_adapter(folder, **limits)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", ["", ".default", ".my_task"])
def test_a_plain_adapter_is_read(tmp_path, name):
    tensors = halves(name=name)
    adapter = read_adapter(write(tmp_path / "one", tensors, task_type="CAUSAL_LM"))
    ((path, change),) = adapter.modules.items()
    assert path == "model.layers.0.self_attn.q_proj"
    assert change.scale == 2
    assert torch.equal(change.a, tensors[f"{Q}.lora_A{name}.weight"])
    assert torch.equal(change.b, tensors[f"{Q}.lora_B{name}.weight"])
    assert (adapter.name, adapter.max_rank, adapter.num_bytes) == ("one", 4, 4 * 4 * 28)


def test_the_digest_follows_config_and_weights(tmp_path):
    tensors = halves()
    digests = {
        read_adapter(write(tmp_path / "one", tensors)).digest,
        read_adapter(write(tmp_path / "two", tensors)).digest,
        read_adapter(write(tmp_path / "three", tensors, lora_alpha=9)).digest,
        read_adapter(write(tmp_path / "four")).digest,
    }
    assert len(digests) == 3


def test_copies_of_saved_modules_may_have_the_name_of_the_adapter(tmp_path):
    head = "base_model.model.lm_head"
    tensors = {**halves(name=".a"), f"{head}.modules_to_save.a.weight": torch.ones(3, 4)}
    adapter = read_adapter(write(tmp_path, tensors, modules_to_save=["lm_head"]))
    assert list(adapter.saved) == ["lm_head.weight"]


def test_without_target_modules_the_tensors_say_what_is_changed(tmp_path):
    assert read_adapter(write(tmp_path, target_modules=None)).modules
    refused(write(tmp_path, target_modules=None, target_parameters=["x.w"]), "target_modules")


def test_layers_without_a_pattern_are_the_first_numbers(tmp_path):
    path = "base_model.model.model.layers.1.mlp.experts.0.q_proj"
    read_adapter(write(tmp_path, halves(path), layers_to_transform=[1]))
    refused(write(tmp_path, halves(path), layers_to_transform=[0]), "experts.0.q_proj", "PEFT")
    endless = f"base_model.model.model.layers.{'9' * 5000}.q_proj"
    refused(write(tmp_path, halves(endless), layers_to_transform=[0]), "PEFT leaves them out")


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"peft_type": "IA3"}, ["'IA3'", "LORA"]),
        ({"peft_type": None}, ["None", "LORA"]),
        ({"r": "4"}, ["'r' in adapter_config.json", "'4'"]),
        ({"r": 0}, ["'r'", "0"]),
        ({"r": True}, ["'r'", "True"]),
        ({"r": -4}, ["-4"]),
        ({"r": 2**70}, ["64 bits"]),
        ({"lora_alpha": float("inf")}, ["lora_alpha", "finite"]),
        ({"lora_alpha": float("nan")}, ["NaN"]),
        ({"lora_alpha": "8"}, ["lora_alpha"]),
        ({"lora_alpha": 1e300}, ["lora_alpha", "1073741824"]),
        ({"lora_alpha": None}, ["lora_alpha"]),
        ({"alpha_pattern": {"q_proj": "x"}}, ["alpha_pattern"]),
        ({"alpha_pattern": {"q_proj": float("inf")}}, ["alpha_pattern"]),
        ({"rank_pattern": {"q_proj": 0}}, ["rank_pattern"]),
        ({"rank_pattern": {"q_proj": 8}}, ["lora_A.weight", "(4, 12)", "(8, in)"]),
        ({"rank_pattern": {"q_proj": 2**62}}, ["lora_A.weight", "(4, 12)"]),
        ({"r": 8}, ["lora_A.weight", "(4, 12)", "(8, in)"]),
        ({"target_modules": [1]}, ["target_modules"]),
        ({"target_modules": ["k_proj"]}, ["q_proj", "target_modules"]),
        ({"target_modules": "all-linear", "exclude_modules": ["q_proj"]}, ["q_proj"]),
        ({"target_modules": "("}, ["expression", "cannot be read"]),
        ({"target_modules": "(?P<a>"}, ["expression"]),
        ({"layers_to_transform": [0], "layers_pattern": "(a+)+"}, ["layers_pattern"]),
        ({"target_modules": [], "target_parameters": ["x.w"]}, ["q_proj", "target_modules"]),
        ({"target_modules": [], "target_parameters": ["w", "v"]}, ["target_parameters", "v, w"]),
        ({"bias": "some"}, ["bias"]),
        ({"use_dora": True}, ["lora_magnitude_vector", "expected"]),
        ({"use_dora": "yes"}, ["use_dora"]),
        ({"lora_bias": True}, ["lora_B.bias"]),
        ({"modules_to_save": ["lm_head"]}, ["lacks lm_head"]),
        ({"trainable_token_indices": [1]}, ["lacks the rows"]),
        ({"trainable_token_indices": [-1]}, ["trainable_token_indices"]),
        ({"use_qalora": True}, ["use_qalora", "not served"]),
        ({"layer_replication": [[0, 2]]}, ["layer_replication"]),
        ({"alora_invocation_tokens": [1]}, ["alora_invocation_tokens"]),
        ({"megatron_config": {"a": 1}}, ["megatron_config"]),
        ({"init_lora_weights": "loftq"}, ["'loftq'"]),
        ({"init_lora_weights": "new"}, ["init_lora_weights", "'new'"]),
        ({"new_setting": 1}, ["new_setting", "PEFT"]),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_served_is_refused(tmp_path, values, words):
    refused(write(tmp_path, **values), *words)


@pytest.mark.parametrize("text", ["[]", "", "{", "7", '{"r": 4, "r": 4}', "{" * 10_000, "\xff"])
def test_a_config_that_is_no_object_is_refused(tmp_path, text):
    write(tmp_path)
    (tmp_path / "adapter_config.json").write_text(text, encoding="latin-1")
    refused(tmp_path, "adapter_config.json")


def test_an_expression_that_never_ends_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("mmdeploy_llm.system.guarding.expressions.SECONDS", 0.3)
    refused(write(tmp_path, target_modules=r"(.*.*.*.*)*(.*)*x"), "takes too long")


def without(tensors, *keys):
    return {key: value for key, value in tensors.items() if key not in keys}


PLAIN = halves()
A, B = PLAIN


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, ["no tensors"]),
        (without(PLAIN, B), ["lora_A of", "expected: lora_A, lora_B"]),
        (without(PLAIN, A), ["lora_B of"]),
        (PLAIN | {A: torch.randn(4)}, [A, "(4,)", "(4, in)"]),
        (PLAIN | {A: torch.randn(())}, [A]),
        (PLAIN | {B: torch.randn(16, 5)}, [B, "(16, 5)", "(out, 4)"]),
        (PLAIN | {B: torch.randn(16, 4, 2)}, [B, "(16, 4, 2)"]),
        (PLAIN | {B: torch.randn(0, 4)}, [B, "gathering"]),
        (PLAIN | {B: torch.full((16, 4), torch.nan)}, [B, "not finite"]),
        (PLAIN | {B: torch.full((16, 4), torch.inf)}, [B, "not finite"]),
        (PLAIN | {B: torch.ones(16, 4, dtype=torch.int8)}, [B, "int8"]),
        (PLAIN | {B: torch.ones(16, 4).to(torch.float8_e4m3fn)}, [B, "float8"]),
        (PLAIN | halves(K), ["k_proj", "target_modules"]),
        (PLAIN | halves(name=".default"), ["twice", "lora_A.weight"]),
        (halves(name=".one") | halves(K, name=".two"), ["several adapters, one, two"]),
        (PLAIN | {f"{Q}.lora_E": torch.ones(4, 1)}, ["lora_E"]),
        (PLAIN | {f"{Q}.lora_magnitude_vector": torch.ones(16)}, ["lora_magnitude_vector"]),
        (PLAIN | {f"{Q}.lora_B.bias": torch.ones(16)}, ["lora_B.bias"]),
        (PLAIN | {f"{Q}.bias": torch.ones(16)}, [f"{Q}.bias", "modules_to_save"]),
        (PLAIN | {"base_model.model.norm.weight": torch.ones(16)}, ["norm.weight"]),
        (PLAIN | {"x.token_adapter.trainable_tokens_delta": torch.ones(1, 4)}, ["indices lacks"]),
        (PLAIN | {"": torch.ones(1)}, ["holds , which"]),
    ],
)
def test_tensors_that_are_wrong_are_named(tmp_path, tensors, words):
    refused(write(tmp_path, tensors), *words)


@pytest.mark.parametrize("config", [{"trainable_token_indices": [1, 2]}])
def test_rows_of_tokens_are_as_many_as_their_ids(tmp_path, config):
    rows = {"base_model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, 4)}
    refused(write(tmp_path, PLAIN | rows, **config), "(1, 4)", "(2, hidden)")


def test_limits_hold_before_anything_is_read(tmp_path):
    folder = write(tmp_path)
    refused(folder, "rank 4", "at most 3", max_rank=3)
    refused(folder, "448 bytes", "at most 447", max_bytes=447)
    assert read_adapter(folder, max_rank=4, max_bytes=448)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("adapter_model.bin", "pickle"),
        ("weights.pt", "pickle"),
        ("x.pkl", "pickle"),
        ("modeling.py", "code"),
        ("x.so", "code"),
    ],
)
def test_code_and_pickles_are_refused_with_advice(tmp_path, name, word):
    (write(tmp_path) / name).write_bytes(b"x")
    refused(tmp_path, name, word, "save_pretrained")


def test_what_training_left_is_not_opened(tmp_path):
    write(tmp_path)
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth", "scheduler.pt"):
        os.mkfifo(tmp_path / name)
    assert read_adapter(tmp_path)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_its_files_is_no_adapter(tmp_path, missing):
    (write(tmp_path) / missing).unlink()
    refused(tmp_path, missing)
    os.mkfifo(tmp_path / missing)
    refused(tmp_path, missing)
    refused(tmp_path / "nothing", "no folder")
    refused(tmp_path / "adapter_config.json", "")


def test_links_lead_inside_or_to_the_blobs_of_the_hubs_cache(tmp_path):
    outside = write(tmp_path / "outside")
    inside = write(tmp_path / "inside")
    name = "adapter_model.safetensors"
    (inside / name).unlink()
    (inside / name).symlink_to(outside / name)
    refused(inside, name, "link out of")
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "1", tmp_path / "cache" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (outside / name).rename(blobs / name)
        (snapshot / name).symlink_to(blobs / name)
    assert read_adapter(snapshot)


def test_files_that_are_cut_off_or_lie_are_refused(tmp_path):
    path = write(tmp_path) / "adapter_model.safetensors"
    whole = path.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + size])
    for data in (b"", whole[:4], whole[:-1], whole[: 8 + size], b"\xff" * 8 + whole[8:]):
        path.write_bytes(data)
        refused(tmp_path, "safetensors")
    header[A]["shape"] = [4, 2**61]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + size :])
    refused(tmp_path, "safetensors")
    pair = json.dumps(header[B])
    text = f"{{{json.dumps(B)}: {pair}, {json.dumps(B)}: {pair}}}".encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + size :])
    refused(tmp_path, "")


def test_the_memory_of_adapters_bounds_what_is_read(tmp_path):
    def never():
        raise AssertionError("the adapter was read")

    write(tmp_path)
    with pytest.raises(CheckpointError, match=r"at most 4 are allowed, raise adapter_memory"):
        AdapterTable(never, max_bytes=1).load("a", str(tmp_path))
