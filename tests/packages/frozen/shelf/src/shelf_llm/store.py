"""Records in a table of SQLite."""

import sqlite3

from mmdeploy_llm.hooks import RecordStore


class Shelf(RecordStore):
    def __init__(self, path, writable):
        if not writable and not path.is_file():
            raise FileNotFoundError(path)
        uri = f"{path.absolute().as_uri()}?mode={'rwc' if writable else 'rw'}"
        self.database = sqlite3.connect(uri, uri=True, isolation_level=None)
        try:
            if writable:
                self.database.execute("PRAGMA journal_mode = WAL")
                self.database.execute("PRAGMA synchronous = NORMAL")
                self.database.execute(
                    "CREATE TABLE IF NOT EXISTS records "
                    "(position INTEGER PRIMARY KEY AUTOINCREMENT, record TEXT NOT NULL)"
                )
            self.database.execute("SELECT position, record FROM records LIMIT 0")
        except BaseException:
            self.database.close()
            raise

    def entries(self):
        yield from self.database.execute("SELECT position, record FROM records ORDER BY position")

    def get(self, position):
        asked = self.database.execute("SELECT record FROM records WHERE position = ?", (position,))
        row = asked.fetchone()
        if row is None:
            raise LookupError(position)
        return row[0]

    def append(self, line, values):
        return self.database.execute("INSERT INTO records (record) VALUES (?)", (line,)).lastrowid

    def delete(self, positions):
        with self.database:
            self.database.execute("BEGIN")
            rows = ((position,) for position in positions)
            self.database.executemany("DELETE FROM records WHERE position = ?", rows)

    def finish(self):
        self.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self):
        self.database.close()
