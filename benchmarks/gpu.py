"""Does everything work on this GPU, and how fast is it? Up to three calls of ten minutes.

    python benchmarks/gpu.py            # or: make gpu; run it again to resume

Needs a checkout and torch, triton, transformers, numpy, einops, scipy, safetensors, greenlet and
psutil; no network and no weights, since models have random ones. The most important rows come
first. A row is appended to `gpu.jsonl` as soon as it is measured, and the page is written from all
rows of the same code, machine and options; the next call measures the missing ones. A row that does
not fit into the remaining time waits for the next call. The profile of one compression is stored
next to `gpu.jsonl`. `--device cpu --geometry tiny` runs the same in seconds.
"""

from __future__ import annotations

import time

_BEGIN = time.monotonic()

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import gc  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from pathlib import Path  # noqa: E402

_HERE = Path(__file__).resolve().parent
# Works from a checkout without installation. The timed engine steps are those of the tests.
sys.path.insert(0, str(_HERE.parent))
sys.path.append(str(_HERE.parent / "tests"))

import torch  # noqa: E402
from decode_shapes import GEOMETRIES  # noqa: E402
from gpu_bench import Bench  # noqa: E402
from gpu_checks import kernels, replay, same, tests  # noqa: E402
from gpu_contexts import paged  # noqa: E402
from gpu_report import BEGUN, Case, Log, OutOfTime, Row, header  # noqa: E402
from gpu_speed import attention, compress, decode, profile  # noqa: E402

from gracekv.files import write_atomically  # noqa: E402

# In this order.
PARTS = {
    part.__name__: part
    for part in (compress, profile, replay, decode, tests, paged, kernels, same, attention)
}


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    limit = float(os.environ.get("GRACEKV_GPU_SECONDS", "570"))
    add("--seconds", type=float, default=limit, help="of this call; or $GRACEKV_GPU_SECONDS")
    add("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}, in this order")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--geometry", default="qwen2.5-7b", choices=list(GEOMETRIES), help='"tiny": few rows')
    add("--weights", type=Path, help="a folder with a transformers model, in place of random ones")
    add("--lengths", type=numbers, default=[8192, 32768, 131072], help="contexts")
    add("--batches", type=numbers, default=[1, 8, 4, 16])
    add("--ratio", type=int, default=8)
    add("--rounds", type=int, default=15, help="maximum, for timings")
    out = _HERE.parent / "runs" / "gpu"
    add("--out", type=Path, default=out, help="folder of gpu.jsonl and the profile")
    add("--page", type=Path, help="benchmarks/results/gpu.md; on a CPU, gpu.md next to the rows")
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"--parts takes some of {', '.join(PARTS)}; got {', '.join(unknown)}")
    options.tiny = options.geometry == "tiny"
    if options.tiny:
        options.lengths, options.batches = [128, 160], [1, 2]
        options.rounds, options.ratio = 2, 4
    if options.page is None:
        on_cpu = options.device == "cpu"
        options.page = (options.out if on_cpu else _HERE / "results") / "gpu.md"
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "torch sees no CUDA GPU. Install a CUDA build of torch, or try the script with "
            "--device cpu --geometry tiny."
        )
    return options


def measured(case: Case, left: float) -> Row:
    """The columns of a row; an error or lack of memory ends the row, not the run.

    Raises:
        OutOfTime: if it takes longer than the `left` seconds.
    """
    begin = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, left)
    row: Row = {"status": "ok"}
    try:
        row |= case.work()
    except torch.OutOfMemoryError:
        row["status"] = "out of memory"
    except OutOfTime:
        raise
    except Exception as error:
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        row["status"] = f"failed: {type(error).__name__}: {first[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return row | {"row s": round(time.perf_counter() - begin, 2)}


def usable(device: str) -> bool:
    """Whether this process can still use the GPU; some errors cannot be recovered from."""
    if device == "cuda":
        try:
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


def run(options: argparse.Namespace, deadline: float) -> None:
    """Measure the missing rows, in order, as far as they fit."""

    def show() -> None:
        write_atomically(options.page, log.page(cases).encode())

    bench = Bench(options)
    cases = [
        dataclasses.replace(case, part=part)
        for part in options.parts
        for case in PARTS[part](bench)
    ]
    log, first = Log(options.out / "gpu.jsonl", header(options)), True
    show()
    for case in cases:
        left = deadline - time.monotonic()
        # The first row may take the whole call, as it would not fit into another one either.
        if log.outcome(case) is not None or left <= (0 if first else log.expected(case)):
            continue
        first = False
        log.append(case, {"status": BEGUN})
        try:
            row = measured(case, left)
        except OutOfTime:
            print(case.part, case.labels, "cut off by the time limit", flush=True)
            break
        log.append(case, row)
        print(case.part, case.labels, row, flush=True)
        show()
        if not usable(options.device):
            left = deadline - time.monotonic()
            again = [sys.executable, __file__, *sys.argv[1:], "--seconds", f"{max(left, 1):.0f}"]
            os.execv(sys.executable, again)
    show()


def main() -> None:
    options = arguments()

    def out_of_time(*_: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, out_of_time)
    run(options, _BEGIN + options.seconds)
    print(options.page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
