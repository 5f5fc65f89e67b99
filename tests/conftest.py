"""Fixtures that every test may use, and the fence that keeps tests off the network."""

import importlib.util
import json
import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

# No test asserts a time: a machine with other work would fail it.
settings.register_profile("llmbench", deadline=None)
settings.load_profile("llmbench")

# Tiny models lose more to threads than they gain, and tests may run beside other work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED_DATA = Path(os.environ.get("LLMBENCH_DATA", REPOSITORY.parent / "shared" / "data"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-golden",
        action="store_true",
        help="write what the tests see to tests/golden; review the difference",
    )


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real evaluation data, prompts and traces; they are not part of the repository."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no test data in {SHARED_DATA}; set LLMBENCH_DATA")
    return SHARED_DATA


@pytest.fixture(scope="session")
def cases_dir(data_dir: Path) -> Path:
    """Inputs of faults that users reported on tools of this kind."""
    cases = data_dir.parent / "cases"
    if not cases.is_dir():
        pytest.skip(f"no cases in {cases}")
    return cases


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., Any]:
    """Make fast tokenizers of one id a UTF-8 byte: <s> is 0, </s> is 1, then 256 bytes."""

    def build(*, adds_bos: bool = False, chat_template: str | None = None) -> Any:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
        backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        if adds_bos:
            backend.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", 0)]
            )
        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=backend,
            bos_token="<s>",
            eos_token="</s>",
            chat_template=chat_template,
        )

    return build


