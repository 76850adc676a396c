"""Plugin `shelf`."""

from mmdeploy_llm.hooks import OutputSinkSpec, hookimpl


@hookimpl
def provide_output_sinks():
    return [OutputSinkSpec(name="shelf", suffixes=(".shelf",), factory="shelf_llm.store:Shelf")]


@hookimpl
def fetch_media(ref, limits):
    if ref.scheme != "shelf":
        return None
    from .media import read

    return read(ref, limits)
