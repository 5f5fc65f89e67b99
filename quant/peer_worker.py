"""Runs one job of quantization with another project's tool, in that tool's own environment.

The file is copied beside its job and started by the peer's interpreter, which knows nothing of
llmbench: it imports nothing of it, and a peer only inside the function that uses it. A job is a
JSON file with base, output, backend, method, format, bits, group_size, sym, activations,
desc_act, act_order, true_sequential, damp_percent (None: the peer's own), smooth_alpha, seed,
threads, samples (lists of token ids) and result, the file to write.
"""

import importlib.metadata
import json
import os
import random
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "llmcompressor",
    "compressed-tensors",
    "gptqmodel",
    "autoawq",
    "auto-gptq",
)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".index.json")


def llmcompressor(job: dict[str, Any]) -> None:
    """RTN, GPTQ, AWQ or SmoothQuant, saved as compressed-tensors."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    settings = {"config_groups": {"group_0": _config_group(job)}, "ignore": ["lm_head"]}
    recipe: list[Any] = []
    if job["method"] == "gptq":
        from llmcompressor.modifiers.gptq import GPTQModifier

        order = "static" if job["act_order"] else None
        damping = {} if job["damp_percent"] is None else {"dampening_frac": job["damp_percent"]}
        recipe.append(GPTQModifier(actorder=order, **damping, **settings))
    else:
        if job["method"] == "awq":
            from llmcompressor.modifiers.transform.awq import AWQModifier

            recipe.append(AWQModifier())
        if job["method"] == "smoothquant":
            from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

            recipe.append(SmoothQuantModifier(smoothing_strength=job["smooth_alpha"]))
        recipe.append(QuantizationModifier(**settings))
    arguments: dict[str, Any] = {}
    if job["method"] != "rtn":
        from datasets import Dataset

        arguments = {
            "dataset": Dataset.from_list(_examples(job)),
            "num_calibration_samples": len(job["samples"]),
            "max_seq_length": max(len(row) for row in job["samples"]),
            "shuffle_calibration_samples": False,
        }
    model = AutoModelForCausalLM.from_pretrained(job["base"], dtype="auto")
    oneshot(model=model, tokenizer=_tokenizer(job), recipe=recipe, **arguments)
    model.save_pretrained(job["output"], save_compressed=True)


def _config_group(job: dict[str, Any]) -> dict[str, Any]:
    """What compressed-tensors calls a scheme."""
    integers = {"type": "int", "dynamic": False}
    weights = {**integers, "num_bits": job["bits"], "symmetric": job["sym"], "strategy": "channel"}
    if job["group_size"] != -1:
        weights |= {"strategy": "group", "group_size": job["group_size"]}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    if job["activations"] == "int8":
        token = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "token"}
        group["input_activations"] = {**token, "dynamic": True}
    if job["bits"] < 8:  # Left to choose, it gives each four-bit code with int8 inputs a byte.
        group["format"] = "pack-quantized"
    return group


def gptqmodel(job: dict[str, Any]) -> None:
    """GPTQ, AWQ or QQQ, saved in each method's own format."""
    # With one, it refuses its own pool of two loaders; by itself it takes one a core.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(2, job["threads"])))
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig

    layout = {"gptq": job["format"] or "gptq", "awq": "gemm", "qqq": "qqq"}[job["method"]]
    settings: dict[str, Any] = {
        "bits": job["bits"],
        "group_size": job["group_size"],
        "sym": job["sym"],
        "desc_act": job["desc_act"],
        # Its order within and of groups wants groups.
        "act_group_aware": job["act_order"] and not job["desc_act"] and job["group_size"] != -1,
        "quant_method": job["method"],
        "format": layout,
        "offload_to_disk": False,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }
    if job["method"] == "gptq":
        settings["true_sequential"] = job["true_sequential"]
        if job["damp_percent"] is not None:
            settings["damp_percent"] = job["damp_percent"]
    model = GPTQModel.load(job["base"], QuantizeConfig(**settings))
    # Without this it drops samples of fewer than ten tokens.
    model.quantize(_examples(job), batch_size=1, calibration_data_min_length=1)
    model.save(job["output"])


