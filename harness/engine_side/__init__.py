"""Everything that is loaded inside SGLang's processes: standard library, NumPy, torch, SGLang and both_sides only."""
