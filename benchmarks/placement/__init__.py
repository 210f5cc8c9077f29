"""Placements compared: copies, load and local activation of every method, on texts held out."""
