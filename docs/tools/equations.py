"""Converts LaTeX in pages to MathML when the site is built, so browsers need no script for it."""

from __future__ import annotations

import html
import re
from xml.etree import ElementTree

from latex2mathml.converter import convert

_NAMESPACE = "http://www.w3.org/1998/Math/MathML"
# Output of the arithmatex extension: \(...\) in a span, \[...\] in a div.
_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
# In a displayed equation, the subscripts of these go below them.
_LIMITS = {"max", "min", "argmax", "argmin", "mean", "median", "sup", "inf", "∑", "∏"}
# Number of children that each element must have.
_PARTS = {"mfrac": 2, "msub": 2, "msup": 2, "munder": 2, "mover": 2, "msubsup": 3, "munderover": 3}
_FUNCTIONS = {"log", "exp", "sin", "cos"}


class EquationError(ValueError):
    """An equation uses LaTeX that the converter does not know."""


def render(page: str) -> str:
    """The HTML of a page with equations as MathML; `EquationError` if one cannot be converted."""
    page = _BLOCK.sub(
        lambda found: f'<div class="equation">{to_mathml(found[1], block=True)}</div>', page
    )
    return _INLINE.sub(lambda found: to_mathml(found[1], block=False), page)


def to_mathml(latex: str, *, block: bool) -> str:
    """One equation as a `<math>` element; `latex` may be HTML-escaped.

    Raises `EquationError` with the equation if a command or an alignment was not understood.
    """
    latex = html.unescape(latex).strip()
    # The converter calls an alignment without numbers align*.
    source = re.sub(r"(begin|end)\{aligned\}", r"\1{align*}", latex)
    try:
        math = convert(source, display="block" if block else "inline")
        # A stray & is invalid XML: an alignment that the converter did not understand.
        root = ElementTree.fromstring(math)
    except Exception as error:
        raise EquationError(f"Cannot render {latex!r}: {error!r}.") from error
    for element in root.iter():
        unknown = (element.text or "").startswith("\\")
        # Browsers support no other variant; for \mathcal{} the converter writes Unicode letters.
        short = len(element) != _PARTS.get(element.tag.rpartition("}")[2], len(element))
        if unknown or short or element.get("mathvariant", "normal") != "normal":
            raise EquationError(
                f"Cannot render {latex!r}: {ElementTree.tostring(element)!r} was not understood. "
                f"Write \\mathcal{{S}} with braces, and only commands that latex2mathml knows."
            )
    _join_upright(root)
    _keep_bars_short(root)
    _set_functions_apart(root)
    if block:
        _put_limits_below(root)
    root.set("alttext", latex)
    ElementTree.register_namespace("", _NAMESPACE)
    return ElementTree.tostring(root, encoding="unicode")


def _tag(name: str) -> str:
    return f"{{{_NAMESPACE}}}{name}"


def _join_upright(root: ElementTree.Element) -> None:
    """Join consecutive upright letters into one word, spaced as a word."""
    for row in root.iter(_tag("mrow")):
        letters = list(row)
        if len(letters) > 1 and all(
            x.tag == _tag("mi") and x.get("mathvariant") == "normal" for x in letters
        ):
            word = ElementTree.Element(_tag("mi"))
            word.text = "".join(x.text or "" for x in letters)
            row[:] = [word]


def _keep_bars_short(root: ElementTree.Element) -> None:
    """Bars on their own get no stretching and no spacing; those of \\left are fences."""
    for element in root.iter(_tag("mo")):
        if element.text in ("|", "‖") and element.get("fence") != "true":
            element.attrib |= {"stretchy": "false", "lspace": "0", "rspace": "0"}


def _set_functions_apart(root: ElementTree.Element) -> None:
    """Put a thin space after log and similar functions, unless a bracket follows."""
    for row in root.iter():
        for word, after in zip(list(row), list(row)[1:], strict=False):
            if word.tag == _tag("mi") and word.text in _FUNCTIONS and after.tag != _tag("mo"):
                word.tag = _tag("mo")
                word.attrib |= {"form": "prefix", "lspace": "0", "rspace": "0.1667em"}


def _put_limits_below(root: ElementTree.Element) -> None:
    for plain, limits in (("msub", "munder"), ("msubsup", "munderover")):
        for element in root.iter(_tag(plain)):
            if "".join(element[0].itertext()).lower() in _LIMITS:
                element.tag = _tag(limits)
