"""The fate of an answer's own tokens: recorded at each cut, and shown on the page."""

import dataclasses
import re

import pytest
import torch
from transformers import DynamicCache

import gracekv
from gracekv import Limit
from gracekv.errors import CacheError, ReportError
from gracekv.report import CutHistory, ReportData
from gracekv.report.encoding import encode
from support.prompts import WORDS, words_book
from support.report_pages import ATTACK

SMALL = {"entries_per_head": 90, "every": 16, "window": 8}


@pytest.fixture(scope="module")
def book():
    return words_book(4096, 2)


def written(result, limit, count=120):
    cache = result.new_cache(limit)
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    ids = result.model.generate(**result.inputs, past_key_values=cache, **options)
    return cache, ids[0]


def counts(cache):
    """In how many heads each token has an entry, counted head by head."""
    held = torch.zeros(cache.packed_length, dtype=torch.int32)
    for layer in cache.packed.layers:
        for g in range(layer.heads):
            held[layer.head(g)[2].long()] += 1
    return held


def test_a_history_is_what_was_read_and_what_each_cut_left(book):
    cache = book.new_cache(Limit(**SMALL, history=True))
    tokens, left = torch.arange(150) * 7 % 31, []
    for token in tokens:
        cuts = cache.cuts
        with torch.no_grad():
            book.model(input_ids=token[None, None], past_key_values=cache)
        if cache.cuts > cuts:
            left.append(counts(cache))
    history = cache.history
    assert cache.cuts > 3
    assert history.first == book.packed.length
    assert torch.equal(history.ids, tokens)
    torch.testing.assert_close(history.held, left, rtol=0, atol=0)


def test_nothing_is_noted_unless_it_is_asked_for(book):
    cache, _ = written(book, Limit(**SMALL))
    assert cache.cuts
    rows, _ = written(book, Limit(**SMALL, history=True), 40)
    rows.batch_repeat_interleave(2)
    for without in (cache, rows, book.new_cache()):
        with pytest.raises(CacheError, match="history=True"):
            book.report("never.html", cache=without)


def test_what_is_taken_back_is_read_again(book):
    cache, ids = written(book, Limit(**SMALL, history=True), 40)
    last = int(cache.history.ids[-1])
    cache.crop(-3)
    assert torch.equal(cache.history.ids, ids[cache.history.first : -4])
    with torch.no_grad():
        book.model(input_ids=ids[-4:-2][None], past_key_values=cache)
    assert torch.equal(cache.history.ids, ids[cache.history.first : -2])
    assert last == int(ids[-2])
    cache.reset()
    assert not len(cache.history.ids)
    assert cache.history.held == ()


def test_the_page_holds_the_texts_and_the_counts(book, tmp_path):
    cache, ids = written(book, Limit(**SMALL, history=True))
    data = ReportData.of({"book": book}).with_history(book, cache.history)
    assert "".join(data.written).strip() == book.tokenizer.decode(ids[book.packed.length : -1])
    header, block = encode(data)
    start, size = header["parts"]["held"]
    shown = torch.frombuffer(bytearray(block[start : start + size]), dtype=torch.int32)
    assert torch.equal(shown, torch.cat(cache.history.held))
    assert header["cuts"]["lengths"] == [len(own) for own in cache.history.held]
    book.report(tmp_path / "page.html", cache=cache)
    assert (tmp_path / "page.html").stat().st_size > 1000
    with pytest.raises(ReportError, match="got DynamicCache"):
        book.report(tmp_path / "other.html", cache=DynamicCache())


@pytest.mark.parametrize("other", ["length", "prompt", "recipe"])
def test_a_cache_of_another_result_is_refused(book, tmp_path, other):
    context = {"length": WORDS[:200], "prompt": WORDS.replace("word5 ", "word6 ")}.get(other, WORDS)
    recipe = "snapkv" if other == "recipe" else None
    prompt = gracekv.Prompt.from_chat(book.tokenizer, context=context)
    second = gracekv.compress(book.model, prompt, ratio=2, pipeline=recipe or book.pipeline)
    assert (second.packed.length == book.packed.length) == (other != "length")
    cache, _ = written(second, Limit(**SMALL, history=True))
    second.report(tmp_path / "own.html", cache=cache)
    with pytest.raises(ReportError, match="belongs to another result"):
        book.report(tmp_path / "other.html", cache=cache)


