"""What only our own tests use; what tests of plugins use too is in `gracekv.testing`."""
