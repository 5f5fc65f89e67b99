"""Mathematics on weights and the checkpoints that carry them."""
