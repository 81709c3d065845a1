"""Smaller scenarios, tallies, and mutants as the control side sees them."""
