"""Declarative benchmark tasks, a YAML file each; the keys are those of lm-evaluation-harness."""
