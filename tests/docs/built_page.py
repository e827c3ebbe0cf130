"""The links and anchors of a built page."""

import re
from html.parser import HTMLParser

# Text in these is shown verbatim.
_VERBATIM = {"code", "pre", "script", "style", "math"}
_TEX = re.compile(r"\\[(\[]|\$\$|\\(?:frac|sum|lambda|mathcal)\b")


class BuiltPage(HTMLParser):
    """One page of the site.

    Attributes:
        ids: anchors.
        links: targets of links.
        loads: resources that a browser loads by itself.
        equations: `<math>` elements.
        raw: pieces of text that look like unrendered LaTeX.
    """

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads, self.raw = set(), [], [], []
        self.equations = 0
        self._verbatim = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag == "link" and given.get("href"):
            self.loads.append(given["href"])
        if tag in ("img", "script", "iframe", "source", "video") and given.get("src"):
            self.loads.append(given["src"])
        self.equations += tag == "math"
        self._verbatim += tag in _VERBATIM

    def handle_endtag(self, tag):
        self._verbatim -= tag in _VERBATIM

    def handle_data(self, data):
        if not self._verbatim and _TEX.search(data):
            self.raw.append(data.strip())
