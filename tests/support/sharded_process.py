"""One of several processes that share a model: runs every check and writes its findings.

    WORLD_SIZE=4 ... python sharded_process.py FOLDER

Imports once, and then forks into WORLD_SIZE processes; each logs to FOLDER/log-RANK. Two processes
run only a few checks. FOLDER holds the checkpoint `model`; for four processes also those of
`sharded_books`, and a saved result `whole.safetensors`. The findings go to FOLDER/found-RANK.json.
Started by `findings`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import gracekv
from gracekv.distributed import connect
from gracekv.distributed.sharding import check_sharding
from gracekv.errors import GracekvError, NonFiniteError
from gracekv.value.output_projection import OutputProjection
from gracekv.vllm import export
from support.free_port import free_port
from support.prompts import random_prompt
from support.sharded_books import (
    MIXED,
    PLANS,
    RATIO,
    bits_facts,
    book_facts,
    context_of,
    facts,
    load_model,
)

PROMPTS = [random_prompt(length, (4, length - 20), seed=length) for length in (180, 150)]
RECIPES = ("gracekv-plus", "gracekv", "gracekv-agnostic", "snapkv", "pyramidkv", "global-eviction")


class Thrice(torch.nn.Module):
    """Like an adapter over a sharded layer: the base's weight under the usual name, and more."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def forward(self, x):
        return 3 * self.base(x)


def adapted_sensitivity(model):
    """Sensitivity of the heads of a model whose first layer is `Thrice`."""
    attention = model.get_decoder().layers[0].self_attn
    attention.o_proj = Thrice(attention.o_proj)
    found = OutputProjection()(gracekv.capture(model, PROMPTS[0]))
    attention.o_proj = attention.o_proj.base
    return found.tolist()


def sharded_by_two(folder, rank):
    """Two pairs of processes, each with its own model, sharded by transformers' function."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "tp"))["tp"]
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=2))
    apply_tensor_parallelism(model, mesh, plan)
    model._tp_size = 2
    return model


def compressed(model, **options):
    """The first prompt's result."""
    return gracekv.compress(model, PROMPTS[0], **({"ratio": RATIO} | options))


def message(call):
    """The error of a call, as text, and the seconds until it was raised."""
    started = time.monotonic()
    try:
        call()
    except (GracekvError, OSError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "no error", time.monotonic() - started


def findings(folder, ranks):
    """Start `ranks` processes in `folder`; returns the findings of each."""
    variables = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(gracekv.__file__).parents[1]), *sys.path]),
    }
    command = [sys.executable, __file__, str(folder)]
    started = subprocess.Popen(command, env=os.environ | variables, start_new_session=True)
    try:
        started.wait(timeout=240)
    finally:
        # All ranks, which would outlive the first process; if all went well, none is left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    logs = "\n".join((folder / f"log-{rank}").read_text()[-3000:] for rank in range(ranks))
    assert started.returncode == 0, logs
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(ranks)]


def main(folder):
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", distributed_config=DistributedConfig(tp_size=world)
    ).eval()
    found = (few_checks if world == 2 else every_check)(model, folder, rank)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # Without a shutdown of the process group.


def few_checks(model, folder, rank):
    """For two processes: recipes with and without trees, a file, and errors that reach both."""
    found = {}
    for name in RECIPES[:2]:
        found[name] = facts(compressed(model, pipeline=name))
    found["adapted"] = adapted_sensitivity(model)
    compressed(model).save(folder / "shared.safetensors")
    found["loaded"] = facts(gracekv.load(folder / "shared.safetensors", model))
    found["other budget"] = message(lambda: compressed(model, ratio=2 + rank))
    found["too small"] = message(lambda: compressed(model, ratio=1000 if rank else RATIO))
    found["after failures"] = facts(compressed(model))
    if rank == 0:
        found["ended"] = message(lambda: compressed(model))
    return found


