"""The guide's script for several processes, started as in the guide."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from page_blocks import ROOT, blocks

import gracekv
from gracekv.hf.generation import decode_rows
from support.free_port import free_port
from support.margins import LOGITS

TOKENS = 64  # of `generate`
GUIDE = blocks(ROOT / "docs" / "more-than-one-gpu.md")


@pytest.fixture
def printed(reader, tiny):
    """Output of two processes of the guide's script, and the folder that they ran in."""
    [script] = [block for block in GUIDE if block.title == "ranks.py"]
    [line] = [block.code for block in GUIDE if block.language == "bash"]
    for part in tiny:
        part.save_pretrained(reader / "tiny")
    (reader / script.title).write_text(script.code, encoding="utf-8")
    tool, option, _, name, _ = shlex.split(line)
    assert (tool, option, name) == ("torchrun", "--nproc-per-node", script.title)
    paths = [str(Path(gracekv.__file__).parents[1]), *sys.path]
    # torchrun's own module; with its own port, several such tests can run at once.
    command = [sys.executable, "-m", "torch.distributed.run", "--master-port", free_port()]
    run = subprocess.run(
        [*command, option, "2", name, "tiny"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        cwd=reader,
        capture_output=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr.decode()[-3000:]
    return run.stdout.decode()


@pytest.mark.long
def test_the_script_of_the_guide(printed, reader, tiny):
    model, tokenizer = tiny
    context = (reader / "book.txt").read_text(encoding="utf-8")
    prompt = gracekv.Prompt.from_chat(tokenizer, context=context, question="Who is Dinah?")
    with gracekv.attached(model):
        result = gracekv.load(reader / "book.gracekv", model, tokenizer=tokenizer)
        assert torch.equal(result.prompt.ids, prompt.ids)
        answer = result.generate_ids(TOKENS)
        # The tokens before the first one that rounding might change.
        cache, ids = result.new_cache(), torch.cat([prompt.ids[None], answer], dim=1)
        with torch.no_grad():
            logits = model(ids[:, cache.packed_length : -1], past_key_values=cache).logits[0]
    best = logits.double().topk(2).values
    unclear = (best[:, 0] - best[:, 1] <= LOGITS).nonzero().flatten().tolist()
    sure = decode_rows(tokenizer, answer[:, : min([TOKENS, *unclear])])[0].rstrip("\ufffd")
    assert len(sure) > 20
    assert printed.startswith(sure)
    spent = result.accounting.spent
    assert printed.endswith(f" {spent}\n")
    assert 0 < spent <= result.accounting.budget
