"""Files written by version 0.2.0 load; older ones, or other groupings, raise named errors."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

import gracekv
from gracekv.cache.serialization import read_header
from gracekv.errors import SavedCacheError
from gracekv.testing.models import tiny_llama

safetensors = pytest.importorskip("safetensors.torch")

FOLDER = Path(__file__).parent / "written_by_0_2_0"
# Bits of the exact entries and of each coded part, and the format of the file.
FILES = {
    "as-it-is": ([], "1"),
    "uniform": ([4], "2"),
    "allocated": ([8, 4], "3"),
    "two-passages": ([8, 8, 4, 4], "4"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_0_2_holds_what_it_held(name, tmp_path):
    path, (bits, number) = FOLDER / f"{name}.gracekv", FILES[name]
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["gracekv_format"] == number
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    model = tiny_llama(layers=1, dtype=torch.bfloat16)
    result = gracekv.load(path, model)
    (layer,) = result.packed.layers
    assert [coding.bits for coding in layer.codings] == bits
    for key, tensor in layer.tensors().items():
        assert torch.equal(tensor, stored[f"layers.0.{key}"])
    assert result.accounting.bytes == layer.kv_bytes
    assert result.generate_ids(3).shape == (1, 3)
    # Saved again, it is the same cache with the same pipeline.
    result.save(tmp_path / "again")
    again = gracekv.load(tmp_path / "again", model)
    assert again.pipeline == result.pipeline
    for key, tensor in again.packed.layers[0].tensors().items():
        assert torch.equal(tensor, layer.tensors()[key])


def changed(path, to, **fields):
    """The file with other fields in its header, and a matching checksum."""
    with safetensors.safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    text = json.dumps(json.loads(metadata["gracekv"]) | fields)
    metadata |= {"gracekv": text, "gracekv_sha256": hashlib.sha256(text.encode()).hexdigest()}
    safetensors.save_file(tensors, to, metadata=metadata)
    return to


@pytest.mark.parametrize("version", ["0.0.9", "0.1.0", "0.1.12.dev3"])
def test_an_older_file_is_refused_with_its_version(tmp_path, version):
    path = changed(FOLDER / "as-it-is.gracekv", tmp_path / "old", gracekv_version=version)
    with pytest.raises(SavedCacheError, match=rf"old was written by gracekv {version}, .* 0\.2\.0"):
        read_header(path)


@pytest.mark.parametrize("version", ["0.2.0", "0.10.1", "1.0.0"])
def test_a_newer_file_is_not(tmp_path, version):
    path = changed(FOLDER / "as-it-is.gracekv", tmp_path / "new", gracekv_version=version)
    assert read_header(path)["gracekv_version"] == version


def test_codes_that_were_grouped_otherwise_are_refused(tmp_path):
    coding = {"bits": 4, "group": 8, "keys": "token", "values": "token"}
    path = changed(FOLDER / "uniform.gracekv", tmp_path / "other", coding=[coding])
    with pytest.raises(SavedCacheError, match="keys by channel and values by token; got"):
        gracekv.load(path, tiny_llama(layers=1, dtype=torch.bfloat16))
