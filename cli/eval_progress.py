"""What `llmbench eval` says while it runs, and when it ends before its time."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmbench.cli.options import KNOWN_ERRORS
from llmbench.cli.progress import Progress
from llmbench.reports.format import number

if TYPE_CHECKING:
    from llmbench.bench.accuracy.model import EvaluatedModel
    from llmbench.bench.accuracy.running_score import Estimate


def shown_on(
    progress: Progress, names: Sequence[str]
) -> "Callable[[str, int, int, Estimate | None], None]":
    """Show each model's way through the items; `names` in the order in which they are asked."""
    left = list(names)
    started, before = time.monotonic(), 0

    def show(task: str, done: int, total: int, estimate: "Estimate | None") -> None:
        nonlocal started, before
        if done < before and len(left) > 1:  # the next model begins
            del left[0]
            started = time.monotonic()
        before = done
        facts = [] if estimate is None else [_so_far(estimate)]
        elapsed = time.monotonic() - started
        if elapsed > 0:
            facts.append(f"{number(done / elapsed, 2)} items/s")
        progress.update(f"{left[0]}: {task}", done, total, ", ".join(facts))

    return show


def _so_far(estimate: "Estimate") -> str:
    text = f"{estimate.metric} {number(estimate.value)}"
    if estimate.low is not None and estimate.high is not None:
        text += f" [{number(estimate.low)}, {number(estimate.high)}]"
    return f"{text} so far"


def say_how_to_resume(folder: Path, note: Callable[[str], None]) -> None:
    """Tell where an interrupted run's answers are, if it has any."""
    if not (folder / "manifest.json").exists():
        return
    note(f"what is answered is in {folder}")
    note(f"the same command with --output {folder} continues where this one stopped")


def say_what_is_kept(folder: Path, candidate: "EvaluatedModel", error: Exception) -> None:
    """Tell of the folder, and of another model that it was begun for."""
    from llmbench.bench.results import read_results

    if not (folder / "manifest.json").exists():
        return
    try:
        plan = read_results(folder).manifest.get("plan") or {}
    except KNOWN_ERRORS:
        return  # then the error is about that
    before, now = plan.get("identity") or {}, candidate.identity
    differing = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if differing:
        error.add_note(
            f"it was begun for {plan.get('model')}, which has other {', '.join(differing)}"
        )
    error.add_note(f"what is answered is kept in {folder}")
