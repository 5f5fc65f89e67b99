"""Errors of reporting, one tree.

ReportError                 anything that a report refuses or fails at
├── NothingToReportError    results that hold no record to show
└── UnwritableReportError   a file of the report that cannot be written

The message says what was expected, what was found and where; the way out is a PEP 678 note.
"""


class ReportError(Exception):
    """Base of all errors that reporting raises on purpose."""


class NothingToReportError(ReportError):
    """Results that hold no record to show."""


class UnwritableReportError(ReportError):
    """A file of the report that cannot be written."""
