"""Fixtures that every test may use, and the fence that keeps tests off the network."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
