"""Policies of batching, task order, preemption, fairness and scaling."""
