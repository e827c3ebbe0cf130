"""RULER's 13 tasks, generated locally from their published procedure."""

from gracekv.evaluate.ruler.generate import TASKS, generate

__all__ = ["TASKS", "generate"]
