"""Widgets around the figures: created once, updated in place, fed by this run's tensors."""
