"""Tokenizers, detokenizers and chat templates."""
