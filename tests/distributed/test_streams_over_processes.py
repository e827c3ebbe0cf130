"""A stream that processes close at different moments ends at one token on all of them."""

import time
from types import SimpleNamespace

import torch

from gracekv.hf.generation import stream_text
from support.thread_exchange import in_threads

TOKENIZER = SimpleNamespace(decode=lambda ids, **_: "".join(f"{x} " for x in ids))


def test_all_processes_stop_where_the_first_one_closed():
    def run(shard):
        steps = []

        def generate(options):
            for step in range(100):
                shard.total(1)  # a layer's all-reduce
                options["streamer"].put(torch.tensor([step]))
                steps.append(step)
                if bool(options["stopping_criteria"](torch.zeros(1, 1), None).all()):
                    break
            options["streamer"].end()

        pieces = stream_text(TOKENIZER, generate, {}, shard)
        next(pieces)
        time.sleep(0.02 * shard.rank)
        pieces.close()
        return len(steps)

    first, second = in_threads(2, run)
    assert first == second < 100
