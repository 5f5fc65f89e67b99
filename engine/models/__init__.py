"""Model front ends behind one forward batch, and how checkpoints become them."""
