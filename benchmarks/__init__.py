"""Measurements that somebody repeats, and the tables of docs/evidence; a script each."""
