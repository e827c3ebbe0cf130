"""Short names for draws that many properties share."""

import torch
from hypothesis import strategies as st

ints, some = st.integers, st.sampled_from
bools, floats, lists = st.booleans, st.floats, st.lists
SEEDS = ints(0, 2**32 - 1)
DTYPES = some([torch.float32, torch.bfloat16])
