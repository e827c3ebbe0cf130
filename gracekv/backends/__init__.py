"""Attention over the ragged cache."""

from gracekv.backends.auto import Auto as Auto
from gracekv.backends.base import BACKENDS as BACKENDS
from gracekv.backends.base import AttentionBackend as AttentionBackend
from gracekv.backends.base import AttentionSpec as AttentionSpec
from gracekv.backends.base import AttentionStep as AttentionStep
from gracekv.backends.base import Backend as Backend
from gracekv.backends.eager import Eager as Eager
from gracekv.backends.numba import Numba as Numba
from gracekv.backends.sdpa import Sdpa as Sdpa
from gracekv.backends.triton import Triton as Triton
