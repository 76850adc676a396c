"""quantize --calibrate: items that cannot be used are reported, what was lost is measured, and a
run that was cut off is continued."""

from __future__ import annotations

import filecmp
import json
import unicodedata
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.checkpoints.quantize import calibrate, loss, quantize_checkpoint, samples
from mmdeploy_llm.checkpoints.quantize.carried import Carried
from mmdeploy_llm.checkpoints.quantize.sites import watched, windows
from mmdeploy_llm.checkpoints.saving import GroupRounder
from mmdeploy_llm.checkpoints.saving.rounding import Scheme
from mmdeploy_llm.cli import app
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.kernels.cpu import load
from mmdeploy_llm.testing.tiny import write_tiny
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.weights.files import SafetensorsFile

SIZES = {"hidden_size": 64, "num_attention_heads": 4}
SHORT = SamplingParams(temperature=0, max_tokens=6, skip_special_tokens=False, ignore_eos=True)

pytestmark = pytest.mark.skipif(load() is None, reason="needs the C++ kernels")


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setattr(samples, "PARAMS", SHORT)


def requests(folder, *more):
    """Writes a JSONL file of text, ids and conversations with an image."""
    folder.mkdir(exist_ok=True)
    for name, color in (("red", (250, 0, 0)), ("blue", (0, 0, 250))):
        Image.new("RGB", (56, 56), color).save(folder / f"{name}.png")
    lines = [{"prompt_token_ids": [5, 9, 200, 31, number]} for number in range(3, 9)]
    lines += [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}]}
        for part in (
            {"type": "image", "image": "red.png"},
            {"type": "image_url", "image_url": {"url": "blue.png"}},
        )
    ]
    lines += [{"prompt": "some words and more"}, *more]
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.full
def test_command(tmp_path):
    plain, output = write_tiny("qwen2_5_vl", tmp_path / "plain", **SIZES), tmp_path / "out"
    image = {"type": "image", "image": "none.png"}
    bad = {"messages": [{"role": "user", "content": [image]}]}
    given = requests(tmp_path / "data", bad, {"promt": "typo"})
    command = ["quantize", str(plain), str(output), "--group-size", "32", "--calibrate", given]
    command += ["--towers", "int8"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "none.png" in result.output
    assert "unknown key 'promt'" in result.output
    assert "calibrated with 8 items" in result.output
    found = json.loads((output / "quantization_loss.json").read_text())
    assert (found["num_items"], found["num_used"]) == (1, 8)
    assert found["num_tokens"] >= SHORT.max_tokens
    assert 0 < found["divergence"] < 0.5
    assert found["perplexity_before"] > 1
    assert not (output / "calibration").exists()
    groups = json.loads((output / "config.json").read_text())["quantization_config"]
    layouts = [own["weights"] for own in groups["config_groups"].values()]
    assert {own["num_bits"] for own in layouts} == {4, 8}
    assert any("visual" in name for name in groups["config_groups"]["group_1"]["targets"])
    with LLM(str(output), block_size=16) as llm:
        assert llm.generate([[5, 9, 200]], SHORT, use_tqdm=False)[0].is_ok


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "ernie4_5_vl_moe"])
def test_outputs_change_less(tmp_path, family):
    sizes = {"hidden_size": 64, "head_dim": 16} if family == "qwen3_moe" else {}
    plain = write_tiny(family, tmp_path / "plain", **sizes)
    found = quantize_checkpoint(
        str(plain),
        tmp_path / "out",
        bits=4,
        group_size=32,
        calibrate_with=requests(tmp_path / "data"),
        open_model=LLM,
    )
    assert found.gain < 0.9
    assert found.loss is not None


