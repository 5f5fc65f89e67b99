"""KV-cache managers: who owns which block of key/value memory."""
