"""Strategies by name: registries, hyperparameters and plugins."""

from gracekv.registry.hyperparameter import bounded, check_values
from gracekv.registry.registry import Configurable, Registry, Strategy

__all__ = ["Configurable", "Registry", "Strategy", "bounded", "check_values"]
