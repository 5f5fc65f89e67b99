"""Errors of measurement, one tree.

BenchError                  anything that measurement refuses or fails at
├── BenchConfigError        flags of a benchmark that cannot hold together
├── WorkloadError           a data set that is missing, broken or too small; prompts too long
├── TargetError             the system under test did not start, or went away
├── LoadGeneratorError      the process that sends the load failed, so the run says nothing
└── ResultsError            a results folder that cannot be written, read or resumed

The message says what was expected, what was found and where; the way out is a PEP 678 note.
"""


class BenchError(Exception):
    """Base of all errors that measurement raises on purpose."""


class BenchConfigError(BenchError):
    """Flags of a benchmark that cannot hold together."""


class WorkloadError(BenchError):
    """A data set that is missing, broken or too small, or a prompt that cannot be built."""


class TargetError(BenchError):
    """The system under test did not start, or went away."""


class LoadGeneratorError(BenchError):
    """The process that sends the load failed, so the run says nothing about the target."""


class ResultsError(BenchError):
    """A results folder that cannot be written, read or resumed."""
