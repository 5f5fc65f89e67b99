"""Reads quantized checkpoints with a peer's own code and writes what the peer makes of them.

It runs in a peer's environment and knows nothing of llmbench: `dump_checkpoints.py LIBRARY IDS
FOLDER...`. LIBRARY names the code that reads: `gptqmodel`, `autoawq`, `compressed-tensors`,
`transformers` (which hands GPTQ and AWQ to gptqmodel) or `bitsandbytes`. Beside each FOLDER
comes a safetensors file `FOLDER.LIBRARY`: `<module>` holds each quantized linear's dequantized
weight [N, C] in the type the peer computes it in, `<module>.s_channel` the outer scales [N] of
QQQ's integers, and `logits` [T, V] are float32, for the token ids of the JSON file IDS.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]


def read_gptqmodel(checkpoint: str) -> tuple[Any, Weights]:
    """GPTQ, AWQ and QQQ by gptqmodel's plain torch kernels."""
    from gptqmodel import BACKEND, GPTQModel

    method = _quantization_config(checkpoint)["quant_method"]
    backend = getattr(BACKEND, f"{method.upper()}_TORCH")
    # In bfloat16 it would round the file's float16 scales before it multiplies.
    model = GPTQModel.load(checkpoint, device="cpu", backend=backend, dtype=torch.float16).model
    return model, _gptqmodel_weights(model)


def read_transformers(checkpoint: str) -> tuple[Any, Weights]:
    """GPTQ and AWQ as transformers loads them, by gptqmodel."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float16, device_map={"": "cpu"}
    )
    return model, _gptqmodel_weights(model)


def _gptqmodel_weights(model: Any) -> Weights:
    from gptqmodel.nn_modules.qlinear import BaseQuantLinear

    weights: Weights = {}
    for name, module in model.named_modules():
        if not isinstance(module, BaseQuantLinear):
            continue
        if hasattr(module, "_dequantize_weight_for_torch"):  # QQQ: integers and outer scales
            weight, outer = module._dequantize_weight_for_torch()
            weights[f"{name}.s_channel"] = outer.flatten()
        elif "awq" in type(module).__name__.lower():
            weight = module._dequantize_weight_for_inference(
                torch.zeros(1, dtype=torch.float16), dtype=torch.float16
            )
        else:
            weight = module.dequantize_weight()
        weights[name] = weight.t()
    return weights


def read_autoawq(checkpoint: str) -> tuple[Any, Weights]:
    """AWQ by autoawq's own unpacking; the logits are those of a plain model of these weights."""
    from awq.utils.packing_utils import dequantize_gemm
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = _quantization_config(checkpoint)
    tensors = load_file(Path(checkpoint) / "model.safetensors")
    weights: Weights = {}
    for key in [key for key in tensors if key.endswith(".qweight")]:
        name = key.removesuffix(".qweight")
        packed = [tensors.pop(f"{name}.{part}") for part in ("qweight", "qzeros", "scales")]
        weights[name] = dequantize_gemm(*packed, settings["bits"], settings["group_size"]).t()
    config = AutoConfig.from_pretrained(checkpoint)
    del config.quantization_config
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.float32)
    dense = {f"{name}.weight": weight for name, weight in weights.items()}
    model.load_state_dict({**tensors, **dense}, strict=False)
    return model, weights


def read_compressed_tensors(checkpoint: str) -> tuple[Any, Weights]:
    """compressed-tensors through transformers, in the file's own types."""
    from compressed_tensors.quantization import QuantizationScheme
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    options = {"quantization_config": CompressedTensorsConfig(run_compressed=False)}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto", **options)
    weights = {
        name: module.weight.detach()
        for name, module in model.named_modules()
        if isinstance(getattr(module, "quantization_scheme", None), QuantizationScheme)
    }
    return model, weights


def read_bitsandbytes(checkpoint: str) -> tuple[Any, Weights]:
    """LLM.int8 as bitsandbytes holds it on a CPU."""
    from bitsandbytes.functional import int8_vectorwise_dequant
    from bitsandbytes.nn import Linear8bitLt
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    weights: Weights = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear8bitLt):
            scales = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
            weights[name] = int8_vectorwise_dequant(module.weight.data, scales)
    return model, weights


def _quantization_config(checkpoint: str) -> dict[str, Any]:
    text = (Path(checkpoint) / "config.json").read_text(encoding="utf-8")
    settings: dict[str, Any] = json.loads(text)["quantization_config"]
    return settings


READERS = {
    "gptqmodel": read_gptqmodel,
    "transformers": read_transformers,
    "autoawq": read_autoawq,
    "compressed-tensors": read_compressed_tensors,
    "bitsandbytes": read_bitsandbytes,
}


def main(library: str, ids: str, *folders: str) -> None:
    """Read, run once over the ids and write a file, for each checkpoint."""
    torch.set_num_threads(1)
    tokens = torch.tensor([json.loads(Path(ids).read_text(encoding="utf-8"))])
    for folder in folders:
        print(f"reading {folder}", flush=True)
        model, weights = READERS[library](folder)
        with torch.inference_mode():
            logits = model.eval()(tokens).logits[0].float()
        tensors = {name: weight.contiguous().clone() for name, weight in weights.items()}
        save_file({**tensors, "logits": logits.clone()}, f"{folder}.{library}")


if __name__ == "__main__":
    main(*sys.argv[1:])
