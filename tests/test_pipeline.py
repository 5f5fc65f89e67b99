"""Whole runs on tiny models: every method on every family, resumption, ties, odd inputs."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbench.bench.accuracy.golden_logits import GoldenLogitsError, check_golden_logits
from llmbench.quant.adapters import refusal
from llmbench.quant.calibration import CalibrationSet, calibration_from_ids
from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import DEFAULT_SCHEMES, METHODS, Method, QuantConfig, Scheme
from llmbench.quant.errors import ConfigError, QuantError, VerificationError
from llmbench.quant.formats.quantized_checkpoint import QuantizedCheckpoint
from llmbench.quant.output_folder import MANIFEST
from llmbench.quant.pipeline import Progress, QuantResult, quantize
from llmbench.quant.plan import plan_run
from llmbench.quant.quantized_weight import QuantizedWeight
from llmbench.quant.verify import verify_checkpoint

SAMPLES = [
    [(7 * i * i + 3 * j) % 120 + 3 for j in range(length)]
    for i, length in enumerate((40, 6, 23, 1))
]


def calibration(samples: list[list[int]] = SAMPLES) -> CalibrationSet:
    return calibration_from_ids(samples, max_seq_length=64)


def config_of(method: Method, **changes: Any) -> QuantConfig:
    scheme = DEFAULT_SCHEMES[method]
    if scheme.group_size != -1:
        scheme = replace(scheme, group_size=16)
    return QuantConfig(method=method, **({"scheme": scheme} | changes))


def run(
    folder: Path,
    output: Path,
    config: QuantConfig,
    samples: list[list[int]] = SAMPLES,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> QuantResult:
    plan = plan_run(Checkpoint.open(folder), config)
    return quantize(
        folder, output, plan=plan, calibration=calibration(samples), on_progress=on_progress
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


@pytest.mark.parametrize("method", METHODS)
def test_every_family_is_quantized_and_runs_in_the_engine_or_is_refused_by_name(
    variant: str,
    method: Method,
    tmp_path: Path,
    tiny_model: Callable[[str], tuple[Path, Any]],
) -> None:
    """The engine's logits are those of the independently decoded weights (golden logits)."""
    folder, model = tiny_model(variant)
    output = tmp_path / "out"
    if refusal(model.config.get_text_config(), method) is not None:
        assert method in ("awq", "qqq", "smoothquant"), "RTN, GPTQ and LLM.int8 are generic"
        with pytest.raises(ConfigError, match=model.config.model_type):
            run(folder, output, config_of(method))
        return
    result = run(folder, output, config_of(method))
    assert result.verification.num_layers == len(result.layers) > 0
    golden = check_golden_logits(folder, output)
    assert golden.relative_error <= golden.tolerance
    if DEFAULT_SCHEMES[method].activations == "none":
        assert golden.relative_error < 1e-4


@pytest.mark.parametrize("method", ["gptq", "awq", "qqq", "smoothquant"])
@pytest.mark.parametrize("stop_at", [0, 1])
def test_a_killed_run_repeated_writes_the_same_bytes(
    method: Method, stop_at: int, tmp_path: Path, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, _ = tiny_model("llama")
    run(folder, tmp_path / "undisturbed", config_of(method))

    def kill(progress: Progress) -> None:
        if progress.num_done == stop_at + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "killed", config_of(method), on_progress=kill)
    assert not (tmp_path / "killed").exists()
    result = run(folder, tmp_path / "killed", config_of(method))
    assert result.num_resumed_blocks == stop_at + 1
    assert files(tmp_path / "killed") == files(tmp_path / "undisturbed")
    assert not (tmp_path / "killed.partial").exists()


