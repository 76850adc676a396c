"""Reads the pictures in archives of web crawls (WARC, ISO 28500): a row for each response that is
an image, with `id` and `url` (its address), `date`, `type` and `image` (its bytes).

    mmdeploy-llm batch crawl.warc.gz -o captions.jsonl --plugin warc.py -p "Describe it."
"""

from mmdeploy_llm.hooks import CorpusFormatSpec, DamagedRow, hookimpl

MAX_HEAD = 2**16  # bytes of a record's header


@hookimpl
def provide_corpus_formats():
    """Lists the format. A name that ends in .gz is unpacked before it is read."""
    suffixes = (".warc", ".warc.gz")
    return [
        CorpusFormatSpec(
            name="warc", suffixes=suffixes, reader=f"{__name__}:read", first_bytes=(b"WARC/",)
        )
    ]


def read(file):
    """Yields the images; a record that cannot be understood costs itself, since its length says
    where the next one begins."""
    with file.open() as content:
        while line := content.readline(MAX_HEAD):
            if not line.strip():
                continue
            if not line.startswith(b"WARC/"):
                raise ValueError(f"a record begins with {line[:20]!r}")
            header = fields(content)
            size = int(header["content-length"])  # without it nobody knows where the next one is
            if header.get("warc-type") != "response":
                skip(content, size)
            elif size > file.max_bytes:
                skip(content, size)
                yield DamagedRow(message=f"a response has {size} bytes, over the limit")
            else:
                row = image_of(header, exactly(content, size))
                if row is not None:
                    yield row


def fields(content):
    """Reads the lines of a header up to the empty one."""
    found = {}
    while (line := content.readline(MAX_HEAD)).strip():
        name, _, value = line.decode("utf-8", "replace").partition(":")
        found[name.strip().lower()] = value.strip()
    if not line.endswith(b"\n"):
        raise EOFError("the file ends within a header")
    return found


def exactly(content, size):
    """Reads so many bytes. The file is cut off when it has fewer."""
    data = content.read(size)
    if len(data) < size:
        raise EOFError(f"the file ends {size - len(data)} bytes before its last record")
    return data


def skip(content, size):
    """Passes over bytes, a piece at a time."""
    while size:
        size -= len(exactly(content, min(size, 2**20)))


def image_of(header, response):
    """Returns the row of an HTTP response, None for one that is no image."""
    head, gap, body = response.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    url = header.get("warc-target-uri", "")
    if not gap or not status.startswith("HTTP/"):
        return DamagedRow(message=f"the response of {url!r} is none of HTTP")
    told = {name.lower(): value.strip() for name, _, value in (it.partition(":") for it in lines)}
    if not told.get("content-type", "").startswith("image/"):
        return None
    kind, date = told["content-type"], header.get("warc-date")
    return {"id": url, "url": url, "date": date, "type": kind, "image": body}
