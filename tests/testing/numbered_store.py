"""A store of records without faults, in which test_output_checks.py plants them."""

import os

from mmdeploy_llm.hooks import OutputSinkSpec, RecordStore, hookimpl


class Numbered(RecordStore):
    """Lines such as `7 {"id": "a", "text": "A cat."}`; a last one without its end is torn."""

    def __init__(self, path, writable):
        self.path = path
        found = list(self.entries()) if path.exists() or not writable else []
        self.file = path.open("ab+" if writable else "rb", buffering=0)
        self.last = found[-1][0] if found else -1
        if writable:
            self.file.truncate(sum(len(f"{number} {line}\n".encode()) for number, line in found))

    def entries(self):
        with self.path.open("rb") as lines:
            for line in lines:
                number, _, record = line.decode().partition(" ")
                if record.endswith("\n"):
                    yield int(number), record[:-1]

    def get(self, position):
        return dict(self.entries())[position]

    def append(self, line, values):
        data = f"{self.last + 1} {line}\n".encode()
        size = self.file.seek(0, os.SEEK_END)
        try:
            if self.file.write(data) < len(data):
                raise OSError("the disk is full")
        except OSError:
            self.file.truncate(size)
            raise
        self.last += 1
        return self.last

    def delete(self, positions):
        gone, copy = set(positions), self.path.with_suffix(".copy")
        with copy.open("wb") as out:
            for number, line in self.entries():
                if number not in gone:
                    out.write(f"{number} {line}\n".encode())
        os.replace(copy, self.path)
        self.file.close()
        self.file = self.path.open("ab+", buffering=0)

    def close(self):
        self.file.close()


@hookimpl
def provide_output_sinks():
    factory = f"{__name__}:Numbered"
    return [OutputSinkSpec(name="numbered", suffixes=(".numbered",), factory=factory)]
