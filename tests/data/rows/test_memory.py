"""Memory does not depend on the size of a corpus: hundreds of megabytes are read in a process whose
largest size is compared with that of one that reads a few."""

import io
import json
import random
import subprocess
import sys
import tarfile

import pytest

pytestmark = pytest.mark.long

CELL_BYTES = 200_000
FEW, MANY = 100, 1600  # rows: 20 and 320 MB
MAX_GROWTH = 120 * 2**20
LANCE_GROWTH = 220 * 2**20  # it reads ahead: 160 MB, for a table of 960 MB as for one of 320
READS = r"""
import re, sys
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.rows.formats.formats import open_rows
num_bytes = 0
for row in open_rows(sys.argv[1]).read(Selection()):
    num_bytes += len(row.values["jpg"])
# Not ru_maxrss, which counts the parent of before exec.
print(num_bytes, re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])
"""


def blob_of(number):
    """Bytes that no format can make smaller."""
    return random.Random(number).randbytes(CELL_BYTES)


def write_tar(path, blobs):
    with tarfile.open(path, "w") as tar:
        for number, blob in enumerate(blobs):
            member = tarfile.TarInfo(f"{number}.jpg")
            member.size = len(blob)
            tar.addfile(member, io.BytesIO(blob))
            tar.members = []


def tables(blobs):
    """Yields tables of 50 rows."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: the extra 'parquet'")
    schema = pyarrow.schema([("jpg", pyarrow.binary())])
    blobs = list(blobs)
    for begin in range(0, len(blobs), 50):
        yield pyarrow.table({"jpg": blobs[begin : begin + 50]}, schema=schema)


def write_parquet(path, blobs):
    from pyarrow import concat_tables, parquet

    # Groups as the library datasets writes them: a group may be one page, read at once.
    table = concat_tables(tables(blobs))
    parquet.write_table(table, path, row_group_size=100)


def write_lance(path, blobs):
    lance = pytest.importorskip("lance", reason="needs pylance: the extra 'lance'")
    from pyarrow import concat_tables

    lance.write_dataset(concat_tables(tables(blobs)), str(path))


def write_jsonl(path, blobs):
    with path.open("w") as file:
        for blob in blobs:
            file.write(json.dumps({"jpg": blob.hex()}) + "\n")


WRITERS = {
    "tar": write_tar,
    "parquet": write_parquet,
    "lance": write_lance,
    "jsonl": write_jsonl,
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_memory_does_not_grow_with_the_corpus(tmp_path, suffix):
    peaks = []
    for num_rows in (FEW, MANY):
        path = tmp_path / f"{num_rows}.{suffix}"
        WRITERS[suffix](path, map(blob_of, range(num_rows)))
        done = subprocess.run(
            [sys.executable, "-c", READS, str(path)], capture_output=True, text=True, timeout=1800
        )
        assert done.returncode == 0, done.stderr
        num_bytes, peak = map(int, done.stdout.split())
        assert num_bytes >= num_rows * CELL_BYTES
        peaks.append(peak * 1024)
    most = LANCE_GROWTH if suffix == "lance" else MAX_GROWTH
    assert peaks[1] - peaks[0] < most, peaks
