"""The inference engine: which token comes out, and when."""
