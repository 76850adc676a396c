#!/usr/bin/env bash
# A column of scores with one NaN among eight numbers, written as Parquet by three libraries, asked by
# DuckDB 2.0.1 before training on it:
#
#                                       written by DuckDB    by pyarrow 26.0.1 or polars 2.1.0
#     count(*) where isnan(x)           1                    0
#     isnan(x) of each row              one true             all false
#     count(*) where not isfinite(x)    1                    1
#     max(x)                            NaN                  10 (pyarrow), NaN (polars)
#     count(*) where x > 5              5, NaN is the most   5 with one row group, 4 with two
#     count(*) where x <= 5             3                    3 with one row group, 4 with two (pyarrow)
#
# The NaN is there: pyarrow and polars find it in each of the files, and DuckDB itself after `create
# table ... as from` the file. DuckDB takes the least and the greatest of a row group for bounds of all
# its numbers, and where the greatest is 10 it answers isnan(x) with false without reading. But the
# format wants NaN left out of both; DuckDB's own writer stores no bounds if there is one, so that a
# test written with DuckDB alone passes. The usual search for broken rows is exactly what cannot find
# them, and how many rows a filter keeps depends on how many rows the writer put in a row group. To ask
# for NaN in a Parquet file, use `not isfinite(x)` or x::varchar = 'nan', or make a table of it first.
#
# (Wrong comparisons of such files have been reported as duckdb/duckdb#25521.)
#
# Seen with Python 3.11, Linux x86-64, 2026-11-29. Needs Python 3.11 or newer and the package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
	duckdb==2.0.1 pyarrow==26.0.1 polars==2.1.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import duckdb
import polars
import pyarrow
import pyarrow.compute
import pyarrow.parquet

scores = pyarrow.table({"x": [1.0, 2.0, float("nan"), 3.0, 9.0, 8.0, 7.0, 10.0]})
base = duckdb.connect()
base.register("scores", scores)


def write(name, writer, rows):
    if writer == "pyarrow":
        pyarrow.parquet.write_table(scores, name, row_group_size=rows)
    elif writer == "polars":
        polars.from_arrow(scores).write_parquet(name, row_group_size=rows)
    else:
        base.execute(f"copy scores to '{name}' (format parquet)")


def ask(what, source, where="true"):
    return base.execute(f"select {what} from {source} where {where}").fetchall()


def answers(source):
    return {
        "isnan": ask("count(*)", source, "isnan(x)")[0][0],
        "isnan of rows": sum(row[0] for row in ask("isnan(x)", source)),
        "not isfinite": ask("count(*)", source, "not isfinite(x)")[0][0],
        "as text": ask("count(*)", source, "x::varchar = 'nan'")[0][0],
        "max": str(ask("max(x)", source)[0][0]),
        "x > 5": ask("count(*)", source, "x > 5")[0][0],
        "x <= 5": ask("count(*)", source, "x <= 5")[0][0],
    }


RIGHT = {"isnan": 1, "isnan of rows": 1, "not isfinite": 1, "as text": 1}
RIGHT |= {"max": "nan", "x > 5": 5, "x <= 5": 3}
BLIND = RIGHT | {"isnan": 0, "isnan of rows": 0}
EXPECTED = {  # writer, rows of a group: answers
    ("duckdb", 8): RIGHT,
    ("pyarrow", 8): BLIND | {"max": "10.0"},
    ("pyarrow", 4): BLIND | {"max": "10.0", "x > 5": 4, "x <= 5": 4},
    ("polars", 8): BLIND,
    ("polars", 4): BLIND | {"x > 5": 4},
}
for (writer, rows), expected in EXPECTED.items():
    name = f"{writer}{rows}.parquet"
    write(name, writer, rows)
    assert pyarrow.parquet.ParquetFile(name).metadata.num_row_groups == 8 // rows
    column = pyarrow.parquet.read_table(name)["x"]
    assert pyarrow.compute.sum(pyarrow.compute.is_nan(column)).as_py() == 1
    assert polars.scan_parquet(name).filter(polars.col("x").is_nan()).collect().height == 1
    found = answers(f"'{name}'")
    print(f"by {writer}, groups of {rows}: {found}")
    assert found == expected, "the behaviour has changed"
    base.execute(f"create or replace table own as from '{name}'")
    assert answers("own") == RIGHT, "as a table all is right"
PYTHON
