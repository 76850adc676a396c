"""The conformance kit on the backends of this package, on the example, and on planted bugs."""

from pathlib import Path

import pytest
from mmdeploy_llm_plugins.attention import provide_attention_backends

from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.hooks.files import load_file as load_plugin
from mmdeploy_llm.testing import AttentionBackendConformance
from mmdeploy_llm.testing.attention import backends
from mmdeploy_llm.testing.attention.subject import BackendSubject
from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped

SPECS = {spec.name: spec for spec in provide_attention_backends()}
EXAMPLE = Path(__file__).parents[3] / "examples/plugins/sdpa.py"
BY_NAME = {check.__name__: check for check in backends.CHECKS}


class TestReference(AttentionBackendConformance):
    spec = SPECS["reference"]


class TestNative(AttentionBackendConformance):
    spec = SPECS["native"]


@pytest.mark.full
class TestTriton(AttentionBackendConformance):
    """Runs in Triton's interpreter, where there is no card."""

    spec = SPECS["triton"]

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, triton_attention, triton_device):
        own = None if triton_device.type == "cuda" else lambda setup: triton_attention
        return BackendSubject(spec=cls.spec, make=own)


class TestExample(AttentionBackendConformance):
    spec = load_plugin(EXAMPLE).provide_attention_backends()[0]


@pytest.mark.parametrize("name", ["flash-attn-3", "flash-attn-4", "flash-attn", "torch-varlen"])
def test_a_backend_that_this_machine_cannot_run_is_skipped_with_the_reason(name):
    with pytest.raises(CheckSkipped, match=r"run the check on one|is not installed"):
        backends.builds(BackendSubject(spec=SPECS[name]))


BUGS = {  # name -> text of the example, what stands there instead, the check that finds it
    "a token does not see itself": (
        "(keys < end[rows, None])",
        "(keys < (end[rows, None] - 1).clamp(min=1))",
        "equals_plain_attention",
    ),
    "a window is one short": (
        "(keys >= first[rows, None])",
        "(keys >= first[rows, None] + (window is not None and window > 1))",
        "windows_are_computed_or_refused",
    ),
    "a window is ignored": (
        "self.starts, self.positions, window)",
        "self.starts, self.positions, None)",
        "windows_are_computed_or_refused",
    ),
    "heads are swapped": (
        "query, key, value, attn_mask=mask, scale=scale, enable_gqa=True",
        "query, *(x.repeat(q.shape[1] // len(x), 1, 1) for x in (key, value)), "
        "attn_mask=mask, scale=scale",
        "equals_plain_attention",
    ),
    "a softcap is ignored": (
        "softcap is not None or sinks",
        "sinks",
        "softcaps_are_computed_or_refused",
    ),
    "sinks are ignored": (
        "softcap is not None or sinks is not None",
        "softcap is not None",
        "sinks_are_computed_or_refused",
    ),
    "spans are ignored": (
        "visible_ranges(self.layout,",
        "visible_ranges(__import__('dataclasses').replace(self.layout, spans=()),",
        "media_see_both_ways_or_are_refused",
    ),
    "causal keeps the spans": (
        "return without_spans(self, self.backend, self.layout, self.cache)",
        "return self",
        "media_see_both_ways_or_are_refused",
    ),
    "values are stored as keys": (
        "write_plain(k, v, keys, values",
        "write_plain(v, k, keys, values",
        "stores_keys_and_values_in_place",
    ),
    "the scale is ignored": ("scale=scale,", "scale=None,", "scale_is_a_factor"),
    "the first layer's cache is read": (
        "self.cache.keys[layer], self.cache.values[layer]",
        "self.cache.keys[0], self.cache.values[0]",
        "reads_what_another_layer_stored",
    ),
    "results are in float32": (
        "        return out\n\n    def causal",
        "        return out.float()\n\n    def causal",
        "equals_plain_attention",
    ),
    "the name is another": ('name = "sdpa"', 'name = "SDPA"', "builds"),
}
LEAK = (
    ("[: self.layout.context_lens[number]]", ""),
    (
        "keys = torch.arange(length, device=first.device)",
        "keys = torch.arange(len(self.tables[number]) * self.cache.block_size)",
    ),
)


def subject_of(source, path):
    path.write_text(source)
    return BackendSubject(spec=load_plugin(path).provide_attention_backends()[0])


@pytest.mark.one_is_quick
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, tmp_path):
    old, new, check = BUGS[bug]
    source = EXAMPLE.read_text()
    assert old in source
    subject = subject_of(source.replace(old, new), tmp_path / f"bug_{len(bug)}_{hash(bug)}.py")
    with pytest.raises(CheckFailed) as failure:
        BY_NAME[check](subject)
    assert len(str(failure.value)) > 20


@pytest.mark.full
def test_rows_after_the_end_that_are_only_masked_are_found(tmp_path):
    """They are multiplied by zero, which shows where they are NaN."""
    source = EXAMPLE.read_text()
    for old, new in LEAK:
        assert old in source
        source = source.replace(old, new)
    subject = subject_of(source, tmp_path / "leak.py")
    backends.equals_plain_attention(subject)
    with pytest.raises(CheckFailed, match="0 \\* NaN is NaN"):
        backends.nothing_leaks_in(subject)


def test_the_example_is_a_plugin():
    manager = PluginManager.load(plugins=(), files=[EXAMPLE])
    assert manager.plugins[0].provides == ("attention backend sdpa",)
