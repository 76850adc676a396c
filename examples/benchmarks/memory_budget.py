"""Answers questions about pictures with a model of 7 B parameters in 4 bits, and says how much
memory that needs.

    memory_budget.py write FOLDER [--layers 28]
    memory_budget.py run FOLDER [--limit-gb 8] [--images 3] [--quantization int4] [...]

write makes a random checkpoint with the shapes of Qwen2.5-VL-7B, 6.9 GB, shard by shard: the
matrices of the decoder in 4 bits (compressed-tensors, groups of 128, symmetric), as quantised
copies on hubs have them; embeddings, head and vision tower in bfloat16.

run answers with pictures of 12 megapixels, one after another. It prints the peak of resident
memory, as Linux counts it, and how much was anonymous and how much pages of files, which the system
takes back when others need memory; it fails where the peak of all is above the limit. GB are 10^9
bytes. RLIMIT_AS and RLIMIT_DATA cannot say this: they count pages that were given back. A real
limit is that of a control group: in_group.py 8e9 memory_budget.py run FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models_here import check_folder

SHARD_BYTES = 10**9
GROUP = 128
POLL_SECONDS = 0.02
SEED = 0
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def config(layers: int, words: Any) -> Any:
    """Returns the config of Qwen2.5-VL-7B, with the tokens of our tokenizer."""
    from checkpoints import MEDIA_TOKENS
    from transformers import Qwen2_5_VLConfig

    ids = {f"{kind}_token_id": getattr(words, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    text = {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": layers,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 24, 24],
        },
    }
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "window_size": 112,
        "patch_size": 14,
    }
    media = {key: words.convert_tokens_to_ids(token) for key, token in MEDIA_TOKENS.items()}
    return Qwen2_5_VLConfig(
        text_config=text | ids, vision_config=vision, tie_word_embeddings=False, **media
    )


def write(folder: Path, layers: int) -> None:
    """Writes the checkpoint."""
    import torch
    from checkpoints import tokenizer, write_processors
    from transformers import Qwen2_5_VLForConditionalGeneration

    folder.mkdir(parents=True)
    words = tokenizer()
    built = config(layers, words)
    with torch.device("meta"):
        shapes = {
            name: tuple(tensor.shape)
            for name, tensor in Qwen2_5_VLForConditionalGeneration(built).state_dict().items()
        }
    write_coded(folder, built, "Qwen2_5_VLForConditionalGeneration", shapes)
    words.save_pretrained(folder)
    write_processors("qwen25vl", folder)


def write_coded(
    folder: Path, built: Any, architecture: str, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Writes a config and random weights of these shapes, the matrices of a decoder's layers in 4
    bits."""
    from mmdeploy_llm.checkpoints.saving.packing import settings
    from mmdeploy_llm.checkpoints.saving.rounding import Scheme

    rounded = [name for name in shapes if is_rounded(name)]
    others = [name for name, shape in shapes.items() if len(shape) == 2 and name not in rounded]
    scheme = Scheme(bits=4, group_size=GROUP, is_symmetric=True)
    names = {scheme: [name.removesuffix(".weight") for name in rounded]}
    ignored = [name.removesuffix(".weight") for name in others]
    values = json.loads(built.to_json_string(use_diff=False))
    values["architectures"] = [architecture]
    values["dtype"] = "bfloat16"
    values["quantization_config"] = dict(settings(names, ignored))
    (folder / "config.json").write_text(json.dumps(values, indent=1))
    print(f"{write_shards(folder, shapes) / 1e9:.2f} GB in {folder}", flush=True)


def is_rounded(name: str) -> bool:
    """Whether a tensor is a matrix of a decoder's layer."""
    is_ours = "visual" not in name and name.endswith(".weight")
    return is_ours and name.split(".")[-2] in LINEARS


