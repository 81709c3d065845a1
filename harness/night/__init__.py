"""Nights: every release, case and family in one planned run, kept, compared with the nights before, and judged."""
