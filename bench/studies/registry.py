"""The studies by name. Importing this loads neither torch nor numpy."""

from typing import Any

from llmbench.bench.studies import (
    batching,
    eval_invariance,
    kv_cache,
    load_generator,
    paged_vs_reserved,
    prefix_cache,
    quantization,
    step_cost,
    vs_lm_eval,
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
        quantization.STUDY,
        vs_transformers.STUDY,
        vs_lm_eval.STUDY,
        eval_invariance.STUDY,
        step_cost.STUDY,
        load_generator.STUDY,
    )
}
