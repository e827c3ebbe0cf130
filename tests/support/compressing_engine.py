"""An engine that compresses documents for tests, and the same results by transformers."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.context_engine import context_engine
from support.engine_answers import assert_same_logprobs, own_logprobs

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank. " * 8
LONGEST, SEQUENCES = 768, 12
QUESTION = "Why is she tired?"
TOKENS = 12


@dataclass(frozen=True)
class Compressing:
    """The model and the tokenizer of transformers; if there is one, an engine and its store."""

    model: Any
    tokenizer: Any
    engine: Any = None
    store: Path | None = None

    def usage(self, name):
        """A metric of the engine."""
        return sum(x.value for x in self.engine.get_metrics() if x.name == f"vllm:{name}")

    def run(self, *requests):
        """The outputs of (ids, sampling parameters), all at once."""
        prompts = [{"prompt_token_ids": list(ids)} for ids, _ in requests]
        return self.engine.generate(prompts, [x for _, x in requests], use_tqdm=False)

    def listing(self):
        """All contexts, by name."""
        (output,) = self.run(([0], params({"list": True})))
        return {one["name"]: one for one in said(output)["contexts"]}

    def wait(self, name):
        """The context's entry in the listing, once it is made or has failed."""
        for _ in range(600):
            one = self.listing()[name]
            if one["state"] != "compressing":
                return one
            time.sleep(0.1)
        raise AssertionError(one)

    def question(self):
        """Ids of the question."""
        return self.tokenizer(QUESTION).input_ids

    def by_transformers(self, ids, **options):
        """The result for the same document, with one token read after it."""
        import gracekv

        prompt = gracekv.Prompt.from_ids([*ids, ids[-1]], (0, len(ids)), question_end=len(ids))
        return gracekv.compress(self.model, prompt, **{"ratio": 4, **options})

    def check(self, answer, result):
        """Check that an answer's log-probabilities are those over a result's cache."""
        tokens = list(answer.token_ids)
        assert len(tokens) == TOKENS
        own = own_logprobs(self.model, self.question(), tokens, result.new_cache())
        assert_same_logprobs(answer, *own)

    def check_about(self, name, result):
        """Ask about the context, and check the answer."""
        (answer,) = self.run((self.question(), asking(name)))
        self.check(answer.outputs[0], result)


def started(folder):
    """A tiny model, and an engine with few pages and short steps, whose store is empty."""
    from gracekv.testing.models import tiny_llama, tiny_tokenizer

    model, tokenizer = tiny_llama(vocabulary=500, dim=32), tiny_tokenizer(vocabulary=500)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "store").mkdir()
    store, pages = folder / "store", {"block_size": 32, "num_gpu_blocks_override": 30}
    most = {"max_model_len": LONGEST, "max_num_seqs": SEQUENCES, "max_num_batched_tokens": 64}
    engine = context_engine(folder / "model", store, **pages, **most, disable_log_stats=False)
    return Compressing(model, tokenizer, engine, store)


def params(order=None, tokens=1, **options):
    """Sampling parameters of a request, with its options about contexts."""
    from vllm import SamplingParams

    extra = None if order is None else {"kv_transfer_params": {"gracekv": order}}
    return SamplingParams(temperature=0.0, max_tokens=tokens, extra_args=extra, **options)


def said(output):
    """What an output says about contexts."""
    return output.kv_transfer_params["gracekv"]


def compress(name, **options):
    """A request to compress a document into the context `name`."""
    return params({"compress": {"name": name, "ratio": 4, **options}})


def asking(name):
    """A question about a context, with log-probabilities."""
    return params(name, TOKENS, logprobs=0, ignore_eos=True)


def tokens_of(layers, first=0):
    """(layer, head, position) of each entry; `first` is the index of the first head."""
    from gracekv.kernels.ragged import rows

    return {
        (number, first + head, place)
        for number, layer in enumerate(layers)
        for head, place in zip(rows(layer.lengths).tolist(), layer.positions.tolist(), strict=True)
    }