@pytest.fixture
def zero_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Save a checkpoint of zeros for what looks at headers alone: needs no torch.

    Tensors follow from a Llama-like config, and `tensors` (name to shape) adds to them or, as
    None, takes away.
    """

    def save(
        config: Mapping[str, Any],
        tensors: Mapping[str, Sequence[int] | None] | None = None,
        *,
        dtype: str = "BF16",
    ) -> Path:
        shapes = {**_llama_shapes(config), **(tensors or {})}
        header, data_end = {}, 0
        for name, shape in shapes.items():
            if shape is None:
                continue
            num_bytes = math.prod(shape) * {"BF16": 2, "F32": 4, "I8": 1}[dtype]
            header[name] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [data_end, data_end + num_bytes],
            }
            data_end += num_bytes
        raw = json.dumps(header).encode()
        folder = tmp_path / f"zeros-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(
            len(raw).to_bytes(8, "little") + raw + bytes(data_end)
        )
        return folder

    return save


def _llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    rows = head_dim * config["num_attention_heads"]
    kv_rows = head_dim * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        block = {
            "self_attn.q_proj": (rows, hidden),
            "self_attn.k_proj": (kv_rows, hidden),
            "self_attn.v_proj": (kv_rows, hidden),
            "self_attn.o_proj": (hidden, rows),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in block.items()}
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


@pytest.fixture(scope="session")
def scripted_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make Llama checkpoints in which each token has one fixed successor.

    Embeddings are one-hot, every branch adds zero, and the head is a table: the likeliest next
    token leads by 8 * sqrt(hidden), 64 or more. Tokens without a successor repeat themselves.
    """

    def build(
        successors: Mapping[int, int], *, vocab_size: int = 64, tokenizer: Any = None
    ) -> Path:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        width = max(64, -(-vocab_size // 16) * 16)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=None,
        )
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            torch.nn.init.eye_(model.model.embed_tokens.weight)
            model.lm_head.weight.zero_()
            for token in range(vocab_size):
                model.lm_head.weight[successors.get(token, token), token] = 8.0
        return _save(model, tokenizer, tmp_path_factory.mktemp("scripted-llama"))

    return build


@pytest.fixture(scope="session")
def scripted_opt(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make OPT checkpoints in which position p is followed by token `script[p]`, whatever it is.

    The one-hot vectors are those of the learned positions; so a text may repeat a token and go on
    differently. Behind the script comes token 0.
    """

    def build(script: Sequence[int], *, vocab_size: int = 64, tokenizer: Any = None) -> Path:
        import torch
        from transformers import OPTConfig, OPTForCausalLM

        num_positions = 64
        config = OPTConfig(
            vocab_size=vocab_size,
            hidden_size=num_positions,
            word_embed_proj_dim=num_positions,
            ffn_dim=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=num_positions,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=None,
        )
        model = OPTForCausalLM(config)
        decoder = model.model.decoder
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            decoder.final_layer_norm.weight.fill_(1.0)
            decoder.embed_positions.weight[2:].fill_diagonal_(1.0)  # two rows are never used
            for position in range(num_positions):
                token = script[position] if position < len(script) else 0
                model.lm_head.weight[token, position] = 8.0
        return _save(model, tokenizer, tmp_path_factory.mktemp("scripted-opt"))

    return build


def _save(model: Any, tokenizer: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A two-layer Llama with random weights, and the same as transformers runs it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    model: Any = LlamaForCausalLM(config)
    return _save(model.eval(), None, tmp_path_factory.mktemp("random-llama")), model


@pytest.fixture(scope="session")
def byte_llama(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Callable[..., Any]
) -> Callable[..., Path]:
    """Save two-layer Llamas with random weights over bytes, once for each seed and length."""
    made: dict[tuple[Any, ...], Path] = {}

    def build(seed: int = 0, *, max_positions: int = 512, adds_bos: bool = False) -> Path:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        key = (seed, max_positions, adds_bos)
        if key not in made:
            torch.manual_seed(seed)
            config = LlamaConfig(
                vocab_size=258,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=max_positions,
                tie_word_embeddings=False,
                bos_token_id=0,
                eos_token_id=1,
                initializer_range=0.3,
            )
            folder = tmp_path_factory.mktemp(f"byte-llama-{seed}")
            made[key] = _save(LlamaForCausalLM(config), byte_tokenizer(adds_bos=adds_bos), folder)
        return made[key]

    return build


@pytest.fixture(scope="session")
def small_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three tasks of 12, 6 and 3 documents: `sums`, `spoken`, `letters`.

    One of each kind: choices behind two examples, answers to write, and texts to score whole.
    """
    folder = tmp_path_factory.mktemp("tasks")

    def write(name: str, rows: Sequence[Mapping[str, Any]], keys: str) -> None:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        head = f"task: {name}\nsummary: {name}\nlocal_files: {{test: {name}.jsonl}}\n"
        text = head + "test_split: test\n" + keys + "metadata: {version: 1.0}\n"
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")

    write(
        "sums",
        [
            {
                "a": n,
                "b": n % 4,
                "choices": [f"{n + n % 4}", "하나", f"about {n * 7}"],
                "gold": n % 3,
            }
            for n in range(12)
        ],
        "output_type: multiple_choice\nfewshot_split: test\nnum_fewshot: 2\n"
        'doc_to_text: "{{a}} + {{b}} ="\ndoc_to_choice: choices\ndoc_to_target: gold\n'
        "metric_list: [{metric: acc}, {metric: acc_norm}]\nprimary_metric: acc\n",
    )
    write(
        "spoken",
        [
            {"n": n, "word": word}
            for n, word in enumerate(["zero", "one", "two", "three", "넷", "5"])
        ],
        "output_type: generate_until\nnum_fewshot: 0\n"
        'doc_to_text: "Say {{n}}:"\ndoc_to_target: word\n'
        'generation_kwargs: {until: ["\\n", "Say"], max_gen_toks: 6}\n'
        "metric_list: [{metric: exact_match}]\n",
    )
    write(
        "letters",
        [{"page": "Dear reader, " * (n + 1) + "안녕."} for n in range(3)],
        "output_type: loglikelihood_rolling\n"
        'doc_to_text: ""\ndoc_to_target: page\n'
        "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n"
        "primary_metric: word_perplexity\n",
    )
    return folder


@pytest.fixture(scope="session")
def loaded_llama(random_llama: tuple[Path, Any]) -> Any:
    """The random Llama in float32, for any number of engines: they share the weights alone."""
    from llmbench.engine.config import EngineConfig
    from llmbench.engine.models.loader import load_model

    config = EngineConfig(model=str(random_llama[0]), dtype="float32", compile=False)
    return load_model(config)


@pytest.fixture(scope="session")
def as_loaded() -> Callable[..., Any]:
    """Wrap any object with a model's methods as the loader would give it."""

    def wrap(model: Any, *, vocab_size: int = 64, **changes: Any) -> Any:
        import torch

        from llmbench.engine.models.loader import LoadedModel

        facts: dict[str, Any] = {
            "folder": Path("double"),
            "hf_config": None,
            "architecture": None,
            "checkpoint": None,
            "tokenizer": None,
            "eos_token_ids": frozenset(),
            "max_model_len": 128,
            "dtype": torch.float32,
            "device": torch.device("cpu"),
            "hidden_size": 1,
            "intermediate_size": 1,
            "kv_bytes_per_token": 1,
            "weight_bytes": 0,
            "free_bytes": 2**30,
        }
        return LoadedModel(model=model, vocab_size=vocab_size, **(facts | changes))

    return wrap


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The real demo checkpoint, fetched once; tests that use it are marked `real`."""
    from llmbench.engine.errors import CheckpointError
    from llmbench.engine.models.catalog import catalog_model
    from llmbench.engine.models.fetch import pull

    try:
        return pull(catalog_model("smollm2-135m"))
    except CheckpointError as error:
        pytest.skip(f"no demo model: {error}")


@pytest.fixture(scope="session")
def simulated_sweep() -> ModuleType:
    """Make records, manifests and folders of a sweep over a simulated engine."""
    return _module_beside("simulated_sweep")


@pytest.fixture(scope="session")
def doubles() -> ModuleType:
    """What tests of evaluations share (evaluation_doubles.py)."""
    return _module_beside("evaluation_doubles")


def _module_beside(name: str) -> ModuleType:
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that opens a connection to another machine."""
    if request.node.get_closest_marker("real"):
        return
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        local = isinstance(address, str | bytes) or (
            isinstance(address, tuple) and address[0] in ("127.0.0.1", "::1", "localhost")
        )
        if not local:
            raise AssertionError(f"a test tried to reach {address!r}")
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", guarded)


TINY_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_GPT2 = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
TINY_OPT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
}
ALTERNATING = ["sliding_attention", "full_attention"]
TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases-tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 24},
    ),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama-dynamic-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}},
    ),
    "llama-yarn-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 5, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied-bias": (
        "qwen3",
        {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 5}),
    "gemma2-no-caps": (
        "gemma2",
        {
            "head_dim": 16,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "layer_types": ALTERNATING,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-window-partial-rotary": (
        "phi3",
        {
            "sliding_window": 7,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    # The prompt of the family tests is longer than the 16 tokens of the short table.
    "phi3-longrope": (
        "phi3",
        {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE},
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-bias-tied": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "opt": ("opt", TINY_OPT),
    "opt-no-bias-gelu": (
        "opt",
        {
            **TINY_OPT,
            "enable_bias": False,
            "activation_function": "gelu",
            "_remove_final_layer_norm": True,
            "deviation": 0.15,  # without that norm 0.3 gives logits of 90, coarse in float32
        },
    ),
    "gpt2": ("gpt2", TINY_GPT2),
    "gpt2-untied-unscaled": (
        "gpt2",
        {
            **TINY_GPT2,
            "n_inner": 80,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
            "scale_attn_weights": False,
        },
    ),
}
"""Variant → (model_type, settings); a test that takes `variant` runs for each of them."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", TINY_MODELS)


@pytest.fixture(scope="session")
def tiny_variants() -> dict[str, tuple[str, dict[str, Any]]]:
    """The variants that `tiny_model` makes."""
    return TINY_MODELS


@pytest.fixture(scope="session")
def random_model() -> Callable[..., Any]:
    """Build a float32 transformers model with weights that make every part of it matter."""

    def build(model_type: str, *, deviation: float = 0.3, **settings: Any) -> Any:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        if "n_embd" not in settings and "ffn_dim" not in settings:
            settings = TINY_SIZES | settings
        config = AutoConfig.for_model(model_type, **settings)
        auto_model: Any = AutoModelForCausalLM
        model = auto_model.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            spread = deviation if parameter.dim() > 1 else 0.1
            torch.nn.init.normal_(parameter, 0.0, spread, generator=generator)
            if parameter.dim() == 1 and name.endswith("weight") and "gemma" not in model_type:
                parameter.data += 1.0
        return model.eval().requires_grad_(False)

    return build


@pytest.fixture(scope="session")
def tiny_model(
    tmp_path_factory: pytest.TempPathFactory, random_model: Callable[..., Any]
) -> Callable[[str], tuple[Path, Any]]:
    """A two-layer random model of a variant: the saved checkpoint's folder, and the model."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(variant: str) -> tuple[Path, Any]:
        if variant not in made:
            model_type, settings = TINY_MODELS[variant]
            model = random_model(model_type, **settings)
            folder = tmp_path_factory.mktemp(variant)
            model.save_pretrained(folder)
            made[variant] = folder, model
        return made[variant]

    return get


@pytest.fixture(scope="session")
def logits_in_pieces() -> Callable[..., Any]:
    """Run token ids through an engine model in pieces of given lengths; returns logits [T, V].

    Blocks of four tokens, handed out in descending order so that a slot is not a position.
    """

    def run(model: Any, token_ids: list[int], pieces: list[int]) -> Any:
        import torch

        from llmbench.engine.batch import ForwardBatch

        size = 4
        table = list(range(-(-len(token_ids) // size), 0, -1))
        caches = model.make_kv_cache((len(table) + 1) * size)
        logits, done = [], 0
        for count in pieces:
            positions = range(done, done + count)
            slots = [table[position // size] * size + position % size for position in positions]
            batch = ForwardBatch(
                input_ids=torch.tensor(token_ids[done : done + count]),
                positions=torch.tensor(positions),
                slot_mapping=torch.tensor(slots),
                query_start_loc=torch.tensor([0, count], dtype=torch.int32),
                seq_lens=torch.tensor([done + count], dtype=torch.int32),
                block_table=torch.tensor([table], dtype=torch.int32),
                logits_indices=torch.arange(count),
                block_size=size,
                num_decodes=int(count == 1),
                query_lens=[count],
                context_lens=[done + count],
            )
            with torch.inference_mode():
                logits.append(model.compute_logits(model.forward(batch, caches)))
            done += count
        assert done == len(token_ids)
        return torch.cat(logits).float()

    return run


@pytest.fixture(scope="session")
def random_weight() -> Callable[..., Any]:
    """Make quantized weights of a scheme with random codes, scales and zero-points."""

    def make(
        scheme: Any, out_features: int, in_features: int, *, seed: int = 0, dtype: str = "float16"
    ) -> Any:
        import torch

        from llmbench.quant.quantized_weight import QuantizedWeight

        generator = torch.Generator().manual_seed(seed)
        shape = (out_features, scheme.num_groups(in_features))

        def integers(low: int, size: tuple[int, int]) -> Any:
            values = torch.randint(low, 1 << scheme.bits, size, generator=generator)
            return values.to(torch.uint8)

        # Powers of two times a few bits: every type of scales holds them.
        mantissa = torch.randint(64, 128, shape, generator=generator)
        return QuantizedWeight(
            bits=scheme.bits,
            group_size=scheme.group_size,
            codes=integers(0, (out_features, in_features)),
            scales=(mantissa * 2.0**-12).to(getattr(torch, dtype)),
            zeros=None if scheme.sym else integers(1, shape),
            activations=scheme.activations,
        )

    return make


@pytest.fixture
def quantized_file(tmp_path: Path) -> Callable[..., Path]:
    """Save quantized weights by module name in a format, as a folder with its config.json.

    `plain` are ordinary tensors; a layer of which only a `.weight` is there counts as skipped.
    `settings` changes the `quantization_config`, where None takes a key away; `tensors` changes
    the format's own tensors likewise.
    """

    def save(
        file_format: Any,
        weights: Mapping[str, Any],
        *,
        plain: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        desc_act: bool = False,
    ) -> Path:
        from safetensors.torch import save_file

        from llmbench.quant.formats.registry import FORMATS

        registered: dict[Any, Any] = dict(FORMATS)
        chosen: Any = registered.get(file_format, file_format)
        plain = plain or {}
        schemes: dict[str, Any] = {name: weight.scheme for name, weight in weights.items()}
        for name in plain:
            if name.endswith("proj.weight"):
                schemes[name.removesuffix(".weight")] = None
        schemes.setdefault("lm_head", None)
        found: dict[str, Any] = dict(plain)
        for name, weight in weights.items():
            found |= chosen.tensors(name, weight)
        described: dict[str, Any] = {
            **chosen.quantization_config(schemes, None, desc_act=desc_act),
            **(settings or {}),
        }
        found |= tensors or {}
        folder = tmp_path / f"quantized-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        kept = {name: tensor.contiguous() for name, tensor in found.items() if tensor is not None}
        save_file(kept, str(folder / "model.safetensors"), metadata={"format": "pt"})
        described = {key: value for key, value in described.items() if value is not None}
        content = {"model_type": "llama", **(config or {}), "quantization_config": described}
        (folder / "config.json").write_text(json.dumps(content))
        return folder

    return save
