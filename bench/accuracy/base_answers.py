"""A baseline that has been evaluated, as its candidates see it: answers, and distances from them.

Of the baseline remain its item records and, where divergence is asked for, the final hidden state
of each scored token on disk and its head. The two together give its whole distributions, so a
candidate is compared with it token by token while the baseline itself is long out of memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmbench.bench.accuracy.items import ItemDivergence, ItemRecord
from llmbench.bench.accuracy.questions import Question
from llmbench.bench.errors import BenchError

if TYPE_CHECKING:
    from llmbench.bench.accuracy.baseline_store import BaselineStore
    from llmbench.bench.accuracy.divergence import HasLogits
    from llmbench.engine.scoring import ContinuationScore


@dataclass(slots=True, kw_only=True)
class BaselineAnswers:
    """A baseline's answers.

    Attributes:
        digest: Of its identity.
        items: By task.
        store: Its hidden states; None where answers alone are compared.
        load_head: Loads what turns them into logits; called once, when the first is needed.
    """

    name: str
    digest: str
    items: Mapping[str, Sequence[ItemRecord]]
    store: "BaselineStore | None" = None
    load_head: "Callable[[], HasLogits | None]" = lambda: None
    _head: "HasLogits | None" = field(default=None, init=False, repr=False)

    def divergence(
        self, question: Question, scores: "Sequence[ContinuationScore]", head: "HasLogits"
    ) -> ItemDivergence:
        """Compare a candidate's hidden states with the baseline's; `head` is the candidate's.

        Raises:
            BenchError: the store lacks the question.
        """
        import torch

        from llmbench.bench.accuracy.divergence import item_divergence, token_divergence

        base_key = question.key(self.digest)
        stored = None if self.store is None else self.store.get(base_key)
        if stored is None or stored.hidden is None:
            error = BenchError(
                f"the baseline {self.name} has no answer to document "
                f"{question.draft.doc_id} of {question.draft.task}"
            )
            error.add_note("repeat the command: what is missing is computed again")
            raise error
        hidden = [score.hidden for score in scores if score.hidden is not None]
        if not hidden:  # a text without tokens
            return item_divergence([], base_key)
        if self._head is None:
            self._head = self.load_head()
            assert self._head is not None  # refused before anything was computed
        targets = [token for ids in question.continuations for token in ids]
        tokens = token_divergence(
            torch.cat(stored.hidden), self._head, torch.cat(hidden), head, targets
        )
        return item_divergence([tokens], base_key)
