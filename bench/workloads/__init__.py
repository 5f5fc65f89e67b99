"""What is sent and when: prompts, lengths and arrival times."""
