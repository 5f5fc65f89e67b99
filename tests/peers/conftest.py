"""Peers in environments of their own, tiny models, and what each side makes of a checkpoint."""

import json
import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent.parent
ENVIRONMENTS = REPOSITORY / ".peers"
PROMPT = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 5, 6, 7, 200]
NUM_SAMPLES, SAMPLE_LENGTH = 16, 64
READ_BY = {
    "gptqmodel": "gptqmodel",
    "transformers": "gptqmodel",
    "autoawq": "autoawq",
    "compressed-tensors": "llmcompressor",
    "bitsandbytes": "bitsandbytes",
}
"""Environment of each library that reads."""
TIMEOUT_S = 3600
"""gptqmodel compiles its kernels at the first load, minutes of work on a small machine."""


class Reading:
    """What a library makes of a checkpoint."""

    def __init__(self, path: Path) -> None:
        from safetensors.torch import load_file

        tensors = load_file(path)
        self.logits: Tensor = tensors.pop("logits")  # [T, V] float32
        self.outer = {
            name.removesuffix(".s_channel"): tensors.pop(name)
            for name in list(tensors)
            if name.endswith(".s_channel")
        }
        self.weights: dict[str, Tensor] = tensors  # by module name, [N, C]

    def holds(self, module: str, weight: Any) -> bool:
        """Whether the peer computes with exactly the numbers of our `QuantizedWeight`."""
        import torch

        theirs = self.weights[module]
        if module not in self.outer:
            return torch.equal(weight.dequantize(theirs.dtype), theirs)
        if weight.channel_scales is None:
            # QQQ's kernel reads a four-bit code from the upper half of a byte.
            integers, scales = weight.centered() * 16, weight.scales[:, 0].float() / 16
        else:
            integers, scales = weight.int8_weight(), weight.channel_scales
        # gptqmodel casts all of a model to float16, QQQ's float32 scales too.
        has_scales = torch.equal(scales.half().float(), self.outer[module].float())
        return has_scales and torch.equal(integers.float(), theirs.float())


class Peer:
    """A peer's environment."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.python = ENVIRONMENTS / name / "bin" / "python"

    def run(self, script: str, *arguments: str | Path) -> None:
        """Run one of the scripts beside this file under the peer's interpreter."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        done = subprocess.run(
            [self.python, Path(__file__).with_name(script), *arguments],
            env=environment,
            cwd=tempfile.gettempdir(),  # gptqmodel leaves a folder of logs where it runs
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout[-6000:]


@pytest.fixture(scope="session")
def peer() -> Callable[[str], Peer]:
    """A peer by name; the test is skipped where its environment is not built."""

    def find(name: str) -> Peer:
        found = Peer(name)
        if not (ENVIRONMENTS / name / "installed").exists():
            pytest.skip(f"{name} is not installed in .peers/{name}: `make test-peers` does it")
        return found

    return find


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Callable[..., Any]) -> Any:
    """A tiny model by family and type of its weights, with widths that groups and tiles divide."""
    made: dict[tuple[str, str], Path] = {}

    def get(family: str, dtype: str) -> Path:
        if (family, dtype) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{dtype}")
            _save_tiny(family, dtype, folder)
            byte_tokenizer().save_pretrained(folder)
            made[family, dtype] = folder
        return made[family, dtype]

    return get


def _save_tiny(family: str, dtype: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=258,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=family == "qwen2",
    )
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(noise * (0.1 if noise.ndim == 1 else noise.shape[1] ** -0.5))
    model.to(getattr(torch, dtype)).save_pretrained(folder)


@pytest.fixture(scope="session")
def read_by(
    peer: Callable[[str], Peer], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Sequence[Path]], list[Reading]]:
    """Read checkpoints by a library, all in one start of its interpreter."""
    ids = tmp_path_factory.mktemp("ids") / "ids.json"
    ids.write_text(json.dumps(PROMPT))

    def read(library: str, folders: Sequence[Path]) -> list[Reading]:
        peer(READ_BY[library]).run("dump_checkpoints.py", library, ids, *folders)
        return [Reading(Path(f"{folder}.{library}")) for folder in folders]

    return read


@pytest.fixture
def engine_logits(logits_in_pieces: Callable[..., Tensor]) -> Callable[[Path], Tensor]:
    """Logits [T, V] of the prompt in llmbench's engine, float32."""

    def run(folder: Path) -> Tensor:
        from llmbench.engine.config import EngineConfig
        from llmbench.engine.models.loader import load_model

        config = EngineConfig(model=str(folder), dtype="float32", compile=False)
        return logits_in_pieces(load_model(config).model, PROMPT, [len(PROMPT)])

    return run


@pytest.fixture
def round_inputs_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the engine round inputs to 8 bits as a peer does, where that differs from its own rule.

    The engine and the kernels that serve such files divide the largest value of a token into 127.
    With a peer's rule the same codes must give the same logits; without any rounding these move
    by 3 %. gptqmodel computes in float16, so inputs near a half go to a neighbouring code: 1.6 %.
    """
    import llmbench.engine.layers.torch_quantized_linear
    import llmbench.quant.linear

    def compressed_tensors(x: Tensor) -> tuple[Tensor, Tensor]:
        """Divides twice the largest value into 255 steps."""
        x = x.float()
        scales = x.abs().amax(dim=-1, keepdim=True) / 127.5
        return (x / scales).round().clamp(-128, 127).to(torch.int8), scales

    def gptqmodel(x: Tensor) -> tuple[Tensor, Tensor]:
        """Its scale is a float16 number."""
        x = x.half()
        scales = x.abs().amax(dim=-1, keepdim=True).div(127.0).float()
        return (x / scales).round().clamp(-128, 127).to(torch.int8), scales

    def switch(peer: str) -> None:
        rules = {"compressed-tensors": compressed_tensors, "gptqmodel": gptqmodel}
        for module in (llmbench.quant.linear, llmbench.engine.layers.torch_quantized_linear):
            monkeypatch.setattr(module, "quantize_activations", rules[peer])

    return switch


@pytest.fixture(scope="session")
def samples() -> list[list[int]]:
    """Calibration tokens: bytes at random."""
    rng = random.Random(0)
    return [[rng.randrange(2, 258) for _ in range(SAMPLE_LENGTH)] for _ in range(NUM_SAMPLES)]
