"""Quantizes several small checkpoints in one start of a peer's interpreter.

It runs in a peer's environment and knows nothing of llmbench but the worker's file:
`make_checkpoints.py WORKER JOB...`. A job is what `quant/peer_worker.py` reads. Importing a peer
takes longer than quantizing a tiny model with it.
"""

import importlib.util
import sys


def main(worker_path: str, *jobs: str) -> None:
    """Run every job; the first that fails ends the process."""
    spec = importlib.util.spec_from_file_location("peer_worker", worker_path)
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    for job in jobs:
        print(f"job {job}", flush=True)
        worker.main(job)


if __name__ == "__main__":
    main(*sys.argv[1:])
