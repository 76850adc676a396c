"""Formats of weights come from plugins: what they may yield, and what is said where they do not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from mmdeploy_llm.errors import CheckpointError, PluginContractError, PluginError
from mmdeploy_llm.hooks import PluginManager, WeightFormatSpec, hookimpl
from mmdeploy_llm.weights.folder.schema import check_config
from mmdeploy_llm.weights.quantized import CodeLayout, GroupedMatrix, QuantizedLayer

from .readable import tensors_seen

CODES = torch.arange(8, dtype=torch.int8).view(2, 4)
TENSORS = {"a.codes": CODES, "a.scale": torch.tensor([2.0]), "norm.weight": torch.ones(3)}
WEIGHT = CODES.float() * 2


def layer(stored, **changes):
    wanted = {"codes": ".codes", "scale": ".scale"}
    fields = {
        "name": "a",
        "key": "a.weight",
        "parts": changes.get("parts") or stored.parts("a", wanted),
        "shape": (2, 4),
        "dtype": torch.float32,
        "decode": lambda parts: parts["codes"].float() * parts["scale"],
        **changes,
    }
    return QuantizedLayer(**fields)


def acme(settings, stored):
    yield layer(stored)


def manager_of(**fields):
    """Returns a manager with one format, of a plugin called acme."""
    fields = {"name": "acme4", "factory": f"{__name__}:acme", "suffixes": (".codes", ".scale")} | (
        fields
    )
    spec = WeightFormatSpec(**fields)
    manager = PluginManager()
    plugin = SimpleNamespace(provide_weight_formats=hookimpl(lambda: [spec]))
    manager.register(plugin, "acme")
    return manager


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Returns a function that reads what a model would see, with `function` as the format's."""

    def run(function=acme, tensors=TENSORS, method="acme4", *, coded=False, **fields):
        monkeypatch.setitem(globals(), "acme", function)
        save_file(tensors, tmp_path / "model.safetensors")
        config = SimpleNamespace(quantization_config={"quant_method": method})
        return tensors_seen(
            tmp_path / "model.safetensors", config, manager_of(**fields), coded=coded
        )

    return run


def test_a_format_of_a_plugin(read):
    found = read()
    assert sorted(found) == ["a.weight", "norm.weight"]
    assert torch.equal(found["a.weight"], WEIGHT)


def test_weights_that_are_stored_in_floats_only(read):
    """Such as factors of a product: no dtype says that they are quantised."""
    floats = {"a.codes": CODES.float(), "a.scale": TENSORS["a.scale"]}
    assert torch.equal(read(tensors=floats)["a.weight"], WEIGHT)


def test_a_weight_in_floats_beside_its_codes(read, caplog):
    with caplog.at_level("INFO", logger="mmdeploy_llm"):
        found = read(tensors={**TENSORS, "a.weight": torch.ones(2, 4)})
    assert torch.equal(found["a.weight"], WEIGHT)
    assert "1 weights in floats are not read, their codes are: a.weight" in caplog.text


def test_dequantised_weights_whose_config_still_names_the_format(read):
    plain = {"a.weight": WEIGHT}
    assert torch.equal(read(lambda *_: (), plain)["a.weight"], WEIGHT)


def test_an_unknown_method_lists_the_known_ones_and_who_reads_them(read):
    text = r"'acme5' quant.*; did you mean 'acme4'\?; supported: acme4 by plugin 'acme' \(re"
    with pytest.raises(CheckpointError, match=text):
        read(method="acme5")
    config = SimpleNamespace(quantization_config={"quant_method": "hqq"})
    with pytest.raises(CheckpointError, match=r"auto-round, awq, .* by plugin 'quantized' "):
        tensors_seen(None, config, PluginManager.load(plugins=("quantized",)), files=())
    with pytest.raises(CheckpointError, match="supported: nothing, for no loaded plugin"):
        tensors_seen(None, config, PluginManager(), files=())


def test_a_format_of_a_plugin_comes_before_a_built_in_one(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from mmdeploy_llm.hooks import WeightFormatSpec, hookimpl\n"
        "@hookimpl\n"
        "def provide_weight_formats():\n"
        "    return [WeightFormatSpec(name='gptq', factory='json:loads', suffixes=('.x',))]\n"
    )
    files = [tmp_path / "mine.py"]
    manager = PluginManager.load(plugins=("quantized",), files=files)
    assert manager.owner(manager.named(WeightFormatSpec, "weight format", "gptq")) == "mine.py"
    chosen = PluginManager.load(plugins=("quantized",), files=files, use={"gptq": "quantized"})
    assert chosen.owner(chosen.named(WeightFormatSpec, "weight format", "gptq")) == "quantized"


