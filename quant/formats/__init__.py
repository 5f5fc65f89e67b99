"""One on-disk format a file: how quantized weights lie in the checkpoints of the ecosystem."""
