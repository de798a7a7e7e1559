"""Models that the usual libraries do not have."""
