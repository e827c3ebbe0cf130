"""Broken pipeline files and experiments are valid or raise named errors."""

import json
from itertools import product
from random import Random

import pytest
import yaml

from gracekv import recipes
from gracekv.errors import ConfigError
from gracekv.pipeline import Pipeline
from gracekv.pipeline.config import load_pipeline, save_pipeline
from support.covering import LONG, cases
from support.mutations import mutated_bytes, mutated_data

FILES = cases(200, 2000)
SUFFIXES = (".yaml", ".toml", ".json")


def test_broken_pipeline_files_are_refused(tmp_path, tally):
    # Every recipe as a file in every format, and as plain data.
    files, data = [], [Pipeline.named(name).to_dict() for name in recipes.names()]
    for name, suffix in product(recipes.names(), SUFFIXES):
        save_pipeline(Pipeline.named(name), tmp_path / f"{name}{suffix}")
        files.append((tmp_path / f"{name}{suffix}").read_bytes())
    for seed in range(FILES):
        rng = Random(seed)
        if seed % 2:
            at = rng.randrange(len(files))
            kind, broken = mutated_bytes(files[at], rng)
            path = tmp_path / f"broken{SUFFIXES[at % len(SUFFIXES)]}"
        else:
            kind, changed = mutated_data(rng.choice(data), rng)
            path = tmp_path / f"broken{rng.choice(['.yaml', '.json'])}"
            write = yaml.safe_dump if path.suffix == ".yaml" else json.dumps
            broken = write(changed).encode("utf-8", "surrogatepass")
        path.write_bytes(broken)
        try:
            with tally:
                pipeline = load_pipeline(path)
        except ConfigError:
            tally.add("refused")
            continue
        assert Pipeline.from_dict(pipeline.to_dict()) == pipeline, f"{seed} {kind}"
        tally.add("a pipeline")
    if LONG:
        assert tally.slowest < 1.0


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_endless_nesting_is_refused_by_name(suffix, tmp_path):
    deep = 3000 * '{"score":' + "1" + 3000 * "}"
    text = f"value = {deep}".replace(":", "=") if suffix == ".toml" else f'{{"value": {deep}}}'
    path = tmp_path / f"deep{suffix}"
    path.write_text(text)
    with pytest.raises(ConfigError, match="deep"):
        load_pipeline(path)
