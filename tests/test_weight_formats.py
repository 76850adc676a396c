"""The table of weight formats: each place that depends on a format follows its row."""

import re
from pathlib import Path

import pytest
import torch

from mmdeploy_llm.cli.bench.cost import WEIGHT_BYTES
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.kernels import cpu as native
from mmdeploy_llm.kernels.coded import layout_of
from mmdeploy_llm.kernels.cpu.coded import CodedPanels
from mmdeploy_llm.kernels.cpu.products import S8Weight
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.weight_formats import (
    FORMATS,
    LOOKED_UP,
    format_on,
    rounds_inputs,
    with_group_size,
)

ROOT = Path(__file__).parent.parent
OWN_NAMES = re.compile(r"\b(int[48](wo|a8)|wint[48]|w[48]a8)\b")  # of formats alone
every = pytest.mark.parametrize("row", FORMATS.values(), ids=list(FORMATS))


def test_no_other_code_names_a_format():
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "mmdeploy_llm").rglob("*.py")
        for line in path.read_text().splitlines()
        if OWN_NAMES.search(line) and '"' in line.replace('"""', "")
    }
    # The error about a checkpoint that is not read says what to do; flags are written from options.
    assert found <= {
        "mmdeploy_llm/values/options/engine_flags.py",
        "mmdeploy_llm/values/options/weight_formats.py",
        "mmdeploy_llm/weights/quantized/formats.py",
    }


@every
def test_places_of_other_formats_have_rows(row):
    assert {row.elsewhere, row.tied_head, row.on_cuda or row.name, LOOKED_UP} <= FORMATS.keys()
    assert FORMATS[row.tied_head].group_size is not None  # its rows are looked up


@every
def test_the_option_takes_name_and_alias(row):
    assert EngineConfig(model="m", quantization=row.name).quantization == row.name
    if row.alias:
        assert EngineConfig(model="m", quantization=row.alias).quantization == row.name


@every
def test_groups_are_refused_where_a_row_has_none(row):
    options = {"quantization": row.name, "quantization_group_size": 32}
    if row.group_size is None:
        with pytest.raises(ConfigError, match="needs a quantization that has groups"):
            EngineConfig(model="m", **options)
        assert with_group_size(row.name, 32) is FORMATS
    else:
        EngineConfig(model="m", **options)
        assert with_group_size(row.name, 32)[row.name].group_size == 32
        assert layout_of(with_group_size(row.name, -1)[row.name], 300).group_size == 300


@every
def test_the_cpu_packs_as_the_row_says(row):
    try:
        kernels = native.load()
    except native.BuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")
    packed = kernels.pack(torch.randn(64, 256).bfloat16(), row.name)
    assert isinstance(packed, S8Weight if row.group_size is None else CodedPanels)
    assert packed.group_size == (row.group_size or 256)
    assert packed.units.nbytes == 64 * 256 * row.bits // 8
    x = torch.randn(8, 256).bfloat16()
    exact = x.float() @ packed.rows(torch.arange(64), torch.float32).T
    error = (packed.product(x, None, torch.float32) - exact).norm() / exact.norm()
    assert (error > 1e-3) == rounds_inputs(row.name)


@every
def test_a_card_takes_the_same_codes(row):
    """What CUDA takes instead has the bits and groups of the row, whatever groups are asked for."""
    assert format_on(row.name, is_cuda=False) == row.name
    for size in (None, 32):
        formats = with_group_size(row.name, size)
        own, on_cuda = formats[row.name], formats[format_on(row.name, is_cuda=True)]
        assert (own.bits, own.group_size) == (on_cuda.bits, on_cuda.group_size)
    assert format_on("int4", is_cuda=True) == "int4wo"
    assert format_on(None, is_cuda=True) is None


@every
def test_the_lower_bound_knows_its_bytes(row):
    assert row.bits / 8 <= WEIGHT_BYTES[row.name] < row.bits / 8 + 0.1


@every
def test_the_guide_has_a_row(row):
    guide = (ROOT / "docs/quantization.md").read_text()
    alias = f"`{row.alias}`" if row.alias else ""
    assert re.search(rf"^\| `{row.name}` \| {re.escape(alias)} ?\| ", guide, re.MULTILINE)
    making = (ROOT / "docs/making_few_bits.md").read_text()
    saved = making[making.index("## Saving what is loaded") :]
    line = next(line for line in saved.splitlines() if f"`{row.name}`" in line)
    assert ("an error" in line) == (row.transformers is None)


@pytest.mark.parametrize("name", ["fp8", "wfp8afp8", "block_wise_fp8"])
def test_floats_of_8_bits_are_refused_with_what_to_do(name):
    with pytest.raises(ConfigError, match=r"use 'int8wo'.* stored in FP8 stays in 8 bits without"):
        EngineConfig(model="m", quantization=name)
