"""A worker's compressor without an engine, and the document that it reads."""

from types import SimpleNamespace

import torch

import gracekv
from gracekv.distributed.sharding import WHOLE
from gracekv.hf import capture
from gracekv.vllm import ContextStore
from gracekv.vllm.compressing import Compressor
from gracekv.vllm.orders import order_of
from gracekv.vllm.recording import Chunk

LENGTH = 60


def read_by_transformers(model):
    """The document and the token read after it, with all queries."""
    ids = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(0))
    prompt = gracekv.Prompt.from_ids(ids, (0, LENGTH - 1), question_end=LENGTH - 1)
    return capture.capture(model, prompt, gracekv.prefill.Needs(later_queries=True))


def asked(name, **options):
    return {"gracekv": {"compress": {"name": name, "ratio": 3, **options}}}


def engine(model, **parallel):
    """vLLM's config of an engine that serves the model, as far as compression reads it."""
    served = SimpleNamespace(hf_text_config=model.config, dtype=model.dtype)
    parallel = {"world_size_across_dp": 1, "tensor_parallel_size": 1, **parallel}
    return SimpleNamespace(model_config=served, parallel_config=SimpleNamespace(**parallel))


class Worker:
    """A compressor, fed as an engine's worker feeds it.

    Args:
        model: model of the document.
        root: folder of the store.
        shard: the heads that the worker computes.
        options: options of the store.
    """

    def __init__(self, model, root, shard=WHOLE, **options):
        config = engine(model, world_size_across_dp=shard.ranks, tensor_parallel_size=shard.ranks)
        self.store = ContextStore(root, **options)
        self.compressor = Compressor(config, self.store, torch.device("cpu"), shard)
        self.shard, self.found = shard, None

    def read(self, prefill, request, parameters, first=0, last=LENGTH):
        """The outcome of a step that computes these tokens."""
        chunk = Chunk(request, order_of(parameters["gracekv"]), 0, first, last - first, LENGTH)
        recording = self.compressor.begin(chunk, request)
        for layer in range(prefill.layers if recording else 0):
            parts = (prefill.queries[layer], prefill.keys[layer], prefill.values[layer])
            own = (self.shard.own_heads(x, 0) for x in parts)
            query, key, value = (x[:, first:last].transpose(0, 1) for x in own)
            recording.add(layer, first, query, key, value, prefill.scale)
        self.found = self.compressor.outcome(idle=False)
        return self.found

    def ended(self):
        """The outcome of the document."""
        for _ in range(3000):
            if self.found is not None:
                return self.found
            self.found = self.compressor.outcome(idle=True)
        raise AssertionError

    def outcome(self):
        """The outcome of the document, whose context is then served."""
        self.compressor.begin(None, None, {self.ended().request})
        return self.found
