"""A model is found where its name says, or the answer is one clear line with a way out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbench.engine.config import EngineConfig
from llmbench.engine.errors import CheckpointError
from llmbench.engine.models import source
from llmbench.engine.models.loader import LoadedModel, load_model


def load(model: Path | str, **settings: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(model), **({"dtype": "float32"} | settings)))


@pytest.fixture
def folder(tmp_path: Path, random_model: Callable[..., Any]) -> Path:
    """A tiny Llama."""
    random_model("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LLMBENCH_CACHE", str(root))
    return root


def test_catalogued_model_is_found_in_the_cache(cache: Path, folder: Path) -> None:
    (cache / "models").mkdir()
    (cache / "models" / "smollm2-135m").symlink_to(folder)
    assert load("smollm2-135m").vocab_size == 128


@pytest.mark.usefixtures("cache")
def test_catalogued_model_that_was_not_fetched_says_how() -> None:
    with pytest.raises(CheckpointError, match="has not been fetched") as caught:
        load("smollm2-135m")
    assert "llmbench models pull smollm2-135m" in caught.value.__notes__[0]


@pytest.mark.parametrize("name", ["smollm2-135", "smolm2-135m"])
def test_misspelt_name_is_answered_with_a_close_one(name: str) -> None:
    with pytest.raises(CheckpointError, match=name) as caught:
        load(name)
    assert "`smollm2-135m`" in caught.value.__notes__[0]


def test_misspelt_folder_is_answered_with_a_close_one(folder: Path) -> None:
    (folder / "llama-tiny").mkdir()
    with pytest.raises(CheckpointError) as caught:
        load(folder / "llama-tinny")
    assert f"`{folder / 'llama-tiny'}`" in caught.value.__notes__[0]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The hub's client, answering with what stands last in the list; records its calls."""
    import huggingface_hub

    calls: list[dict[str, Any]] = []

    def snapshot_download(model: str, **options: Any) -> str:
        answer = calls.pop()["answer"]
        calls.append({"model": model, **options})
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_hub_id_loads_what_the_hub_answers(folder: Path, hub: list[dict[str, Any]]) -> None:
    hub.append({"answer": folder})
    assert load("someone/something").vocab_size == 128
    assert hub[0]["model"] == "someone/something"
    assert "*.safetensors" in hub[0]["allow_patterns"]


def test_dummy_weights_fetch_no_weights(folder: Path, hub: list[dict[str, Any]]) -> None:
    hub.append({"answer": folder})
    load("someone/something", load_format="dummy")
    assert "*.safetensors" not in hub[0]["allow_patterns"]


def test_hub_that_cannot_be_reached_is_one_clear_line(hub: list[dict[str, Any]]) -> None:
    hub.append({"answer": OSError("Network is unreachable\nand more")})
    with pytest.raises(CheckpointError, match="Network is unreachable") as caught:
        load("someone/something")
    assert "\n" not in str(caught.value)
    assert "models pull smollm2-135m" in caught.value.__notes__[0]


@pytest.mark.parametrize("name", ["/no/such/place", "./nowhere", "a/b/c", "two words"])
def test_what_cannot_be_a_hub_id_is_not_asked_for(name: str, hub: list[dict[str, Any]]) -> None:
    with pytest.raises(CheckpointError, match="neither a folder"):
        source.resolve_folder(name)
    assert not hub
