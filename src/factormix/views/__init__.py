"""Figures, reports and the explorer."""
