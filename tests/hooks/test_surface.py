"""The surface that plugins may import: nothing in it is removed or changed by accident.

surface.json records it. When something was added on purpose:

    python tests/hooks/test_surface.py

writes the file anew; commit it with the change, and say in CHANGELOG.md what is new.
"""

import dataclasses
import importlib
import inspect
import json
import re
import warnings
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("surface.json")
MODULES = (
    "mmdeploy_llm.attention.base",
    "mmdeploy_llm.errors",
    "mmdeploy_llm.caches",
    "mmdeploy_llm.forward",
    "mmdeploy_llm.gguf.tables",
    "mmdeploy_llm.hooks",
    "mmdeploy_llm.hooks.specs",
    "mmdeploy_llm.layers",
    "mmdeploy_llm.media",
    "mmdeploy_llm.messages",
    "mmdeploy_llm.page_ranges",
    "mmdeploy_llm.request",
    "mmdeploy_llm.testing",
    "mmdeploy_llm.tiny",
    "mmdeploy_llm.weights.map",
    "mmdeploy_llm_processors.from_transformers",
    "mmdeploy_llm_processors.image.decode",
    "mmdeploy_llm_processors.image.embedded",
    "mmdeploy_llm_processors.image.options",
    "mmdeploy_llm_processors.image.patches",
    "mmdeploy_llm_processors.image.processor",
    "mmdeploy_llm_processors.image.special_texts",
    "mmdeploy_llm_processors.image.tiling.tile_processor",
    "mmdeploy_llm_processors.image.tiling.tiles",
    "mmdeploy_llm_processors.isolation",
    "mmdeploy_llm_processors.sized",
    "mmdeploy_llm_processors.video.opening",
    "mmdeploy_llm_processors.video.options",
    "mmdeploy_llm_processors.video.processor",
    "mmdeploy_llm_processors.video.select",
    "mmdeploy_llm_processors.video.timed",
    "mmdeploy_llm_processors.video.timeline",
)
ADDED = (
    "{name} is new in the surface of plugins. If that is meant, record it with "
    "`python tests/hooks/test_surface.py` and add a line to CHANGELOG.md; if not, begin its name "
    "with an underscore"
)
REMOVED = (
    "{name} was in the surface of plugins and is gone. Keep it: let it call what takes its place "
    "and warn with DeprecationWarning (a hook: hookspec(warn_on_impl=...)), write it under "
    "'Deprecated' in CHANGELOG.md, and remove it when plugins/README.md, 'Versions', allows it"
)
CHANGED = (
    "{name} was {old} in the surface of plugins and is {new}. Plugins rely on the old form: give "
    "new fields and arguments a default and put them behind the others, or keep the old name as "
    "it is, deprecated, beside a new one. If every plugin goes on working, record it with "
    "`python tests/hooks/test_surface.py`"
)


def surface():
    """Returns name -> signature or type as text; a class has an entry for each of its members."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for public in _public(module):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                found |= _described(f"{name}.{public}", getattr(module, public))
    return dict(sorted(found.items()))


def _public(module):
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return listed
    return [
        name
        for name, item in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(item)
        and getattr(item, "__module__", module.__name__) == module.__name__
        and name not in ("annotations", "TYPE_CHECKING")
    ]


def _described(name, item):
    if not inspect.isclass(item):
        return {name: _signature(item) if callable(item) else type(item).__name__}
    if issubclass(item, Exception):  # who catches a base class catches its subclasses
        bases = ", ".join(base.__name__ for base in item.__bases__)
        return {name: f"{bases} {getattr(item, 'code', '')}".strip()}
    found = {name: "class"}
    if dataclasses.is_dataclass(item):
        fields = dataclasses.fields(item)
        found |= {f"{name}.{field.name}": _field(field) for field in fields}
    for part, value in vars(item).items():
        has_own_init = not (dataclasses.is_dataclass(item) or getattr(item, "_is_protocol", False))
        if part.startswith("_") and not (part == "__init__" and has_own_init):
            continue
        if part.startswith("test_"):  # a check of the kit; more are added freely
            continue
        if callable(value) or isinstance(value, (staticmethod, classmethod)):
            found[f"{name}.{part}"] = _signature(getattr(item, part))
        elif isinstance(value, property):
            found[f"{name}.{part}"] = "property"
    for part, kind in inspect.get_annotations(item).items():
        if not part.startswith("_"):
            found.setdefault(f"{name}.{part}", str(kind))
    return found


def _field(field):
    is_required = (
        field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )
    return f"{field.type}{'' if is_required else ' = ...'}"


def _signature(function):
    try:
        text = str(inspect.signature(function))
    except (TypeError, ValueError):
        return "callable"
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def problems(recorded, found):
    """Returns a message for each difference."""
    wrong = [REMOVED.format(name=name) for name in recorded if name not in found]
    wrong += [ADDED.format(name=name) for name in found if name not in recorded]
    wrong += [
        CHANGED.format(name=name, old=recorded[name], new=text)
        for name, text in found.items()
        if recorded.get(name, text) != text
    ]
    return wrong


def test_nothing_was_removed_changed_or_added_by_accident():
    wrong = problems(json.loads(FILE.read_text()), surface())
    assert not wrong, "\n\n".join(wrong)


def test_what_is_recorded():
    """It contains the members that plugins rely on most."""
    found = surface()
    assert found["mmdeploy_llm.hooks.ModelSpec.priority"] == "int = ..."
    assert found["mmdeploy_llm.hooks.ModelSpec.name"] == "str"
    assert found["mmdeploy_llm.hooks.specs.fetch_media"].startswith("(ref: 'MediaRef', limits:")
    assert found["mmdeploy_llm.hooks.ReasoningParser.feed"].startswith("(self, text: 'str')")
    assert found["mmdeploy_llm.errors.MediaLimitError"] == "MediaError 413"
    assert "mmdeploy_llm.layers.CausalLM.logits" in found
    assert "mmdeploy_llm.testing.ModelConformance.write" in found


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ({"a.b": "()"}, {}, "a.b was in the surface .* warn with DeprecationWarning"),
        ({}, {"a.b": "()"}, "a.b is new in the surface .* record it with"),
        ({"a.b": "(x)"}, {"a.b": "(x, y)"}, r"a.b was \(x\) .* and is \(x, y\)"),
    ],
)
def test_each_difference_says_what_to_do(old, new, message):
    (found,) = problems(old, new)
    assert re.search(message, found)


if __name__ == "__main__":
    FILE.write_text(json.dumps(surface(), indent=1) + "\n")
    print(f"{FILE.name}: {len(surface())} entries")
