"""Texts below the options of `caption --help` and `batch --help`."""

# click does not rewrap a paragraph that begins with "\b".
EXIT_CODES = """\b
Exit codes: 0 every item has its answer, 1 some items failed, 2 wrong usage or
unusable model, 3 stopped by --max-failures or without its output, or items are
left, 4 none failed, and some answers are empty, truncated or in a loop,
130 stopped with Ctrl-C, 143 by SIGTERM, 129 by SIGHUP."""

CAPTION_EPILOG = f"""\b
Examples:
  mmdeploy-llm caption photos/ extra.png
  mmdeploy-llm caption photos/ -p "Write one sentence for a blind reader."
  mmdeploy-llm caption photos/ --resume          continue an interrupted run
  mmdeploy-llm caption photos/ -o captions.tar   WebDataset: captions beside images
  mmdeploy-llm caption photos/ --model models/acme-vl
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
  id, line, path       identify the item; path only for files of a folder
  text, reasoning      the answer, and the reasoning before it
  tool_calls           only if the model called tools
  finish_reason        stop, tool_calls, length, repetition, error or abort
  outcome              ok, empty, truncated, repetition or failed
  error_code, error_msg, error_class, error     200 and null for success
  num_image_tokens, num_video_tokens, num_prompt_tokens, num_output_tokens,
  num_cached_tokens, timings (seconds)
  num_video_frames, video_seconds   frames used of videos, and the time they cover
  media, prompt        the media of the input, the start of its question
  columns              the values of --columns
  boxes, picture_size  with --boxes: in pixels of the picture, upright
  outputs              every sample, with n > 1 or logprobs
  item_digest, config_digest     what --resume compares
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
