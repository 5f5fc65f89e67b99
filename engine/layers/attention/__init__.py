"""Attention back ends over the paged KV cache."""
