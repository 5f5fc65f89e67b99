"""Turns a llama-family GGUF file into an ordinary bfloat16 safetensors checkpoint.

A GGUF file holds quantized tensors under llama.cpp's names, the model's sizes, and the tokenizer's
tables. Three things differ from a Hugging Face checkpoint: the names; the rows of the query and key
projections, which llama.cpp interleaves because it rotates neighbouring pairs (x0, x1) where
Hugging Face rotates halves (x0, x_{D/2}); and the pre-tokenizer, which is given by name only
(llama.cpp, src/llama-vocab.cpp: `smollm` splits off single digits before GPT-2's pattern).

The result loads in transformers, vLLM and the built-in engine with nothing left of the GGUF.

Shapes: `N` out features · `C` in features · `D` head size.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from llmbench.engine.errors import CheckpointError

CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert_gguf(
    gguf_path: Path, output: Path, on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Write the checkpoint of `gguf_path` into the existing folder `output`.

    `on_progress` is called with the number of tensors done and their total.
    """
    reader = GGUFReader(gguf_path)
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"expected a llama GGUF, found `{architecture}` ({gguf_path.name})")
    config = _config(reader)
    weights: dict[str, torch.Tensor] = {}
    for index, tensor in enumerate(reader.tensors):
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))  # [N, C] or [N]
        if tensor.name.endswith("attn_q.weight"):
            values = _halves_order(values, config["num_attention_heads"])
        elif tensor.name.endswith("attn_k.weight"):
            values = _halves_order(values, config["num_key_value_heads"])
        weights[_hugging_face_name(tensor.name)] = values.to(torch.bfloat16).contiguous()
        if on_progress is not None:
            on_progress(index + 1, len(reader.tensors))
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    _write_json(output / "config.json", config)
    _write_json(
        output / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _write_tokenizer(reader, output, config["max_position_embeddings"])


def _halves_order(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order: within a head, (x0, x_{D/2}, x1, …) → (x0, x1, …, x_{D/2}, …)."""
    rows, columns = weight.shape
    paired = weight.view(num_heads, rows // num_heads // 2, 2, columns)  # [heads, D/2, 2, C]
    return paired.transpose(1, 2).reshape(rows, columns)


def _hugging_face_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    if name.startswith("blk."):
        _, index, rest = name.split(".", 2)
        if rest in BLOCK_NAMES:
            return f"model.layers.{index}.{BLOCK_NAMES[rest]}"
    raise CheckpointError(f"no place in a llama checkpoint for the GGUF tensor `{name}`")


def _config(reader: GGUFReader) -> dict[str, Any]:
    heads = _field(reader, "llama.attention.head_count")
    hidden = _field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        # GGUF stores float32: 1e-5 reads back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(_field(reader, "llama.rope.freq_base")),
        "tie_word_embeddings": all(t.name != "output.weight" for t in reader.tensors),
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
    }


def _write_tokenizer(reader: GGUFReader, output: Path, max_length: int) -> None:
    kind = (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(f"expected the GGUF tokenizer gpt2/smollm, found {'/'.join(kind)}")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    tokenizer.save(str(output / "tokenizer.json"))
    _write_json(
        output / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
            "bos_token": tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
            "eos_token": tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
            "pad_token": tokens[_field(reader, "tokenizer.ggml.padding_token_id")],
            "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        },
    )
    template = _field(reader, "tokenizer.chat_template")
    (output / "chat_template.jinja").write_text(template, encoding="utf-8")


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise CheckpointError(f"the GGUF file has no field `{name}`")
    return field.contents()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
