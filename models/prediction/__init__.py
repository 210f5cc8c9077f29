"""Prediction of the experts of following layers, and counts of routing."""
