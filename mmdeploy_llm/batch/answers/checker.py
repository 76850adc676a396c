"""Checks texts against a JSON schema in a process that can be killed. Needs the extra `validate`.

A schema's pattern can take years, and its references can nest without an end. Nothing is fetched: a
schema that refers to another document is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from mmdeploy_llm.errors import ConfigError, WorkerDiedError
from mmdeploy_llm.system.processes.helper import Helper, limit_memory
from mmdeploy_llm.system.processes.process import Channel

SECONDS = 5.0  # for one text
MAX_MEMORY = 2**29  # bytes that checking a text may take
MAX_SHOWN = 300  # characters of a violation
GOOD = b"G"
META_SCHEMAS = ("http://json-schema.org/", "https://json-schema.org/")


class TooExpensiveError(Exception):
    """A check took too much time or memory, which another answer would not change."""


class Checker:
    """Checks texts by one schema. Raises ConfigError for a schema that is none, and when the
    package jsonschema is missing. Not thread-safe."""

    name = "the schema"
    needs_end = True

    def __init__(self, schema: Any, seconds: float = SECONDS) -> None:
        if find_spec("jsonschema") is None:
            raise ConfigError(
                "checking answers needs the package jsonschema: pip install "
                '"mmdeploy-llm[validate]", or leave out --validate'
            )
        for ref in _references(schema):
            if not ref.startswith(("#", *META_SCHEMAS)):
                raise ConfigError(
                    f"the schema refers to {ref[:80]!r}, and only references within it, which "
                    "begin with #, are followed; put what it needs into its $defs"
                )
        self._seconds = seconds
        self._helper = Helper("schema", serve, json.dumps(schema))
        try:
            fault = self._violation(None)
        except TooExpensiveError as error:
            fault = str(error)
        if fault is not None:
            self.close()
            raise ConfigError(f"the schema cannot be used: {fault}")

    def violation(self, text: str) -> str | None:
        """Returns what is wrong with a text, None when nothing is. Raises TooExpensiveError."""
        return self._violation(text)

    def close(self) -> None:
        """Ends the process."""
        self._helper.close()

    def _violation(self, text: str | None) -> str | None:
        try:
            answer = self._helper.call(text, self._seconds)
        except TimeoutError:
            raise TooExpensiveError(f"the check took more than {self._seconds:g} s") from None
        except WorkerDiedError:
            raise TooExpensiveError(
                f"the check took more than {MAX_MEMORY >> 20} MiB of memory, or the schema is "
                "nested too deeply"
            ) from None
        return None if answer == GOOD else answer[1:].decode("utf-8", "replace")


def serve(channel: Channel) -> None:
    """Runs in the process: checks what comes until the channel closes. None checks the schema."""
    schema = json.loads(channel.receive())
    import jsonschema
    from jsonschema_specifications import REGISTRY

    channel.ready()
    limit_memory(MAX_MEMORY)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    # This registry knows the published schemas and fetches nothing.
    validator = kind(schema, registry=REGISTRY)
    while True:
        text = channel.receive()
        found = _schema_fault(kind, schema) if text is None else _fault(validator, text)
        words = GOOD if found is None else b"E" + found[:MAX_SHOWN].encode("utf-8", "replace")
        channel.answer(words)


def _schema_fault(kind: Any, schema: Any) -> str | None:
    try:
        kind.check_schema(schema)
    except Exception as error:  # SchemaError, and what broken schemas provoke
        return _first_line(error)
    return None


def _fault(validator: Any, text: str) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {error}"
    try:
        first = next(validator.iter_errors(value), None)
    except RecursionError:
        return "the schema refers to itself without an end"
    except Exception as error:  # a reference that leads nowhere, a pattern that is none
        return f"the schema cannot be applied: {_first_line(error)}"
    if first is None:
        return None
    where = "/".join(map(str, first.absolute_path))
    return f"{where}: {_first_line(first)}" if where else _first_line(first)


def _first_line(error: Exception) -> str:
    return (str(getattr(error, "message", error)).splitlines() or [type(error).__name__])[0]


def _references(schema: Any) -> Iterator[str]:
    """Yields the references in a schema, whatever its nesting."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            for name in ("$ref", "$dynamicRef", "$recursiveRef"):
                if isinstance(value.get(name), str):
                    yield value[name]
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
