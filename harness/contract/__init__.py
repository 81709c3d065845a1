"""Records and words that every room shares. Needs no other room."""
