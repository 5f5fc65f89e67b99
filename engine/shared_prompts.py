"""The n answers to one prompt: the first computes it, the others find it in the prefix cache.

A block can be found once it is computed, so n answers that start in the same step would compute
their prompt n times. Therefore the first one is queued alone and the others are held back until
its prompt is done, which takes one step, or as many as the prompt has chunks. Then they are queued
in front of what came after them.
"""

from collections.abc import Sequence

from llmbench.engine.request import Request, RequestStatus
from llmbench.engine.scheduler import Scheduler


class SharedPrompts:
    """Queues answers with a scheduler, all at once or behind the first of them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups: list[tuple[Request, list[Request]]] = []  # (first, held back)

    @property
    def num_held(self) -> int:
        """Requests that are held back."""
        return sum(len(held) for _, held in self._groups)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the answers to one prompt, all or none; raises RequestError as `Scheduler.add`."""
        first, *others = requests
        self._scheduler.add(first)
        if not others:
            return
        if self._can_share(first):
            self._groups.append((first, others))
            return
        # What the first one was checked for holds for them too: same prompt, same parameters.
        for request in others:
            self._scheduler.add(request)

    def release(self) -> None:
        """Queue the answers whose prompt is computed, or whose first one ended before that."""
        waiting = self._groups
        self._groups = []
        for first, held in waiting:
            if first.num_output_tokens > 0:
                for request in reversed(held):
                    self._scheduler.add(request, at_front=True)
            elif not first.is_finished:
                self._groups.append((first, held))
            elif held:
                self.add(held)

    def abort(self, request: Request) -> None:
        """End a request, queued or held back; one that has ended is left alone."""
        if self._scheduler.abort(request.request_id) is not None:
            self.release()
            return
        for _, held in self._groups:
            if request in held:
                held.remove(request)
                request.status = RequestStatus.FINISHED
                request.finish_reason = "abort"

    def _can_share(self, request: Request) -> bool:
        kv = self._scheduler.kv
        # Log-probabilities of the prompt need all its positions computed for each answer.
        reads_cache = kv.has_prefix_cache and request.sampling_params.prompt_logprobs is None
        return reads_cache and request.num_prompt_tokens > kv.block_size
