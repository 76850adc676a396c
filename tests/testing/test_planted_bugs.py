"""Mutation tests of the kit: bugs of the kinds that authors make, planted in the built-in plugins.

Each must be found by the check that the table names, on the samples that an author gets without
writing any. At least 90 % are found; MISSED says why the rest is not.
"""

import pytest

from mmdeploy_llm.hooks import MediaLimits, PluginManager
from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.testing.media.processors import CHECKS
from mmdeploy_llm.testing.media.subject import ProcessorSubject, checkpoint_of
from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped
from mmdeploy_llm.testing.plugins import fetchers, left_over, logits
from mmdeploy_llm.testing.plugins.plugins import PluginSubject

from .planted_media import MISSED, PLANTS, VIDEO
from .planted_others import FETCHERS, LOGITS

# Found where two threads meet in the midst of a call, which a loaded machine may prevent once.
TRIES = {"a lock removed": 5}
BY_NAME = {check.__name__: check for check in CHECKS}
OPTIONS = {
    "image": {
        "item_options": {"max_pixels": 28 * 28 * 6, "min_pixels": 28 * 28 * 2},
        "other_options": {"do_normalize": False},
    },
    "video": {
        "item_options": [{"target_frames": 4, "fps": -1}, {"fps": 5.0}],
        "options": {"video_min_pixels": 56 * 56, "video_max_pixels": 28 * 28 * 16},
        "limits": MediaLimits(isolation="thread"),
    },
}


@pytest.fixture(scope="module")
def subject_for(tmp_path_factory):
    """subject_for(name of a processor) -> a new subject; files are written once."""
    specs = {spec.name: spec for spec in PluginManager.load().media_processors}
    checkpoints = {}

    def make(name, *, of_processes=False):
        spec = specs[name]
        if name not in checkpoints:
            checkpoints[name] = checkpoint_of(spec, tmp_path_factory.mktemp(name))
        options = dict(OPTIONS[spec.kind]) if name in ("qwen-image", "qwen-video") else {}
        if of_processes:
            options["limits"] = MediaLimits()
        return ProcessorSubject(spec=spec, checkpoint=checkpoints[name], **options)

    return make


def found(check, subject):
    """Returns the message of the check, None when it passes or is skipped."""
    try:
        check(subject)
    except CheckFailed as failure:
        return str(failure)
    except CheckSkipped:
        return None
    finally:
        subject.close()
    return None


def marked(name):
    processor, _, _ = PLANTS[name]
    return pytest.param(name, marks=[pytest.mark.full] * (processor == VIDEO))


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", [marked(name) for name in PLANTS])
def test_a_planted_bug_is_found(subject_for, monkeypatch, name):
    monkeypatch.setattr(left_over, "GRACE", 0.1)
    processor, plant, check = PLANTS[name]
    cls = imported(subject_for(processor).spec.factory)
    with monkeypatch.context() as patched:
        plant(cls, patched.setattr)
        for _ in range(TRIES.get(name, 1)):
            subject = subject_for(processor, of_processes=name == "processes that stay")
            message = found(BY_NAME[check], subject)
            if message is not None:
                break
    assert (message is None) == (name in MISSED), message
    print(f"{name}: {check}: {message}")


# tests/plugins/test_media_processors.py checks videos.
WITHOUT = sorted({(one[0], one[2]) for one in PLANTS.values() if one[0] != VIDEO})


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", WITHOUT, ids=str)
def test_it_passes_without_the_bug(subject_for, name):
    processor, check = name
    assert found(BY_NAME[check], subject_for(processor)) is None


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", FETCHERS)
def test_a_planted_bug_of_a_fetcher_is_found(monkeypatch, name):
    plugin, plant, check = FETCHERS[name]
    monkeypatch.setattr(fetchers, "SECONDS", 2.0)
    module = PluginSubject.of(plugin).loaded
    plant(monkeypatch.setattr)
    subject = fetchers.FetcherSubject(fetch=module.fetch_media, serves={})
    message = None
    try:
        {one.__name__: one for one in fetchers.CHECKS}[check](subject)
    except CheckFailed as failure:
        message = str(failure)
    assert (message is None) == (name in MISSED), message
    print(f"{name}: {check}: {message}")


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", LOGITS)
def test_a_planted_bug_of_a_logits_processor_is_found(monkeypatch, name):
    cls, plant, check = LOGITS[name]
    specs = {imported(spec.factory): spec for spec in PluginManager.load().logits_processors}
    arguments = ({"logit_bias": {3: 1.5}}, {"logit_bias": {9: -2.0}})
    if cls.__name__ == "RepetitionWindow":
        arguments = ({}, {"repetition_window": 2}, {"repetition_window_penalty": 0.5})
    plant(monkeypatch.setattr)
    subject = logits.LogitsProcessorSubject(spec=specs[cls], arguments=arguments)
    with pytest.raises(CheckFailed) as failure:
        {one.__name__: one for one in logits.CHECKS}[check](subject)
    print(f"{name}: {check}: {failure.value}")


def test_the_share_of_planted_bugs(capsys):
    total = len(PLANTS) + len(FETCHERS) + len(LOGITS)
    share = 1 - len(MISSED) / total
    with capsys.disabled():
        print(f"\nplanted in built-in plugins: {total}, found: {share:.0%}")
    assert set(MISSED) <= {*PLANTS, *FETCHERS, *LOGITS}
    assert share >= 0.9
