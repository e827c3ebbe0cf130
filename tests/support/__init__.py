"""Helpers of our own tests; those that tests of plugins use, too, are in `gracekv.testing`."""
