"""Does everything work on this GPU, and how fast is it? One command, under ten minutes.

    python benchmarks/gpu.py            # or: make gpu

Needs a checkout and torch, triton, transformers, numpy, einops, scipy and safetensors; no network,
and no weights: models have random ones. Every row is appended to `gpu.jsonl` as soon as it is
measured; `gpu.md` is written from it at the end, whatever happens. `--device cpu --tiny` runs the
same parts in seconds, to keep the script itself tested.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

_HERE = Path(__file__).resolve().parent
# A checkout needs no installation. The steps of an engine that are timed are those of the tests.
sys.path.insert(0, str(_HERE.parent))
sys.path.append(str(_HERE.parent / "tests"))

import torch  # noqa: E402
from gpu_bench import Bench  # noqa: E402
from gpu_checks import kernels, replay, same, tests  # noqa: E402
from gpu_contexts import paged  # noqa: E402
from gpu_report import OutOfTime, Rows, header, page  # noqa: E402
from gpu_speed import attention, compress, decode, profile  # noqa: E402

from gracekv.files import write_atomically  # noqa: E402

PARTS = {
    part.__name__: part
    for part in (kernels, same, paged, replay, compress, decode, attention, profile, tests)
}


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=9.0, help="rows that would begin later are left out")
    add("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}, in this order")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--tiny", action="store_true", help="a tiny model and short contexts")
    add("--geometry", default="qwen2.5-7b", help="a name of decode_shapes.GEOMETRIES")
    add("--weights", type=Path, help="a folder with a transformers model, in place of random ones")
    add("--lengths", type=numbers, default=[8192, 32768, 131072], help="contexts")
    add("--batches", type=numbers, default=[1, 4, 8, 16])
    add("--ratio", type=int, default=8)
    add("--rounds", type=int, default=15)
    add("--out", type=Path, default=_HERE / "results", help="folder of gpu.jsonl and gpu.md")
    add("--resume", action="store_true", help="append to gpu.jsonl instead of beginning a new one")
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"--parts takes some of {', '.join(PARTS)}; got {', '.join(unknown)}")
    if options.tiny:
        options.geometry, options.lengths, options.batches = "tiny", [128, 160], [1, 2]
        options.rounds, options.ratio = 2, 4
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "torch sees no CUDA GPU. Install a CUDA build of torch, or try the script with "
            "--device cpu --tiny."
        )
    return options


def restart(rest: list[str], minutes: float) -> None:
    """Run the remaining parts in a new process: an error has made this one's GPU unusable."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    words += ["--resume", "--parts", ",".join(rest), "--minutes", f"{minutes:.2f}"]
    os.execv(sys.executable, [sys.executable, __file__, *words])


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    lines = options.out / "gpu.jsonl"
    if not options.resume:
        lines.unlink(missing_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    rows = Rows(lines, deadline, options.device)

    def out_of_time(*_: object) -> None:
        if rows.working:
            raise OutOfTime

    # Ends a row that runs past the deadline; those that follow are left out.
    signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, 60 * options.minutes)
    try:
        if not options.resume:
            rows.measure("machine", {}, lambda: header(options))
        bench = Bench(options, rows)
        for number, part in enumerate(options.parts):
            rows.measure_all(part, lambda part=part: PARTS[part](bench))
            rest = options.parts[number + 1 :]
            if rows.broken and rest:
                restart(rest, max((deadline - time.monotonic()) / 60, 0.1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        read = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
        text = page(read)
        write_atomically(options.out / "gpu.md", text.encode())
        print(text)


if __name__ == "__main__":
    main()
