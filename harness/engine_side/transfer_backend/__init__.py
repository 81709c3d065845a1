"""Carries what a prefill engine hands to a decode engine, in the place of SGLang's network transfers."""
