"""A text that is long enough to compress."""

from importlib.resources import files

CHAPTER = (files("gracekv") / "data" / "alice_chapter_1.txt").read_text(encoding="utf-8")
