"""One captured prompt for our recipes and kvpress's presses, and the tokens that each keeps."""

from dataclasses import dataclass

import torch

from gracekv import Budget, Pipeline, recipes
from gracekv.hf.capture import capture
from gracekv.prefill import Needs
from gracekv.prefill.prompt import Prompt
from gracekv.testing.models import tiny_llama
from gracekv.value import Scorer
from gracekv.value.column_sums import ReceivedAttention
from gracekv.value.critical import WrittenNorms
from support.chapter import CHAPTER
from support.covering import every
from support.margins import assert_same_choice, indicator

WINDOW = 20
RATIOS = every(2, (1.5, 2, 4, 6))


@dataclass
class Case:
    """A captured prompt that is all context, and the inputs of its attention modules."""

    model: object
    prefill: object
    inputs: list

    @property
    def length(self):
        return self.prefill.spans.length

    def entries(self, ratio):
        """Per head; the largest ratio still leaves more than the window."""
        return max(int(self.length / ratio), WINDOW + 1)

    def layers(self):
        """Per layer what a press takes: module, hidden states, keys, values that tell positions."""
        rope = self.prefill.rope
        extra = {"position_embeddings": (rope.cos[None], rope.sin[None])}
        for layer, block in enumerate(self.model.model.layers):
            keys = self.prefill.keys[layer][None]
            told = torch.arange(self.length).float()[None, None, :, None].expand_as(keys)
            yield block.self_attn, self.inputs[layer], keys, told, extra


def case_of(model, ids):
    inputs = []

    def note(module, args, kwargs):
        inputs.append(kwargs["hidden_states"])

    attentions = [block.self_attn for block in model.model.layers]
    hooks = [x.register_forward_pre_hook(note, with_kwargs=True) for x in attentions]
    try:
        prompt = Prompt.from_ids(ids, context=(0, len(ids)))
        observers = frozenset({ReceivedAttention(), WrittenNorms()})
        prefill = capture(model, prompt, Needs(later_queries=True, observers=observers))
    finally:
        for hook in hooks:
            hook.remove()
    return Case(model, prefill, inputs)


def tiny():
    # Without the window, the length is a multiple of 10, as needed to compare ChunkKV.
    ids = torch.randint(0, 97, (170 + WINDOW,), generator=torch.Generator().manual_seed(1))
    return case_of(tiny_llama(layers=3, heads=6, kv_heads=2), ids)


def smollm2():
    from gracekv.hf.smollm2 import load_smollm2

    model, tokenizer = load_smollm2()
    return case_of(model, torch.tensor(tokenizer(CHAPTER[:4000])["input_ids"][: 600 + WINDOW]))


def ours(case, recipe, entries, window=WINDOW, **changes):
    """Per (layer, head) the context positions that the pipeline keeps, and all positions' scores.

    Scores are float64 [L, G, T]; positions that are kept regardless have scores far from others.
    """
    data = {**recipes.RECIPES[recipe].pipeline, "window": {"size": window, "minimum": 0}, **changes}
    pipeline = Pipeline.from_dict({k: v for k, v in data.items() if not isinstance(v, Scorer)})
    for name, scorer in data.items():
        if isinstance(scorer, Scorer):
            object.__setattr__(pipeline, name, scorer)
    run = pipeline.run(case.prefill, Budget.entries_per_head(entries))
    chosen = run.selection
    recent = set(range(case.length - run.plan.recent, case.length))
    found = [set(recent) for _ in range(chosen.layers * chosen.heads)]
    for unit, position in zip(chosen.head_of_entry().tolist(), chosen.start.tolist(), strict=True):
        found[unit].add(position)
    scores = torch.full((chosen.layers, chosen.heads, case.length), 1e30, dtype=torch.float64)
    region = run.partition.region
    scores[..., region.start : region.end] = run.relevance.scores
    return found, scores


def theirs(case, press, attentions=None):
    """Per (layer, head) the positions that the press keeps, read from the values."""
    found = []
    for layer, (module, hidden, keys, values, extra) in enumerate(case.layers()):
        seen = None if attentions is None else attentions[layer]
        _, kept = press.compress(module, hidden, keys, values, seen, extra)
        masked = module.__dict__.pop("masked_key_indices", None)
        for head in range(kept.shape[1]):
            positions = {round(x) for x in kept[0, head, :, 0].tolist()}
            if masked is not None:
                positions -= set(masked[2][masked[1] == head].tolist())
            found.append(positions)
    return found


def assert_same_kept(got, want, scores, across_heads=False):
    """Positions may differ only if their scores tie: within a head, or within a layer's heads."""
    masks = [indicator(kept, scores.shape[-1]).view(scores.shape) for kept in (got, want)]
    if across_heads:
        masks, scores = [mask.flatten(1) for mask in masks], scores.flatten(1)
    assert_same_choice(*masks, scores)


def exactly(n, length):
    """The compression ratio at which a press keeps `n` of `length` tokens."""
    return 1 - (n + 0.5) / length


def true_scores(case, press):
    """float64 [L, G, T]: the press's scores of the layers' own keys and values."""
    found = []
    for layer, (module, hidden, keys, _, extra) in enumerate(case.layers()):
        values = case.prefill.values[layer][None]
        with torch.no_grad():
            found.append(press.score(module, hidden, keys, values, None, extra)[0].double())
    return torch.stack(found)
