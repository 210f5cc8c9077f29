"""Ranks placed, launched, watched and replaced."""
