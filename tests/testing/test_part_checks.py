"""Bugs planted in formats of parts: each is found by the check that the table names. The formats
without them pass: tests/plugins/outputs/test_conformance.py, tests/outside/test_output_parts.py."""

import pytest
from mmdeploy_llm_plugins.outputs.npy import NpyParts
from mmdeploy_llm_plugins.outputs.tars import TarParts

from mmdeploy_llm.hooks import OutputSinkSpec, PluginManager
from mmdeploy_llm.testing import CheckFailed, CheckSkipped
from mmdeploy_llm.testing.data import parts
from mmdeploy_llm.testing.data.outputs import OutputSubject
from tests.testing.copied_parts import copied

BY_NAME = {check.__name__: check for check in parts.CHECKS}
OF_VECTORS = """if json.loads(self._lines[number]).get("embedding"):
                    yield self._record(number)[0].key"""
# What is wrong: (format, what is replaced, by what, the check that finds it).
BUGS = {
    "the number of items is ignored": (
        *(TarParts, "items=most_items or MAX_ITEMS", "items=MAX_ITEMS"),
        "parts_have_what_was_written",
    ),
    "what was done again stays": (
        *(NpyParts, "first_positions(drops))", "frozenset())"),
        "parts_have_what_was_written",
    ),
    "a part is lost that is copied": (
        *(TarParts, "        return kept > len(drops)", "        return False"),
        "parts_have_what_was_written",
    ),
    "vectors are not read": (
        *(NpyParts, "if not place.num_rows:", "if True:"),
        "parts_have_what_was_written",
    ),
    "positions lead to the last one": (
        *(TarParts, "offset = position\n", "offset = 0\n"),
        "parts_have_what_was_written",
    ),
    "places all begin at the first row": (
        *(NpyParts, "return found\n", "return [replace(own, row=0) for own in found]\n"),
        "arrays_have_the_vectors",
    ),
    "keys are those of items with a vector": (
        *(NpyParts, "yield self._record(number)[0].key", OF_VECTORS),
        "arrays_have_the_vectors",
    ),
    "pictures are left out": (
        *(TarParts, "if blob is not None:", "if blob is None:"),
        "pictures_are_stored",
    ),
    "pictures lack their end": (
        *(TarParts, "size=member.size, suffix", "size=member.size - 1, suffix"),
        "pictures_are_stored",
    ),
    "a picture is called as its tar": (
        *(TarParts, 'suffix=member.name.rpartition(".")[2]', 'suffix="tar"'),
        "pictures_are_stored",
    ),
}


def subject_of(folder, form, text="", instead=""):
    file = copied(folder / "planted.py", form, text, instead)
    manager = PluginManager.load(plugins=(), files=[file])
    return OutputSubject(spec=manager.provided(OutputSinkSpec)[0], file=file)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name, tmp_path):
    form, text, instead, check = BUGS[name]
    subject = subject_of(tmp_path, form, text, instead)
    with pytest.raises(CheckFailed) as failure:
        BY_NAME[check](subject)
    print(f"{name}: {check}: {failure.value}")


def test_what_a_format_does_not_hold_is_not_checked(tmp_path):
    subject = subject_of(tmp_path, TarParts)
    with pytest.raises(CheckSkipped, match="no arrays"):
        parts.arrays_have_the_vectors(subject)
    bare = OutputSinkSpec(name="csv", suffixes=(".csv",), factory="csv:DictWriter")
    with pytest.raises(CheckSkipped, match="no format of parts"):
        parts.parts_have_what_was_written(OutputSubject(spec=bare))
