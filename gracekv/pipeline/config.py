"""Pipelines as files: YAML, TOML or JSON."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from gracekv.errors import ConfigError
from gracekv.files import path_of, read_text, write_atomically
from gracekv.pipeline import Pipeline
from gracekv.registry.plugins import foreign_modules, import_modules, module_list

FORMATS = (".yaml", ".yml", ".toml", ".json")
_MOST = 100_000


def load_pipeline(spec: str | Path) -> Pipeline:
    """A recipe by name, or a `Pipeline` from the fields in a .yaml, .toml or .json file.

    Fields missing from the file come from the recipe under its key `base`, or else from the paper's
    method. Modules listed under `imports` are imported first, to register strategies of other
    packages. Raises `UnknownStrategyError` for an unknown recipe or strategy, `PluginError` for a
    module that cannot be imported, `ConfigError` for a file that cannot be read, is not valid, or
    has unknown fields.
    """
    path = path_of(spec)
    if path.suffix not in FORMATS:
        return Pipeline.named(str(spec))
    try:
        base = "gracekv"
        if isinstance(data := parse_file(path), dict):
            import_modules(module_list(data.pop("imports", ()), str(path)))
            base = str(data.pop("base", base))
        return Pipeline.from_dict({} if data is None else data, base=base)
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply to be a pipeline.") from error


def save_pipeline(pipeline: Pipeline, path: str | Path) -> None:
    """Write every field of `pipeline` to a .yaml, .toml or .json file, atomically.

    Modules outside gracekv that define its strategies are listed under `imports`.
    Raises `ConfigError` for another suffix.
    """
    path = path_of(path)
    # YAML cannot represent NumPy numbers, which fields may hold.
    data = json.loads(json.dumps(pipeline.to_dict()))
    if modules := [name for name in foreign_modules(pipeline) if name != "__main__"]:
        data = {"imports": modules, **data}
    if path.suffix in (".yaml", ".yml"):
        import yaml

        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    elif path.suffix == ".toml":
        import tomli_w

        text = tomli_w.dumps(_without_none(data))
    elif path.suffix == ".json":
        text = json.dumps(data, indent=2) + "\n"
    else:
        raise ConfigError(f"Pipeline files end in one of {', '.join(FORMATS)}; got {path.name!r}.")
    write_atomically(path, text.encode())


def parse_file(path: Path) -> Any:
    """The content of a .yaml, .toml or .json file; `ConfigError` if it cannot be read."""
    text = read_text(path)
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix == ".json":
            return json.loads(text)
        import yaml

        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error
        # Aliases of aliases are small, until a message writes them out.
        room, waiting = _MOST, [content]
        while waiting:
            value = waiting.pop()
            within = value.values() if isinstance(value, dict) else value
            if isinstance(value, dict | list | tuple | set):
                room -= len(within)
                if room < 0:
                    raise ValueError(f"it has more than {_MOST:,} values, aliases included")
                waiting += within
        return content
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid {path.suffix[1:]}: {error}") from error


def _without_none(data: Any) -> Any:
    """Leave out None: TOML has no null, and optional fields are None by default."""
    if isinstance(data, dict):
        return {key: _without_none(value) for key, value in data.items() if value is not None}
    return [_without_none(item) for item in data] if isinstance(data, list) else data
