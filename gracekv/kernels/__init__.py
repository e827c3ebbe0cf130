"""Compiled inner loops behind the same signatures as the torch ones; every one is optional."""
