"""From logits to tokens: processors, noise, sampler, log-probabilities."""
