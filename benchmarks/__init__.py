"""What somebody measures again: `cost` (probe, judging), `throughput`, `time_to_detect`, `witness`; see each one."""
