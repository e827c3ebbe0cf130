"""Compiled inner loops with the same signatures as their torch versions; all are optional."""
