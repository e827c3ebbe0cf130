"""Interrupts at random lines: the model answers as before, and files are either old or new."""

import gc
import inspect
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

import gracekv
from gracekv.evaluate import Experiment, read_rows, run
from gracekv.hf import attach, graph_replay
from gracekv.prefill.attention_patch import patched_attention
from gracekv.prefill.partial_attention import rotations
from gracekv.testing.models import tiny_llama, tiny_tokenizer
from gracekv.undo import hooked, replaced_forward, undone
from support.covering import LONG, cases
from support.interrupts import executed_lines, interrupted

CASES = cases(12, 1000)
PACKAGE = Path(gracekv.__file__).parent


class Session:
    """A model, two prompts, a result and its file, which an interrupt must not harm."""

    def __init__(self, folder):
        self.folder = folder
        # Collect earlier tests' models now: doing so removes their names from the registries.
        gc.collect()
        self.tokenizer = tiny_tokenizer(vocabulary=600)
        self.model = tiny_llama(vocabulary=600)
        ids = torch.randint(4, 600, (2, 90), generator=torch.Generator().manual_seed(0))
        self.prompt, other = (gracekv.Prompt.from_ids(one, (4, 80)) for one in ids)
        self.result = gracekv.compress(self.model, self.prompt, ratio=2)
        self.book = gracekv.compress(self.model, gracekv.Prompt.from_ids(ids[0], (4, 90)), ratio=2)
        self.passage = ids[1, :30]
        gracekv.compress(self.model, other, ratio=4).save(folder / "other.gracekv")
        self.result.save(folder / "result.gracekv")
        panel = {
            "tasks": ["ruler:niah_single_1"], "methods": ["fullkv", "gracekv"], "ratios": [2],
            "lengths": [400], "samples": 1, "generate": False, "model": "tiny",
        }  # fmt: skip
        self.experiment = Experiment.from_dict(panel)
        self.want = self.answers()
        self.state = self.state_of_process()

    def state_of_process(self):
        """State that an interrupt might leave changed although answers stay right."""
        interfaces = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
        return [
            self.model.config._attn_implementation,
            [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in self.model.modules()],
            ["forward" in vars(module) for module in self.model.modules()],
            [sorted(interface) for interface in interfaces],
            torch.get_float32_matmul_precision(),
            torch.is_grad_enabled(),
            # In another thread, which cannot get a lock that this one still holds.
            ThreadPoolExecutor(1).submit(attach, self.model).result(60) is None,
        ]

    def compress(self):
        gracekv.compress(self.model, self.prompt, ratio=2)

    def compress_in_chunks(self):
        gracekv.compress(self.model, self.prompt, ratio=2, capture=gracekv.CaptureOptions(chunk=32))

    def generate(self):
        self.result.generate_ids(3)

    def generate_by_replay(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graph_replay, "suits", lambda *args: True)
            self.generate()

    def extend(self):
        self.book.extend(self.passage, ratio=2)

    def save(self):
        self.result.save(self.folder / "target.gracekv")

    def load(self):
        gracekv.load(self.folder / "result.gracekv", self.model)

    def evaluate(self):
        run(self.experiment, self.folder / "rows", model=self.model, tokenizer=self.tokenizer)

    def answers(self):
        """Answers of the model by itself, of an existing result, and of a new one."""
        ids = self.prompt.ids[None]
        plain = self.model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        new = gracekv.compress(self.model, self.prompt, ratio=2, pipeline="snapkv")
        return [plain.tolist(), *(r.generate_ids(3).tolist() for r in (self.result, new))]

    def check(self, action):
        assert self.state_of_process() == self.state
        assert self.answers() == self.want
        if action == "save":
            # The other file was put there before each save. Two files of one result may differ in
            # the order of header fields.
            path = self.folder / "target.gracekv"
            if path.read_bytes() != (self.folder / "other.gracekv").read_bytes():
                assert gracekv.load(path, self.model).generate_ids(3).tolist() == self.want[1]
        if action == "evaluate":
            out = self.folder / "rows"
            before = (out / "rows-main.jsonl").read_bytes()
            done = run(self.experiment, out, model=self.model, tokenizer=self.tokenizer)
            rows = read_rows(out)
            assert (done.failed, len(rows), len({row["key"] for row in rows})) == (0, 2, 2)
            assert not any(row["error"] for row in rows)
            whole = before[: before.rfind(b"\n") + 1]
            assert (out / "rows-main.jsonl").read_bytes().startswith(whole)

    def prepare(self, action):
        if action == "save":
            other = (self.folder / "other.gracekv").read_bytes()
            (self.folder / "target.gracekv").write_bytes(other)
        if action == "evaluate":
            (self.folder / "rows").mkdir(exist_ok=True)
            (self.folder / "rows" / "rows-main.jsonl").write_bytes(b"")


ACTIONS = ["compress", "compress_in_chunks", "generate", "extend", "save", "load", "evaluate"]


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return Session(tmp_path_factory.mktemp("session"))


def test_interrupts_at_random_lines_harm_nothing(session, tally):
    lines = {}
    for action in ACTIONS:
        for call in (lambda act: act(), executed_lines):
            # Work done once per process, such as compiling, is not counted.
            session.prepare(action)
            lines[action] = call(getattr(session, action))
    for seed in range(CASES):
        rng = Random(seed)
        action = ACTIONS[seed % len(ACTIONS)]
        place = rng.choice(sorted(lines[action]))
        occurrence = rng.randint(1, min(3, lines[action][place]))
        session.prepare(action)
        try:
            with tally:
                came = interrupted(getattr(session, action), place, occurrence)
            session.check(action)
        except Exception as error:
            where = f"{Path(place[0]).relative_to(PACKAGE)}:{place[1]}"
            raise AssertionError(f"seed {seed}: {action} at {where}, {occurrence}") from error
        tally.add(f"{action} interrupted" if came else f"{action} not interrupted")
    again = gracekv.compress(session.model, session.prompt, ratio=2)
    for one, other in zip(again.packed.layers, session.result.packed.layers, strict=True):
        assert torch.equal(one.values, other.values)


@pytest.mark.parametrize("action", ["compress_in_chunks", "generate_by_replay"])
def test_interrupts_where_a_model_is_set_back_harm_nothing(session, action):
    """Every line of code that changes a model and restores it, at its first and last execution."""
    changes = (
        patched_attention,
        rotations,
        undone,
        hooked,
        replaced_forward,
        graph_replay.replaying,
    )
    sources = [inspect.getsourcelines(change.__wrapped__) for change in changes]
    lines = {
        (change.__wrapped__.__code__.co_filename, first + number)
        for change, (text, first) in zip(changes, sources, strict=True)
        for number in range(len(text))
    }
    count = executed_lines(getattr(session, action))
    assert len(lines & count.keys()) > 10
    for number, place in enumerate(sorted(lines & count.keys())):
        # Daily, one of the two.
        for occurrence in {1, count[place]} if LONG else {(1, count[place])[number % 2]}:
            assert interrupted(getattr(session, action), place, occurrence)
            session.check(action)
