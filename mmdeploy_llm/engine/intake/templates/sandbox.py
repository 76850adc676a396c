"""The sandbox that chat templates run in: jinja2's, with a deadline and without huge numbers.

A template is a program from a stranger. The clock is checked at every loop iteration, call, filter,
test and arithmetic operation, in whatever thread it runs. A single operation between two checks can
take long, so can compiling, and memory is bounded only for the results of operators. Therefore this
sandbox runs in a process that can be killed (renderer.py).
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_TEMPLATE = 2**20  # characters
MAX_CACHED = 2**16  # characters of a template that is kept compiled
MAX_BITS = 1024  # of a number that a template computes with
MAX_COUNT = 100_000  # of an integer argument, such as a width, of a call, filter or repetition
MAX_LENGTH = 2**26  # items or characters in the result of an operator


class TemplateTimeError(TemplateRuntimeError):
    """The template's time is up."""


class _Generation(Extension):
    """Parses {% generation %}, which marks text for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _SafeNamespace(Namespace):
    """namespace(...) that refuses names starting with an underscore: Python gives them a
    meaning."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *given = args
        values = dict(*given, **values)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox as chat templates expect it, with a time limit per thread (`limited`)."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self._thread = threading.local()
        self.filters = {name: self._watched(call) for name, call in self.filters.items()}
        self.filters["tojson"] = self._watched(_to_json)
        self.tests = {name: self._watched(call) for name, call in self.tests.items()}
        self.globals |= {
            "namespace": _SafeNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        del self.globals["lipsum"]

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Limits what this thread renders inside: raises TemplateTimeError after `seconds`."""
        self._thread.end = time.monotonic() + seconds
        try:
            yield
        finally:
            del self._thread.end

    def check_time(self) -> None:
        """Raises TemplateTimeError once this thread's time is up."""
        if time.monotonic() > getattr(self._thread, "end", float("inf")):
            raise TemplateTimeError("its time is up")

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yields the items of a `for` and checks the clock before each."""
        for item in items:
            self.check_time()
            yield item

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.check_time()
        _check_sizes((*args, *kwargs.values()))
        if isinstance(getattr(__obj, "__self__", None), (str, bytes)):
            _check_counts((*args, *kwargs.values()))  # methods of texts take widths and counts
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes `left operator right`, unless a number or the result is too large."""
        self.check_time()
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        """Generates the code of a template; overrides jinja2's hook so that every loop goes
        through `each`."""
        for loop in list(source.find_all(nodes.For)):
            each = nodes.EnvironmentAttribute("each")
            loop.iter = nodes.Call(each, [loop.iter], [], None, None).set_lineno(loop.lineno)
        return super()._generate(source, name, filename, defer_init)

    def _watched(self, call: Any) -> Callable[..., Any]:
        """Wraps a filter or test: checks the clock and its numeric arguments before the call."""

        # The value that is filtered, after the context if jinja2 passes one.
        num_first = 2 if hasattr(call, "jinja_pass_arg") else 1

        @functools.wraps(call)  # keeps jinja_pass_arg
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.check_time()
            _check_sizes((*args, *kwargs.values()))
            _check_counts((*args[num_first:], *kwargs.values()))
            return call(*args, **kwargs)

        return watched


def compiled(template: str) -> Template:
    """Returns the template ready to render, with a sandbox of its own. Raises jinja2's errors."""
    if len(template) > MAX_TEMPLATE:
        raise SecurityError(f"it has {len(template)} characters, {MAX_TEMPLATE} are allowed")
    return Sandbox().from_string(template)


_cached = functools.lru_cache(maxsize=8)(compiled)


def run(template: str, variables: dict[str, Any], seconds: float) -> str:
    """Renders the template. Raises TemplateTimeError after `seconds`, jinja2's other errors and
    whatever the template raises."""
    ready = (_cached if len(template) <= MAX_CACHED else compiled)(template)
    sandbox = ready.environment
    assert isinstance(sandbox, Sandbox)
    with sandbox.limited(seconds):
        return ready.render(variables)


def _check_sizes(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise SecurityError(f"a number has more than {MAX_BITS} bits")


def _check_counts(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_COUNT:
            raise SecurityError(f"it requests {value}, {MAX_COUNT} is allowed")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    _check_sizes((left, right))
    numbers = [value for value in (left, right) if isinstance(value, int)]
    texts = [value for value in (left, right) if isinstance(value, (str, bytes, list, tuple))]
    size = sum(map(len, texts))
    if operator == "*" and texts and numbers:
        size *= max(0, *numbers)
    if operator in ("+", "*") and size > MAX_LENGTH:
        raise SecurityError(f"{operator} would make {size} characters or items")
    if operator == "**" and numbers[1:] and left.bit_length() * max(0, right) > MAX_BITS:
        raise SecurityError(f"** would make a number of more than {MAX_BITS} bits")


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the name {name!r}: it starts with underscore")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON as chat templates expect it, without the HTML escapes that jinja2's own
    filter adds."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
