"""Lets the API pages show a registered class as what it becomes: a dataclass with a signature."""

from __future__ import annotations

from typing import Any

from griffe import Class, Decorator, ExprName, Extension


class Registered(Extension):
    """Adds the decorator that `Registry.register` applies."""

    def on_class_instance(self, *, cls: Class, **_: Any) -> None:
        """Called for each class that griffe has read."""
        if any(".register" in str(decorator.value) for decorator in cls.decorators):
            dataclass = ExprName("dataclasses.dataclass")
            cls.decorators.append(Decorator(dataclass, lineno=None, endlineno=None))
