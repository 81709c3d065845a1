"""What somebody measures again: `cost` (probe and judging), `throughput` and `time_to_detect`; see each one's head."""
