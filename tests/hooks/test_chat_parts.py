"""Types of content parts: who has them, and what is refused when a plugin is loaded."""

from types import SimpleNamespace

import pytest

from mmdeploy_llm.errors import PluginConflictError, PluginLoadError
from mmdeploy_llm.hooks import ChatPartSpec, MediaProcessorSpec, PluginManager, hookimpl


def spec(name="place", **fields):
    return ChatPartSpec(**{"name": name, "types": ("place",), "factory": "json:loads", **fields})


def manager(use=None, **plugins):
    made = PluginManager(use or {})
    for name, found in plugins.items():
        made.register(provider(found), name)
    return made


def provider(found):
    return SimpleNamespace(provide_chat_parts=hookimpl(lambda: found))


def register(*specs):
    manager(acme=specs)


def test_a_type_belongs_to_its_plugin():
    plugins = manager(acme=[spec(), spec("table", types=("table", "grid"))])
    assert [own.name for own in plugins.provided(ChatPartSpec)] == ["place", "table"]
    assert plugins.kinds.chat_part("grid").origin.name == "acme"
    assert plugins.kinds.chat_part("grid", "qwen2_vl").spec.name == "table"
    assert plugins.kinds.chat_part("map") is None
    assert plugins.plugins[0].provides == ("chat part place", "chat part table")


def test_the_highest_priority_and_the_named_family_come_first():
    plugins = manager(
        one=[spec("any")], two=[spec("more", priority=1)], three=[spec("own", models=("Qwen_X",))]
    )
    assert plugins.kinds.chat_part("place").spec.name == "more"
    assert plugins.kinds.chat_part("place", "qwen-x").spec.name == "own"


def test_two_of_one_priority_are_a_conflict_until_use_decides():
    plugins = {"one": [spec("a")], "two": [spec("b")]}
    kinds = manager(**plugins).kinds
    words = "'place'.*chat part 'a' of plugin 'one'.*chat part 'b' of plugin 'two'"
    with pytest.raises(PluginConflictError, match=words):
        kinds.chat_part("place")
    for key in ("place", "b"):
        assert manager({key: "two"}, **plugins).kinds.chat_part("place").spec.name == "b"


def test_types_of_kinds_are_nobody_elses():
    """The types are also those of a kind that another plugin adds; its further types are taken."""
    plugins = manager(acme=[spec(types=("scan", "scan_url", "input_scan"))])
    scan = MediaProcessorSpec(name="s", kind="scan", factory="a:b", part_types=("input_scan",))
    plugins.register(SimpleNamespace(provide_media_processors=hookimpl(lambda: [scan])), "scans")
    assert plugins.kinds.chat_part("scan") is plugins.kinds.chat_part("scan_url") is None
    assert plugins.kinds.chat_part("input_scan").spec.name == "place"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"types": ()}, "types must be a tuple of at least one word"),
        ({"types": ("text",)}, "types must be"),
        ({"types": ("image_url",)}, "none of ('text', 'image', 'video', 'image_url', 'video_url')"),
        ({"types": ("Place",)}, "types must be"),
        ({"types": "place"}, "types must be"),
        ({"factory": "json"}, 'factory must be "module:Attribute"'),
        ({"keys": {"type": str}}, "keys must be a mapping of names, not 'type'"),
        ({"keys": {"lat": "float"}}, "keys must be"),
        ({"optional": ("lat",)}, "optional must be"),
        ({"files": ("path",)}, "files must be among its keys"),
        ({"models": ()}, "models must be"),
        ({"late": 1}, "late must be a bool"),
        ({"priority": True}, "priority must be an int"),
    ],
)
def test_wrong_specs_are_refused(fields, words):
    with pytest.raises(PluginLoadError) as caught:
        register(spec(**fields))
    assert words in str(caught.value)


def test_a_type_is_given_once():
    with pytest.raises(PluginLoadError, match="returns chat part 'place' for model \\* twice"):
        register(spec("a"), spec("b"))