def test_an_unfinished_run_of_other_settings_is_not_continued(
    tmp_path: Path, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, _ = tiny_model("llama")

    def kill(progress: Progress) -> None:
        if progress.num_done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "out", config_of("gptq"), on_progress=kill)
    with pytest.raises(QuantError, match="unfinished run with another config"):
        run(folder, tmp_path / "out", config_of("gptq", damp_percent=0.1))
    with pytest.raises(QuantError, match="unfinished run with another calibration_digest"):
        run(folder, tmp_path / "out", config_of("gptq"), samples=SAMPLES[:1])


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_statistics_cover_every_token_in_any_order(
    method: Method, tmp_path: Path, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    """Case C02: texts of 40, 6, 23 and 1 tokens."""
    folder, _ = tiny_model("llama")
    config = config_of(method)
    forward = run(folder, tmp_path / "forward", config)
    assert {report.num_tokens for report in forward.layers.values()} == {70}
    run(folder, tmp_path / "backward", config, samples=SAMPLES[::-1])
    run(folder, tmp_path / "last", config, samples=SAMPLES[-1:])
    assert files(tmp_path / "forward") == files(tmp_path / "backward")
    assert files(tmp_path / "forward") != files(tmp_path / "last")


@pytest.mark.parametrize("dead", [False, True])
def test_singular_hessian_is_damped_and_stays_near_rtn(
    dead: bool, tmp_path: Path, random_model: Callable[..., Any]
) -> None:
    """Case C01: one text of four tokens, rank 4 of 64; then eight inputs that are always zero."""
    model = random_model("llama", tie_word_embeddings=False)
    if dead:
        model.model.embed_tokens.weight[:, :8] = 0
    model.save_pretrained(tmp_path / "base")
    tokens = [3, 50, 7, 90]
    inputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers.0" in name:
            module.register_forward_pre_hook(
                lambda module, args, name=name: inputs.__setitem__(name, args[0][0])
            )
    model(input_ids=torch.tensor([tokens]))
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for method in ("gptq", "rtn"):
        config = config_of(method, scheme=Scheme(group_size=32), true_sequential=False)
        result = run(tmp_path / "base", tmp_path / method, config, samples=[tokens])
        assert method == "rtn" or all(report.damp for report in result.layers.values())
        found = QuantizedCheckpoint.of(Checkpoint.open(tmp_path / method))
        assert found is not None
        assert all((found.weight(name).scales > 0).all() for name in found.layers)
        weights[method] = {name: found.weight(name).dequantize() for name in found.layers}
        assert all(torch.isfinite(weight).all() for weight in weights[method].values())
    for name, x in inputs.items():
        exact = x @ model.get_submodule(name).weight.t()
        gptq, rtn = (
            float((x @ weights[method][name].t() - exact).square().sum())
            for method in ("gptq", "rtn")
        )
        assert gptq <= 1.05 * rtn, name
    check_golden_logits(tmp_path / "base", tmp_path / "gptq")


def test_checkpoint_that_the_engine_reads_wrongly_never_gets_its_name(
    tmp_path: Path,
    tiny_model: Callable[[str], tuple[Path, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A zero point off by one in the engine: an error, nothing under the name, and a way on."""
    folder, _ = tiny_model("llama")
    plan = plan_run(Checkpoint.open(folder), config_of("rtn"))
    centered = QuantizedWeight.centered

    def check(staged: Path) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(QuantizedWeight, "centered", lambda weight: centered(weight) + 1)
            check_golden_logits(folder, staged)

    with pytest.raises(GoldenLogitsError, match="differ from those of the saved weights"):
        quantize(folder, tmp_path / "out", plan=plan, calibration=None, check=check)
    assert not (tmp_path / "out").exists()
    result = run(folder, tmp_path / "out", config_of("rtn"))
    assert result.num_resumed_blocks == 2
    check_golden_logits(folder, tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
def test_rows_of_zeros_stay_zero(
    method: Method, dtype: torch.dtype, tmp_path: Path, random_model: Callable[..., Any]
) -> None:
    """Case C03: zero groups and a zero row in a layer, for every method and stored type."""
    model = random_model("llama").to(dtype)
    down = model.model.layers[0].mlp.down_proj
    down.weight[:, :16] = 0
    down.weight[5] = 0
    model.save_pretrained(tmp_path / "base")
    run(tmp_path / "base", tmp_path / "out", config_of(method, transform="none"))
    found = QuantizedCheckpoint.of(Checkpoint.open(tmp_path / "out"))
    assert found is not None
    weight = found.weight("model.layers.0.mlp.down_proj")
    assert torch.isfinite(weight.scales.float()).all()
    assert (weight.scales > 0).all()
    assert (weight.dequantize()[5] == 0).all()
    if method == "rtn":
        assert (weight.dequantize()[:, :16] == 0).all()
    assert torch.isfinite(weight.dequantize()).all()


@pytest.mark.parametrize("model_type", ["qwen2", "gemma"])
@pytest.mark.parametrize("method", METHODS)
def test_tied_embeddings_stay_tied_and_untouched(
    method: Method, model_type: str, tmp_path: Path, random_model: Callable[..., Any]
) -> None:
    """Case C07: no second head, the embedding bit for bit; rotation alone unties, and says so."""
    model = random_model(model_type, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    changes: dict[str, Any] = {"transform": "smooth"} if method == "qqq" else {}
    run(tmp_path / "base", tmp_path / "out", config_of(method, **changes))
    base, out = Checkpoint.open(tmp_path / "base"), Checkpoint.open(tmp_path / "out")
    assert out.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in out
    name = "model.embed_tokens.weight"
    assert torch.equal(base.get(name), out.get(name))


def test_rotation_unties_embeddings_in_config_and_files(
    tmp_path: Path, random_model: Callable[..., Any]
) -> None:
    model = random_model("qwen2", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    run(tmp_path / "base", tmp_path / "out", config_of("qqq", transform="rotate"))
    out = Checkpoint.open(tmp_path / "out")
    assert out.config["tie_word_embeddings"] is False
    assert not torch.equal(out.get("lm_head.weight"), out.get("model.embed_tokens.weight"))


def test_head_is_quantized_on_request(tmp_path: Path, random_model: Callable[..., Any]) -> None:
    model = random_model("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "base")
    config = config_of("gptq", quantize_lm_head=True)
    result = run(tmp_path / "base", tmp_path / "out", config)
    assert result.layers["lm_head"].num_tokens == 70
    assert "lm_head.qweight" in Checkpoint.open(tmp_path / "out")
    check_golden_logits(tmp_path / "base", tmp_path / "out")


def test_other_files_are_copied_and_weights_are_not(
    tmp_path: Path, tiny_model: Callable[[str], tuple[Path, Any]], byte_tokenizer: Any
) -> None:
    _, model = tiny_model("llama")
    base = tmp_path / "base"
    model.save_pretrained(base)
    byte_tokenizer(chat_template="{{ messages }}").save_pretrained(base)
    (base / "modeling_own.py").write_text("# code", encoding="utf-8")
    (base / "pytorch_model.bin").write_bytes(b"old")
    (base / ".gitattributes").write_text("", encoding="utf-8")
    run(base, tmp_path / "out", config_of("rtn"))
    names = set(files(tmp_path / "out"))
    assert {"generation_config.json", "tokenizer.json", "modeling_own.py", MANIFEST} <= names
    assert any("chat_template" in name for name in names)
    assert not {"pytorch_model.bin", ".gitattributes", "model.safetensors.index.json"} & names


def test_weights_that_are_not_finite_are_not_saved(
    tmp_path: Path, random_model: Callable[..., Any]
) -> None:
    model = random_model("llama")
    model.model.layers[1].input_layernorm.weight[3] = torch.nan
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(QuantError, match=r"layers\.1\.input_layernorm\.weight holds numbers"):
        run(tmp_path / "base", tmp_path / "out", config_of("rtn"))
    assert not (tmp_path / "out").exists()


def test_existing_output_is_not_written_over(
    tmp_path: Path, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, _ = tiny_model("llama")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x", encoding="utf-8")
    with pytest.raises(QuantError, match="exists and is not empty"):
        run(folder, tmp_path / "out", config_of("rtn"))
    with pytest.raises(QuantError, match="is the checkpoint that is to be quantized"):
        run(folder, folder, config_of("rtn"))


@pytest.mark.parametrize("suffix", [".qweight", ".qzeros", ".scales", ".g_idx"])
def test_verification_finds_a_single_changed_bit(
    suffix: str, tmp_path: Path, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, _ = tiny_model("llama")
    run(folder, tmp_path / "out", config_of("gptq"))
    verify_checkpoint(tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    entry = Checkpoint.open(tmp_path / "out")._entry(f"model.layers.0.mlp.down_proj{suffix}")
    content = bytearray(path.read_bytes())
    content[entry.start] ^= 1
    path.write_bytes(content)
    with pytest.raises(VerificationError, match="down_proj"):
        verify_checkpoint(tmp_path / "out")


def test_verification_finds_zeros_that_contradict_the_tag(
    tmp_path: Path, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    """vllm#26343: version 2 zeros under the tag of version 1."""
    folder, _ = tiny_model("llama")
    run(folder, tmp_path / "out", config_of("gptq"))
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(VerificationError, match="do not match the tag gptq_v2"):
        verify_checkpoint(tmp_path / "out")
