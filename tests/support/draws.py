"""Short names for draws that many properties share."""

import torch
from hypothesis import strategies as st

ints, some = st.integers, st.sampled_from
bools, floats, lists, tuples = st.booleans, st.floats, st.lists, st.tuples
SEEDS = ints(0, 2**32 - 1)
DTYPES = some([torch.float32, torch.bfloat16])
