"""The example of an agent runs to the end."""

import re
import runpy

from page_blocks import ROOT


def test_an_agent_s_conversation_is_compressed(reader, capsys):
    runpy.run_path(str(ROOT / "examples" / "agent.py"), run_name="__main__")
    printed = capsys.readouterr().out
    held = [int(x.replace(",", "")) for x in re.findall(r"([\d,]+) entries", printed)]
    assert len(held) == 5
    assert held[-1] < 3.5 * held[0]
