"""What a plugin provides is checked field by field before anything relies on it."""

import pytest

from mmdeploy_llm.errors import PluginLoadError
from mmdeploy_llm.hooks import ModelSpec, PluginManager

GOOD = {"name": "m", "architectures": ("M",), "factory": "pkg.mod:Class"}


WRONG = {
    "name": ("", " ", 3),
    "architectures": ((), "M", ["M"], ("M", "")),
    "factory": (
        *("pkg.mod", "pkg.mod:", ":Class", "pkg mod:Class"),
        *("pkg..mod:Class", "pkg.mod:Class()", int),
    ),
    "media": (("text",), "image"),
    "reasoning": ("",),
    "atomic_media": (None,),
    "tp_plan": ({"layer": "diagonal"}, None),
    "priority": ("high", True),
}


@pytest.mark.parametrize("field", WRONG)
def test_model_spec_field_is_checked(make_plugin, field):
    for value in WRONG[field]:
        spec = ModelSpec(**{**GOOD, field: value})
        message = f"PluginContractError: ModelSpec .*{field} must be"
        with pytest.raises(PluginLoadError, match=message):
            register(make_plugin, spec)


def register(make_plugin, spec):
    manager = PluginManager()
    manager.register(make_plugin(provide_models=lambda: [spec]), "mine")
    return manager


def test_good_model_spec_with_every_field(make_plugin):
    spec = ModelSpec(
        **GOOD,
        media=("image", "video"),
        reasoning="p",
        atomic_media=True,
        tp_plan={"layers.*.mlp.down_proj": "rowwise"},
        priority=-5,
    )
    assert register(make_plugin, spec).models == (spec,)


def test_media_processor_spec_is_checked(site):
    site.install(
        "odd",
        """
        @hookimpl
        def provide_media_processors():
            return [MediaProcessorSpec(name="p", kind="Smell it", factory="a:b", models="x")]
        """,
    )
    (failure,) = PluginManager.load().failures
    assert "kind must be a lower-case word such as 'image', 'video'" in failure.error
    assert "models must be a tuple of at least one text, got 'x' (str)" in failure.error


def test_reasoning_parser_spec_is_checked(site):
    site.install(
        "odd",
        """
        @hookimpl
        def provide_reasoning_parsers():
            return [ReasoningParserSpec(name="p", factory="nothing")]
        """,
    )
    assert "ReasoningParserSpec p: factory must be" in PluginManager.load().failures[0].error


def test_value_whose_repr_raises_or_has_an_address(site):
    site.install(
        "odd",
        """
        class Odd:
            def __repr__(self): raise OSError("no")
        @hookimpl
        def provide_models(): return [Odd()]
        @hookimpl
        def provide_reasoning_parsers(): return [object()]
        """,
    )
    errors = " ".join(failure.error for failure in PluginManager.load().failures)
    assert "(its repr raises OSError: no) (Odd)" in errors
    assert "<object object> (object)" in errors


@pytest.mark.parametrize(
    ("hook", "specs", "claim"),
    [
        (
            "provide_models",
            "ModelSpec(name=n, architectures=(n,), factory='a:b') for n in ('x_y', 'X-Y')",
            "model x-y",
        ),
        (
            "provide_models",
            "ModelSpec(name=n, architectures=('A',), factory='a:b') for n in ('x', 'y')",
            "architecture A",
        ),
        (
            "provide_reasoning_parsers",
            "ReasoningParserSpec(name=n, factory='a:b') for n in ('x_y', 'X-Y')",
            "reasoning parser x-y",
        ),
        (
            "provide_reasoning_parsers",
            "ReasoningParserSpec(name=n, factory='a:b', aliases=('z',)) for n in ('x', 'y')",
            "reasoning parser z",
        ),
        (
            "provide_tool_parsers",
            "ToolParserSpec(name=n, factory='a:b', aliases=('y',)) for n in ('x', 'Y')",
            "tool parser y",
        ),
        (
            "provide_logits_processors",
            "LogitsProcessorSpec(name=n, factory='a:b', aliases=('y',)) for n in ('x', 'Y')",
            "logits processor y",
        ),
        (
            "provide_reading_presets",
            "ReadingPreset(name=n, architectures=('A',), tasks={'page': ''}) for n in ('x', 'X')",
            "reading preset x",
        ),
        (
            "provide_media_processors",
            "MediaProcessorSpec(name=n, kind='image', factory='a:b') for n in ('x', 'y')",
            "the image processor for model *",
        ),
    ],
)
def test_duplicate_within_one_plugin(site, hook, specs, claim):
    site.install("twice", f"@hookimpl\ndef {hook}():\n    return [{specs}]\n")
    (failure,) = PluginManager.load().failures
    assert f"{hook} returns {claim} twice" in failure.error
