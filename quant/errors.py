"""Errors about weights and the files that carry them, one tree.

QuantError              anything this folder refuses or fails at
├── CheckpointError     a checkpoint that is missing, broken or of an unknown kind
├── ConfigError         settings that contradict one another or the model
├── FormatError         codes that a file format cannot carry, or a file that breaks its format
├── CalibrationError    calibration data that is missing, empty or unreadable
└── VerificationError   a saved checkpoint that does not hold what was quantized

The message says what was expected, what was found and where; the way out is a PEP 678 note.
"""


class QuantError(Exception):
    """Base of all errors that this folder raises on purpose."""


class CheckpointError(QuantError):
    """A checkpoint that is missing, broken or of an unknown kind."""


class ConfigError(QuantError):
    """Settings that contradict one another or the model."""


class FormatError(QuantError):
    """Codes that a file format cannot carry, or a file that breaks its format."""


class CalibrationError(QuantError):
    """Calibration data that is missing, empty or unreadable."""


class VerificationError(QuantError):
    """A saved checkpoint that does not hold what was quantized."""
