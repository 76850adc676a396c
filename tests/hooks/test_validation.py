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


@pytest.mark.one_is_quick
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


WRONG_HOOKS = {
    "def on_step(stat): ...": "on_step takes stats, yours has stat",
    "def fetch_media(self, limit): ...": "fetch_media takes ref, limits, yours has self, limit",
    "def provide_models(config): ...": "provide_models takes no arguments, yours has config",
    "def on_step(stats=None): ...": "on_step has default values for stats; remove them",
    "def on_step(*, stats): ...": "on_step takes its arguments by position; remove the *",
    "async def on_step(stats): ...": "on_step is asynchronous; hooks are called, not awaited",
    "def on_stop(): ...": "there is no hook 'on_stop'",
}


@pytest.mark.one_is_quick
@pytest.mark.parametrize("source", WRONG_HOOKS)
def test_a_wrong_hook_names_what_is_right(site, source):
    site.install("odd", f"@hookimpl\n{source}")
    (failure,) = PluginManager.load().failures
    assert (failure.phase, WRONG_HOOKS[source] in failure.error) == ("register", True)


def test_arguments_that_take_anything_are_no_fault(site):
    """They get nothing; the documented ones come by name."""
    site.install("odd", "@hookimpl\ndef on_step(stats, *rest, **more): assert not (rest or more)")
    manager = PluginManager.load()
    manager.notify("on_step", stats=1)
    assert manager.failures == ()


def test_of_several_faults_all_are_told(site):
    site.install("odd", "\n".join(f"@hookimpl\n{each}" for each in list(WRONG_HOOKS)[1:3]))
    (failure,) = PluginManager.load().failures
    assert all(text in failure.error for text in list(WRONG_HOOKS.values())[1:3])
    specs = "ModelSpec(name='', architectures='A', factory='f'), ModelSpec(name='b', media='x'"
    site.install(
        "specs",
        f"""
        @hookimpl
        def provide_models(): return [{specs}, architectures=('B',), factory='a:b')]
        @hookimpl
        def provide_tool_parsers(): return 1
        """,
    )
    with pytest.raises(PluginLoadError) as found:
        PluginManager.load(plugins=("specs",))
    for text in ("name must", "architectures must", "factory must", "media must", "an iterable"):
        assert text in str(found.value)
