"""The studies by name. Importing this loads neither torch nor numpy."""

import difflib
from typing import Any

from llmbench.bench.errors import BenchConfigError
from llmbench.bench.studies import (
    batching,
    kv_cache,
    load_generator,
    paged_vs_reserved,
    prefix_cache,
    step_cost,
    vs_transformers,
)
from llmbench.bench.studies.study import Study

STUDIES: dict[str, Study[Any]] = {
    study.name: study
    for study in (
        kv_cache.STUDY,
        paged_vs_reserved.STUDY,
        batching.STUDY,
        prefix_cache.STUDY,
        vs_transformers.STUDY,
        step_cost.STUDY,
        load_generator.STUDY,
    )
}


def study_named(name: str) -> Study[Any]:
    """The study called `name`; BenchConfigError names the close ones otherwise."""
    if name in STUDIES:
        return STUDIES[name]
    error = BenchConfigError(f"no study `{name}`")
    close = difflib.get_close_matches(name, STUDIES, n=2, cutoff=0.4)
    if close:
        error.add_note(f"did you mean {' or '.join(f'`{found}`' for found in close)}?")
    error.add_note("`llmbench study --help` lists them")
    raise error
