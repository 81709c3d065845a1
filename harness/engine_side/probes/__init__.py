"""What watches the engine. It must not change what the engine computes."""
