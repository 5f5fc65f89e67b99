"""Errors about weights and the files that carry them, one tree.

QuantError              anything this folder refuses or fails at
└── CheckpointError     a checkpoint that is missing, broken or of an unknown kind

The message says what was expected, what was found and where; the way out is a PEP 678 note.
"""


class QuantError(Exception):
    """Base of all errors that this folder raises on purpose."""


class CheckpointError(QuantError):
    """A checkpoint that is missing, broken or of an unknown kind."""
