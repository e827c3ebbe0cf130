"""One standard prefill and the data that compression reads from it."""

from gracekv.prefill.base import Prefill as Prefill
from gracekv.prefill.layer_capture import CaptureInfo as CaptureInfo
from gracekv.prefill.layer_capture import LayerCapture as LayerCapture
from gracekv.prefill.needs import Needs as Needs
from gracekv.prefill.needs import PrefillReader as PrefillReader
from gracekv.prefill.needs import depth_layers as depth_layers
from gracekv.prefill.observer import FinalObserver as FinalObserver
from gracekv.prefill.observer import LayerObserver as LayerObserver
from gracekv.prefill.observer import Observer as Observer
from gracekv.prefill.observer import PassObserver as PassObserver
from gracekv.prefill.spans import PromptSpans as PromptSpans
from gracekv.prefill.spans import Region as Region
