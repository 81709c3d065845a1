"""The faults that are put into a running engine."""