def auto_gptq(job: dict[str, Any]) -> None:
    """GPTQ in the layout that all others call GPTQ v1."""
    from auto_gptq import AutoGPTQForCausalLM, BaseQuantizeConfig

    settings = {key: job[key] for key in ("bits", "group_size", "sym", "desc_act")}
    if job["damp_percent"] is not None:
        settings["damp_percent"] = job["damp_percent"]
    config = BaseQuantizeConfig(**settings, true_sequential=job["true_sequential"])
    model = AutoGPTQForCausalLM.from_pretrained(job["base"], config)
    model.quantize(_examples(job), batch_size=1)
    model.save_quantized(job["output"], use_safetensors=True)


def autoawq(job: dict[str, Any]) -> None:
    """AWQ with clip search, saved in the gemm layout."""
    import torch
    from awq import AutoAWQForCausalLM
    from awq.quantize import quantizer

    # autoawq joins its texts and cuts them into pieces of one length; what is left over at the
    # end is dropped. Here there are token ids in place of texts.
    joined = torch.tensor([token for row in job["samples"] for token in row])
    length = max(len(row) for row in job["samples"])
    pieces = list(joined[: len(joined) // length * length].view(-1, 1, length))
    quantizer.get_calib_dataset = lambda *_, **__: pieces

    class Restoring(quantizer.AwqQuantizer):  # type: ignore[misc]
        """Keeps copies of the weights that each step of the scale search starts from.

        autoawq keeps `.cpu()` of them, which on a CPU are the very tensors that it goes on to
        scale and round, so that every step would start from the last one's weights.
        """

        def _compute_best_scale(
            self, x: Any, w_mean: Any, x_mean: Any, module: Any, *rest: Any, **options: Any
        ) -> Any:
            plain = module.state_dict
            module.state_dict = lambda: {name: kept.clone() for name, kept in plain().items()}
            try:
                return super()._compute_best_scale(x, w_mean, x_mean, module, *rest, **options)
            finally:
                del module.state_dict

    # Half precision, its default, is slow on CPUs that have no instructions for it.
    dtype = torch.float16 if torch.cuda.is_available() else torch.float32
    model = AutoAWQForCausalLM.from_pretrained(
        job["base"], torch_dtype=dtype, device_map="auto" if torch.cuda.is_available() else "cpu"
    )
    layout = {"w_bit": 4, "q_group_size": job["group_size"], "zero_point": True, "version": "GEMM"}
    model.quantize(
        _tokenizer(job),
        quant_config=layout,
        max_calib_samples=len(pieces),
        max_calib_seq_len=length,
        quantizer_cls=Restoring,
    )
    model.save_quantized(job["output"])


def _examples(job: dict[str, Any]) -> list[dict[str, list[int]]]:
    """The samples as a tokenizer would return them."""
    return [{"input_ids": row, "attention_mask": [1] * len(row)} for row in job["samples"]]


def _tokenizer(job: dict[str, Any]) -> Any:
    """The base's tokenizer; None where the folder has none."""
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((Path(job["base"]) / name).exists() for name in names):
        return None
    return AutoTokenizer.from_pretrained(job["base"])


def _copy_missing(job: dict[str, Any]) -> None:
    """Bring what the peer did not write: the tokenizer's files, the chat template and others."""
    for source in Path(job["base"]).iterdir():
        target = Path(job["output"]) / source.name
        if source.is_file() and not source.name.endswith(WEIGHT_SUFFIXES) and not target.exists():
            shutil.copyfile(source, target)


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


BACKENDS = {
    "llmcompressor": llmcompressor,
    "gptqmodel": gptqmodel,
    "auto-gptq": auto_gptq,
    "autoawq": autoawq,
}


def main(path: str) -> None:
    """Run the job of a file and write its result."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    import torch

    torch.set_num_threads(job["threads"])
    torch.manual_seed(job["seed"])
    random.seed(job["seed"])
    start = time.perf_counter()
    BACKENDS[job["backend"]](job)
    seconds = time.perf_counter() - start
    _copy_missing(job)
    # Kibibytes on Linux, bytes on macOS (getrusage(2)).
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    result = {"seconds": seconds, "peak_rss_bytes": peak, "versions": _versions()}
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
