"""Texts below the options of `embed --help`, `search --help` and `dedupe --help`."""

from __future__ import annotations

from .batch_help import EXIT_CODES

# click does not rewrap a paragraph that begins with "\b".
EMBED_EPILOG = f"""\b
Examples:
  mmdeploy-llm embed photos/ -o photos.parquet -m models/acme-clip
  mmdeploy-llm embed pages.jsonl -o pages.npy --prompt "{{title}}. {{body}}"
  mmdeploy-llm embed photos/ -o photos.parquet --resume --report photos.html

\b
INPUT is what `batch` reads: a folder of media, or a corpus in any format. Of a
row with media these are embedded, with the text of --prompt or of a column
"prompt" if there is one; a line of JSON may have a prompt, media or messages.
A text column: --prompt "{{text}}" or --prompt-column text.

\b
What is written has a record of each item, as `batch --help-all` lists them,
and its vector in "embedding":
  NAME.parquet    FixedSizeList<float32>; of models with a vector for each token
                  a list of these
  NAME.npy        a folder of arrays, part-00000.npy, which numpy loads and maps,
                  and ids.jsonl: part and row of each item
  NAME.lance      a Lance dataset, with the extra lance
  NAME.jsonl      {{"shape": [size], "float32": base64 of little-endian numbers}}
  NAME.tar        the same, in WebDataset tars beside the media
An item that fails has no vector, and a record that says why. --resume works as
in `batch`, also after kill -9. The report shows the nearest neighbours of ten
items, drawn at random.

{EXIT_CODES}"""

SEARCH_EPILOG = """\b
Examples:
  mmdeploy-llm search photos.parquet "a red car"
  mmdeploy-llm search photos.parquet --image query.jpg --report found.html
  mmdeploy-llm search photos.parquet --like 2024/beach.jpg --top-k 50 --json

\b
VECTORS is an output of `embed`, or several as a glob in quotes. The model that
made it embeds the query: its name and the digest of its files are in the
output, and another model is refused. Any table in Parquet with a column of
vectors, and .npy files (ids in NAME.ids.txt beside them) are searched too; then
--model says of which model they are, or --like names an item of the file.

\b
The search is exact: all vectors are read, block by block, so memory does not
grow with the file. Scores are cosines, with --similarity dot products; of
models with a vector for each token MaxSim. Vectors that are not finite are left
out and told.

\b
Exit codes: 0 success, 2 wrong usage, unusable model or query."""

DEDUPE_EPILOG = """\b
Examples:
  mmdeploy-llm dedupe photos.parquet --threshold 0.97 -o groups.csv
  mmdeploy-llm batch photos/ -o captions.jsonl --only @groups.csv
  mmdeploy-llm dedupe photos.parquet -o keep.txt        the ids to keep only

\b
Items are one group if a chain of pairs connects them whose cosine is at least
--threshold; the first one in the file is kept. So two items of a group may be
less alike than the threshold: a higher one makes smaller groups. The table has
a row for each item:
  id, keep (yes or no), group (a number; empty: nothing is like it),
  similarity and nearest (to the item that is most like it), path
An item without a vector is kept. `caption --dedupe` and `batch --dedupe` need
no vectors: they find files of the same bytes or pixels only, while they run.

\b
Each pair is compared once, in blocks, so memory does not grow with the file,
and time with its square: a million vectors of 512 numbers are some hours.

\b
Exit codes: 0 success, 2 wrong usage or a file that cannot be read."""
