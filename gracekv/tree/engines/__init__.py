"""The prototype's distortion: engines `torch`, `numba` and `triton`, and their reference."""