def write_shards(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Writes all tensors with random values; returns their bytes. Holds one shard in memory."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(SEED)
    shard: dict[str, Any] = {}
    places: dict[str, str] = {}
    total = size = 0

    def flush() -> None:
        nonlocal size, shard
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        size, shard = 0, {}

    for name, shape in shapes.items():
        found = dict(tensors(name, shape))
        own = sum(tensor.nbytes for tensor in found.values())
        shard |= found
        size, total = size + own, total + own
        if size >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def tensors(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yields what is stored of a tensor: itself, or its codes and scales."""
    import torch

    if not is_rounded(name):
        scale = 1.0 if "norm" in name or "ln_q" in name else 0.02
        values = torch.empty(shape, dtype=torch.bfloat16)
        yield name, values.fill_(1) if scale == 1.0 else values.normal_(0, scale)
        return
    rows, columns = shape
    path = name.removesuffix(".weight")
    low, high = -(2**31), 2**31
    yield f"{path}.weight_packed", torch.randint(low, high, (rows, columns // 8)).to(torch.int32)
    yield f"{path}.weight_scale", torch.full((rows, columns // GROUP), 0.004, dtype=torch.bfloat16)
    yield f"{path}.weight_shape", torch.tensor(shape)


@dataclass(slots=True, kw_only=True)
class Peak:
    """The most memory of this process so far, in bytes: anonymous, of files. Its thread is the only
    writer."""

    anonymous: int = 0
    files: int = 0

    def watch(self) -> None:
        """Looks often, in a thread."""
        while True:
            found = status()
            self.anonymous = max(self.anonymous, found["RssAnon"])
            self.files = max(self.files, found["RssFile"])
            time.sleep(POLL_SECONDS)


def status() -> dict[str, int]:
    """Returns the sizes of this process's memory that Linux shows, in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    names = ("VmHWM", "VmRSS", "RssAnon", "RssFile")
    return {name: int(lines[name].split()[0]) * 1024 for name in names}


def run(args: argparse.Namespace) -> None:
    """Loads the model and asks about pictures one after another; prints a line about each stage."""
    begin = time.perf_counter()
    peak = Peak()
    threading.Thread(target=peak.watch, daemon=True).start()

    def say(what: str) -> None:
        now = status()
        print(
            f"{what}: resident {now['VmRSS'] / 1e9:.2f} GB (anonymous {now['RssAnon'] / 1e9:.2f}, "
            f"files {now['RssFile'] / 1e9:.2f}); peaks so far {now['VmHWM'] / 1e9:.2f} "
            f"({peak.anonymous / 1e9:.2f}, {peak.files / 1e9:.2f})",
            flush=True,
        )

    from mmdeploy_llm import LLM, SamplingParams

    say(f"imported after {time.perf_counter() - begin:.1f} s")
    llm = LLM(
        str(args.folder),
        dtype="bfloat16",
        quantization=args.quantization,
        kv_cache_memory=args.kv_mb * 10**6,
        image_tokens=args.image_tokens,
        max_model_len=args.max_model_len,
        max_num_seqs=args.seqs,
        weight_cache=args.weight_cache,
        num_threads=args.threads,
    )
    say(f"loaded after {time.perf_counter() - begin:.1f} s")
    from camera import write_photos

    with tempfile.TemporaryDirectory() as place:
        photos = write_photos(Path(place), args.images)
        params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
        for number, path in enumerate(photos, start=1):
            parts = [
                {"type": "image", "image": str(path)},
                {"type": "text", "text": "Describe it."},
            ]
            began, cpu = time.perf_counter(), time.process_time()
            (output,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            assert output.is_ok, output.error_msg
            say(
                f"picture {number}: {output.num_input_image_tokens} tokens in, {args.tokens} out, "
                f"{seconds:.1f} s, CPU {cpu:.1f} s"
            )
    llm.close()
    if status()["VmHWM"] > args.limit_gb * 1e9:
        sys.exit(f"the peak is above {args.limit_gb:g} GB")


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=["write", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--limit-gb", type=float, default=8)
    parser.add_argument("--images", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--image-tokens", type=int, default=256)
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--kv-mb", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--seqs", type=int, default=4)
    parser.add_argument("--weight-cache", default=False, metavar="FOLDER")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.job == "write":
        write(args.folder, args.layers)
    else:
        check_folder(parser, args.folder, "memory_budget.py write FOLDER writes the model")
        run(args)


if __name__ == "__main__":
    main()
