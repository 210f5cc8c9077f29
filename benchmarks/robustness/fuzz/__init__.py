"""Mutated requests, by the million, against the API in process or a server over HTTP."""
