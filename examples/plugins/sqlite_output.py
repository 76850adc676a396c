"""Writes the records of a batch to a table of SQLite, with columns to ask it by.

mmdeploy-llm caption photos -o captions.sqlite --plugin sqlite_output.py
sqlite3 captions.sqlite "SELECT path, text FROM records WHERE outcome = 'ok'"
mmdeploy-llm export captions.sqlite -o captions.parquet --plugin sqlite_output.py
"""

import sqlite3

from mmdeploy_llm.hooks import OutputSinkSpec, RecordStore, hookimpl

COLUMNS = ("id", "path", "line", "text", "outcome", "error_code", "error_message")
TABLE = f"""
CREATE TABLE IF NOT EXISTS records (
    position INTEGER PRIMARY KEY AUTOINCREMENT, record TEXT NOT NULL, {", ".join(COLUMNS)}
)"""
INSERT = f"""
INSERT INTO records (record, {", ".join(COLUMNS)}) VALUES (?{", ?" * len(COLUMNS)})"""


@hookimpl
def provide_output_sinks():
    """Lists the format."""
    suffixes = (".sqlite", ".db")
    return [OutputSinkSpec(name="sqlite", suffixes=suffixes, factory=f"{__name__}:SqliteStore")]


class SqliteStore(RecordStore):
    """The table `records` of a database. A commit without a wait for the disk survives the death of
    the process: the log has it, and SQLite itself forgets a transaction that was not ended."""

    def __init__(self, path, writable):
        if not writable and not path.is_file():
            raise FileNotFoundError(path)
        mode = "rwc" if writable else "rw"  # a reader, too, may have to write the log's index
        self.database = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None
        )
        try:
            if writable:
                self.database.execute("PRAGMA journal_mode = WAL")
                self.database.execute("PRAGMA synchronous = NORMAL")
                self.database.execute(TABLE)
            self.database.execute("SELECT position, record FROM records LIMIT 0")
        except BaseException:
            self.database.close()
            raise

    def entries(self):
        """Yields all records by position, which SQLite never gives twice."""
        yield from self.database.execute("SELECT position, record FROM records ORDER BY position")

    def get(self, position):
        """Returns one record."""
        asked = self.database.execute("SELECT record FROM records WHERE position = ?", (position,))
        row = asked.fetchone()
        if row is None:
            raise LookupError(position)
        return row[0]

    def append(self, line, values):
        """Adds a row, which is a transaction of its own."""
        error = values["error"] or {}
        values = {**values, "error_code": error.get("code"), "error_message": error.get("message")}
        cells = [values.get(name) for name in COLUMNS]
        return self.database.execute(INSERT, (line, *cells)).lastrowid

    def delete(self, positions):
        """Removes rows in one transaction."""
        with self.database:
            self.database.execute("BEGIN")
            rows = ((position,) for position in positions)
            self.database.executemany("DELETE FROM records WHERE position = ?", rows)

    def finish(self):
        """Writes the log into the database, which is then one file."""
        self.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self):
        """Closes the database."""
        self.database.close()
