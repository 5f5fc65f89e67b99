"""Errors of measurement, one tree.

BenchError                  anything that measuring refuses or fails at
├── WorkloadError           a data set, a length or an arrival process that gives no requests
├── TargetError             the engine or server under test failed to start, broke or fell silent
├── LoadGeneratorError      the process that sends the load failed, so the run says nothing
└── ResultsError            a results folder that cannot be written, read or resumed

The message says what was expected, what was found and where; the way out is a PEP 678 note.
"""


class BenchError(Exception):
    """Base of all errors that measuring raises on purpose."""


class WorkloadError(BenchError):
    """A data set, a length or an arrival process that gives no requests."""


class TargetError(BenchError):
    """The engine or server under test failed to start, broke or fell silent."""


class LoadGeneratorError(BenchError):
    """The process that sends the load failed, so the run says nothing about the target."""


class ResultsError(BenchError):
    """A results folder that cannot be written, read or resumed."""
