"""What somebody measures again: `cost` (probe and judging), `throughput`, `time_to_detect`, `witness`; see each head."""
