"""This project's engine, for photos.py: `LLM.run_batch` from the folder to the file."""

import time

BEGUN = time.perf_counter()

from typing import Any  # noqa: E402

import photo_job  # noqa: E402

from mmdeploy_llm import LLM, SamplingParams, __version__  # noqa: E402

QUANTIZATIONS: dict[str, Any] = {"bf16": None, "int4": "int4"}


def main() -> None:
    """Captions the folder."""
    args = photo_job.parse()
    tokens = args.image_tokens
    options = {"max_num_seqs": args.parallel, "num_threads": args.threads}
    llm = LLM(
        args.model,
        dtype="bfloat16",
        quantization=QUANTIZATIONS.get(args.precision, args.precision),
        image_tokens=int(tokens) if tokens.isdecimal() else tokens,
        **{name: value for name, value in options.items() if value is not None},
    )
    ready, load_cpu = time.perf_counter() - BEGUN, time.process_time()
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)

    def caption() -> None:
        llm.run_batch(
            args.photos,
            args.output,
            prompt=photo_job.QUESTION,
            sampling_params=params,
            use_tqdm=False,
        )

    parts: dict[str, float] = {}
    if args.meter:
        parts = measured(llm, caption)
    else:
        caption()
    stats = llm.stats()
    photo_job.answer(
        engine=f"mmdeploy_llm {__version__}",
        ready=ready,
        load_cpu=load_cpu,
        num_tokens=stats.num_generated_tokens - args.meter,
        num_prompt_tokens=stats.num_queried_tokens,
        parts=parts,
    )


def measured(llm: LLM, caption: Any) -> dict[str, float]:
    """Returns where the time goes. A request of one token starts the threads that compute."""
    from photo_meter import Meter

    llm.generate([[21, 22, 23]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    meter = Meter(llm)
    with meter.watching():
        caption()
    return dict(meter.seconds)


if __name__ == "__main__":
    main()
