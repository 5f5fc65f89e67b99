"""What a model's answers are worth, and how far they are from another model's."""
