"""Ready experiments, one published comparison a file."""