def test_quantised_and_loaded_results_report_their_own_caches(book, tmp_path):
    how = {"pipeline": "gracekv-agnostic-allocated", "kv_bytes": book.accounting.bytes}
    quantised = gracekv.compress(book.model, book.prompt, **how)
    assert quantised.packed.layers[-1].coded
    cache, _ = written(quantised, Limit(**{**SMALL, "entries_per_head": 400}, history=True))
    quantised.report(tmp_path / "quantised.html", cache=cache)
    gracekv.compress(book.model, book.prompt, ratio=2, pipeline="snapkv").save(tmp_path / "saved")
    loaded = gracekv.load(tmp_path / "saved", book.model, tokenizer=book.tokenizer)
    cache = loaded.new_cache(Limit(**{**SMALL, "entries_per_head": 400}, history=True))
    loaded.report(tmp_path / "loaded.html", cache=cache)


def test_a_chat_reports_its_turns(book, tmp_path):
    chat = book.chat(Limit(**SMALL, history=True))
    for turn in range(3):
        chat.ask(f"word{turn} and{turn}", max_new_tokens=24)
    history = chat._cache.history
    assert torch.equal(history.ids, chat._ids[history.first :][: len(history.ids)])
    for name, one in {"chat": chat, "plain": book.chat()}.items():
        one.report(tmp_path / f"{name}.html")
        assert (tmp_path / f"{name}.html").exists()


@pytest.fixture(scope="session")
def shown(pair, data):
    """Two columns, which `write` never makes; the section is the same."""
    texts = tuple(f" said{i}" for i in range(40))
    texts = (*texts[:7], f" {ATTACK}", "\n", *texts[9:])
    first, units = data.spans.length - 1, data.columns[0].entries.layers * 2
    rng = torch.Generator().manual_seed(0)
    held = tuple(
        torch.randint(0, units + 1, (first + n,), generator=rng, dtype=torch.int32)
        for n in (16, 32, 38)
    )
    history = CutHistory(first, torch.arange(40), held)
    return dataclasses.replace(data, history=history, written=texts)


def test_the_section_is_there_only_with_a_history(page, opened, shown):
    assert page.locator("#cutsSection").is_hidden()
    empty = opened(dataclasses.replace(shown, history=dataclasses.replace(shown.history, held=())))
    assert "never reached the limit" in empty.locator("#cutsHint").inner_text()
    assert empty.locator("#cuts").is_hidden()


def test_the_text_is_shaded_as_each_cut_left_it(opened, shown):
    page, history, units = opened(shown), shown.history, shown.columns[0].entries.layers * 2
    assert page.locator("#cutShown").inner_text() == "3 of 3"
    for cut in (3, 1, 2):
        page.locator("#cut").fill(str(cut))
        held = history.held[cut - 1]
        words = page.locator("#cutText .t")
        assert words.count() == len(held) - history.first
        said = words.evaluate_all("words => words.map(w => [w.className, w.textContent])")
        for at, (name, text) in enumerate(said):
            share = int(held[history.first + at]) / units
            assert abs(int(re.fullmatch(r"t a(\d)", name)[1]) - 8 * share**0.5) <= 0.5 + 1e-6
            assert text == shown.written[at]
        alive = int((held[history.first :] > 0).sum())
        assert f"{alive} of the {words.count()} tokens" in page.locator("#cutSaid").inner_text()
    assert page.evaluate("window.hacked") is None


def test_the_picture_tells_tokens_and_heads_and_chooses_a_cut(opened, shown):
    page, history, units = opened(shown), shown.history, shown.columns[0].entries.layers * 2
    picture = page.locator("#cutsPicture")
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    # The prompt takes 0.3 of the width, which is less than its share of the tokens.
    line, total = 0.3, history.first + len(shown.written)
    for cut, token in ((0, history.first // 2), (1, history.first + 20), (0, history.first + 30)):
        place = line * (token + 0.5) / history.first
        if token >= history.first:
            place = line + (1 - line) * (token + 0.5 - history.first) / (total - history.first)
        at = {"x": box["width"] * place, "y": box["height"] * (cut + 0.5) / 3}
        picture.hover(position=at)
        tip = page.locator("#tip").inner_text()
        assert f"#{token}," in tip
        held = history.held[cut]
        late = token >= len(held)
        want = "not written yet" if late else f"held in {int(held[token])} of {units} heads"
        assert want in tip
        picture.click(position=at)
        assert page.locator("#cutShown").inner_text() == f"{cut + 1} of 3"
    # Empty only where nothing was written yet.
    pixels, wide = page.evaluate(
        "() => { const c = document.getElementById('cutsPicture');"
        " return [[...c.getContext('2d').getImageData(0, 0, c.width, 3).data], c.width]; }"
    )
    for empty, held in zip(
        torch.tensor(pixels)[3::4].view(3, wide) == 0, history.held, strict=True
    ):
        left = (1 - line) * (total - len(held)) / (total - history.first)
        assert float(empty.double().mean()) == pytest.approx(left, abs=0.03)
