"""Texts below the options of `caption --help` and `batch --help`."""

from textwrap import wrap

FIELDS_HERE = "(the fields of a record)"
NAME_WIDTH, WIDTH = 20, 79  # of the lines about them

# click does not rewrap a paragraph that begins with "\b".
EXIT_CODES = """\b
Exit codes: 0 every item has its answer, 1 some items failed, 2 wrong usage or
unusable model, 3 stopped by --max-failures or without its output, or items are
left, 4 none failed, and some answers are empty, cut off, malformed or in a loop,
130 stopped with Ctrl-C, 143 by SIGTERM, 129 by SIGHUP."""

CAPTION_EPILOG = f"""\b
Examples:
  mmdeploy-llm caption photos/ extra.png --model models/acme-vl
  mmdeploy-llm caption photos/ -p "Write one sentence for a blind reader."
  mmdeploy-llm caption photos/ --resume          continue an interrupted run
  mmdeploy-llm caption photos/ -o captions.tar   WebDataset: captions beside images
  mmdeploy-llm caption drawings/ --demo          by the bundled model
  mmdeploy-llm caption photos/ --engine max_model_len=8192

\b
`mmdeploy-llm batch --help` describes the fields of the JSONL file.

{EXIT_CODES}"""

BATCH_EPILOG = f"""\b
Each line of the input is one JSON object. It holds chat messages:
  {{"id": "a", "messages": [{{"role": "user", "content": [
     {{"type": "image", "image": "a.jpg"}}, {{"type": "video", "video": "b.mp4"}},
     {{"type": "text", "text": "What?"}}]}}],
   "chat_template_kwargs": {{"enable_thinking": false}}, "tools": [...],
   "sampling_params": {{"max_tokens": 50}}}}
or a raw prompt with the model's own placeholders (or "prompt_token_ids"):
  {{"prompt": "...", "multimodal_data": {{"image": ["a.jpg"]}}}}
Media paths are relative to the input's folder. A line without an id gets its
line number, from 1. In a table (Parquet, Arrow, CSV, Lance) these keys are
columns. A line may have up to 16 images and 4 videos; the limits change with,
for example, --engine 'limit_mm_per_prompt={{"image": 100}}'.

\b
In a corpus with media the rows are asked about:
  tar (WebDataset)     members of one key: images and videos by their suffix,
                       columns txt and the fields of json; id: shard and key
  Parquet, Arrow, Lance, hf://datasets/OWNER/NAME[?config=C&split=S], folders
  of save_to_disk      the only column with bytes of images or videos
  CSV, TSV             paths in a column named image, or in --image-column
  s3://, gs://, hf://  any of them, with the extra fsspec
The question is --prompt "Describe {{title}}." with the columns in braces,
--prompt-column, a column prompt, or a request to describe the media.

\b
Each line of the output, or row of its Parquet files, or JSON in its tars, is
one item, in the order of completion:
{FIELDS_HERE}
A bad input line gets an output line with its error and affects no other line.

\b
Examples:
  mmdeploy-llm batch prompts.jsonl --output answers.jsonl --report answers.html
  mmdeploy-llm batch prompts.parquet -o answers.jsonl --shard 2/8
  mmdeploy-llm batch 'laion/{{00000..00099}}.tar' -o captions.jsonl --columns url
  mmdeploy-llm batch photos.parquet -o captions.jsonl --prompt "Is it {{title}}?"
  mmdeploy-llm batch media/ -o answers.tar --prompt "What is happening?"
  mmdeploy-llm batch prompts.jsonl -o s3://bucket/answers.parquet --shard auto
  mmdeploy-llm batch prompts.jsonl -o answers.jsonl --resume

\b
--resume works after any end of a run, even kill -9: finished items are
skipped, items that were in progress or whose input has changed run again.
Results of another model, or of other options or parameters, are refused;
--resume-anyway keeps them. An output NAME.parquet or NAME.tar is a folder of
complete parts, and a file .open-... that the next run continues. With a URL
parts are uploaded when they are complete, and that file is on this machine, in
the folder NAME-DIGEST.journal here or in --journal.

{EXIT_CODES}"""


def filled(epilog: str) -> str:
    """Returns a text with what is said of the fields of a record, if it has a place for it."""
    if FIELDS_HERE not in epilog:
        return epilog
    from mmdeploy_llm.data.records.record import FIELDS

    indent = " " * (NAME_WIDTH + 2)
    told = [f"  {name:{NAME_WIDTH - 1}} {own.says}" for name, own in FIELDS.items()]
    lines = [line for own in told for line in wrap(own, WIDTH, subsequent_indent=indent)]
    return epilog.replace(FIELDS_HERE, "\n".join(lines))
