"""The surface that plugins may import: nothing in it is removed or changed by accident.

surface.json records it. When something was added on purpose:

    python tests/hooks/test_surface.py

writes the file anew, and raises API_VERSION where the policy says so; commit it with the change,
and say in CHANGELOG.md what is new. released.json is the surface of the last release, with which
API_VERSION is compared: `python tests/hooks/test_surface.py --release` makes it the present one.
"""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
import types
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest

from mmdeploy_llm import __version__
from mmdeploy_llm.hooks import API_VERSION
from mmdeploy_llm.hooks.renames import OLD_NAMES
from mmdeploy_llm.layers import RotaryConfig

MISSING = dataclasses.MISSING
MAX_TEXT = 150  # characters of a default that is recorded
FILE = Path(__file__).with_name("surface.json")
RELEASED = Path(__file__).with_name("released.json")
VERSIONS = Path(__file__).parents[2] / "mmdeploy_llm/hooks/versions.py"
BUMP = (
    "API_VERSION in mmdeploy_llm/hooks/versions.py must be {wanted}: this is no longer the last "
    "release, {old}, which {why}; `python tests/hooks/test_surface.py` sets it"
)
MODULES = (
    "mmdeploy_llm.hooks",
    "mmdeploy_llm.data.outputs.public",
    "mmdeploy_llm.layers.attention.layouts",
    "mmdeploy_llm.layers.attention.writing",
    "mmdeploy_llm.errors",
    "mmdeploy_llm.caches",
    "mmdeploy_llm.forward",
    "mmdeploy_llm.weights.gguf.tables",
    "mmdeploy_llm.hooks.specs",
    "mmdeploy_llm.layers",
    "mmdeploy_llm.media",
    "mmdeploy_llm.messages",
    "mmdeploy_llm.media.documents.page_ranges",
    "mmdeploy_llm.layers.pooling.rules",
    "mmdeploy_llm.request",
    "mmdeploy_llm.testing",
    "mmdeploy_llm.testing.tiny",
    "mmdeploy_llm.weights.map",
    "mmdeploy_llm.weights.quantized",
    "mmdeploy_llm_processors.from_transformers",
    "mmdeploy_llm_processors.image.embedded",
    "mmdeploy_llm_processors.image.options",
    "mmdeploy_llm_processors.image.patches",
    "mmdeploy_llm_processors.image.processor",
    "mmdeploy_llm_processors.image.special_texts",
    "mmdeploy_llm_processors.image.tiling.tile_processor",
    "mmdeploy_llm_processors.image.tiling.tiles",
    "mmdeploy_llm_processors.sized",
    "mmdeploy_llm_processors.video.options",
    "mmdeploy_llm_processors.video.processor",
    "mmdeploy_llm_processors.video.select",
    "mmdeploy_llm_processors.video.timed",
)
ADDED = (
    "{name} is new in the surface of plugins. If that is meant, record it with "
    "`python tests/hooks/test_surface.py` and add a line to CHANGELOG.md; if not, begin its name "
    "with an underscore"
)
REMOVED = (
    "{name} was in the surface of plugins and is gone. Keep it: let it call what takes its place "
    "and warn with DeprecationWarning (a hook: hookspec(warn_on_impl=...)), write it under "
    "'Deprecated' in CHANGELOG.md, and remove it when 'Versions', "
    "in mmdeploy_llm_plugins/README.md, allows it"
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
            value = vars(item).get(part, MISSING)
            is_slot = inspect.ismemberdescriptor(value)
            found.setdefault(f"{name}.{part}", _with_default(kind, MISSING if is_slot else value))
    return found


def _field(field):
    if field.default_factory is not MISSING:
        return f"{field.type} = {field.default_factory.__name__}()"
    return _with_default(field.type, field.default)


def _with_default(kind, value):
    return f"{kind}" if value is MISSING else f"{kind} = {_text(value)}"


def _text(value):
    """Returns a default as text, the same in each process; "..." for a mapping or a long one."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return "..." if isinstance(value, Mapping) or len(text) > MAX_TEXT else text


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


def wanted_version(version, before, now):
    """Returns the API version that the policy asks for, and why: a new major version for what is
    gone or no longer what it was, a new minor one for what is new."""
    broken = sorted(
        name for name in before if name not in now or not is_compatible(before[name], now[name])
    )
    if broken:
        return (version[0] + 1, 0), f"had {', '.join(broken)} as it was"
    new = sorted(name for name in now if now[name] != before.get(name))
    if new:
        return (version[0], version[1] + 1), f"has not {', '.join(new[:5])}"
    return tuple(version), ""


def is_compatible(old, new):
    """Whether who relies on the old signature, field or type can go on with the new one."""
    if old == new:
        return True
    if old.startswith("(") and new.startswith("("):
        return _takes_as_much(_arguments(old), _arguments(new))
    (before, had, default), (now, has, present) = (text.partition(" = ") for text in (old, new))
    keeps_default = not had or (has and default == present)
    return keeps_default and " " not in now.replace(" | ", "|") and _parts(before) <= _parts(now)


def _takes_as_much(old, new):
    if old is None or new is None:
        return False
    for index, (name, default, kind) in enumerate(old.positional):
        if index >= len(new.positional) or new.positional[index][0] != name:
            return False
        if default not in (None, new.positional[index][1]) or not kind <= new.positional[index][2]:
            return False
    taken = {name: (default, kind) for name, default, kind in (*new.positional, *new.named)}
    for name, default, kind in old.named:
        if name not in taken or not kind <= taken[name][1]:
            return False
        if default not in (None, taken[name][0]):
            return False
    added = [*new.positional[len(old.positional) :], *new.named]
    known = {name for name, _, _ in (*old.positional, *old.named)}
    return (
        all(default is not None for name, default, _ in added if name not in known)
        and old.rest <= new.rest
        and new.returns <= old.returns
    )


def _parts(text):
    """Returns the types of a union."""
    return frozenset(part.strip(" '") for part in text.split("|"))


def _arguments(signature):
    """Returns the arguments of a signature that was written as text, None if it is no Python."""
    text = re.sub(r"<[^<>]*>", "...", signature)
    try:
        (function,) = ast.parse(f"def f{text}: ...").body
    except SyntaxError:
        return None
    args = function.args

    def kind(arg):
        return frozenset() if arg.annotation is None else _parts(ast.unparse(arg.annotation))

    def described(plain, defaults):
        texts = [None if default is None else ast.unparse(default) for default in defaults]
        return [(arg.arg, text, kind(arg)) for arg, text in zip(plain, texts, strict=True)]

    plain = [*args.posonlyargs, *args.args]
    required = [None] * (len(plain) - len(args.defaults))
    return types.SimpleNamespace(
        positional=described(plain, [*required, *args.defaults]),
        named=described(args.kwonlyargs, args.kw_defaults),
        rest={name for name in ("vararg", "kwarg") if getattr(args, name) is not None},
        returns=_parts(ast.unparse(function.returns)) if function.returns else frozenset(),
    )


def test_the_version_follows_the_policy():
    """Additions since the last release raise the minor number, removals and changes the major."""
    released = json.loads(RELEASED.read_text())
    wanted, why = wanted_version(released["version"], released["surface"], surface())
    old = tuple(released["version"])
    assert wanted == API_VERSION, BUMP.format(wanted=wanted, old=old, why=why)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ({"a": "()"}, {"a": "()"}, (3, 4)),
        ({"a": "()"}, {"a": "()", "b": "class"}, (3, 5)),
        ({"a": "()", "b": "()"}, {"a": "()"}, (4, 0)),
        ({"a": "()", "b": "()"}, {"a": "()", "c": "()"}, (4, 0)),
        ({"a": "(x: 'int')"}, {"a": "(x: 'int', y: 'int' = 0)"}, (3, 5)),
        ({"a": "(x: 'int')"}, {"a": "(x: 'int', *, y: 'int' = 0)"}, (3, 5)),
        ({"a": "(x: 'int')"}, {"a": "(x: 'int', y: 'int')"}, (4, 0)),
        ({"a": "(x: 'int')"}, {"a": "(y: 'int')"}, (4, 0)),
        ({"a": "(x: 'int' = 0)"}, {"a": "(x: 'int')"}, (4, 0)),
        ({"a": "(x, y)"}, {"a": "(y, x)"}, (4, 0)),
        ({"a": "(x, *, y)"}, {"a": "(x)"}, (4, 0)),
        ({"a": "(x: 'int')"}, {"a": "(x: 'int | str')"}, (3, 5)),
        ({"a": "(x: 'int | str')"}, {"a": "(x: 'int')"}, (4, 0)),
        ({"a": "() -> 'int'"}, {"a": "() -> 'int | None'"}, (4, 0)),
        ({"a": "() -> 'int | None'"}, {"a": "() -> 'int'"}, (3, 5)),
        ({"a": "(**more)"}, {"a": "()"}, (4, 0)),
        ({"a": "(x=<object>)"}, {"a": "(x=<object>, y=1)"}, (3, 5)),
        ({"f": "int"}, {"f": "int = ..."}, (3, 5)),
        ({"f": "int = ..."}, {"f": "int"}, (4, 0)),
        ({"f": "int = ..."}, {"f": "int | None = ..."}, (3, 5)),
        ({"a": "(x: 'int' = 0)"}, {"a": "(x: 'int' = 1)"}, (4, 0)),
        ({"a": "(*, x=0)"}, {"a": "(*, x)"}, (4, 0)),
        ({"a": "(*, x=0)"}, {"a": "(*, x=1)"}, (4, 0)),
        ({"f": "int = 0"}, {"f": "int = 1"}, (4, 0)),
        ({"f": "int"}, {"f": "int = 1"}, (3, 5)),
        ({"f": "class"}, {"f": "()"}, (4, 0)),
        ({"e": "MediaError 413"}, {"e": "MediaError 400"}, (4, 0)),
    ],
)
def test_what_the_policy_asks_for(old, new, wanted):
    assert wanted_version((3, 4), old, new)[0] == wanted


class Before:
    """A surface of a few entries."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config:
        size: int
        scale: float = 1.0
        names: tuple = ()

        def read(self, file, *, limit=3, is_strict=False): ...

    class Test:
        tolerance: float = 1e-4


def _as(source):
    """Returns the surface of classes that are written as Before's, with one change."""
    text = inspect.getsource(Before)
    assert source[0] in text
    own = {"dataclasses": dataclasses}
    exec(text.replace(*source), own)  # its own test's text
    return {
        key: value
        for name, item in vars(own["Before"]).items()
        if inspect.isclass(item)
        for key, value in _described(name, item).items()
    }


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (("size: int", "length: int"), "Config.size"),
        (("        names: tuple = ()\n", ""), "Config.names"),
        (("scale: float = 1.0", "scale: float = 2.0"), "Config.scale"),
        (("scale: float = 1.0", "scale: float"), "Config.scale"),
        (("tolerance: float = 1e-4", "tolerance: float = 1e-3"), "Test.tolerance"),
        (("*, limit=3, is_strict=False", "*, is_strict=False"), "Config.read"),
        (("limit=3", "limit=4"), "Config.read"),
        (("def read", "def read_all"), "Config.read"),
    ],
)
def test_what_hurts_a_plugin_fails_both_tests(source, name):
    """A renamed or removed field, a changed default, and a keyword argument that is gone: the
    record differs, and the policy asks for a major version."""
    before, now = _as(("", "")), _as(source)
    assert any(message.startswith(f"{name} was") for message in problems(before, now))
    wanted, why = wanted_version((3, 4), before, now)
    assert wanted == (4, 0)
    assert f"had {name}" in why


