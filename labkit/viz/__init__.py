"""Figures from configs and traces, each with alternative text, a finding and a table."""
