"""How the trained pair under cases/trained/ was made."""
