"""A card is a line "id size", and a text of that many bytes; each ends with an end of line."""

from mmdeploy_llm.hooks import DamagedRow

MAX_LINE = 4096


def read(file):
    with file.open() as content:
        if content.readline(MAX_LINE) != b"CARDS 1\n":
            raise ValueError("the file does not begin with CARDS 1")
        while line := content.readline(MAX_LINE):
            name, _, size = line.decode("utf-8").rstrip("\n").rpartition(" ")
            size = int(size)
            if size < 0 or size > file.max_bytes:
                raise ValueError(f"a card of {size} bytes")
            text = content.read(size)
            if len(text) < size or content.read(1) != b"\n":
                raise EOFError("the file ends within a card")
            try:
                yield {"id": name, "text": text.decode("utf-8")}
            except UnicodeDecodeError as error:
                yield DamagedRow(message=f"card {name!r} is no text: {error}")
