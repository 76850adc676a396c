"""A module with a format of parts as a plugin in a file of its own, elsewhere and by another
name."""

import inspect

HOOK = """
from mmdeploy_llm.hooks import OutputSinkSpec, hookimpl

@hookimpl
def provide_output_sinks():
    return [OutputSinkSpec(name="strange", suffixes=(".strange",), factory=f"{{__name__}}:{}",
                           options={!r})]
"""


def copied(file, form, text="", instead=""):
    """Writes the module of a PartFormat, with one change if a text is given."""
    source = inspect.getsource(inspect.getmodule(form))
    assert not text or source.count(text) == 1, text
    options = ("part_items", "media_root") if "Blob" in source else ("part_items",)
    file.write_text(source.replace(text, instead) + HOOK.format(form.__name__, options))
    return file
