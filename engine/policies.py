"""Batching policies: how a step's token budget is dealt out among running and waiting requests.

static         a batch is filled, then runs until all of it is done
prefill_first  whole prompts if any fits, else decodes (early vLLM)
mixed          decodes and whole prompts in one step (Orca, Yu et al. 2022)
chunked        decodes first, what is left to prompt chunks in order of arrival
               (Sarathi-Serve, Agrawal et al. 2024)
splitfuse      a fixed number of tokens each step: short prompts whole, one long prompt split to
               fill it exactly (Dynamic SplitFuse, DeepSpeed-FastGen 2024)

They differ in order and cutting alone; budgets, blocks and preemption are those of `Step`. A
sequence that starts over after a preemption is a prompt again, output included.
"""

from typing import Protocol

from llmbench.engine.config import Policy
from llmbench.engine.step import Step


class BatchingPolicy(Protocol):
    """Deals out one step after another; may remember what it did in the last one."""

    def deal(self, step: Step) -> None:
        """Schedule tokens; at least one if any request is waiting or running."""


class StaticPolicy:
    """Admit only to an empty engine; nobody joins until the whole batch is done.

    Prompts of one batch that exceed a step's budget together are computed in several steps before
    the first decode, so the batch is bounded by `max_num_seqs` and not by the budget.
    """

    def __init__(self) -> None:
        self._is_filling = False

    def deal(self, step: Step) -> None:
        """Fill the batch with whole prompts, then decode it to its end."""
        if not step.running:
            self._is_filling = True
        if self._is_filling:
            self._is_filling = step.admit(split=False) > 0
        if not self._is_filling:
            step.continue_running()


class PrefillFirstPolicy:
    """Whole prompts alone as long as one fits, which stalls all decodes meanwhile."""

    def deal(self, step: Step) -> None:
        """Admit whole prompts, or decode if none fits."""
        if not step.admit(split=False):
            step.continue_running()


class MixedPolicy:
    """Decodes and whole prompts in the same step.

    A prompt that does not fit beside the decodes gets a step of its own, at most every other
    one: neither waits for the other to end.
    """

    def __init__(self) -> None:
        self._was_alone = False

    def deal(self, step: Step) -> None:
        """Decode and admit whole prompts, or admit one long prompt alone."""
        self._was_alone = bool(step.running) and not self._was_alone and step.admit_alone()
        if not self._was_alone:
            step.continue_running()
            step.admit(split=False)


class ChunkedPolicy:
    """Decodes first, then prompt chunks in order of arrival: no decode ever waits for a prompt."""

    def deal(self, step: Step) -> None:
        """Decode, continue a started prompt, then start waiting ones."""
        step.continue_running()
        step.admit(split=True)


class SplitFusePolicy:
    """As chunked, but a long prompt gets what whole shorter ones behind it leave."""

    def deal(self, step: Step) -> None:
        """Decode, continue a started prompt, then compose waiting ones to the exact budget."""
        step.continue_running()
        step.compose()


def make_policy(name: Policy) -> BatchingPolicy:
    """Make the policy of that name, with no memory of earlier steps."""
    policies: dict[Policy, type[BatchingPolicy]] = {
        "static": StaticPolicy,
        "prefill_first": PrefillFirstPolicy,
        "mixed": MixedPolicy,
        "chunked": ChunkedPolicy,
        "splitfuse": SplitFusePolicy,
    }
    return policies[name]()
