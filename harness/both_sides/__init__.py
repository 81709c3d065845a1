"""What the control side and the engine side both use: data and framing, standard library and NumPy only."""
