"""The help of `count` besides its options."""

from __future__ import annotations

# click does not rewrap a paragraph that begins with "\b".
COUNT_EPILOG = """\b
Of the model its config, tokenizer and processors are enough: weights are
neither read nor fetched. INPUT is what `batch` and `caption` read:
  prompts.jsonl, prompts.parquet     one item per line or row
  photos/, a.jpg, "docs/*.pdf"       one item per picture, video, sound or
                                     document, with the question of --prompt
Without INPUT, --prompt and --image are one item.

\b
Each line of the result has the tokens of the whole prompt, those of pictures
and of videos, which stand in the prompt unless an encoder reads them, and the
item; with --json it is an object:
  {"id", "line", "num_prompt_tokens", "num_input_image_tokens",
   "num_input_video_tokens", "error_code", "error_msg"}
and "num_input_KIND_tokens" of media of other kinds, such as audio.
An item that cannot be counted gets a line with its error and affects no other.

\b
Examples:
  mmdeploy-llm count --prompt "What is in this picture?" --image a.png
  mmdeploy-llm count prompts.jsonl -m models/acme-vl --total
  mmdeploy-llm count photos/ -m folder/with/config --json > counts.jsonl
  cat story.txt | mmdeploy-llm count --raw --prompt -

\b
Exit codes: 0 success, 1 some items failed, 2 wrong usage or unusable model,
130 stopped with Ctrl-C."""