def test_sums_equal_the_inputs(tmp_path):
    """Moments of the first layer's q, k and v are those of its normed embeddings."""
    plain = write_tiny("qwen2", tmp_path / "plain", **SIZES)
    scheme = Scheme(bits=4, group_size=32)
    options = calibrate.engine_options(EngineConfig(model=str(plain)))
    with (
        SafetensorsFile(plain / "model.safetensors") as file,
        LLM(str(plain), **options) as llm,
    ):
        (first, *_) = windows(llm.model, [file], GroupRounder(scheme))
        site = next(own for own in first.sites if own.name.endswith("0.self_attn.qkv_proj.weight"))
        calibrate._stop_recording(llm.model)
        ids = [5, 9, 200, 31, 7]
        sample = samples.Sample(prompt={"prompt_token_ids": ids}, start=2)
        with watched(llm.model, [site]) as (own,):
            loss.pass_through(llm, sample)
    weights = load_file(plain / "model.safetensors")
    rows = weights["model.embed_tokens.weight"][ids].bfloat16().float()
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)
    x = (normed * weights["model.layers.0.input_layernorm.weight"].float()).bfloat16().float()
    expected = x.T @ x
    assert (own.moments - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("chunk", [64, 16])
def test_carried_states_give_the_same_sums(tmp_path, chunk):
    """Passes through the layers of one window see what passes through the whole model see, and no
    layer is computed in more than two of them."""
    plain = write_tiny("qwen2", tmp_path / "plain", num_hidden_layers=6, **SIZES)
    options = calibrate.engine_options(EngineConfig(model=str(plain)))
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 200, (n,), generator=generator).tolist() for n in (40, 3, 17)]
    given = [samples.Sample(prompt={"prompt_token_ids": ids}, start=2) for ids in prompts]
    calls = Counter()
    with (
        SafetensorsFile(plain / "model.safetensors") as file,
        LLM(str(plain), max_num_batched_tokens=chunk, max_num_seqs=4, **options) as llm,
    ):
        calibrate._stop_recording(llm.model)
        todo = windows(llm.model, [file], GroupRounder(Scheme(bits=4, group_size=32)))
        assert [(own.first, own.stop) for own in todo] == [(0, 2), (2, 4), (4, 6)]
        for number, layer in enumerate(llm.model.model.layers):
            layer.mlp.register_forward_hook(lambda *_, number=number: calls.update([number]))
        sums = {}
        for kind, carried in (("whole", None), ("carried", Carried(llm.model))):
            calls.clear()
            for own in todo:
                part = nullcontext() if carried is None else carried.window(own.first, own.stop)
                with watched(llm.model, own.sites) as found, part:
                    for sample in given:
                        loss.pass_through(llm, sample)
                sums[kind] = sums.get(kind, []) + [each.moments for each in found]
    passes = calls[0] // 2  # of windows 0 and 1
    assert calls == {number: passes * (2 if number < 4 else 1) for number in range(6)}
    for ours, whole in zip(sums["carried"], sums["whole"], strict=True):
        assert torch.equal(ours, whole)
        assert torch.equal(ours, ours.T)


@pytest.mark.full
def test_continued(tmp_path, monkeypatch):
    """The run dies after the answers, after the reference, and after each window."""
    plain, given = write_tiny("qwen2", tmp_path / "plain", **SIZES), requests(tmp_path / "data")
    given = given.replace("requests", "texts")
    lines = (tmp_path / "data" / "requests.jsonl").read_text().splitlines()
    texts = [line for line in lines if "image" not in line]
    (tmp_path / "data" / "texts.jsonl").write_text("\n".join(texts))

    def run(name):
        return quantize_checkpoint(
            str(plain), tmp_path / name, bits=4, group_size=32, calibrate_with=given, open_model=LLM
        )

    run("whole")
    for owner, name, number in (
        (calibrate, "answers_of", 0),
        (calibrate, "_round_window", 0),
        (calibrate, "_round_window", 1),
        (calibrate, "CalibratedRounder", 0),
    ):
        with monkeypatch.context() as patch:
            own, calls = getattr(owner, name), iter(range(100))

            def die(*args, own=own, calls=calls, number=number):
                if next(calls) == number:
                    raise KeyboardInterrupt
                return own(*args)

            patch.setattr(owner, name, die)
            if name == "CalibratedRounder":
                patch.setattr("mmdeploy_llm.checkpoints.quantize.convert.CalibratedRounder", die)
            with pytest.raises(KeyboardInterrupt):
                run("out")
    monkeypatch.setattr(calibrate, "_round_window", None)  # all windows are there
    run("out")
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert names == {path.name for path in (tmp_path / "out").iterdir()}
    _, different, wrong = filecmp.cmpfiles(
        tmp_path / "whole", tmp_path / "out", names, shallow=False
    )
    assert (different, wrong) == ([], [])


def test_prompts_of_this_package():
    """All are read as any corpus is, and are as many and as varied as the command says."""
    items = samples.read_items("builtin")
    assert len({item.digest for item in items}) == 59
    assert samples.PROMPTS.stat().st_size < 40_000
    texts = [item.prompt.text or str(item.prompt.messages) for item in items]
    assert sum(item.prompt.messages is not None for item in items) == 16
    blocks = {"CJK", "HIRAGANA", "HANGUL", "CYRILLIC", "ARABIC", "DEVANAGARI", "LATIN"}
    assert blocks <= {unicodedata.name(x, "").split(" ")[0] for text in texts for x in text}


@pytest.mark.full
def test_nothing_to_calibrate_with(tmp_path):
    plain = write_tiny("qwen2", tmp_path / "plain", **SIZES)
    (tmp_path / "bad.jsonl").write_text('{"promt": 1}\n')
    with pytest.raises(ConfigError, match="none of 1 calibration items can be used: line 1"):
        quantize_checkpoint(
            str(plain),
            tmp_path / "out",
            bits=4,
            group_size=32,
            calibrate_with=str(tmp_path / "bad.jsonl"),
            open_model=LLM,
        )
