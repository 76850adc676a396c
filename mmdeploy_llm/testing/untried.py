"""Names what a package provides and no test class of a pytest run tries: it says of no plugin that
it is wrong, and a missing test class is otherwise seen by nobody."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import mmdeploy_llm.testing as kit
from mmdeploy_llm.hooks import MediaProcessorSpec
from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.hooks.records import Spec, describe

from .conformance import Conformance
from .doors import FETCHER
from .plugins.declared import is_ours
from .plugins.plugin_subject import PluginSubject


def untried(classes: Collection[type[Any]]) -> list[str]:
    """Returns a line for each thing that the plugins of the PluginConformance classes provide and
    that no class of these tries; our own plugins are tested all over their tests."""
    tests = [each for each in classes if issubclass(each, Conformance)]
    found: list[str] = []
    for one in tests:
        if not issubclass(one, kit.PluginConformance) or not hasattr(one, "plugin"):
            continue
        subject = PluginSubject.of(one.plugin)
        if is_ours(subject.loaded.__name__):
            continue
        if subject.has_hook(FETCHER) and not any(
            issubclass(each, kit.FetcherConformance) for each in tests
        ):
            found.append(f"{FETCHER} has no FetcherConformance here")
        for spec in subject.specs:
            found += _of_spec(spec, [each for each in tests if getattr(each, "spec", None) == spec])
    return list(dict.fromkeys(found))


def _of_spec(spec: Spec, tests: list[type[Any]]) -> Iterator[str]:
    wanted = _class_for(spec)
    if wanted is None:
        return
    tests = [each for each in tests if issubclass(each, wanted)]
    if not tests:
        yield f"{describe(spec)} has no {wanted.__name__} here"
        return
    tried = {name: _given(tests, name) for name in ("arguments", "item_options", "other_options")}
    for argument in getattr(spec, "arguments", ()):
        if argument not in tried["arguments"]:
            yield f"{describe(spec)}: the argument `{argument}` stands in no arguments"
    if not isinstance(spec, MediaProcessorSpec):
        return
    for attribute, names in _options(imported(spec.factory)).items():
        given = tried[attribute] | (_given(tests, "options") if attribute[0] == "o" else set())
        for name in names if hasattr(wanted, attribute) else ():
            if name not in given:
                yield f"{describe(spec)}: the option `{name}` stands in no {attribute}"


def _class_for(spec: Spec) -> type[Any] | None:
    """Returns the test class for a spec; None where the kit has none."""
    if getattr(spec, "yields", None) is not None:
        return kit.SplitterConformance
    kinds = (kind.__name__.removesuffix("Spec") for kind in type(spec).__mro__)
    found = (getattr(kit, f"{name}Conformance", None) for name in kinds)
    return next(filter(None, found), None)


def _given(tests: list[type[Any]], attribute: str) -> set[str]:
    """Returns the names that the classes give in an attribute, a mapping or several."""
    found: set[str] = set()
    for one in tests:
        value = getattr(one, attribute, None) or ()
        for names in (value,) if isinstance(value, Mapping) else value:
            found |= set(names)
        if attribute == "item_options":
            found |= {name for _, names in getattr(one, "reference_options", ()) for name in names}
    return found


def _options(factory: Any) -> dict[str, list[str]]:
    """Returns the attribute of a test class -> options that a processor's methods read from their
    argument: the engine's in the constructor, those of an item in the others."""
    found: dict[str, list[str]] = {"other_options": [], "item_options": []}
    if not inspect.isclass(factory):
        return found
    found["item_options"] += getattr(factory, "item_options", ())
    tree = ast.parse(textwrap.dedent(inspect.getsource(factory)))
    for method in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        attribute = "other_options" if method.name == "__init__" else "item_options"
        found[attribute] += [
            name
            for argument in method.args.args
            if argument.arg in ("options", "given")
            for name in _read(method, argument.arg)
        ]
    return {attribute: list(dict.fromkeys(names)) for attribute, names in found.items()}


def _read(method: ast.AST, argument: str) -> Iterator[str]:
    """Yields the names that a method reads from a mapping."""
    for node in ast.walk(method):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=read), attr="get" | "pop"),
                args=[ast.Constant(value=str(name)), *_],
            ) if read == argument:
                yield name
            case ast.Subscript(value=ast.Name(id=read), slice=ast.Constant(value=str(name))) if (
                read == argument
            ):
                yield name
            case ast.Compare(
                left=ast.Constant(value=str(name)),
                ops=[ast.In() | ast.NotIn()],
                comparators=[ast.Name(id=read)],
            ) if read == argument:
                yield name
