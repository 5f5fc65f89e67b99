"""Progress of a long command on stderr: a bar on a terminal, a plain line now and then elsewhere.

A bar names the stage, how far it is, the time left and the current estimate of the result ("TTFT
p50 41 ms so far"), and is cleared at the end. Without a terminal nothing moves: a line is printed
when ten seconds or ten percent have passed, and none within two seconds of the last, so that a log
shows life and stays short.
"""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from llmbench.cli.output import Output

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

LINE_INTERVAL_S = 10.0
LINE_SHARE = 0.1
LEAST_INTERVAL_S = 2.0


class Progress:
    """A context manager; `update` may be called as often as one likes."""

    def __init__(self, output: Output, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = output
        self._clock = clock
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._line_at = clock()
        self._line_share = 0.0

    def __enter__(self) -> "Progress":
        if not self._output.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:3.0f} %"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[estimate]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, stage: str, done: float, total: float, estimate: str = "") -> None:
        """Show that `done` of `total` is done of `stage`; a new stage starts a new bar."""
        if self._output.quiet:
            return
        if self._bar is not None:
            self._update_bar(self._bar, stage, done, total, estimate)
        else:
            self._update_lines(stage, done, total, estimate)

    def note(self, text: str) -> None:
        """Print a line that stays, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            self._output.note(text)

    def _update_bar(
        self, bar: "RichProgress", stage: str, done: float, total: float, estimate: str
    ) -> None:
        if self._task is None or stage != self._stage:
            if self._task is not None:
                bar.remove_task(self._task)
            self._task = bar.add_task(stage, total=total, estimate=estimate)
            self._stage = stage
        bar.update(self._task, completed=done, total=total, estimate=estimate)

    def _update_lines(self, stage: str, done: float, total: float, estimate: str) -> None:
        now = self._clock()
        share = done / total if total > 0 else 0.0
        if stage != self._stage:
            self._stage, self._line_at, self._line_share = stage, now, 0.0
        waited_s, gained = now - self._line_at, share - self._line_share
        is_due = waited_s >= LINE_INTERVAL_S or (
            waited_s >= LEAST_INTERVAL_S and (gained >= LINE_SHARE or share >= 1.0)
        )
        if is_due and self._line_share < 1.0:
            self._line_at, self._line_share = now, share
            text = f"{stage}: {share:.0%}"
            self._output.note(f"{text}, {estimate}" if estimate else text)
