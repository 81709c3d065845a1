"""A scenario through an engine and the reference, to its verdict. Only `oracle` touches torch."""
