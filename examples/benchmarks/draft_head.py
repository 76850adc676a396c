"""Measures speculative="mtp" for one request: the bundled model with its draft layer.

    python examples/benchmarks/draft_head.py
    python examples/benchmarks/draft_head.py --threads 1 --rounds 7

Two engines, with drafts and without, describe the same pictures in turn, one after the other, and
say what they see before they answer. Prints for each round the tokens per second of both after the
first token, the ratio, and how many drafts were right; then the median of the ratios. Both must
give the same answers.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from mmdeploy_llm import LLM, SamplingParams

PICTURES = sorted((Path(__file__).parent.parent / "images").glob("picture-*"))
PARAMS = SamplingParams(temperature=0, max_tokens=128)


def chat_about(picture: Path) -> list[dict[str, Any]]:
    """Returns the question about a picture."""
    text = {"type": "text", "text": "Describe the image."}
    return [{"role": "user", "content": [{"type": "image", "image": str(picture)}, text]}]


def answers(llm: LLM) -> tuple[float, list[Any]]:
    """Returns the tokens per second after the first token of all answers, and their tokens."""
    seconds, count, found = 0.0, 0, []
    for picture in PICTURES:
        (output,) = llm.chat(chat_about(picture), PARAMS, use_tqdm=False)
        if output.error_msg:
            raise SystemExit(output.error_msg)
        metrics = output.metrics
        seconds += metrics.model_forward_time - metrics.first_token_time
        count += len(output.outputs.token_ids) - 1
        found.append(output.outputs.token_ids)
    return count / seconds, found


def main() -> None:
    """Prints one line for each round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="shapes-vl", help="name or folder (shapes-vl)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", help="as in LLM, for example int8 (none)")
    parser.add_argument("--threads", type=int, help="cores to compute on (all)")
    args = parser.parse_args()
    options: dict[str, Any] = {"quantization": args.quantization, "num_threads": args.threads}
    options |= {"quiet": True, "max_num_seqs": 1}
    plain, drafted = (LLM(args.model, speculative=kind, **options) for kind in (None, "mtp"))
    ratios = []
    for number in range(args.rounds + 1):
        before = drafted.stats()
        (slow, wanted), (fast, found) = answers(plain), answers(drafted)
        after = drafted.stats()
        if found != wanted:
            raise SystemExit("the answers differ")
        if not number:  # both record their steps, and time them
            continue
        ratios.append(fast / slow)
        num_right = after.num_accepted_drafts - before.num_accepted_drafts
        print(
            f"{slow:.0f} tok/s without, {fast:.0f} with: ratio {fast / slow:.2f}, {num_right} of "
            f"{after.num_drafts - before.num_drafts} drafts right",
            flush=True,
        )
    print(f"median of the ratios: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
