"""Many groups of requests through one engine: the loop under LLM and ScoringEngine.

A group is what is asked together and wanted together: the answers to one prompt, the
continuations of one context. Groups are taken from an iterator as the engine empties, so that an
evaluation of a hundred thousand items holds a few hundred requests at a time.
"""

from collections.abc import Generator, Iterator

from llmbench.engine.engine_core import EngineCore
from llmbench.engine.request import Request


def run_groups(
    core: EngineCore,
    groups: Iterator[list[Request]],
    *,
    max_live: int | None = None,
    share_across: bool = False,
) -> Generator[list[tuple[int, list[Request]]]]:
    """Run groups to their end; after each step yield those that it ended, with their numbers.

    Groups enter in their order while fewer than `max_live` of their requests are unfinished (None:
    all before the first step). With `share_across` they share prefixes with each other. Whatever
    ends the iteration, an error and a closed generator included, also ends what is still running,
    and leaves an engine that can be used again.
    """
    live: dict[int, list[Request]] = {}
    num_left: dict[int, int] = {}  # unfinished requests of each live group
    group_of: dict[str, int] = {}
    numbered = enumerate(groups)
    try:
        while True:
            while max_live is None or len(group_of) < max_live:
                number, group = next(numbered, (-1, []))
                if number < 0:
                    break
                live[number] = group
                core.add_requests(group, share_across=share_across)
                num_left[number] = len(group)
                group_of.update((request.request_id, number) for request in group)
            if not live:
                break
            if not core.has_unfinished:  # the rest was aborted from elsewhere between two steps
                aborted = list(live.items())
                live.clear()
                group_of.clear()
                yield aborted
                continue
            ended: list[tuple[int, list[Request]]] = []
            for output in core.step():
                if output.finish_reason is None or output.request_id not in group_of:
                    continue
                number = group_of.pop(output.request_id)
                num_left[number] -= 1
                if not num_left[number]:
                    ended.append((number, live.pop(number)))
            yield ended
    finally:
        for group in live.values():
            for request in group:
                core.abort(request.request_id)