def test_an_old_name_is_removed_when_its_time_is_over():
    """No row of a table of old names outlives the version that it names."""
    for module in map(importlib.import_module, MODULES):
        for item in vars(module).values():
            for old, (new, until) in getattr(item, OLD_NAMES, {}).items():
                left = [*map(int, until.split("."))] > [*map(int, __version__.split(".")[:2])]
                assert left, f"{item.__name__}.{old}, now {new}, was to be gone in {until}"


def test_an_old_name_works_and_is_told():
    with pytest.warns(DeprecationWarning, match=r"now called rotary_dim; mmdeploy-llm 0\.3 remov"):
        config = RotaryConfig(head_dim=8, turned_dim=4)
    assert config == RotaryConfig(head_dim=8, rotary_dim=4)
    with pytest.warns(DeprecationWarning, match="now called rotary_dim"):
        assert config.turned_dim == 4
    with pytest.warns(DeprecationWarning, match="now called rotary_dim"):
        assert dataclasses.replace(config, turned_dim=2).rotary_dim == 2
    with pytest.raises(TypeError, match="turned_dims"):
        RotaryConfig(head_dim=8, turned_dims=4)


def test_nothing_was_removed_changed_or_added_by_accident():
    wrong = problems(json.loads(FILE.read_text()), surface())
    assert not wrong, "\n\n".join(wrong)


def test_what_is_recorded():
    """It contains the members that plugins rely on most."""
    found = surface()
    assert found["mmdeploy_llm.hooks.ModelSpec.priority"] == "int = 0"
    assert found["mmdeploy_llm.layers.RotaryConfig.turned_dim"] == "property"
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


def record(words):
    """Writes the surface, and the version that the policy asks for; --release: as a new start."""
    found = surface()
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    if "--release" in words:
        content = {"version": API_VERSION, "surface": found}
        RELEASED.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    released = json.loads(RELEASED.read_text())
    wanted, why = wanted_version(released["version"], released["surface"], found)
    text = VERSIONS.read_text()
    VERSIONS.write_text(re.sub(r"(?m)^API_VERSION = \([^)]*\)", f"API_VERSION = {wanted}", text))
    print(f"{FILE.name}: {len(found)} entries; API_VERSION = {wanted} {why}")


if __name__ == "__main__":
    record(sys.argv[1:])