class TestTensors:
    def test_one_that_is_missing(self, read):
        with pytest.raises(CheckpointError, match=r"layer a has no tensor a\.scale"):
            read(tensors={"a.codes": CODES})

    def test_the_one_by_which_the_weight_is_found(self, read):
        def finding(settings, stored):
            yield from (layer(stored) for _ in stored.names(".codes"))

        lone = {"a.scale": TENSORS["a.scale"], "norm.weight": torch.ones(3)}
        with pytest.raises(CheckpointError, match=r"a\.scale in .* not there: a\.codes\. The f"):
            read(finding, lone)

    def test_integers_that_are_called_as_weights_in_floats_are(self, read):
        tensors = {**TENSORS, "b.weight": CODES.clone()}
        with pytest.raises(CheckpointError, match=r"b\.weight in .* not there: b\.scale"):
            read(tensors=tensors, suffixes=(".weight", ".scale"))

    def test_ignored_ones(self, read):
        tensors = {**TENSORS, "a.input_scale": torch.ones(1)}
        assert "a.input_scale" in read(tensors=tensors)
        assert "a.input_scale" not in read(tensors=tensors, ignored=(".input_scale",))

    @pytest.mark.parametrize(
        "dtype", [torch.bool, torch.int16, torch.uint16, torch.uint32, torch.float8_e5m2]
    )
    def test_dtypes(self, read, dtype):
        def found(settings, stored):
            yield layer(stored, parts=stored.parts("a", {"codes": ".codes"}), decode=floats)

        def floats(parts):
            return parts["codes"].float()

        codes = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1]]).to(dtype)
        assert torch.equal(read(found, {"a.codes": codes})["a.weight"], codes.float())


def raising(*_):
    raise ZeroDivisionError("no luck")


class TestFaults:
    """Each is an error that names the plugin, while the model is loaded."""

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"shape": [2, 4]}, r"yields a with shape \[2, 4\]; it must be a tuple"),
            ({"shape": (8,)}, r"yields a with shape \(8,\)"),
            ({"shape": (2, 0)}, r"yields a with shape \(2, 0\)"),
            ({"dtype": torch.int8}, r"yields a with dtype torch\.int8"),
            ({"parts": {}}, "yields a with parts none"),
            ({"parts": {"codes": "b.codes"}}, r"parts \['b\.codes'\], which are not in the files"),
            (
                {"shape": (2, 2, 2), "layout": CodeLayout(bits=8, group_size=4)},
                "only matrices have one",
            ),
        ],
    )
    def test_layers_that_cannot_be(self, read, changes, text):
        with pytest.raises(PluginContractError, match=rf"weight format acme4 of plugin.*{text}"):
            read(lambda _, stored: [layer(stored, **changes)])

    def test_no_layer(self, read):
        with pytest.raises(PluginContractError, match="yields a str; it must yield QuantizedLayer"):
            read(lambda *_: ["a.weight"])

    def test_a_layer_twice(self, read):
        with pytest.raises(PluginContractError, match=r"yields a\.weight twice"):
            read(lambda _, stored: [layer(stored), layer(stored)])

    def test_a_function_that_raises(self, read):
        with pytest.raises(PluginError, match=r"acme4 of plugin 'acme'.*ZeroDivisionError: no luc"):
            read(raising)

    def test_a_decoder_that_raises(self, read):
        text = r"failed to dequantise a \(a\.codes int8 \[2, 4\], a\.scale .*ZeroDivisionError"
        with pytest.raises(PluginError, match=text):
            read(lambda _, stored: [layer(stored, decode=raising)])

    @pytest.mark.parametrize("made", [torch.ones(1, 4), CODES, None])
    def test_a_weight_of_another_shape_or_dtype(self, read, made):
        """A single row would otherwise fill all of them."""
        with pytest.raises(PluginError, match=r"dequantise[sd]? a "):
            read(lambda _, stored: [layer(stored, decode=lambda _: made)])

    def test_rows_of_another_shape(self, read):
        rows = SimpleNamespace(rows=lambda start, end: torch.ones(1, 4))
        with pytest.raises(
            PluginContractError, match=r"rows 0 to 2 of torch\.float32 \[1, 4\]; it"
        ):
            read(lambda _, stored: [layer(stored, decode=lambda _: rows)])

    def test_a_layout_of_what_has_no_codes(self, read):
        layout = CodeLayout(bits=8, group_size=4)
        with pytest.raises(PluginContractError, match="gives a a layout, but decodes it to a Te"):
            read(lambda _, stored: [layer(stored, layout=layout)], coded=True)

    def test_codes_of_another_shape(self, read):
        def decode(parts):
            codes = parts["codes"][:, :2]
            return GroupedMatrix(
                codes=codes, scales=torch.ones(2, 1), group_size=4, dtype=torch.float32
            )

        layout = CodeLayout(bits=8, group_size=4)
        with pytest.raises(PluginContractError, match=r"codes \[2, 2\]; they must be \[2, 4\]"):
            read(lambda _, stored: [layer(stored, decode=decode, layout=layout)], coded=True)


@pytest.mark.parametrize("value", [[], "gptq", 4])
def test_quantization_config_that_is_no_object(value):
    with pytest.raises(CheckpointError, match=r"quantization_config.* an object"):
        check_config({"quantization_config": value}, "config.json")
    check_config({"quantization_config": None}, "config.json")
