"""The built-in engine, as the engine process serves it.

Imports the engine, and with it torch, when it is made and not before: this module is also named
in processes that never load a model.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbench.engine.config import EngineConfig
from llmbench.engine.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from llmbench.engine.async_engine import AsyncEngine
    from llmbench.engine.engine_core import EngineCore


@dataclass(frozen=True, slots=True)
class BuiltInEngineFactory:
    """Loads the engine of a config; an `EngineFactory`."""

    config: EngineConfig

    def __call__(self, on_progress: Callable[[str], None]) -> "BuiltInEngine":
        """Load the model and start the engine's thread."""
        on_progress("importing torch")
        from llmbench.engine.async_engine import AsyncEngine

        engine = AsyncEngine(self.config, on_progress=on_progress)
        engine.start()
        return BuiltInEngine(engine)


class BuiltInEngine:
    """An AsyncEngine whose cells start with an empty prefix cache and no step records."""

    def __init__(self, engine: "AsyncEngine") -> None:
        self._engine = engine
        core = engine.core
        self.info: dict[str, Any] = {
            "model": core.config.model,
            "max_model_len": core.max_model_len,
            "dtype": str(core.loaded.dtype).removeprefix("torch."),
            "device": str(core.loaded.device),
            "kernel": core.loaded.model.kernel,
            "quantization": core.loaded.quantization,
            "memory": dataclasses.asdict(core.memory_plan),
        }

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine thread."""
        return self._engine.failure

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        on_output: Callable[[RequestOutput], None],
    ) -> None:
        """Queue a request."""
        self._engine.submit(prompt_token_ids, params, request_id, on_output)

    def abort(self, request_id: str) -> None:
        """Drop a request."""
        self._engine.abort(request_id)

    def begin_cell(self) -> None:
        """Forget cached prefixes and earlier step records."""

        def reset(core: "EngineCore") -> None:
            core.reset_prefix_cache()

        self._engine.call(reset)
        self._engine.take_step_records()

    def end_cell(self, steps_path: Path) -> None:
        """Write the step records since `begin_cell`."""
        from llmbench.engine.step_record import write_parquet

        write_parquet(self._engine.take_step_records(), steps_path)

    def shutdown(self) -> None:
        """End the engine's thread."""
        self._engine.shutdown()
