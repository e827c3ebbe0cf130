"""One standard prefill and what compression reads from it."""

from gracekv.prefill.base import Prefill
from gracekv.prefill.needs import Needs, depth_layers
from gracekv.prefill.observer import FinalObserver, LayerObserver, Observer, PassObserver
from gracekv.prefill.prompt import PromptSpans, Region

__all__ = [
    "FinalObserver",
    "LayerObserver",
    "Needs",
    "Observer",
    "PassObserver",
    "Prefill",
    "PromptSpans",
    "Region",
    "depth_layers",
]
