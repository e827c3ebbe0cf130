"""The page as text: one file, no external resources, prompts never as markup; refusals."""

import base64
import dataclasses
import json
import re
import zlib
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch

from gracekv.cache import Accounting, Timings
from gracekv.errors import ReportError
from gracekv.pipeline.run import CodedRelevance
from gracekv.prefill import PromptSpans
from gracekv.report import ReportData, compare, write
from gracekv.report.data import ReportColumn
from gracekv.report.entries import KeptEntries
from gracekv.report.page import default_label, render, with_labels

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Tags(HTMLParser):
    """Elements, their attributes, and the text of scripts by id."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.scripts, self.inside = [], [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        named = dict(attributes)
        self.addresses += [named[name] for name in ("src", "href", "action") if name in named]
        if tag == "script":
            self.inside = named.get("id")
            self.scripts[self.inside] = ""

    def handle_endtag(self, tag):
        if tag == "script":
            self.inside = "none"

    def handle_data(self, data):
        if self.inside in self.scripts:
            self.scripts[self.inside] += data


def test_one_file_and_nothing_from_elsewhere(make, tmp_path):
    path = tmp_path / "folder" / "page.html"
    write(path, make("gracekv", 3))
    assert [found.name for found in path.parent.iterdir()] == ["page.html"]
    found = Tags(path.read_text(encoding="utf-8"))
    assert set(found.addresses) == {"#words", "data:,"}
    assert "link" in found.tags
    assert "default-src 'none'" in path.read_text(encoding="utf-8")
    # SVG's namespace is a name, not a fetched address.
    text = re.sub(r"http://www\.w3\.org/2000/svg", "", path.read_text(encoding="utf-8"))
    assert "http://" not in text
    assert "https://" not in text


def test_texts_are_never_markup(make, words):
    result = make("gracekv", 3, tokenizer=words(dict.fromkeys(range(200), ATTACK)))
    text = render(ReportData.of({f"label {ATTACK}": result}, {f"label {ATTACK}": ATTACK}))
    found = Tags(text)
    assert found.tags == Tags(render(ReportData.of({"a": make("gracekv", 3)}))).tags
    assert ATTACK not in text
    header = json.loads(found.scripts["header"])
    assert header["columns"][0]["label"] == f"label {ATTACK}"
    assert header["columns"][0]["answer"] == ATTACK
    block = zlib.decompress(base64.b64decode(found.scripts["block"]))
    offset, size = header["parts"]["text"]
    assert block[offset : offset + size].decode() == ATTACK * result.prompt.spans.length


def test_marks_of_the_template_in_a_label_stay_text(make):
    # Half of a surrogate pair cannot be written.
    page = render(ReportData.of({"{{script}} {{block}}\ud800": make("snapkv", 3)})).encode()
    assert "<title>{{script}} {{block}}? – gracekv report</title>" in page.decode()


def test_the_page_is_written_whole_or_not_at_all(make, tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("before")
    broken = make("gracekv", 3)
    broken.run = dataclasses.replace(broken.run, selection=None)
    with pytest.raises(ReportError):
        write(path, broken)
    assert path.read_text() == "before"


def test_labels_by_default(make):
    small, pages = {"window": {"size": 32, "minimum": 4}}, {"quota": "global"}
    assert default_label(make("snapkv", 4, context=400, fields=small)) == "snapkv 4x"
    assert default_label(make("fullkv", 4, fields=small)) == "fullkv"
    assert default_label(make("snapkv", 4, context=400, fields={**small, **pages})) == "custom 4x"
    one, two = (make("snapkv", 4, context=400, fields=small) for _ in range(2))
    assert list(with_labels([one, two])) == ["snapkv 4x", "snapkv 4x (2)"]
    # The budget counts bytes, and so does the label: there are more entries with fewer bits.
    tiny = {"window": {"size": 2, "minimum": 2}}
    name, ratio = default_label(make("gracekv-plus-allocated", 4, context=400, fields=tiny)).split()
    assert name == "gracekv-plus-allocated"
    assert float(ratio.removesuffix("x")) == pytest.approx(4, abs=0.1)


def test_the_model_is_named_but_no_folder(make):
    result = make("snapkv", 3)
    assert ReportData.of({"a": result}).model == "somebody/a-model"
    for name in ("/home/me/models/mine", "/home/me/models/mine/", "C:\\models\\mine"):
        result.model = SimpleNamespace(config=SimpleNamespace(name_or_path=name))
        assert ReportData.of({"a": result}).model.endswith("mine")
        assert "home" not in ReportData.of({"a": result}).model
    result.model = SimpleNamespace()
    assert ReportData.of({"a": result}).model == "SimpleNamespace"


def other_spans(make):
    result = make("snapkv", 3)
    moved = dataclasses.replace(result.prompt.spans, context_end=90)
    result.prompt = dataclasses.replace(result.prompt, spans=moved)
    return result


REFUSED = [
    (lambda make: {}, None, "at least one result; got none"),
    (lambda make: {"a": make("snapkv", 3), "b": other_spans(make)}, None, "different contexts"),
    (lambda make: {"a": make("snapkv", 3), "b": make("snapkv", 3, layers=3)}, None, "KV heads"),
    (lambda make: {4: make("snapkv", 3)}, None, "A label is a string; got int"),
    (lambda make: make("snapkv", 3), None, "results in a list, or by label; got SimpleN"),
    (lambda make: {"a": make("snapkv", 3)}, {"a": ["b", "c"]}, "An answer is a string; got list"),
    (lambda make: ["page.html"], None, r"a result of gracekv\.compress .*; got str"),
    (lambda make: {"a": make("snapkv", 3)}, {"z": "no"}, "keyed by label: a; got z"),
]


@pytest.mark.parametrize(("results", "answers", "message"), REFUSED)
def test_what_cannot_stand_side_by_side(make, tmp_path, results, answers, message):
    with pytest.raises(ReportError, match=message):
        compare(results(make), tmp_path / "page.html", answers=answers)
    assert not list(tmp_path.iterdir())


WORDS = (" the", " rabbit", " ran", " away", ".\n", " because", " it", " was", " late", ",")


LAYERS, HEADS = 28, 4
# A context of 32k tokens, from which each head keeps a quarter.
BEGIN, END, KEPT = 40, 40 + 32768, 8192


def column(number):
    """A random column, as scattered and large as possible.

    In the first one, half of the entries are merged and extend to the next one; the others hold
    single tokens.
    """
    rng, units, tokens = torch.Generator().manual_seed(number), LAYERS * HEADS, END - BEGIN
    start = torch.rand(units, tokens, generator=rng).argsort(1)[:, :KEPT].sort(1).values
    reach = torch.cat([start[:, 1:], torch.full((units, 1), tokens)], 1)
    merged = (torch.rand(start.shape, generator=rng) < 0.5) & (number == 0)
    end = torch.where(merged, reach, start + 1)
    start, end = start.flatten() + BEGIN, end.flatten() + BEGIN
    offsets, mass = torch.arange(units + 1) * KEPT, 1 + 0.7 * (end - start - 1).float()
    depth = torch.randint(0, 9, start.shape, generator=rng).to(torch.int16)
    floor = torch.rand(start.shape, generator=rng) < 0.3
    entries = KeptEntries(LAYERS, HEADS, (BEGIN, END), offsets, start, end, mass, depth, floor)
    scores = CodedRelevance.of(torch.rand(LAYERS, HEADS, tokens - 32, generator=rng) ** 6)
    shown = {"entries": entries, "slots": torch.arange(BEGIN, END + 1, 64), "relevance": scores}
    count, held = len(start), offsets.diff().view(LAYERS, HEADS)
    counts = {"budget": count, "spent": count, "floor_spent": 0, "recent": 32, "entries": held}
    sizes = {"bytes": 256 * count, "metadata_bytes": 8 * count, "full_bytes": 256 * units * tokens}
    told = {"curve": None, "accounting": Accounting(**counts, **sizes), "timings": Timings()}
    return ReportColumn(f"made {number}", pipeline={}, represents="node", **shown, **told)


@pytest.mark.long
def test_two_results_of_32k_tokens_stay_below_15_megabytes():
    spans = PromptSpans(BEGIN, END, END + 30, END + 40)
    words = tuple(WORDS[i * i % 10] for i in range(spans.length))
    data = ReportData("a model", spans, words, (column(0), column(1)))
    assert len(render(data).encode()) < 15e6