def every_check(model, folder, rank):
    """For four processes."""
    world, one, found = int(os.environ["WORLD_SIZE"]), PROMPTS[0], {}
    for name in RECIPES:
        found[f"four {name}"] = facts(compressed(model, pipeline=name))
    batch = gracekv.compress(model, PROMPTS, ratio=RATIO)
    found["four batch"] = facts(batch)
    batch.save(folder / "batch.safetensors")
    found["four full"] = facts(compressed(model, ratio=1))
    found["four loaded"] = facts(gracekv.load(folder / "whole.safetensors", model))
    result = compressed(model)
    found |= {f"bits {name}": made for name, made in bits_facts(model, one).items()}
    quantised = gracekv.compress(model, PROMPTS, ratio=RATIO, pipeline="gracekv-plus-allocated")
    quantised.save(folder / "quantised.safetensors")
    found["four quantised"] = facts(quantised)
    found["four quantised again"] = facts(gracekv.load(folder / "quantised.safetensors", model))
    for name in MIXED:
        plan = DistributedConfig(tp_size=world, tp_plan=PLANS.get(name))
        mixed = load_model(folder, name, distributed_config=plan)
        found[f"book {name}"] = book_facts(mixed, folder / f"{name}.safetensors")

    # Invalid calls.
    lagrangian = gracekv.Pipeline.from_dict({"allocate": "lagrangian"})
    for name, pipe in {"lagrangian": lagrangian, "d2o": gracekv.Pipeline.named("d2o")}.items():
        found[f"refused {name}"] = message(lambda pipe=pipe: compressed(model, pipeline=pipe))
    page = folder / "page.html"
    found["refused report"] = message(lambda: result.report(page))
    found["refused comparison"] = message(lambda: gracekv.report.compare([result], page))
    found["refused export"] = message(lambda: export(result, folder / "store/book"))

    # Processes that differ, or fail at some stage.
    found["other budget"] = message(lambda: compressed(model, ratio=2 + rank // 3))
    found["other capture"] = message(lambda: gracekv.capture(model, PROMPTS[rank // 3]))
    found["other prompt"] = message(lambda: gracekv.compress(model, PROMPTS[rank // 3], ratio=2))
    book = gracekv.compress(model, context_of(one), ratio=RATIO)
    found["other passage"] = message(lambda: book.extend([1, 2, rank // 3] * 9, ratio=2))
    found["other answer"] = message(lambda: result.generate_ids(2 + rank // 3))
    found["too small"] = message(lambda: compressed(model, ratio=1000 if rank == 1 else RATIO))
    found["no folder"] = message(lambda: result.save(folder / "x" if rank else "/proc/no/file"))
    stock = gracekv.value.ValueNorm.layer

    def broken(self, capture, region, memory):
        raise NonFiniteError("broken on purpose")

    if rank == 2:
        gracekv.value.ValueNorm.layer = broken
    found["fails in a stage"] = message(lambda: compressed(model))
    gracekv.value.ValueNorm.layer = stock
    found["after failures"] = facts(compressed(model))

    pair = sharded_by_two(folder, rank)
    for name in RECIPES[:2]:
        found[f"two {name}"] = facts(compressed(pair, pipeline=name))
    found["two loaded"] = facts(gracekv.load(folder / "whole.safetensors", pair))
    found["two quantised"] = facts(gracekv.load(folder / "quantised.safetensors", pair))
    attention = pair.get_decoder().layers[1].self_attn
    pair.get_decoder().layers[1].self_attn = None
    found["no attention"] = message(lambda: check_sharding(pair))
    pair.get_decoder().layers[1].self_attn = attention
    pair._tp_plan["model.layers.*.self_attn.q_proj"] = "colwise_gather_output"
    found["gathered"] = message(lambda: check_sharding(pair))
    pair._tp_size = None
    found["other sharding"] = message(lambda: check_sharding(pair))

    # The last process is late once, and then exits.
    connect(model, timeout=1.5)
    if rank == 3:
        time.sleep(4)
    found["too late"] = message(lambda: compressed(model))
    connect(model)
    if rank < 3:
        found["ended"] = message(lambda: compressed(model))
    return found


def start(folder, rank):
    """The process of a rank, with its own log."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        main(folder)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    # No thread has been started yet, and imports take longer than most checks.
    pids = []
    for number in range(int(os.environ["WORLD_SIZE"])):
        pids.append(os.fork())
        if not pids[-1]:
            start(Path(sys.argv[1]), number)
    sys.exit(any(os.waitpid(pid, 0)[1] for pid in pids))
