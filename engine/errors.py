"""Errors of the engine, one tree.

EngineError                 anything the engine refuses or fails at
├── ConfigError             flags that cannot hold together
├── CheckpointError         a checkpoint that is missing, broken or of an unknown kind
├── UnsupportedModelError   a sound checkpoint of a model that the engine cannot drive
├── KernelBuildError        the CPU kernels cannot be compiled here
├── OutOfMemoryError        weights, KV cache or activations do not fit; the note shows the sum
└── RequestError            one request that can never run; other requests are unharmed

The message says what was expected, what was found and where; the way out is a PEP 678 note.
"""


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose."""


class ConfigError(EngineError):
    """Engine settings that cannot hold together."""


class CheckpointError(EngineError):
    """A checkpoint that is missing, broken or of an unknown kind."""


class UnsupportedModelError(EngineError):
    """A sound checkpoint of a model that the engine cannot drive."""


class KernelBuildError(EngineError):
    """The fused CPU kernels cannot be compiled or loaded here."""


class OutOfMemoryError(EngineError):
    """Weights, KV cache or activations do not fit; the note shows the arithmetic."""


class RequestError(EngineError):
    """One request that can never run; other requests are unharmed."""
