"""What a set of results is about: model, machine, requests, versions.

A figure without these says nothing, so each one carries them under its title.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from llmbench.reports.format import counted, shorten, size

REPORTED_PACKAGES = ("llmbench", "torch", "transformers")


def model_name(manifest: Mapping[str, Any]) -> str:
    """Return the last part of the model's path or id, shortened where it is very long."""
    engine = _section(manifest, "config", "engine")
    name = str(engine.get("model") or "unknown model")
    return shorten(PurePath(name).name or name)


def hardware(manifest: Mapping[str, Any]) -> str:
    """Return the GPUs, or else processor, cores and memory."""
    facts = _section(manifest, "hardware")
    gpus: Sequence[str] = facts.get("gpus") or []
    if gpus:
        names = sorted(set(gpus))
        return ", ".join(f"{gpus.count(name)} × {name}" for name in names)  # noqa: RUF001
    cores = facts.get("num_usable_cores")
    memory = _section(manifest, "environment", "memory").get("total_bytes")
    parts = [str(facts.get("cpu_model") or "unknown processor")]
    if cores is not None:
        parts.append(f"{cores:g} cores" if cores != 1 else "1 core")
    if memory is not None:
        parts.append(size(memory))
    return ", ".join(parts)


def workload(manifest: Mapping[str, Any]) -> str:
    """Return dataset, requests and mean lengths."""
    settings = _section(manifest, "config", "workload")
    facts = _section(manifest, "plan", "workload")
    dataset = str(settings.get("dataset_name") or "unknown workload")
    if settings.get("dataset_path"):
        dataset += f" ({shorten(PurePath(settings['dataset_path']).name, 32)})"
    count = facts.get("num_requests") or settings.get("num_prompts")
    if not count:
        return dataset
    text = f"{dataset}, {counted(count, 'request')}"
    prompt, output = facts.get("num_prompt_tokens"), facts.get("max_output_tokens")
    if prompt is not None and output is not None:
        text += f" of {prompt / count:,.0f} → ≤ {output / count:,.0f} tokens"
    return text


def versions(manifest: Mapping[str, Any]) -> str:
    """Return the versions that figures depend on."""
    software = _section(manifest, "software")
    known = [(name, software.get(name)) for name in REPORTED_PACKAGES]
    return ", ".join(f"{name} {version}" for name, version in known if version)


def subtitle(manifest: Mapping[str, Any]) -> str:
    """Return the line under a figure's title."""
    parts = [model_name(manifest), hardware(manifest), workload(manifest), versions(manifest)]
    return " · ".join(part for part in parts if part)


def _section(manifest: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    section: Any = manifest
    for key in keys:
        section = section.get(key) if isinstance(section, Mapping) else None
    return section if isinstance(section, Mapping) else {}
