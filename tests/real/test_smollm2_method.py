"""The whole method on one real capture: fast stages against the float64 references."""

from itertools import pairwise

import pytest
import torch

import gracekv.value.reference as value_reference
from gracekv import Budget, Pipeline
from gracekv.allocate.reference import greedy_heap
from gracekv.cache import PrototypePacker
from gracekv.segment import CurvatureDP
from gracekv.tree import Nodes, Prototype, PrototypeRule, TreeBatch, TreeContext
from gracekv.tree.engines.reference import ReferenceDistortion, prototype_of
from gracekv.tree.tree_batch import Workspace
from gracekv.value import MultiHop, OutputProjection
from support.chapter import CHAPTER
from support.covering import cases
from support.segmented import by_reference
from support.skips import needs_smollm2

pytestmark = [pytest.mark.model, needs_smollm2]


@pytest.fixture(scope="module")
def prefill():
    from gracekv.hf.capture import capture
    from gracekv.hf.smollm2 import load_smollm2
    from gracekv.prefill.prompt import Prompt

    model, tokenizer = load_smollm2()
    prompt = Prompt.from_chat(tokenizer, context=CHAPTER[:500], question="What did Alice see?")
    return capture(model, prompt)


def context_of(prefill, partition, scored, sensitivity):
    return TreeContext(
        prefill=prefill, partition=partition, scores=scored.scores, seed_scores=scored.seed_scores,
        sensitivity=sensitivity, rule=PrototypeRule(), curvature=partition.curvature,
    )  # fmt: skip


def test_distortion_within_1e_4_of_float64(prefill):
    region = prefill.spans.region(32)
    pipeline = Pipeline.named("gracekv")
    partition = pipeline.segment(prefill, region)
    scores = pipeline.value(prefill, region)
    context = context_of(prefill, partition, scores, pipeline.sensitivity(prefill))
    rng = torch.Generator().manual_seed(0)
    for layer in (0, prefill.layers // 2, prefill.layers - 1):
        batch = TreeBatch.of(context, [layer])
        evaluators = [
            Prototype(engine=engine).evaluator(batch, Workspace(torch.device("cpu")))
            for engine in ("torch", "numba")
        ]
        for head in range(prefill.kv_heads):
            want = ReferenceDistortion(context, layer, head, Prototype())
            for _ in range(cases(4, 12)):
                slot = int(torch.randint(partition.slots, (), generator=rng))
                a, b = partition.bounds[slot : slot + 2].tolist()
                i, j = sorted(torch.randint(a, b + 1, (2,), generator=rng).tolist())
                if i == j:
                    continue
                tree = head * partition.slots + slot
                nodes = Nodes(*(torch.tensor([x]) for x in (tree, i - a, j - a)))
                costs = [evaluator(nodes).costs[:, 0] for evaluator in evaluators]
                # The interval's ends and six places inside, since the reference is slow.
                inside = torch.randint(0, j - i, (6,), generator=rng).tolist()
                for k in sorted({0, j - i - 1, *inside}):
                    both = torch.tensor([want.node(i, i + k + 1), want.node(i + k, j)]).double()
                    # A cost is a squared difference of masses, so rounding a logit changes it by
                    # its root. Float32 rounds by up to 4e-6 here, where |q| |k| reaches 62.
                    whole = want.drop(a, b)
                    rounding = 1e-9 * whole + 4e-6 * (both * whole).sqrt()
                    for own in costs:
                        error = (own[:, k].double() - both).abs()
                        assert (error <= (1e-4 * both).maximum(rounding)).all()


def test_segmentation_and_relevance_match_their_references(prefill):
    region = prefill.spans.region(32)
    rule = CurvatureDP(max_length=40)  # fewer slots to score one by one
    _, _, profit, bounds = by_reference(prefill, region, rule)
    # Slots may differ only at equal profit, up to 1e-4, as states are float32.
    found = (x - region.start for x in (rule(prefill, region).bounds.numpy(), bounds))
    sums = [sum(profit[a, b - a - 1] for a, b in pairwise(slots)) for slots in found]
    assert sums[0] == pytest.approx(sums[1], rel=1e-4)

    fast, slow = MultiHop()(prefill, region), value_reference.multi_hop(MultiHop(), prefill, region)
    torch.testing.assert_close(fast.scores.double(), slow.scores, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(fast.seed_scores.double(), slow.seed_scores, rtol=1e-3, atol=1e-7)
    omega = OutputProjection()
    want = value_reference.output_projection(omega, prefill)
    torch.testing.assert_close(omega(prefill).double(), want, rtol=1e-4, atol=0)


@pytest.mark.parametrize("ratio", [2, 8, 24])
def test_the_auction_and_the_packed_entries(prefill, ratio):
    run = Pipeline.named("gracekv").run(prefill, Budget.ratio(ratio))
    assert run.floor is not None
    assert run.frontier is not None
    assert run.relevance is not None
    assert run.partition is not None
    # Exact: both order the same gains.
    assert torch.equal(run.frontier.kept, greedy_heap(run.floor, None).kept)
    assert run.accounting.budget - 1 <= run.accounting.spent <= run.accounting.budget
    # Every packed entry of two heads, against the definition of its interval.
    context = context_of(prefill, run.partition, run.relevance, run.relevance.sensitivity)
    forest, kept = run.frontier.forest, run.frontier.kept
    packed = PrototypePacker()(prefill, run.selection, run.relevance.scores, PrototypeRule())
    for layer, head in ((0, 0), (prefill.layers - 1, prefill.kv_heads - 1)):
        mine = kept & (forest.head_of_node() == layer * prefill.kv_heads + head)
        nodes = sorted(zip(forest.start[mine].tolist(), forest.end[mine].tolist(), strict=True))
        keys, values, positions, log_m = packed.layers[layer].head(head)
        for i, (a, b) in enumerate(nodes, start=run.partition.region.start):
            entry = prototype_of(context, layer, head, a, b)
            assert int(positions[i]) == entry.position
            torch.testing.assert_close(keys[i].double(), entry.key, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(values[i].double(), entry.value, rtol=1e-3, atol=1e-4)
            assert float(log_m[i].exp()) == pytest.approx(entry.multiplicity, rel=1e-3)
