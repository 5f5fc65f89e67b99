"""Measurement: workloads, load generation, metrics and results."""
