"""The load generator and the raw event log that it writes."""
