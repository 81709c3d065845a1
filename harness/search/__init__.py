"""Smaller scenarios, and mutants as the control side sees them."""
